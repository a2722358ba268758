"""What retrieval gave, as tables in the terminal and as a page: accuracy with intervals, and what was held."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.page import page, pictures, table, text
from experiments.plots import INK
from experiments.reports.bootstrap import Estimate
from experiments.reports.contest import BEST, TIED
from experiments.reports.drawing import Style, legend, stacked, whiskers
from experiments.reports.provenance import commands
from experiments.reports.retrieval import Hits, Task, tasks, wilson
from experiments.reports.retrieval_shown import figures
from experiments.results import Row
from experiments.whole import put

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = (
    "Right: the first number generated is the one asked for; with Wilson's 95% interval. Held: trials in which some "
    "head of a layer still held the whole number as the answer began. Of heads: the share of its tokens held, mean "
    "over heads and layers. Held, missed: held and not right. Gone, found: not held and right, which is luck, or what "
    "later tokens carry of it. * the best of a budget's policies, = tied with it: the interval of their difference "
    "over the same trials holds 0."
)
_WIDTH, _POLICY = 110, 26  # columns of a table, and of its policies at least
_MARKS = {BEST: "* ", TIED: "= "}


def show(console: Console, rows: Sequence[Row]) -> None:
    """Prints a table for each model, task and language."""
    for title, group in _grouped(rows):
        heads, lines = lines_of(group)
        drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for index, head in enumerate(heads):
            words = head.replace(", ", ",\n").replace("of ", "of\n").replace("at ", "at\n").replace(" back", "\nback")
            if index == 1:
                drawn.add_column(words, min_width=_POLICY, overflow="fold")
            else:
                drawn.add_column(words, justify="right", no_wrap=True)
        for line in lines:
            drawn.add_row(*line)
        console.print(f"\n{title}", style="bold", highlight=False, markup=False)
        console.print(drawn, markup=False, width=_WIDTH, crop=False)
    if rows:
        console.print(NOTES, style="dim", highlight=False)


def lines_of(group: Sequence[Task]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table, budget by budget; by depth or distance where there are several."""
    name, words = ("distance", "{:g} back") if group[0].by("distance") else ("depth", "at {:g}")
    places = sorted({at for task in group for at in task.by(name)})
    heads = ["budget", "policy", "trials", "right", "95%", "held", "of heads", "held, missed", "gone, found"]
    several = places if len(places) > 1 else []
    lines = []
    for task in group:
        by = task.by(name)
        for line in task.lines:
            if line.method == "full" and task is not group[0]:
                continue
            budget = "-" if line.method == "full" else str(task.setting.budget)
            at_places = [_percent(line.accuracy(by[at]) if at in by else None) for at in several]
            label = _MARKS.get(line.standing, "  ") + line.label
            lines.append([budget, label, str(line.trials), *_shares(line), *at_places])
    return [*heads, *(words.format(at) for at in several)], lines


def write(folder: Path, rows: Sequence[Row]) -> Path:
    """Writes the page of all tables and figures; returns its path."""
    body = ["<h1>Retrieval under bounded caches</h1>", f'<p class="note">{NOTES}</p>']
    for number, (title, group) in enumerate(_grouped(rows)):
        body += [f"<h2>{text(title)}</h2>", table("", *lines_of(group))]
        style = Style([line.label for task in group for line in task.lines])
        for each, task in enumerate(group):
            named: dict[str, tuple[str, Any]] = {}
            if task.by("distance"):
                caption = "Right answers against how far back the number stood, with Wilson's 95% intervals, and below "
                caption += "how often it was held. The dotted line is the budget: what stood further back is gone."
                named[f"distance-{number}-{each}"] = (
                    f"Budget {task.setting.budget}. {caption}",
                    by_distance(task, style),
                )
            for name, drawn in figures(task, style).items():
                if name == "depth":
                    named[f"depth-{number}-{each}"] = (f"{task.setting.title}. {drawn.caption}", drawn.figure)
            body += pictures(named)
    body += ["<h2>Commands</h2>", *(f"<pre>{text(each)}</pre>" for each in commands(rows))]
    put(folder / "passkey.html", page("Retrieval under bounded caches", body))
    return folder / "passkey.html"


def by_distance(task: Task, style: Style) -> "Figure":
    """Accuracy, and the share held, against distance in tokens; dotted where the budget ends."""
    figure, panels = stacked(2, 2.5)
    tokens: dict[float, float] = {}
    for line in task.lines:
        for place, row in line.cells.items():
            if place.distance is not None:
                tokens[place.distance] = row["asked"]["distance"]["tokens"]
    for axes, words, share in zip(panels, ("right, %", "held, %"), (Hits.accuracy, Hits.held), strict=True):
        for line in task.lines:
            found = [(tokens[at], share(line, places)) for at, places in task.by("distance").items()]
            known = [(at, each) for at, each in found if each is not None]
            whiskers(axes, [at for at, _ in known], [_percents(each) for _, each in known], style.joined(line.label))
        if task.setting.budget is not None:
            axes.axvline(task.setting.budget, color=INK, linewidth=0.9, linestyle=":")
        axes.set_ylabel(words, color=INK)
        axes.set_ylim(-4, 104)
        axes.set_xlim(left=0)
    ends = ", ".join(f"{lines:g} lines are {at:g}" for lines, at in sorted(tokens.items()))
    panels[-1].set_xlabel(f"tokens back ({ends})", color=INK, fontsize=8)
    legend(figure, panels)
    return figure


def _grouped(rows: Sequence[Row]) -> list[tuple[str, list[Task]]]:
    """Tasks with their titles, one for all budgets."""
    found: dict[str, list[Task]] = {}
    for model in dict.fromkeys(row["asked"]["model"] for row in rows):
        for task in tasks([row for row in rows if row["asked"]["model"] == model]):
            parts = task.setting._replace(budget=None).title.split(", ")
            title = ", ".join([model, *(part for part in parts if part != "no budget")])
            found.setdefault(title, []).append(task)
    return list(found.items())


def _shares(line: Hits) -> list[str]:
    """Right, its interval, held, by what share of heads, held and missed, gone and found: over all trials of a line."""
    pairs = [
        pair
        for row in line.cells.values()
        for pair in zip(row["figures"]["hits"], row["figures"]["visible"], strict=True)
    ]
    right, count = wilson(sum(hit for hit, _ in pairs), len(pairs)), len(pairs)
    between = "-" if right is None or right.low is None else f"{100 * right.low:.0f}-{100 * (right.high or 0):.0f}"
    missed, found = (sum(pair == each for pair in pairs) / count for each in ((0, 1), (1, 0)))
    heads = [share for row in line.cells.values() for share in row["figures"]["held_share"]]
    held = [_percent(line.held()), f"{sum(heads) / count:.0%}"]
    return [_percent(right), between, *held, f"{missed:.0%}", f"{found:.0%}"]


def _percent(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.value:.0%}"


def _percents(found: Estimate) -> Estimate:
    return Estimate(100 * found.value, 100 * (found.low or 0.0), 100 * (1.0 if found.high is None else found.high))
