"""How figures of a report are drawn: the look of each label, points with intervals, axes that no line dominates."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.plots import COLOURS, DASHES, INK, LEGEND, LOG_FROM, MARKS, frame, logarithmic, plain_ticks
from experiments.reports.bootstrap import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = list[tuple[float, Estimate]]
_NAMED = {"full": INK, "window": COLOURS["window"], "Window": COLOURS["window"], "StreamingLLM": COLOURS["sinks"]}
_OTHERS = ["#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#8C6D1F", "#5B6068"]
_FAR = 4.0  # times the spread of all others, from which a line is cut off
_CROWD = 3  # lines, below which none is


class Style:
    """Colour, dash and mark of each label: the same in all figures of a page."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.looks: dict[str, dict[str, Any]] = {}
        number = 0
        for index, label in enumerate(sorted(labels)):
            known = _NAMED.get(label.partition("(")[0])
            again = number // len(_OTHERS)
            colour = known or _OTHERS[number % len(_OTHERS)]
            number += known is None
            dash = DASHES[(again if known is None else 0) % len(DASHES)]
            self.looks[label] = {"color": colour, "linestyle": dash, "marker": MARKS[index % len(MARKS)]}

    def line(self, label: str) -> dict[str, Any]:
        """For a line through points."""
        return {**self.looks[label], "label": label, "markersize": 3.5, "linewidth": 1.4}

    def point(self, label: str) -> dict[str, Any]:
        """For a point with whiskers."""
        return {**self.looks[label], "label": label, "markersize": 5, "linestyle": "", "capsize": 2.5, "elinewidth": 1}

    def joined(self, label: str) -> dict[str, Any]:
        """For points with whiskers and a line through them."""
        return {**self.point(label), "linestyle": self.looks[label]["linestyle"], "linewidth": 1.2}


def lines(axes: Any, points: Mapping[str, Points], style: Style, apart: float, levels: Sequence[float] = ()) -> None:
    """A line with whiskers for each label, each `apart` times further right than the one before, to be seen.

    `levels` are to be seen as well. A line far above all others is cut off, and said how high it is; else the axis is
    logarithmic if need be.
    """
    shown = {label: found for label, found in sorted(points.items()) if found}
    for index, (label, found) in enumerate(shown.items()):
        shift = apart ** (index - (len(shown) - 1) / 2)
        look = style.joined(label) if len(found) > 1 else style.point(label)
        whiskers(axes, [at * shift for at, _ in found], [each for _, each in found], look)
    top = max(shown, key=lambda label: max(each.value for _, each in shown[label]), default=None)
    others = [each for label, found in shown.items() if label != top for _, each in found]
    others += [Estimate(level) for level in levels]
    if top is None or len(shown) < _CROWD or not _far(shown[top], others):
        logarithmic_if(axes, [each.value for found in shown.values() for _, each in found])
        return
    lowest = min(each.value if each.low is None else each.low for each in others)
    highest = max(each.value if each.high is None else each.high for each in others)
    axes.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.2 * (highest - lowest))
    beyond = ", ".join(f"{each.value:.4g}" for _, each in shown[top] if each.value > axes.get_ylim()[1])
    place = {"xycoords": "axes fraction", "ha": "right", "va": "top", "fontsize": 8}
    axes.annotate(f"above the figure: {top}, {beyond}", (0.99, 0.99), color=style.looks[top]["color"], **place)


def _far(mine: Points, others: Sequence[Estimate]) -> bool:
    values = [each.value for each in others]
    spread = max(values) - min(values)
    return spread > 0 and max(each.value for _, each in mine) > max(values) + _FAR * spread


def whiskers(axes: Any, across: Sequence[float], found: Sequence[Estimate], look: dict[str, Any]) -> None:
    """Points with their intervals."""
    if not found:
        return
    low = [0.0 if each.low is None else max(0.0, each.value - each.low) for each in found]
    high = [0.0 if each.high is None else max(0.0, each.high - each.value) for each in found]
    axes.errorbar(across, [each.value for each in found], yerr=[low, high], **look)


def legend(figure: "Figure", panels: Sequence[Any]) -> None:
    """One for all panels, below them."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), **LEGEND)


def logarithmic_if(axes: Any, values: Sequence[float]) -> None:
    """Makes the axis that goes up logarithmic where the greatest of `values` is several times the least."""
    if values and min(values) > 0 and max(values) > LOG_FROM * min(values):
        logarithmic(axes)


def logarithmic_across(axes: Any) -> None:
    """Makes the axis that goes across logarithmic, with plain numbers at the ticks."""
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)


def stacked(count: int, height: float, share: bool = True) -> tuple["Figure", list[Any]]:
    """A figure of panels one below the other."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(7.2, height * count + 0.9), layout="constrained")
    panels = list(figure.subplots(count, 1, squeeze=False, sharex=share).flat)
    for axes in panels:
        frame(axes)
    return figure, panels
