"""Retrieval as a table and as figures: a heat map of length and depth, or accuracy against distance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.page import Shown
from experiments.plots import INK
from experiments.reports.bootstrap import Estimate
from experiments.reports.drawing import Style, legend, logarithmic_across, stacked, whiskers
from experiments.reports.figures import Drawn
from experiments.reports.retrieval import Hits, Task
from experiments.reports.tables import NONE, STANDING, interval, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = (
    "Accuracy: exact matches. Small below a figure: Wilson's 95% interval. Held: the share of trials in which what was "
    "asked for was still in the cache, in some layer and head, when the answer began: what is not held cannot be "
    "recalled. Tied: the interval of the difference to the best, over the same trials, holds 0."
)
_COLUMNS, _MOST = 3, 8  # heat maps side by side; columns of a table by place
_WIDE = 8.0  # times the least distance the greatest, from which the axis is logarithmic


def table(task: Task) -> tuple[list[str], list[list[Shown]]]:
    """Headings and rows: all trials, then by depth or by distance."""
    name, say = _axis(task)
    by = task.by(name) if name else {}
    by = by if len(by) <= _MOST else {}
    heads = ["policy", "trials", "accuracy", "held", *(say(value) for value in by)]
    rows = []
    for line in task.lines:
        row = [Shown(line.label, STANDING[line.standing], line.label), Shown(str(line.trials), "", line.trials)]
        row += [_share(line.accuracy()), _share(line.held())]
        rows.append(row + [_share(line.accuracy(places)) for places in by.values()])
    return heads, rows


def figures(task: Task, style: Style) -> dict[str, Drawn]:
    """By name."""
    made = {}
    if len(task.by("distance")) > 1:
        caption = (
            "Accuracy against how far back the answer stood, with Wilson's 95% intervals; below, the share of trials "
            "in which it was still held. A token outside the cache is gone. Dotted: the budget."
        )
        made["distance"] = Drawn(caption, _distance(task, style), task.rows)
    if task.by("length") and task.by("depth"):
        caption = "Accuracy by length of the prompt (across, tokens) and depth of what was hidden (down, %)."
        made["depth"] = Drawn(caption, _heat(task), task.rows)
    return made


def _axis(task: Task) -> tuple[str | None, Any]:
    if task.by("distance"):
        return "distance", lambda value: f"{value:g} back"
    if task.by("depth"):
        return "depth", lambda value: f"at {100 * value:g}%"
    return None, str


def _share(found: Estimate | None) -> Shown:
    return Shown(NONE) if found is None else Shown(percent(found.value), interval(found, percent), found.value)


def _distance(task: Task, style: Style) -> "Figure":
    figure, panels = stacked(2, 2.5)
    by, (tokens, unit) = task.by("distance"), _tokens(task)
    wide = min(tokens.values()) > 0 and max(tokens.values()) > _WIDE * min(tokens.values())
    for axes, words, share in zip(panels, ("accuracy, %", "held, %"), (Hits.accuracy, Hits.held), strict=True):
        for number, line in enumerate(task.lines):
            found = [(tokens[at], share(line, places)) for at, places in by.items()]
            known = [(at, _percents(each)) for at, each in found if each is not None]
            shift = 1.015 ** (number - (len(task.lines) - 1) / 2) if wide else 1.0
            whiskers(axes, [at * shift for at, _ in known], [each for _, each in known], style.joined(line.label))
        if unit == "tokens" and task.setting.budget is not None:
            axes.axvline(task.setting.budget, color=INK, linewidth=0.9, linestyle=":")
        axes.set_ylabel(words, color=INK)
        axes.set_ylim(-4, 104)
    if wide:
        logarithmic_across(panels[-1])
    panels[-1].set_xlabel(f"{unit} back" + (" (log; set a little apart)" if wide else ""), color=INK)
    legend(figure, panels)
    return figure


def _tokens(task: Task) -> tuple[dict[float, float], str]:
    """By distance in lines, the same in tokens if every cell tells it; and the unit."""
    found: dict[float, float] = {}
    for line in task.lines:
        for place, row in line.cells.items():
            told = row["asked"]["distance"] if place.distance is not None else None
            if place.distance is not None and isinstance(told, dict) and told.get("tokens"):
                found[place.distance] = told["tokens"]
    lines = task.by("distance")
    return (found, "tokens") if set(found) == set(lines) else ({at: at for at in lines}, "lines")


def _percents(found: Estimate) -> Estimate:
    low, high = found.low or 0.0, 1.0 if found.high is None else found.high
    return Estimate(100 * found.value, 100 * low, 100 * high)


def _heat(task: Task) -> "Figure":
    from matplotlib.figure import Figure  # optional, and slow to import

    lengths, depths = list(task.by("length")), list(task.by("depth"))
    across = min(_COLUMNS, len(task.lines))
    down = -(-len(task.lines) // across)
    figure = Figure(figsize=(7.2, down * (0.9 + 0.3 * len(depths))), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[len(task.lines) :]:
        axes.set_visible(False)
    for axes, line in zip(panels, task.lines, strict=False):
        _heat_map(axes, task, line, lengths, depths)
    return figure


def _heat_map(axes: Any, task: Task, line: Hits, lengths: Sequence[float], depths: Sequence[float]) -> None:
    values: list[list[float]] = []
    for row, depth in enumerate(depths):
        values.append([])
        for column, length in enumerate(lengths):
            found = line.accuracy([place for place in task.places if (place.length, place.depth) == (length, depth)])
            values[-1].append(float("nan") if found is None else found.value)
            if found is not None:
                ink = "#000000" if found.value > 0.6 else "#ffffff"
                where = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
                axes.text(column + 0.5, row + 0.5, f"{100 * found.value:.0f}", **where)
    axes.pcolormesh(values, vmin=0, vmax=1, cmap="viridis", edgecolors="none")
    axes.invert_yaxis()
    axes.set_xticks([at + 0.5 for at in range(len(lengths))], [f"{each:g}" for each in lengths], fontsize=7)
    axes.set_yticks([at + 0.5 for at in range(len(depths))], [f"{100 * each:g}" for each in depths], fontsize=7)
    axes.tick_params(colors=INK, length=0)
    axes.set_title(line.label, fontsize=8, color=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
