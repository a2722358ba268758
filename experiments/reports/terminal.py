"""The report's tables in the terminal, 100 columns wide."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.page import Shown
from experiments.reports import retrieval_shown, tables
from experiments.reports.analysis import Analysis, Part
from experiments.reports.contest import BEST, BOUND, TIED, UNRANKED, Contest, Result
from experiments.reports.retrieval import Task

WIDTH, _NAME = 100, 27
_MARKS = {BEST: "* ", TIED: "= ", UNRANKED: "! ", BOUND: "^ ", "": "  "}
_HEADS = ("policy", "ppl", "after", "x full", "95%", "gap", "KL", "recall", "MiB", "ms/tok")
_KEY = (
    "* best, = tied with it, ^ looks ahead, ! not ranked. After: after the first eviction, as are x full (and its 95% "
    "interval), gap and KL."
)


def show(console: Console, analysis: Analysis) -> None:
    """Prints the tables."""
    for note in analysis.found.notes:
        _say(console, f"Note: {note}.", "yellow")
    for part in analysis.parts:
        console.print(f"\n{part.group.title}", style="bold", highlight=False, markup=False)
        for contest in part.contests:
            _contest(console, analysis, part, contest)
        for task in part.tasks:
            _say(console, f"\n{task.setting.title}", "bold")
            for note in task.notes:
                _say(console, note, "yellow")
            _task(console, task)
    if any(part.contests for part in analysis.parts):
        _say(console, _KEY, "dim")
    for row in analysis.found.failed:
        _say(console, f"Failed: {row['asked'].get('name')} on {row['asked'].get('text')}: {row['reason']}", "red")


def _contest(console: Console, analysis: Analysis, part: Part, contest: Contest) -> None:
    of = f": on the tokens that {contest.of} scored" if contest.of else ""
    _say(console, f"\n{contest.panel.setting.title}{of}", "bold")
    for note in contest.notes:
        _say(console, note, "yellow")
    rows = [_cells(result, contest) for result in contest.results]
    kept = [index for index in range(len(_HEADS)) if index == 0 or any(row[index] not in ("", "-") for row in rows)]
    shown = [[Shown(row[index]) for index in kept] for row in rows]
    _print(console, [_HEADS[index] for index in kept], shown)
    for sentence in (
        tables.standings(contest),
        tables.drawn(contest),
        tables.lacking(contest, analysis.failed(contest, part)),
    ):
        if sentence:
            _say(console, sentence, "dim")


def _task(console: Console, task: Task) -> None:
    heads, rows = retrieval_shown.table(task)
    standings = [line.standing for line in task.lines]
    for row, standing in zip(rows, standings, strict=True):
        row[0] = Shown(_MARKS[standing] + row[0].says)
    _print(console, heads, rows)


def _cells(result: Result, contest: Contest) -> list[str]:
    ratio, cost = result.ratio, result.costs.get("ms_per_token")
    between = "" if ratio is None or ratio.low is None else f"{tables.three(ratio.low)}-{tables.three(ratio.high)}"
    return [
        _MARKS[result.standing] + result.line.label,
        "-" if contest.of else tables.fixed(result.perplexity.value),
        tables.fixed(result.after.value),
        tables.three(ratio and ratio.value),
        between,
        "-" if result.gap is None else f"{result.gap.value:.0%}",
        tables.three(result.kl and result.kl.value),
        tables.three(result.recall and result.recall.value),
        tables.fixed(None if result.bytes is None else result.bytes / 2**20, 1),
        tables.fixed(cost and cost.value, 1),
    ]


def _print(console: Console, headings: Sequence[str], rows: Sequence[Sequence[Shown]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")  # the mark
    for index, heading in enumerate(headings):
        if index:
            table.add_column(heading.replace(" back", "\nback").replace("at ", "at\n"), justify="right", no_wrap=True)
        else:
            longest = max((len(row[0].says) - 2 for row in rows), default=0)
            table.add_column(heading, min_width=min(_NAME, longest), overflow="fold")
    for row in rows:
        name, *others = (cell.says for cell in row)
        table.add_row(name[:1], name[2:], *others)
    console.print(table, width=WIDTH, markup=False, crop=False, no_wrap=True)


def _say(console: Console, words: str, style: str) -> None:
    console.print(words, style=style, highlight=False, markup=False, width=WIDTH)
