import json
from pathlib import Path
from typing import Any

import pytest
from report_cells import VERSIONS, append, failed, nlls, retrieval, stream

from experiments.__main__ import main
from experiments.reports.diff import diff


def run(tmp_path: Path, *more: str) -> int:
    return main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), *more])


def both(tmp_path: Path, **changed: float) -> None:
    """A run of two cells and the same again; `changed` are other figures of the second one's second cell."""
    for folder in ("a", "b"):
        stream(tmp_path / folder, "full", nlls(200, 0), cost={"seconds": 1.0 if folder == "a" else 9.0})
        stream(tmp_path / folder, "H2O", nlls(200, 1), figures=changed if folder == "b" else {})


def test_equal_runs_are_equal_whatever_they_cost(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    both(tmp_path)
    assert run(tmp_path) == 0
    assert "2 cells in both, 0 of them with figures that differ" in capsys.readouterr().out


def test_a_figure_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    both(tmp_path, kl=0.5)
    old = diff(tmp_path / "a", tmp_path / "a", 0.0)
    assert not old.changes
    assert run(tmp_path) == 1
    (change,) = diff(tmp_path / "a", tmp_path / "b", 0.0).changes
    assert (change.figure, change.old, change.new, change.relative) == ("kl", 0.0, 0.5, 1.0)
    assert "1 of them with figures that differ" in capsys.readouterr().out


@pytest.mark.parametrize(("tolerance", "code"), [("0", 1), ("0.99e-4", 1), ("1.01e-4", 0)])
def test_tolerance_is_relative(tmp_path: Path, tolerance: str, code: int) -> None:
    both(tmp_path, recall=0.75 * (1 + 1e-4))
    assert run(tmp_path, "--tolerance", tolerance) == code


def test_numbers_within_lists_are_compared(tmp_path: Path) -> None:
    stream(tmp_path / "a", "full", nlls(200, 0))
    stream(tmp_path / "b", "full", nlls(200, 0), figures={"curve": [[64, 10.5], [200, 11.6]]})
    (change,) = diff(tmp_path / "a", tmp_path / "b", 0.0).changes
    assert (change.figure, change.old, change.new) == ("curve[1][1]", 11.5, 11.6)


def test_lists_of_other_lengths_differ(tmp_path: Path) -> None:
    stream(tmp_path / "a", "full", nlls(200, 0))
    stream(tmp_path / "b", "full", nlls(200, 0), figures={"curve": [[64, 10.5]]})
    found = {(change.figure, change.old, change.new) for change in diff(tmp_path / "a", tmp_path / "b", 1.0).changes}
    assert found == {("curve[1][0]", 200, "not there"), ("curve[1][1]", 11.5, "not there")}


def test_answers_are_compared(tmp_path: Path) -> None:
    retrieval(tmp_path / "a", "full", [1, 1], [1, 1])
    retrieval(tmp_path / "b", "full", [1, 0], [1, None])
    found = {change.figure: (change.old, change.new) for change in diff(tmp_path / "a", tmp_path / "b", 1e-4).changes}
    assert found == {"accuracy": (1.0, 0.5), "hits[1]": (1, 0), "visible[1]": (1, None)}


def test_cells_are_matched_over_versions_threads_and_devices(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    stream(tmp_path / "a", "full", nlls(200, 0))
    newer = {**VERSIONS, "torch": "2.14.0"}
    stream(tmp_path / "b", "full", nlls(200, 0), versions=newer, threads=2, device="cuda")
    assert run(tmp_path) == 0
    said = capsys.readouterr().out
    for words in ("torch differs: 2.13.0 and 2.14.0", "threads differs: 1 and 2", "device differs: cpu and cuda"):
        assert words in said


@pytest.mark.parametrize("field", ["dtype", "policy", "budget", "text_sha256", "chunk"])
def test_nothing_else_may_differ_between_cells_that_are_matched(tmp_path: Path, field: str) -> None:
    stream(tmp_path / "a", "H2O", nlls(200, 0))
    other: dict[str, Any] = {field: 100 if field in ("budget", "chunk") else "other"}
    stream(tmp_path / "b", "H2O", nlls(200, 0), **other)
    found = diff(tmp_path / "a", tmp_path / "b", 0.0)
    assert (found.shared, len(found.only_old), len(found.only_new)) == (0, 1, 1)


def test_a_cell_with_the_same_key_is_matched_first(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for threads in (1, 2) if folder == "a" else (2, 1):
            stream(tmp_path / folder, "full", nlls(200, threads), threads=threads)
    found = diff(tmp_path / "a", tmp_path / "b", 0.0)
    assert (found.shared, found.changes, found.conditions) == (2, [], {})


def test_a_cell_is_matched_once(tmp_path: Path) -> None:
    stream(tmp_path / "a", "full", nlls(200, 0))
    for threads in (1, 2):
        stream(tmp_path / "b", "full", nlls(200, 0), threads=threads)
    found = diff(tmp_path / "a", tmp_path / "b", 0.0)
    assert (found.shared, len(found.only_old), len(found.only_new)) == (1, 0, 1)


def test_a_difference_as_large_as_the_tolerance_is_none(tmp_path: Path) -> None:
    both(tmp_path, recall=0.75 / 2)
    assert run(tmp_path, "--tolerance", "0.5") == 0


def test_cells_of_one_run_alone_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    both(tmp_path)
    stream(tmp_path / "a", "TOVA", nlls(200, 2))
    stream(tmp_path / "b", "SnapKV", nlls(200, 3))
    assert run(tmp_path) == 1
    said = capsys.readouterr().out
    assert "only in the first: TOVA on one" in said
    assert "only in the second: SnapKV on one" in said
    assert run(tmp_path, "--shared") == 0


def test_a_cell_that_fails_now_differs(tmp_path: Path) -> None:
    row = stream(tmp_path / "a", "H2O", nlls(200, 1))
    append(tmp_path / "b", {**row, "status": "failed", "reason": "out of memory", "figures": {}})
    (change,) = diff(tmp_path / "a", tmp_path / "b", 0.0).changes
    assert (change.figure, change.old, change.new) == ("status", "done", "failed: out of memory")


def test_a_figure_that_is_gone_differs(tmp_path: Path) -> None:
    row = stream(tmp_path / "a", "H2O", nlls(200, 1))
    append(tmp_path / "b", {**row, "figures": {name: row["figures"][name] for name in row["figures"] if name != "kl"}})
    (change,) = diff(tmp_path / "a", tmp_path / "b", 1.0).changes
    assert (change.figure, change.new) == ("kl", "not there")


def test_no_number_and_a_number_differ(tmp_path: Path) -> None:
    both(tmp_path, recall=None)  # type: ignore[arg-type]
    assert run(tmp_path, "--tolerance", "10") == 1


def test_a_number_without_end_differs_from_any_other(tmp_path: Path) -> None:
    row = stream(tmp_path / "a", "H2O", nlls(200, 1))
    append(tmp_path / "b", {**row, "figures": {**row["figures"], "perplexity": float("inf")}})
    assert run(tmp_path, "--tolerance", "10") == 1
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "b")]) == 0


