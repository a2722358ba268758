import argparse
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grid_functions
import numpy as np
import pytest
import torch
from rich.console import Console

from experiments.grid import store as store_module
from experiments.grid.cell import Cell, Found, measured
from experiments.grid.options import add_options, check_workers, threads
from experiments.grid.pool import _visible, attempt, here, spread
from experiments.grid.run import run
from experiments.grid.store import DONE, FAILED, Store

COMMAND = ["python", "-m", "experiments.some", "--text", "a b.txt"]
TESTS = Path(__file__).parent


def cell(number: int, function: str = "square", payload: Any = None, **asked: Any) -> Cell:
    return Cell(f"grid_functions:{function}", {"kind": "test", "number": number, **asked}, payload)


def options(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, folder)
    return parser.parse_args(["--workers", "0", *more])


def measure(cells: Sequence[Cell], folder: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    printed = io.StringIO()
    rows = run(cells, Store(folder), Console(file=printed, width=200), options(folder, *more), COMMAND)
    return rows, printed.getvalue()


def without_time(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("cost", "date")} for row in rows]


# cells


def test_a_key_tells_functions_and_everything_that_is_asked_apart() -> None:
    asked = {"kind": "test", "number": 1, "deep": {"list": [1, 2]}}
    cells = [
        Cell("a:b", asked),
        Cell("a:c", asked),
        Cell("a:b", {**asked, "number": 2}),
        Cell("a:b", {**asked, "deep": {"list": [2, 1]}}),
    ]
    assert len({each.key for each in cells}) == len(cells)
    assert Cell("a:b", dict(reversed(asked.items())), "payload").key == cells[0].key
    assert len(cells[0].key) == 16


def test_what_json_cannot_hold_is_no_key() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = Cell("a:b", {"kind": "test", "number": float("nan")}).key


def test_a_cell_is_measured_by_the_function_it_names() -> None:
    found = measured(cell(3))
    assert found.figures == {"square": 9}
    np.testing.assert_equal(found.scores["twice"], [6.0, np.nan])


# the store


def test_what_is_filed_is_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing():
        row = store.add(cell(3), measured(cell(3)), COMMAND)
        store.fail(cell(4), "why\nnot", COMMAND)
    again = Store(tmp_path)
    assert again.rows() == [row, again.find(cell(4).key)]
    assert (row["status"], row["command"], row["figures"], row["kind"]) == (DONE, COMMAND, {"square": 9}, "test")
    np.testing.assert_equal(again.scores(row["key"])["twice"], [6.0, np.nan])
    failed = again.rows("test")[1]
    assert (failed["status"], failed["reason"], again.scores(failed["key"])) == (FAILED, "why not", {})
    assert again.rows("other") == []
    assert again.damaged == 0


def test_a_line_cut_short_counts_as_not_done_and_spoils_no_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing():
        store.add(cell(1), measured(cell(1)), COMMAND)
        store.add(cell(2), measured(cell(2)), COMMAND)
    whole = store.path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 9, whole.index(b"\n") + 2):
        store.path.write_bytes(whole[:length])
        cut = Store(tmp_path)
        complete = length == len(whole) - 1  # all but the line's end
        assert [row["asked"]["number"] for row in cut.rows()] == ([1, 2] if complete else [1])
        assert cut.damaged == (not complete)
        cut.add(cell(3), measured(cell(3)), COMMAND)
        assert [row["asked"]["number"] for row in Store(tmp_path).rows()] == ([1, 2, 3] if complete else [1, 3])


