"""The figures of sink emergence, all over training steps: share, layers, rates, norms, and what eviction costs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.emergence_curves import Curve, Point
from experiments.onset import Onset
from experiments.plots import DASHES, INK, LEGEND, LOG_FROM, MARKS, frame, logarithmic, panel
from experiments.revisions import WARM_UP
from experiments.sinks import PLACES, THRESHOLDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#5B6068"]
_EVICTED = {"window": "window", "sinks1": "1 sink + window", "sinks4": "4 sinks + window"}
_BARS = 4  # steps whose rates are drawn
_ACROSS = "training step (log)"


def figures(curves: Sequence[Curve], onsets: Sequence[dict[str, Onset]]) -> dict[str, tuple[str, "Figure"]]:
    """By file name: a caption, and the figure; `onsets` are those of the curves."""
    made = {
        "a_share": (
            "A. Share of attention that falls on the first token, mean over layers, heads, documents and queries from "
            "the first one counted; shaded: from the least document to the greatest. Dotted: even attention. Step 0 is "
            "at the left, on a stretch of its own.",
            _share(curves),
        ),
        "b_layers": ("B. The same share by layer (up) and checkpoint (across), mean over heads.", _layers(curves)),
        "c_rates": (
            "C. Sink_k^eps: part of segments, layers and heads in which the k-th token of 64 receives more than eps, "
            "at four checkpoints; a BOS is in front if the documents have one.",
            _rates(curves, onsets),
        ),
        "d_norms": (
            "D. Left: the greatest entry of the hidden states over their median, in the block where that is most. "
            "Right: norm of the first token's values over that of the others, mean over layers.",
            _norms(curves),
        ),
    }
    if any(point.perplexity("full") for curve in curves for point in curve.points):
        made["e_eviction"] = (
            "E. Perplexity over that of the full cache, on the tokens that come when the bounded cache is full: with "
            "the first token evicted like any other, and with one or four first tokens kept.",
            _eviction(curves),
        )
    return made


def _share(curves: Sequence[Curve]) -> "Figure":
    figure, axes = panel(_ACROSS, "share of the first token, %")
    values = []
    for number, curve in enumerate(curves):
        steps, documents = _steps(curve), [[100 * each for each in point.by_document()] for point in curve.points]
        means = [100 * float(point.share.mean()) for point in curve.points]
        _draw(axes, list(zip(steps, means, strict=True)), number, curve.series)
        if len(documents[0]) > 1:
            lows, highs = ([chosen(each) for each in documents] for chosen in (min, max))
            axes.fill_between(steps, lows, highs, color=_LINES[number % len(_LINES)], alpha=0.15, linewidth=0)
        values += means
    for level in sorted({round(100 * curve.points[-1].uniform, 6) for curve in curves}):
        axes.axhline(level, color=INK, linewidth=1, linestyle=":", label=f"even attention, {level:.3g}%")
        values.append(level)
    _across(axes, curves)
    _warm_up(axes, curves)
    if max(values) > LOG_FROM * min(values):
        logarithmic(axes)
    figure.legend(**LEGEND)
    return figure


def _layers(curves: Sequence[Curve]) -> "Figure":
    deepest = max(len(point.layers) for curve in curves for point in curve.points)
    figure, panels = _panels(len(curves), min(3, len(curves)), min(3.4, 1.4 + 0.15 * deepest))
    top = max(100 * max(point.layers) for curve in curves for point in curve.points)
    images = []
    for axes, curve in zip(panels, curves, strict=False):
        table = [[100 * point.layers[layer] for point in curve.points] for layer in range(len(curve.points[0].layers))]
        look = {"vmin": 0, "vmax": top, "cmap": "viridis", "interpolation": "nearest"}
        images.append(axes.imshow(table, origin="lower", aspect="auto", **look))
        steps = _steps(curve)
        every = max(1, -(-len(steps) // 8))
        axes.set_xticks(range(0, len(steps), every), [_short(each) for each in steps[::every]], fontsize=7)
        axes.set_yticks(range(0, len(table), -(-len(table) // 8)))
        axes.set_title(curve.series, fontsize=9, color=INK)
        axes.set_xlabel("checkpoint, step", color=INK)
        axes.set_ylabel("layer", color=INK)
        axes.grid(False)
    bar = figure.colorbar(images[-1], ax=panels, shrink=0.9)
    bar.set_label("share of the first token, %", color=INK)
    bar.ax.tick_params(colors=INK, labelsize=8)
    return figure


def _rates(curves: Sequence[Curve], onsets: Sequence[dict[str, Onset]]) -> "Figure":
    figure, panels = _panels(_BARS * len(curves), _BARS, 2.0)
    for row, (curve, onset) in enumerate(zip(curves, onsets, strict=True)):
        chosen = _chosen(curve.points, onset["lasting"])
        for column, axes in enumerate(panels[_BARS * row : _BARS * (row + 1)]):
            if column >= len(chosen):
                axes.set_visible(False)
                continue
            for number, eps in enumerate(map(str, THRESHOLDS)):
                rates = [100 * each for each in chosen[column].rate(chosen[column].rates, eps) or []]
                places = [k + 0.2 * (number - 1.5) for k in range(1, PLACES + 1)]
                label = f"eps {eps}" if row == column == 0 else None
                axes.bar(places, rates, width=0.2, color=_LINES[number], label=label)
            axes.set_ylim(0, 100)
            axes.set_title(f"{curve.series}\nstep {chosen[column].step:,}", fontsize=7, color=INK)
            axes.set_xticks(range(1, PLACES + 1))
            axes.set_xlabel("k", color=INK)
            if column == 0:
                axes.set_ylabel("Sink_k^eps, %", color=INK)
    figure.legend(**{**LEGEND, "ncols": 4})
    return figure


def _norms(curves: Sequence[Curve]) -> "Figure":
    figure, panels = _panels(2, 2, 3.4)
    words = ("greatest entry over median", "norm of first value over others")
    for axes, name, up in zip(panels, ("massive", "value_norm"), words, strict=True):
        values = []
        for number, curve in enumerate(curves):
            found = [(point.step, point.figures()[name]) for point in curve.points]
            known = [(step, value) for step, value in found if value is not None]
            if known:
                _draw(axes, known, number, curve.series if name == "massive" else None)
                values += [value for _, value in known]
        axes.set_xlabel(_ACROSS, color=INK)
        axes.set_ylabel(up, color=INK)
        if name == "value_norm":
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        _across(axes, curves, apart=4)
        _warm_up(axes, curves, *([] if name == "massive" else [None]))
        if values and max(values) > LOG_FROM * min(values):
            logarithmic(axes)
    figure.legend(**LEGEND)
    return figure


def _eviction(curves: Sequence[Curve]) -> "Figure":
    figure, axes = panel(_ACROSS, "perplexity over the full cache's")
    values = []
    for number, curve in enumerate(curves):
        for dash, cache in enumerate(_EVICTED):
            found = [
                (point.step, point.perplexity("full", "after"), point.perplexity(cache, "after"))
                for point in curve.points
            ]
            known = [(step, value / full) for step, full, value in found if full and value]
            if known:
                _draw(axes, known, number, None, dash)
                values += [value for _, value in known]
    axes.axhline(1, color=INK, linewidth=0.8)
    _across(axes, curves)
    _warm_up(axes, curves)
    if values and max(values) > LOG_FROM * min(values):
        logarithmic(axes)
    for number, curve in enumerate(curves):
        _draw(axes, [], number, curve.series)
    for dash, words in enumerate(_EVICTED.values()):
        axes.plot([], [], color=INK, linestyle=DASHES[dash], linewidth=1.5, label=words)
    figure.legend(**LEGEND)
    return figure


def _chosen(points: Sequence[Point], onset: Onset) -> list[Point]:
    """Four checkpoints at most: the first and the last, those about the onset, and others evenly between."""
    last = len(points) - 1
    wanted = [0, last]
    if onset.crossing is not None:
        wanted += [
            index for index, point in enumerate(points) if point.step in (onset.crossing.before, onset.crossing.at)
        ]
    wanted += [round(last * part) for part in (1 / 3, 2 / 3, 1 / 2)] + list(range(last))
    return [points[index] for index in sorted(list(dict.fromkeys(wanted))[:_BARS])]


def _draw(axes: Any, points: Sequence[tuple[int, float]], number: int, label: str | None, dash: int = 0) -> None:
    axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        color=_LINES[number % len(_LINES)],
        marker=MARKS[number % len(MARKS)],
        linestyle=DASHES[(dash + number // len(_LINES)) % len(DASHES)],
        markersize=3.5,
        linewidth=1.5,
        label=label,
    )


def _across(axes: Any, curves: Sequence[Curve], apart: float = 1.7) -> None:
    steps = sorted({step for curve in curves for step in _steps(curve)})
    positive = [step for step in steps if step > 0]
    if not positive:
        return
    axes.set_xscale("symlog", linthresh=positive[0], linscale=0.4)
    axes.set_xlim(left=0 if steps[0] == 0 else None)
    shown: list[int] = []
    for step in reversed(steps):  # the last one always, and what is not too near to the next
        if not shown or step == 0 or shown[-1] > apart * step:
            shown.append(step)
    axes.set_xticks(shown, [_short(step) for step in shown])
    axes.minorticks_off()


def _warm_up(axes: Any, curves: Sequence[Curve], label: str | None = "end of warm-up, 1,430") -> None:
    steps = [step for curve in curves if curve.source.startswith("EleutherAI/pythia-") for step in _steps(curve)]
    if steps and min(steps) < WARM_UP < max(steps):
        axes.axvline(WARM_UP, color=INK, linewidth=0.8, linestyle="--", alpha=0.6, label=label)


def _panels(count: int, columns: int, height: float) -> tuple["Figure", list[Any]]:
    from matplotlib.figure import Figure  # optional, and slow to import

    rows = -(-count // columns)
    figure = Figure(figsize=(7.2, height * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        frame(axes, labelsize=7)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels


def _steps(curve: Curve) -> list[int]:
    return [point.step for point in curve.points]


def _short(step: int) -> str:
    return f"{step // 1000}k" if step >= 1000 and step % 1000 == 0 else f"{step}"
