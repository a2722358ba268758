"""The figures of the streaming experiment: perplexity over the text and over the budget, bytes over the text.

Colours are Okabe and Ito's, which the colour-blind tell apart; each method has one, its runs differ by dash.
"""

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.results import Row
from experiments.runs import labels
from experiments.summary import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1a1b1e"  # text and the full cache; the report replaces it by the page's own colour
COLOURS = {"full": INK, "window": "#D55E00", "sinks": "#0072B2", "recompute": "#009E73", "reread": "#CC79A7"}
DASHES = ["-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3))]
MARKS = ["o", "s", "^", "D", "v", "P"]
_GREY = "#808080"
_NAME: dict[str, Any] = {"fontsize": 6.5, "color": _GREY, "annotation_clip": False}  # of a text, above where it begins
_NAMED = 24  # texts named above a curve, at most
_MARKED = 64  # points of a curve that are marked one by one, at most
LOG_FROM = 4.0  # times between the least and the greatest, from which an axis is logarithmic
LEGEND: dict[str, Any] = {
    "loc": "outside lower left",
    "ncols": 3,
    "frameon": False,
    "fontsize": 8,
    "labelcolor": INK,
}


def figures(rows: Sequence[Row]) -> dict[str, tuple[str, "Figure"]]:
    """By file name: a caption, and the figure."""
    whole = [row for row in rows if row["setting"]["method"] != "recompute" or row["setting"]["every"] == 1] or rows
    made = {
        "perplexity_over_text": (
            "Perplexity within each stretch of the text, by method. The dotted line marks the budget: what comes later "
            "is read with tokens evicted. A recompute that scored some tokens only is left out: too few a stretch."
            + (" Grey lines: another text begins." if _begins(rows) else ""),
            _over_text(whole),
        ),
        "bytes_over_text": (
            "Bytes that keys and values take as the text is read: an ordinary cache grows with every token, a bounded "
            "one does not. For recompute and reread: what one pass over the window would hold.",
            _bytes(rows),
        ),
    }
    for field, words in (("budget", "budget, tokens a layer holds"), ("sinks", "first tokens never evicted")):
        values = {row["setting"][field] for row in rows if row["setting"][field] is not None}
        if len(values) > (2 if field == "sinks" else 1):  # none and one number of sinks make no curve
            caption = (
                f"Perplexity of the tokens after the first eviction, by {field}. Dashed: the full cache, whole text."
            )
            made[f"perplexity_over_{field}"] = (caption, _over(whole, field, words))
    return made


def svg(figure: "Figure", name: str) -> str:
    """The figure as an SVG element that takes the page's text colour."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(INK, "currentColor", text[text.index("<svg") :], flags=re.IGNORECASE)
    return re.sub(
        r'(<svg[^>]*?) height="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1), count=1
    )


def _over_text(rows: Sequence[Row]) -> "Figure":
    figure, axes = panel("position in the text, tokens", "perplexity")
    _draw(axes, rows, lambda row: row["curve"])
    for budget in sorted({row["setting"]["budget"] for row in rows if row["setting"]["budget"]}):
        axes.axvline(budget, color=INK, linewidth=0.8, linestyle=":", alpha=0.6)
    for at, title in _begins(rows)[:_NAMED]:
        axes.axvline(at, color=_GREY, linewidth=0.8, zorder=0)
        axes.annotate(title, (at, 1), (2, 2), xycoords=("data", "axes fraction"), textcoords="offset points", **_NAME)
    values = [value for row in rows for _, value in row["curve"]]
    if max(values) > LOG_FROM * min(values):
        logarithmic(axes)
    return figure


def _begins(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Where each text begins if there are several."""
    return [(at, title) for at, title in rows[0].get("begins", [])]


def _bytes(rows: Sequence[Row]) -> "Figure":
    figure, axes = panel("position in the text, tokens", "keys and values, MiB")
    _draw(axes, rows, lambda row: [[at, held / 2**20] for at, held in row["bytes_curve"]])
    axes.set_ylim(bottom=0)
    return figure


def _over(rows: Sequence[Row], field: str, words: str) -> "Figure":
    figure, axes = panel(words, "perplexity after the first eviction")
    lines: dict[tuple, list[tuple[int, float]]] = {}
    for row in rows:
        if row["setting"][field] is not None and row["perplexity_after"] is not None:
            other = {**row["setting"], field: None}
            if field == "sinks":
                other["method"] = "sinks"  # a window is the point at no sinks
            lines.setdefault(tuple(other.items()), []).append((row["setting"][field], row["perplexity_after"]))
    counts: dict[str, int] = {}
    common = [
        each for each in ("budget", "positions", "chunk") if len({dict(other)[each] for other in lines} - {None}) < 2
    ]
    for other, points in lines.items():
        named = dict(other)
        number = counts[named["method"]] = counts.get(named["method"], -1) + 1
        label = setting({"setting": named}).described(common)
        _line(axes, sorted(points), named["method"], number, label)
    for row in rows:
        if row["setting"]["method"] == "full":
            axes.axhline(row["perplexity"], color=INK, linewidth=1, linestyle="--", label="full")
    ticks = sorted({at for points in lines.values() for at, _ in points})
    axes.set_xscale("symlog" if field == "sinks" else "log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    values = [value for points in lines.values() for _, value in points]
    if max(values) > LOG_FROM * min(values):
        logarithmic(axes)
    figure.legend(**LEGEND)
    return figure


def _draw(axes: Any, rows: Sequence[Row], points: Callable[[Row], list]) -> None:
    counts: dict[str, int] = {}
    names = labels([setting(row) for row in rows])
    for row, name in zip(rows, names, strict=True):
        method = row["setting"]["method"]
        number = counts[method] = counts.get(method, -1) + 1
        _line(axes, points(row), method, number, name)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.figure.legend(**LEGEND)


def _line(axes: Any, points: list, method: str, number: int, label: str) -> None:
    axes.plot(
        *zip(*points, strict=True),
        color=COLOURS[method],
        linestyle=DASHES[number % len(DASHES)],
        marker=MARKS[list(COLOURS).index(method)] if len(points) <= _MARKED else None,
        markersize=3.5,
        linewidth=1.6,
        label=label,
    )


def panel(across: str, up: str) -> tuple["Figure", Any]:
    """A figure and its axes, with what goes across and up as their labels."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)
    frame(axes)
    return figure, axes


def frame(axes: Any, labelsize: int = 8) -> None:
    """Gives axes a frame on two sides and a faint grid behind what is drawn."""
    axes.tick_params(colors=INK, which="both", labelsize=labelsize)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.grid(True, color=_GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def logarithmic(axes: Any) -> None:
    """Makes the axis that goes up logarithmic, and says so in its label."""
    axes.set_yscale("log")
    axes.set_ylabel(axes.get_ylabel() + " (log)")
    plain_ticks(axes.yaxis)


def plain_ticks(axis: Any) -> None:
    """Has 1, 2 and 5 times each power of ten at a logarithmic axis, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