def test_of_two_lines_of_a_cell_the_later_holds(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing():
        store.fail(cell(1), "not yet", COMMAND)
        store.add(cell(2), measured(cell(2)), COMMAND)
        store.add(cell(1), measured(cell(1)), COMMAND)
    assert [(row["asked"]["number"], row["status"]) for row in store.rows()] == [(2, DONE), (1, DONE)]
    assert Store(tmp_path).rows() == store.rows()
    assert len(store.path.read_text().splitlines()) == 3


def test_a_cell_whose_arrays_are_lost_is_not_done_and_damaged_ones_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing():
        for number in (1, 2):
            store.add(cell(number), measured(cell(number)), COMMAND)
    (tmp_path / "scores" / f"{cell(1).key}.safetensors").unlink()
    (tmp_path / "scores" / f"{cell(2).key}.safetensors").write_bytes(b"no arrays")
    again = Store(tmp_path)
    assert (again.find(cell(1).key), again.damaged) == (None, 1)
    with pytest.raises(ValueError, match=r"is damaged .*: delete it, and the cell is measured again"):
        again.scores(cell(2).key)


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with Store(tmp_path).writing(), pytest.raises(ValueError, match="being written to by another run"):
        measure([cell(1)], tmp_path)
    assert measure([cell(1)], tmp_path)[0][0]["figures"] == {"square": 1}


def test_a_full_disk_ends_the_run_and_what_was_filed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, line: Any, /) -> int:
            super().write(bytes(line)[:40])
            raise OSError(28, "No space left on device")

    measure([cell(1)], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
        with pytest.raises(OSError, match="No space left"):
            measure([cell(1), cell(2), cell(3)], tmp_path)
    assert [row["asked"]["number"] for row in Store(tmp_path).rows()] == [1]
    assert len(measure([cell(1), cell(2), cell(3)], tmp_path)[0]) == 3
    assert [row["asked"]["number"] for row in Store(tmp_path).rows()] == [1, 2, 3]


def test_what_a_killed_process_left_half_written_is_cleared(tmp_path: Path) -> None:
    measure([cell(1)], tmp_path)
    (half := tmp_path / "scores" / f".{cell(2).key}.safetensors.123").touch()
    measure([cell(1)], tmp_path)
    assert not half.exists()


# processes


def test_whatever_goes_wrong_with_a_cell_is_its_outcome() -> None:
    errors = [ValueError("first\nsecond"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), KeyError("a")]
    reasons = [attempt(cell(0, "fail", error)).reason for error in errors]
    assert reasons == [
        "ValueError: first",
        "out of memory: MemoryError()",
        "out of memory: CUDA out of memory",
        "KeyError: 'a'",
    ]
    with pytest.raises(KeyboardInterrupt):
        attempt(cell(0, "fail", KeyboardInterrupt()))


def test_in_this_process_threads_are_as_asked_and_put_back() -> None:
    before = torch.get_num_threads()
    (outcome,) = here([cell(0, "threads")], before + 1)
    assert outcome.found is not None
    assert outcome.found.figures == {"threads": before + 1, "process": os.getpid()}
    assert torch.get_num_threads() == before


def test_processes_measure_what_this_one_does(tmp_path: Path) -> None:
    cells = [*(cell(number) for number in range(5)), cell(9, "fail", ValueError("no"))]
    alone, _ = measure(cells, tmp_path / "alone")
    together, printed = measure(cells, tmp_path / "together", "--workers", "2")
    assert without_time(together) == without_time(alone)
    assert [row["status"] for row in together] == [DONE] * 5 + [FAILED]
    assert "failed: " in printed
    assert "ValueError: no" in printed


def test_each_process_has_its_threads_and_there_are_as_many_as_asked() -> None:
    outcomes = list(spread([cell(number, "threads") for number in range(6)], 2, 1, 0))
    found = [outcome.found.figures for outcome in outcomes if outcome.found is not None]
    assert {each["threads"] for each in found} == {1}
    assert len(found) == 6
    assert 1 <= len({each["process"] for each in found}) <= 2
    assert os.getpid() not in {each["process"] for each in found}


def test_a_dead_process_loses_its_cell_alone_and_the_cell_is_tried_again(tmp_path: Path) -> None:
    dying = cell(7, "die", folder=str(tmp_path), times=2)
    cells = [cell(1), dying, *(cell(number) for number in (2, 3, 4))]
    outcomes = {outcome.cell.asked["number"]: outcome for outcome in spread(cells, 2, 1, retries=2)}
    squares = {number: each.found.figures["square"] for number, each in outcomes.items() if each.found is not None}
    assert squares == {number: number**2 for number in (1, 2, 3, 4, 7)}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_cell_that_kills_its_process_each_time_is_given_up_with_the_reason(tmp_path: Path) -> None:
    cells = [cell(7, "die", folder=str(tmp_path), times=9), cell(1)]
    outcomes = {outcome.cell.asked["number"]: outcome for outcome in spread(cells, 1, 1, retries=1)}
    assert outcomes[7].reason == "its process was killed, as the system does where memory runs out, 2 times"
    assert outcomes[1].found is not None
    assert len(list(tmp_path.iterdir())) == 2


def test_a_process_never_hears_ctrl_c_and_this_one_does() -> None:
    outcomes = list(spread([cell(number, "signals") for number in range(2)], 2, 1, 0))
    assert [outcome.found and outcome.found.figures for outcome in outcomes] == [{"deaf": True}] * 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ending_early_ends_the_processes(tmp_path: Path) -> None:
    outcomes = spread([cell(1), cell(2, "slow", folder=str(tmp_path))], 2, 1, 0)
    assert next(outcomes).cell.asked["number"] == 1
    while not (started := list(tmp_path.iterdir())):
        time.sleep(0.01)
    outcomes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started[0].name), 0)


def test_processes_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "from test_grid import *\n"
        f"list(spread([cell(number, 'slow', folder={str(tmp_path)!r}) for number in (1, 2)], 2, 1, 0))"
    )
    script = tmp_path.with_name("parent.py")
    script.write_text(f"if __name__ == '__main__':\n    {program.replace(chr(10), chr(10) + '    ')}\n".replace(
        "from test_grid import *", "from test_grid import cell, spread"))  # fmt: skip
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths})
    while len(children := list(tmp_path.iterdir())) < 2:
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{child.name}").exists() for child in children):
        assert time.monotonic() < until, "a process outlived its parent"
        time.sleep(0.02)


def test_gpus_go_round() -> None:
    assert [_visible(number, 3, None) for number in range(5)] == ["0", "1", "2", "0", "1"]
    assert [_visible(number, 2, "4,7") for number in range(3)] == ["4", "7", "4"]


