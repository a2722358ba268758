"""The figures of tables that differ in nothing but the budget: over the text, over budgets, over bytes, divergence."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.plots import INK, LOG_FROM, panel
from experiments.reports.contest import Contest, Result, starts
from experiments.reports.drawing import Points, Style, legend, lines, logarithmic_across, logarithmic_if, stacked
from experiments.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUCKETS = 16  # of a text, at most
_TEXT = (
    "Perplexity within each stretch of the text, over all documents that are as long. Dotted: the first eviction. "
    "Methods that scored some tokens only are left out."
)
_BUDGET = "Perplexity of all tokens by budget, with 95% intervals. Dashed: the full cache."
_BYTES = (
    "What is paid and what is got: bytes of keys and values held, and perplexity after the first eviction over the "
    "full cache's on the same tokens, with 95% intervals. Further down is better, further left is cheaper."
)
_KL = "Divergence of what is predicted from what the full cache predicts, nats a token, with 95% intervals."


class Drawn(NamedTuple):
    """A figure, its caption, and the cells it shows."""

    caption: str
    figure: Any
    rows: list[Row]


def figures(contests: Sequence[Contest], style: Style) -> dict[str, Drawn]:
    """By name; of contests over all tokens, smallest budget first."""
    rows = [row for each in contests for row in each.rows]
    made = {"text": Drawn(_TEXT, _over_text(contests, style), rows)}
    if len({each.panel.setting.budget for each in contests}) > 1:
        made["budget"] = Drawn(_BUDGET, _over_budget(contests, style), rows)
    if any(result.ratio and result.bytes is not None for each in contests for result in each.results):
        made["bytes"] = Drawn(_BYTES, _over_bytes(contests, style), rows)
    if any(result.kl and result.kl.value > 0 for each in contests for result in each.results):
        made["kl"] = Drawn(_KL, _divergence(contests, style), rows)
    return made


def curve(result: Result, contest: Contest) -> list[tuple[int, float]]:
    """(end, perplexity) of each stretch of the text, over all documents that have tokens there."""
    cells = result.line.cells
    longest = max(contest.units.lengths)
    width = 64 * max(1, -(-longest // (64 * _BUCKETS)))
    points = []
    for start in range(0, longest, width):
        masks = {name: mask for name, mask in contest.tokens.counted.items() if name in cells}
        end = start + width
        parts = [cells[name].nll[start:end][mask[start:end]] for name, mask in masks.items()]
        values = np.concatenate(parts)
        if len(values):
            with np.errstate(over="ignore"):
                points.append((min(end, longest), float(np.exp(values.mean()))))
    return points


def _over_text(contests: Sequence[Contest], style: Style) -> "Figure":
    figure, panels = stacked(len(contests), 2.6)
    for axes, contest in zip(panels, contests, strict=True):
        values: list[float] = []
        for result in contest.results:
            points = [point for point in curve(result, contest) if math.isfinite(point[1])]
            if points:
                axes.plot(*zip(*points, strict=True), **style.line(result.line.label))
                values += [value for _, value in points]
        for start in sorted(set(starts(contest.panel).values()) - {0}):
            axes.axvline(start, color=INK, linewidth=0.8, linestyle=":", alpha=0.6)
        axes.set_xlim(left=0)
        axes.set_ylabel("perplexity", color=INK)
        axes.set_title(contest.panel.setting.title, fontsize=9, color=INK, loc="left")
        logarithmic_if(axes, values)
    panels[-1].set_xlabel("position in the text, tokens", color=INK)
    legend(figure, panels)
    return figure


def _over_budget(contests: Sequence[Contest], style: Style) -> "Figure":
    figure, axes = panel("budget, tokens a layer holds (log; set a little apart)", "perplexity of all tokens")
    points: dict[str, Points] = {}
    for contest in contests:
        for result in contest.results:
            budget = contest.panel.setting.budget
            if result.line.method != "full" and budget is not None and math.isfinite(result.perplexity.value):
                points.setdefault(result.line.label, []).append((budget, result.perplexity))
    full = {result.perplexity.value for each in contests for result in each.results if result.line.method == "full"}
    axes.set_xscale("log", base=2)
    lines(axes, points, style, 1.012, sorted(full))
    for number, value in enumerate(sorted(full)):
        axes.axhline(value, color=INK, linewidth=1, linestyle="--", label=None if number else "full")
    ticks = sorted({at for found in points.values() for at, _ in found})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    legend(figure, [axes])
    return figure


def _over_bytes(contests: Sequence[Contest], style: Style) -> "Figure":
    words = "keys and values held, MiB (log; set a little apart)"
    figure, axes = panel(words, "perplexity over the full cache's")
    points: dict[str, Points] = {}
    for contest in contests:
        for result in contest.results:
            ratio = result.ratio
            if result.bytes is not None and ratio is not None and math.isfinite(ratio.value):
                found = points.setdefault(result.line.label, [])
                if result.line.method != "full" or not found:  # it is in the table of every budget
                    found.append((result.bytes / 2**20, ratio))
    logarithmic_across(axes)
    lines(axes, points, style, 1.012)
    axes.axhline(1, color=INK, linewidth=0.8)
    legend(figure, [axes])
    return figure


def _divergence(contests: Sequence[Contest], style: Style) -> "Figure":
    shown = [[one for one in each.results if one.kl is not None and one.kl.value > 0] for each in contests]
    contests = [each for each, results in zip(contests, shown, strict=True) if results]
    shown = [results for results in shown if results]
    figure, panels = stacked(len(contests), 0.7 + 0.24 * max(map(len, shown)), share=True)
    for axes, contest, results in zip(panels, contests, shown, strict=True):
        results = sorted(results, key=lambda each: each.kl.value if each.kl else 0.0, reverse=True)
        for place, result in enumerate(results):
            found = result.kl
            if found is not None:
                look = {**style.point(result.line.label), "label": None}
                sides = None if found.low is None else [[found.value - found.low], [(found.high or 0) - found.value]]
                axes.errorbar([found.value], [place], xerr=sides, **look)
        axes.set_yticks(range(len(results)), [each.line.label for each in results])
        axes.set_title(contest.panel.setting.title, fontsize=9, color=INK, loc="left")
        axes.set_ylim(-0.6, len(results) - 0.4)
    values = [each.kl.value for results in shown for each in results if each.kl]
    if max(values) > LOG_FROM * min(values):
        panels[0].set_xscale("log")
    else:
        panels[0].set_xlim(left=0)
    panels[-1].set_xlabel("KL, nats a token" + (" (log)" if panels[0].get_xscale() == "log" else ""), color=INK)
    return figure
