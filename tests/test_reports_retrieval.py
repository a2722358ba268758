import math
from pathlib import Path

import pytest
from report_cells import retrieval

from experiments.reports.analysis import analysed
from experiments.reports.contest import BEST, BOUND, TIED, UNRANKED
from experiments.reports.drawing import Style
from experiments.reports.retrieval import Hits, Task, wilson
from experiments.reports.retrieval_shown import figures, table

pytest.importorskip("matplotlib")


def only(folder: Path) -> Task:
    (part,) = analysed([folder]).parts
    (task,) = part.tasks
    return task


def by_name(task: Task) -> dict[str, Hits]:
    return {line.label: line for line in task.lines}


def test_intervals_are_wilson_s() -> None:
    for hits, trials, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        found = wilson(hits, trials)  # Newcombe (1998), table I, method 3
        assert found is not None
        assert found.value == hits / trials
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert wilson(0, 0) is None


def test_accuracy_is_over_all_trials_and_not_a_mean_of_means(tmp_path: Path) -> None:
    retrieval(tmp_path, "H2O", [1] * 9 + [0], [1] * 10, depth=0.1)
    retrieval(tmp_path, "H2O", [0, 0], [0, None], depth=0.5, prompts_sha256="others")
    line = by_name(only(tmp_path))["H2O"]
    accuracy, held = line.accuracy(), line.held()
    assert accuracy is not None
    assert accuracy.value == 9 / 12
    assert held is not None
    assert held.value == 10 / 11  # of those for which it is known


def test_a_table_has_a_column_for_each_depth(tmp_path: Path) -> None:
    for length in (512, 1024):
        for depth, hits in ((0.1, [1, 1, 0, 0]), (0.9, [1, 1, 1, int(length == 512)])):
            retrieval(tmp_path, "full", hits, [1] * 4, length=length, depth=depth, prompts_sha256=f"{length} {depth}")
    heads, rows = table(only(tmp_path))
    assert heads == ["policy", "trials", "accuracy", "held", "at 10%", "at 90%"]
    assert [cell.says for cell in rows[0]] == ["full", "16", "68.8%", "100.0%", "50.0%", "87.5%"]
    assert set(figures(only(tmp_path), Style(["full"]))) == {"depth"}


@pytest.mark.parametrize("nested", [False, True])
def test_distances_make_a_curve_with_what_was_held(tmp_path: Path, nested: bool) -> None:
    for distance, right in ((1, 1), (10, 1), (100, 0)):
        where = {"lines": distance, "tokens": 7 * distance} if nested else distance
        retrieval(tmp_path, "H2O", [right] * 4, [right] * 4, task="streameval", length=None, depth=None, distance=where)
    task = only(tmp_path)
    heads, rows = table(task)
    assert heads[4:] == ["1 back", "10 back", "100 back"]
    assert [cell.says for cell in rows[0]][4:] == ["100.0%", "100.0%", "0.0%"]
    drawn = figures(task, Style(["H2O"]))["distance"].figure
    accuracy, held = drawn.axes
    for axes in (accuracy, held):
        assert list(axes.lines[0].get_ydata()) == [100.0, 100.0, 0.0]
        assert list(axes.lines[0].get_xdata()) == pytest.approx([7, 70, 700] if nested else [1, 10, 100])
    assert held.get_xlabel().startswith("tokens back" if nested else "lines back")
    assert held.get_ylabel() == "held, %"
    assert held.get_xscale() == "log"


def test_heat_maps_say_the_accuracy_of_each_length_and_depth(tmp_path: Path) -> None:
    for length in (512, 1024):
        for depth in (0.1, 0.9):
            hits = [1] * (1 if length == 512 else 3) + [0] * (3 if depth == 0.1 else 1)
            retrieval(
                tmp_path, "full", hits, [1] * len(hits), length=length, depth=depth, prompts_sha256=str(len(hits))
            )
    (axes,) = figures(only(tmp_path), Style(["full"]))["depth"].figure.axes
    said = {each.get_position(): each.get_text() for each in axes.texts}
    assert said == {(0.5, 0.5): "25", (1.5, 0.5): "50", (0.5, 1.5): "50", (1.5, 1.5): "75"}
    assert axes.yaxis_inverted()
    assert [each.get_text() for each in axes.get_xticklabels()] == ["512", "1024"]
    assert [each.get_text() for each in axes.get_yticklabels()] == ["10", "90"]


def test_ties_are_over_the_same_trials(tmp_path: Path) -> None:
    retrieval(tmp_path, "full", [1] * 40, [1] * 40)
    retrieval(tmp_path, "H2O", [1] * 30 + [0] * 10, [1] * 40)
    retrieval(tmp_path, "TOVA", [0, 1] + [1] * 27 + [0] * 11, [1] * 40)
    retrieval(tmp_path, "window", [1] * 8 + [0] * 32, [0] * 40)
    retrieval(tmp_path, "Clairvoyant(256)", [1] * 40, [1] * 40)
    found = by_name(only(tmp_path))
    standings = {name: line.standing for name, line in found.items()}
    assert standings == {"full": "", "H2O": BEST, "TOVA": TIED, "window": "", "Clairvoyant(256)": BOUND}


def test_nobody_is_best_where_nobody_found_anything(tmp_path: Path) -> None:
    for name in ("full", "H2O", "TOVA"):
        retrieval(tmp_path, name, [1, 1, 1] if name == "full" else [0, 0, 0], [1, 1, 0])
    assert {line.standing for line in by_name(only(tmp_path)).values()} == {""}


def test_who_lacks_a_place_is_not_ranked(tmp_path: Path) -> None:
    for depth in (0.1, 0.9):
        for name in ("H2O", "TOVA"):
            retrieval(tmp_path, name, [1, 0], [1, 0], depth=depth)
    retrieval(tmp_path, "SnapKV", [1, 1], [1, 1], depth=0.9)
    task = only(tmp_path)
    assert by_name(task)["SnapKV"].standing == UNRANKED
    assert task.notes == ["SnapKV lacks 1 of 2 cells: its accuracy is of the others."]


def test_budgets_languages_and_tasks_have_tables_of_their_own(tmp_path: Path) -> None:
    for language in ("en", "ko"):
        retrieval(tmp_path, "full", [1], [1], language=language)
        for budget in (64, 128):
            retrieval(tmp_path, "H2O", [1], [1], language=language, budget=budget)
    retrieval(tmp_path, "H2O", [0], [0], task="late")
    (part,) = analysed([tmp_path]).parts
    found = {(task.setting.task, task.setting.language, task.setting.budget): len(task.lines) for task in part.tasks}
    assert found == {
        **{("passkey", language, budget): 2 for language in ("en", "ko") for budget in (64, 128)},
        ("late", "en", 64): 1,
    }


def test_wilson_stays_within_a_share() -> None:
    for trials in (1, 2, 50):
        for hits in range(trials + 1):
            found = wilson(hits, trials)
            assert found is not None
            assert 0 <= (found.low or 0.0) <= found.value + 1e-12
            assert found.value - 1e-12 <= (math.inf if found.high is None else found.high) <= 1