# runs


def test_finished_cells_are_not_measured_again_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, printed = measure([cell(1), cell(2)], tmp_path)
    assert "known already" not in printed
    monkeypatch.setattr(grid_functions, "square", lambda cell: Found({"square": -1}))
    again, printed = measure([cell(1), cell(2), cell(3)], tmp_path)
    assert "2 of 3 cells are known already" in printed
    assert [row["figures"]["square"] for row in again] == [1, 4, -1]
    assert again[:2] == first
    fresh, _ = measure([cell(1)], tmp_path, "--fresh")
    assert fresh[0]["figures"]["square"] == -1


def test_a_log_has_a_line_for_each_cell(tmp_path: Path) -> None:
    cells = [cell(number, name=f"policy {number}") for number in (1, 2, 3)]
    measure(cells[:1], tmp_path)
    _, printed = measure(cells, tmp_path)
    assert "2 of 3 cells: policy 2\n3 of 3 cells: policy 3\n" in printed


def test_a_failure_is_kept_until_it_is_to_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = cell(1, "fail", ValueError("no"))
    assert measure([failing], tmp_path)[0][0]["status"] == FAILED
    monkeypatch.setattr(grid_functions, "fail", lambda cell: Found({"square": 1}))
    assert measure([failing], tmp_path)[0][0]["status"] == FAILED
    assert measure([failing], tmp_path, "--retry-failed")[0][0]["status"] == DONE


def test_a_cell_that_is_asked_for_twice_is_measured_once(tmp_path: Path) -> None:
    rows, printed = measure([cell(1), cell(1), cell(2)], tmp_path)
    assert [row["asked"]["number"] for row in rows] == [1, 2]
    assert "known already" not in printed
    assert len(Store(tmp_path).path.read_text().splitlines()) == 2


@pytest.mark.parametrize("figure", [math.inf, math.nan, np.float32(1), {1}])
def test_a_figure_that_cannot_be_kept_fails_its_cell_alone(tmp_path: Path, figure: Any) -> None:
    rows, printed = measure([cell(1, "tell", figure), cell(2)], tmp_path)
    assert [row["status"] for row in rows] == [FAILED, DONE]
    assert rows[0]["reason"].startswith("what was found cannot be kept: ")
    assert "cannot be kept" in printed
    assert Store(tmp_path).rows() == rows


@pytest.mark.parametrize("asked", [None, [], {}, {"kind": "other"}])
def test_a_line_that_says_not_what_was_asked_is_damaged(tmp_path: Path, asked: Any) -> None:
    (row,), _ = measure([cell(1)], tmp_path)
    (tmp_path / "results.jsonl").write_text(json.dumps({**row, "asked": asked}) + "\n")
    assert (Store(tmp_path).rows(), Store(tmp_path).damaged) == ([], 1)


def test_an_interrupt_keeps_what_is_filed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure([cell(1), cell(2, "fail", KeyboardInterrupt()), cell(3)], tmp_path)
    assert [row["asked"]["number"] for row in Store(tmp_path).rows()] == [1]
    rows, _ = measure([cell(1), cell(3)], tmp_path)  # the folder is free again
    assert len(rows) == 2


def test_threads_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert [threads(options(tmp_path, "--workers", number)) for number in "0128"] == [8, 8, 4, 1]
    assert threads(options(tmp_path, "--workers", "16")) == 1
    assert threads(options(tmp_path, "--workers", "2", "--threads", "3")) == 3


def test_weights_that_do_not_fit_are_refused_before_work(tmp_path: Path) -> None:
    given = options(tmp_path, "--workers", "2")
    given.device = "cpu"
    check_workers(given, [None, 2**20])
    with pytest.raises(ValueError, match=r"the weights take 2048\.0 GiB in --workers 2 .*: fewer workers"):
        check_workers(given, [None, 2**40])


# clusters


def test_a_cluster_without_ray_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.grid import cluster

    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "sinkcache\[ray\]"'):
        cluster.check_ray("auto")
    cluster.check_ray(None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A Ray cluster of two workers on this machine."""
    ray = pytest.importorskip("ray", reason='needs the package ray: pip install "sinkcache[ray]"')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return ray


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray's own
def test_a_cluster_runs_the_grid_and_a_killed_worker_loses_its_cell_alone(cluster: Any, tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    cells = [
        *(cell(number) for number in range(6)),
        cell(7, "die", folder=str(marks), times=1, seconds=1),
        cell(9, "fail", ValueError("no")),
    ]
    rows, printed = measure(cells, tmp_path / "cluster", "--ray", "local", "--workers", "2", "--threads", "1")
    found = {row["asked"]["number"]: row["figures"].get("square") for row in rows}
    assert found == {**{number: number**2 for number in (*range(6), 7)}, 9: None}
    assert "ValueError: no" in printed
    assert len(list(marks.iterdir())) == 2
    alone, _ = measure(cells, tmp_path / "alone")
    assert without_time(alone) == without_time(rows)
    np.testing.assert_equal(Store(tmp_path / "cluster").scores(rows[2]["key"])["twice"], [4.0, np.nan])
