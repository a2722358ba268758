"""`report` and `diff`: runs as a page, as files and in the terminal; and two runs beside each other."""

import importlib.util
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.options import Parser
from experiments.reports import diff as differences
from experiments.reports import terminal
from experiments.reports.analysis import analysed
from experiments.reports.source import Unusable
from experiments.reports.write import write

_INSTALL = 'the report needs {}: run `pip install "sinkcache[experiments]"`'
_PACKAGES = ("pyarrow", "matplotlib")


def report(folders: Sequence[str | Path], out: Path, console: Console) -> Path:
    """Writes the report of the runs in `folders` and prints its tables; returns the page's path.

    Raises Unusable if a folder holds no run, ModuleNotFoundError if a package for it is not installed.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(_INSTALL.format(", ".join(missing)))
    analysis = analysed(folders)
    path = write(analysis, out)  # first: what is printed may be piped to a program that ends
    terminal.show(console, analysis)
    console.print(f"Report: {path}", highlight=False, markup=False, soft_wrap=True)
    return path


def add_parsers(commands: Parser) -> None:
    """Adds `report` and `diff` to a parser."""
    added = commands.add_subparsers(dest="command", metavar="COMMAND")
    made = added.add_parser("report", help="a page, CSV and parquet of one run or several")
    made.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with a results.jsonl")
    made.add_argument("--out", type=Path, metavar="DIR", help="for what is written; without, the first folder")
    compared = added.add_parser("diff", help="the figures that differ between two runs: 0 if none, 1 if some")
    compared.add_argument("old", type=Path, metavar="A")
    compared.add_argument("new", type=Path, metavar="B")
    compared.add_argument(
        "--tolerance", type=_tolerance, default=0.0, metavar="X", help="relative difference that is none; default 0"
    )
    compared.add_argument("--shared", action="store_true", help="look at the cells alone that both runs have")


def run(given: Namespace, console: Console) -> int:
    """Does what was asked for; returns the exit code. Raises ValueError, OSError or ModuleNotFoundError."""
    if given.command == "report":
        report(given.folders, given.out or given.folders[0], console)
        return 0
    found = differences.diff(given.old, given.new, given.tolerance)
    if given.shared:
        if not found.shared:
            raise Unusable(f"{given.old} and {given.new} have no cell in common")
        found.only_old, found.only_new = [], []
    differences.show(console, found)
    return int(bool(found.changes or found.only_old or found.only_new))


def _tolerance(value: str) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise ArgumentTypeError(f"must be a number, got {value!r}") from error
    if not 0 <= number < float("inf"):
        raise ArgumentTypeError(f"must be 0 or more, got {value}")
    return number
