"""The tables of a command in the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.report import NOTES
from experiments.results import Results
from experiments.summary import HEADINGS, compared, lines, number


def show(console: Console, results: Results, keys: Sequence[str]) -> None:
    """Prints a line per run, then the runs on the tokens that a sampled recompute scored."""
    row = results[keys[0]]
    title = f"{row['model']}, {row['dtype']}: {row['tokens']:,} tokens of {row['text']}"
    _print(console, title, HEADINGS, [line.cells() for line in lines(results, keys)])
    console.print(NOTES, style="dim", highlight=False)
    for each in compared(results, keys):
        rows = [(label, number(value), number(ratio)) for label, value, ratio in each.rows]
        _print(console, each.title, ("run", "perplexity", "x full"), rows)


def _broken(heading: str) -> str:
    """A heading on two lines where that keeps the table within 80 columns."""
    breaks = {"positions": "posi-\ntions", "perplexity": "perplex-\nity", "ms/token": "ms/\ntoken"}
    return breaks.get(heading, heading.replace(" ", "\n", 1))


def _print(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(_broken(heading), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n{title}", style="bold", highlight=False)
    console.print(table)