@pytest.mark.parametrize("content", [None, "", "not json\n{\n"])
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None) -> None:
    stream(tmp_path / "a", "full", nlls(200, 0))
    (tmp_path / "b").mkdir()
    if content is not None:
        (tmp_path / "b" / "results.jsonl").write_text(content)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "b") in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("tolerance", ["-1", "nan", "much", "inf"])
def test_a_tolerance_must_be_a_number(tmp_path: Path, tolerance: str) -> None:
    both(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, f"--tolerance={tolerance}")
    assert ended.value.code == 2


def test_nothing_in_common_is_refused_if_only_that_is_asked_for(tmp_path: Path) -> None:
    stream(tmp_path / "a", "full", nlls(200, 0))
    stream(tmp_path / "b", "H2O", nlls(200, 0))
    assert run(tmp_path) == 1
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--shared")
    assert ended.value.code == 2


def test_damaged_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    both(tmp_path)
    with open(tmp_path / "b" / "results.jsonl", "a") as file:
        file.write('{"key": "cut sho')
    assert run(tmp_path) == 0
    assert "1 damaged line of the second passed over" in capsys.readouterr().out


def test_the_last_line_of_a_key_holds(tmp_path: Path) -> None:
    failed(tmp_path / "a", "H2O", "killed")
    row = json.loads((tmp_path / "a" / "results.jsonl").read_text())
    append(tmp_path / "a", {**row, "status": "done", "reason": None, "figures": {"perplexity": 3.0}})
    append(tmp_path / "b", {**row, "status": "done", "reason": None, "figures": {"perplexity": 3.0}})
    assert run(tmp_path) == 0
