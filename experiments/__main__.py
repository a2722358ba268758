"""`python -m experiments` lists the experiments; `report` and `diff` read what runs left behind."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.options import Parser
from experiments.reports.command import add_parsers, run

_MAIN = 'if __name__ == "__main__":'
_COMMANDS = {
    "experiments report FOLDER": "A page, CSV and parquet of one run or several.",
    "experiments diff A B": "The figures that differ between two runs.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Ends with 2 and a line if it cannot be run."""
    command, console = Parser(prog="experiments", description=__doc__), Console()
    add_parsers(command)
    given = command.parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        if given.command is None:
            _list(console)
            return 0
        return run(given, console)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)


def experiments() -> dict[str, str]:
    """By module that can be run, the first line of its docstring; none is imported."""
    here, found = Path(__file__).parent, {}
    for path in sorted({*here.glob("*.py"), *here.rglob("__main__.py")} - {Path(__file__)}):
        source = path.read_text(encoding="utf-8")
        if path.stem == "__main__" or _MAIN in source.splitlines():
            parts = path.relative_to(here).with_suffix("").parts
            name = ".".join(("experiments", *parts)).removesuffix(".__main__")
            found[name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def _list(console: Console) -> None:
    found = {**experiments(), **_COMMANDS}
    width = max(map(len, found))
    for name, words in found.items():
        console.print(f"python -m {name:{width}}  {words}", highlight=False, markup=False, soft_wrap=True)
    console.print("Each has --help.", style="dim", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
