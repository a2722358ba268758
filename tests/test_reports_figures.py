import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cells import grid, nlls, stream

from experiments.plots import COLOURS, INK
from experiments.reports.analysis import analysed
from experiments.reports.bootstrap import Estimate
from experiments.reports.contest import Contest
from experiments.reports.drawing import Style, lines
from experiments.reports.figures import Drawn, curve, figures

pytest.importorskip("matplotlib")


def of(folder: Path) -> tuple[list[Contest], dict[str, Drawn]]:
    """The contests over all tokens of a run of one family, and their figures."""
    (part,) = analysed([folder]).parts
    (family,) = part.families
    contests = [panel[0] for panel in family]
    labels = {result.line.label for each in contests for result in each.results}
    return contests, figures(contests, Style(sorted(labels)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Contest], dict[str, Drawn]]:
    folder = tmp_path_factory.mktemp("ran")
    grid(folder, tokens=300)
    return of(folder)


def drawn(axes: Any) -> dict[str, list[float]]:
    """The heights of the points of each line, by its label."""
    found = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return {label: list(getattr(each, "lines", [each])[0].get_ydata()) for label, each in found.items()}


def test_a_curve_is_weighted_by_tokens_over_all_documents(tmp_path: Path) -> None:
    long, short = nlls(2000, 0), nlls(700, 1)
    stream(tmp_path, "full", long, "long")
    stream(tmp_path, "full", short, "short")
    (part,) = analysed([tmp_path]).parts
    (contest,) = part.contests
    points = curve(contest.results[0], contest)
    assert [end for end, _ in points] == [*range(128, 2000, 128), 2000]
    for start, (end, value) in zip(range(0, 2000, 128), points, strict=True):
        both = [each for one in (long, short) for each in one[start:end] if not math.isnan(each)]
        assert value == pytest.approx(math.exp(sum(both) / len(both)), rel=1e-12)


def test_each_budget_has_a_panel_with_a_line_for_each_method(ran: tuple[list[Contest], dict[str, Drawn]]) -> None:
    contests, made = ran
    panels = made["text"].figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        f"budget {budget}, cache positions, chunk 16" for budget in (64, 128)
    ]
    for axes, contest in zip(panels, contests, strict=True):
        found = drawn(axes)
        assert set(found) == {each.line.label for each in contest.results}
        assert "recompute 1/32" not in found
        for result in contest.results:
            assert found[result.line.label] == pytest.approx([value for _, value in curve(result, contest)])
        marks = [
            line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":" and len(line.get_xdata()) == 2
        ]
        assert marks == [(contest.panel.setting.budget or 0) + 1]


def test_perplexity_over_budget_and_ratio_over_bytes_are_those_of_the_tables(
    ran: tuple[list[Contest], dict[str, Drawn]],
) -> None:
    contests, made = ran
    budgets, ratios = drawn(made["budget"].figure.axes[0]), drawn(made["bytes"].figure.axes[0])
    for label in ("window", "StreamingLLM", "TOVA", "H2O(recent=32)"):
        results = [result for each in contests for result in each.results if result.line.label == label]
        assert budgets[label] == pytest.approx([each.perplexity.value for each in results])
        assert ratios[label] == pytest.approx([each.ratio.value for each in results if each.ratio])
    assert budgets["full"] == [contests[0].results[0].perplexity.value] * 2
    assert ratios["full"] == [1.0]
    assert len(made["bytes"].rows) == len({row["key"] for row in made["bytes"].rows}) + 2  # full is in both tables


def test_divergences_stand_in_order_with_their_names(ran: tuple[list[Contest], dict[str, Drawn]]) -> None:
    contests, made = ran
    for axes, contest in zip(made["kl"].figure.axes, contests, strict=True):
        known = {r.line.label: r.kl.value for r in contest.results if r.kl and r.kl.value > 0}
        names = [each.get_text() for each in axes.get_yticklabels()]
        assert names == sorted(known, key=lambda name: known[name], reverse=True)
        heights = {each[0].get_ydata()[0]: each[0].get_xdata()[0] for each in axes.containers}
        assert [heights[place] for place in range(len(names))] == pytest.approx([known[name] for name in names])
        assert "full" not in names


def test_one_budget_makes_no_curve_over_budgets(tmp_path: Path) -> None:
    grid(tmp_path, documents=1, budgets=(64,), tokens=300)
    assert set(of(tmp_path)[1]) == {"text", "bytes", "kl"}


def test_a_line_far_above_the_others_is_cut_off_and_said(ran: tuple[list[Contest], dict[str, Drawn]]) -> None:
    contests, made = ran
    axes = made["bytes"].figure.axes[0]
    (words,) = [each.get_text() for each in axes.texts]
    high = [
        result.ratio.value
        for each in contests
        for result in each.results
        if result.line.label == "window" and result.ratio
    ]
    assert words == f"above the figure: window, {', '.join(f'{each:.4g}' for each in high)}"
    seen = [result.ratio for each in contests for result in each.results if result.line.label != "window"]
    low, top = axes.get_ylim()
    for each in seen:
        assert each is not None
        assert low < (each.low or each.value) <= (each.high or each.value) < top
    assert top < min(high)


def test_lines_that_are_near_are_all_seen() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    points = {
        name: [(1.0, Estimate(value)), (2.0, Estimate(value))] for name, value in (("a", 1.0), ("b", 1.2), ("c", 1.5))
    }
    lines(axes, points, Style(["a", "b", "c"]), 1.01, [0.9])
    low, top = axes.get_ylim()
    assert low <= 1.0 < 1.5 <= top
    assert not axes.texts
    assert axes.get_yscale() == "linear"


def test_a_collapse_makes_the_axis_logarithmic(tmp_path: Path) -> None:
    stream(tmp_path, "full", nlls(300, 0))
    stream(tmp_path, "window", np.concatenate([nlls(66, 1), np.full(234, 9.0)]))
    assert of(tmp_path)[1]["text"].figure.axes[0].get_yscale() == "log"


def test_a_label_looks_the_same_in_all_figures_and_unlike_others() -> None:
    labels = ["full", "window", "StreamingLLM(num_sinks=4)", *(f"P{index}" for index in range(9))]
    style = Style(labels)
    assert style.looks["full"]["color"] == INK
    assert style.looks["window"]["color"] == COLOURS["window"]
    assert style.looks["StreamingLLM(num_sinks=4)"]["color"] == COLOURS["sinks"]
    assert len({(str(each["color"]), str(each["linestyle"]), each["marker"]) for each in style.looks.values()}) == len(
        labels
    )
    assert Style(list(reversed(labels))).looks == style.looks
