import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from conftest import VOCABULARY, build
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments import stream_cell
from experiments.compare_policies import main
from experiments.entrants import DEFAULT, written
from experiments.grid.cell import Found
from experiments.grid.store import DONE, FAILED, Store

ROOT = Path(__file__).parents[1]
SMALL = ["--tokens", "40", "--budget", "8,12", "--chunk", "4", "--recompute-every", "5", "--reread-every", "6"]
TWO = ["--policy", "H2O(recent=budget//2)", "TOVA()"]
NAMES = {"full", "window", "Clairvoyant(256)", "recompute 1/5", "reread 6", "H2O(recent=budget//2)", "TOVA()"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models (`model`, and `other` with words of its own) and texts (`one.txt`, `two.txt`)."""
    folder = tmp_path_factory.mktemp("place")
    words = [f"w{index}" for index in range(VOCABULARY - 2)]
    for name, order in (("model", words), ("other", words[::-1])):
        vocabulary = {"<unk>": 0, "<s>": 1, **{word: index + 2 for index, word in enumerate(order)}}
        plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
        bos = {} if name == "other" else {"bos_token": "<s>"}
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", **bos).save_pretrained(folder / name)
        network: Any = build("llama", torch.float32)
        network.save_pretrained(folder / name)
    for name, factor in (("one", 7), ("two", 11)):
        (folder / f"{name}.txt").write_text("".join(f"w{index * index * factor % 89} " for index in range(90)))
    return folder


def command(place: Path, out: Path, *more: str, texts: tuple[str, ...] = ("one",)) -> list[str]:
    files = [str(place / f"{name}.txt") for name in texts]
    how = ["--workers", "0", "--threads", "1", "--out", str(out)]
    return ["--model", str(place / "model"), *how, *SMALL, *TWO, "--text", *files, *more]


def rows(out: Path) -> list[dict[str, Any]]:
    return Store(out).rows("stream")


def unmeasured(cell: Any) -> Found:
    raise AssertionError("measured again")


def test_every_combination_is_a_cell_and_baselines_are_always_there(place: Path, tmp_path: Path) -> None:
    more = ["--positions", "cache,original", "--chunk", "4,5", "--documents", "2", "--policy", "H2O(recent=budget//2)"]
    assert main(command(place, tmp_path, *more)) == 0
    found = [row["asked"] for row in rows(tmp_path)]
    assert {each["name"] for each in found} == NAMES - {"TOVA()"}
    assert {each["text"] for each in found} == {"one.txt 1", "one.txt 2"}
    assert len({each["ids_sha256"] for each in found}) == 2
    for text in {each["text"] for each in found}:
        mine = [each for each in found if each["text"] == text]
        for name in ("window", "H2O(recent=budget//2)", "Clairvoyant(256)"):
            cells = [(each["budget"], each["positions"], each["chunk"]) for each in mine if each["name"] == name]
            assert sorted(cells) == [(b, p, c) for b in (8, 12) for p in ("cache", "original") for c in (4, 5)]
        assert sorted(each["chunk"] for each in mine if each["name"] == "full") == [4, 5]
        assert sorted(each["budget"] for each in mine if each["name"] == "reread 6") == [8, 12]
    assert len(found) == 2 * (2 + 2 * 2 + 3 * 2 * 2 * 2)
    assert {row["status"] for row in rows(tmp_path)} == {DONE}


def test_a_share_of_the_budget_is_written_as_such(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path))
    asked = {row["asked"]["budget"]: row["asked"]["policy"] for row in rows(tmp_path) if "H2O" in row["asked"]["name"]}
    assert {budget: policy.partition("recent=")[2][0] for budget, policy in asked.items()} == {8: "4", 12: "6"}
    for name in DEFAULT[:-1]:
        assert repr(written(name, 128)).startswith(name.partition("(")[0])


def test_all_hold_as_many_tokens(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path))
    held = {(row["asked"]["budget"], row["figures"]["held"]) for row in rows(tmp_path)}
    by_budget = {budget: {each for other, each in held if other == budget} - {None} for budget in (8, 12)}
    assert len(by_budget[8]) == len(by_budget[12]) == 1
    assert by_budget[8].pop() * 12 == by_budget[12].pop() * 8


def test_a_policy_that_is_a_baseline_is_measured_once(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path, "--policy", "Window()"))
    assert {row["asked"]["name"] for row in rows(tmp_path)} == NAMES - {"H2O(recent=budget//2)", "TOVA()"}


def test_finished_cells_are_kept_and_only_what_is_new_is_measured(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(command(place, tmp_path)) == 0
    before, seen = rows(tmp_path), []
    monkeypatch.setattr(stream_cell, "measure", lambda cell: (seen.append(cell), Found({}))[1])
    assert main(command(place, tmp_path)) == 0
    assert "13 of 13 cells are known already" in capsys.readouterr().out
    assert main(command(place, tmp_path, "--policy", "H2O(recent=budget//2)", "Knorm()")) == 0
    assert [cell.asked["name"] for cell in seen] == ["Knorm()", "Knorm()"]
    assert rows(tmp_path)[:13] == before


@pytest.mark.parametrize(
    ("change", "measured_again"),
    [
        (["--dtype", "bfloat16"], 13),
        (["--threads", "2"], 13),
        (["--attention", "eager"], 13),
        (["--bos", "prepend"], 13),
        (["--tokens", "41"], 13),
        (["--horizon", "9"], 2),
        (["--budget", "8"], 0),
        (["--reread-every", "7"], 2),
        (["--bucket", "9"], 13),
    ],
)
def test_whatever_figures_depend_on_makes_another_cell(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], measured_again: int
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(stream_cell, "measure", lambda cell: (seen.append(cell), Found({}))[1])
    main(command(place, tmp_path))
    assert len(seen) == 13
    main(command(place, tmp_path, *change))
    assert len(seen) == 13 + measured_again


def test_other_weights_under_the_same_name_are_measured_anew(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(stream_cell, "measure", lambda cell: (seen.append(cell), Found({}))[1])
    network: Any = build("llama", torch.float32)
    for seed in (0, 1):
        PreTrainedTokenizerFast.from_pretrained(place / "model").save_pretrained(tmp_path / "model")
        torch.manual_seed(seed)
        network.lm_head.weight.data.normal_()
        network.save_pretrained(tmp_path / "model")
        main(command(place, tmp_path / "out", "--model", str(tmp_path / "model")))
    assert len(seen) == 26


def test_a_text_that_changed_is_named_and_measured_anew(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (text := tmp_path / "one.txt").write_text((place / "one.txt").read_text())
    main(command(place, tmp_path / "out", "--text", str(text)))
    capsys.readouterr()
    text.write_text(text.read_text().replace("w7 ", "w8 ", 1))
    main(command(place, tmp_path / "out", "--text", str(text)))
    assert "document 'one.txt' is not what it was when" in capsys.readouterr().out
    assert len(rows(tmp_path / "out")) == 26


def test_a_model_that_splits_text_differently_is_told_apart_from_the_start(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    both = [str(place / "model"), str(place / "other")]
    assert main(command(place, tmp_path, "--model", *both, "--budget", "8", "--policy", "TOVA()")) == 0
    assert "split text in different ways" in capsys.readouterr().out
    assert {row["asked"]["model"] for row in rows(tmp_path)} == set(both)
    assert main(command(place, tmp_path, "--model", both[0], "--budget", "8", "--policy", "TOVA()")) == 0
    assert "split text in different ways" not in capsys.readouterr().out


def test_a_cell_that_fails_is_filed_and_the_rest_go_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    whole = stream_cell.measure

    def fails(cell: Any) -> Found:
        if cell.asked["name"] == "TOVA()":
            raise MemoryError
        return whole(cell)

    with monkeypatch.context() as patch:
        patch.setattr(stream_cell, "measure", fails)
        assert main(command(place, tmp_path)) == 1
    out = capsys.readouterr().out
    assert "out of memory" in out
    assert "2 of 13 cells failed: --retry-failed measures them again" in out
    failed = [row for row in rows(tmp_path) if row["status"] == FAILED]
    assert {row["asked"]["name"] for row in failed} == {"TOVA()"}
    assert main(command(place, tmp_path)) == 1
    assert main(command(place, tmp_path, "--retry-failed")) == 0
    assert {row["status"] for row in rows(tmp_path)} == {DONE}


def test_an_interrupt_says_what_is_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    whole, calls = stream_cell.measure, []

    def third(cell: Any) -> Found:
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(cell)

    monkeypatch.setattr(stream_cell, "measure", third)
    assert main(command(place, tmp_path)) == 130
    assert "finished cells are kept in" in capsys.readouterr().out
    assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policy", "H3O()"], r"--policy H3O\(\): no policy is named H3O: did you mean H2O"),
        (["--policy", "H2O(window=3)"], r"--policy H2O\(window=3\): H2O has no field window"),
        (["--policy", "H2O(recent=budget)"], r"--policy H2O\(recent=budget\): .*raise the budget or protect fewer"),
        (["--policy", "H2O(recent=budget//0)"], r"written as budget//2"),
        (["--policy", "calibrated"], "needs the budgets of .* by layer"),
        (["--policy", "calibrated", "--layer-budgets", "nowhere.json"], "nowhere.json cannot be read"),
        (["--budget", "39"], "evicts nothing from --tokens 40"),
        (["--tokens", "91"], "has 90 tokens where 91 are to be read"),
        (["--tokens", "4000"], "has fewer tokens than --tokens 4000"),
        (["--documents", "3"], "where 40 are to be read"),
        (["--text", "nowhere.txt"], "nowhere.txt' cannot be read"),
        (["--model", "nowhere/at/all"], "does not exist"),
        (["--budget", "0"], "must be a whole number, 1 or more"),
        (["--positions", "sideways"], "is none of cache, original"),
        (["--dataset", "a/b"], "exclude each other"),
        (["--config", "plain"], "--config plain is of a dataset: give --dataset too"),
        (["--chunk", ""], "must be a whole number"),
        (["--chunk", "4,40"], "--budget 8 in chunks of 40 evicts nothing from --tokens 40 before the last"),
        (["--chunk", "39"], "evicts nothing from --tokens 40"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line_before_work(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, change: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command(place, tmp_path / "out", *change))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_a_bos_that_there_is_not_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(command(place, tmp_path, "--model", str(place / "other"), "--bos", "prepend"))
    assert "has no BOS token: use --bos none" in capsys.readouterr().err


def test_two_documents_of_one_name_are_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (twin := tmp_path / "one.txt").write_text((place / "two.txt").read_text())
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", "--text", str(place / "one.txt"), str(twin)))
    assert "two documents are named 'one.txt'" in capsys.readouterr().err


def test_one_text_under_two_names_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (twin := tmp_path / "twin.txt").write_text((place / "one.txt").read_text())
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", "--text", str(place / "one.txt"), str(twin)))
    assert "'one.txt' and 'twin.txt' are the same text" in capsys.readouterr().err


def test_a_device_that_there_is_not_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", "--device", "cuda"))
    assert "this torch sees no CUDA device" in capsys.readouterr().err


def test_a_text_longer_than_the_model_was_trained_to_read_is_said(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(stream_cell, "measure", lambda cell: Found({}))
    (long := tmp_path / "long.txt").write_text("w1 " * 129)
    for tokens, said in (("128", False), ("129", True)):
        main(command(place, tmp_path / "out", "--text", str(long), "--tokens", tokens))
        assert ("trained to read 128 tokens" in capsys.readouterr().out) == said


def test_a_layer_that_would_hold_more_than_the_text_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (lists := tmp_path / "budgets.json").write_text("[5, 60]")
    more = ["--policy", "calibrated", "--layer-budgets", str(lists), "--budget", "30", "--tokens", "35"]
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", *more))
    assert re.search("--policy calibrated has a layer hold 3[6-9] of --tokens 35", capsys.readouterr().err)


MINE = """
from dataclasses import dataclass, field
from sinkcache import Policy

@dataclass(frozen=True)
class Mine(Policy):
    share: float = 0.5
    hidden: int = field(default=0, repr=False)

    def score(self, entries): return entries.positions.float()
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`plug_in(source)` has the distribution `stranger`, with its policy `Mine`, also called `Another`, be `source`."""

    def install(source: str) -> None:
        info = tmp_path / "site" / "stranger-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[sinkcache.policies]\nMine = stranger_of_grids:Mine\nAnother = stranger_of_grids:Mine\n")  # fmt: skip  # noqa: E501
        (info.parent / "stranger_of_grids.py").write_text(source)
        sys.modules.pop("stranger_of_grids", None)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path / "site")
    yield install
    sys.modules.pop("stranger_of_grids", None)


def test_a_plug_in_that_was_edited_is_measured_anew(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plug_in: Any
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(stream_cell, "measure", lambda cell: (seen.append(cell), Found({}))[1])
    for source, names in ((MINE, 2), (MINE, 0), (MINE.replace("float()", "neg().float()"), 2)):
        plug_in(source)
        seen.clear()
        main(
            command(
                place, tmp_path / "out", "--budget", "8", "--policy", "Protect(Mine(), num_sinks=1, recent=2)", "Mine()"
            )
        )
        mine = [cell.asked["name"] for cell in seen if "Mine" in cell.asked["name"]]
        assert len(mine) == names
    assert all("code" not in cell.asked for cell in seen if "Mine" not in cell.asked["name"])


@pytest.mark.parametrize("policy", ["Mine(hidden=1)", "Protect(Mine(hidden=1), num_sinks=1, recent=2)"])
def test_a_policy_that_does_not_write_all_it_has_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, plug_in: Any, policy: str
) -> None:
    plug_in(MINE)
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", "--policy", policy))
    assert "is another policy when it is read again" in capsys.readouterr().err


def test_a_budget_too_small_for_the_calibrated_policy_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (lists := tmp_path / "budgets.json").write_text("[10, 20, 30]")
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", "--policy", "calibrated", "--layer-budgets", str(lists)))
    assert "--policy calibrated: num_sinks + recent must be less than the budget" in capsys.readouterr().err


def test_lists_of_another_length_are_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (lists := tmp_path / "budgets.json").write_text("[10, 20, 30, 40, 50, 60, 70, 80, 90]")
    more = ["--policy", "calibrated", "--layer-budgets", str(lists), "--budget", "30"]
    with pytest.raises(SystemExit):
        main(command(place, tmp_path / "out", *more))
    assert "9 entries for" in capsys.readouterr().err


def comparable(out: Path) -> dict[str, Any]:
    """What of a store must be the same on every run: everything but times, dates and the folder's name."""
    store, found = Store(out), {}
    for row in store.rows():
        arrays = {name: array.tobytes() for name, array in store.scores(row["key"]).items()}
        kept = {name: row[name] for name in ("asked", "figures", "status", "reason", "function", "arrays")}
        found[row["key"]] = (json.dumps(kept, sort_keys=True), arrays)
    return found


@pytest.mark.slow
def test_killed_twenty_times_it_comes_to_the_same_store(place: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    quiet: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}

    def started(out: Path) -> list[str]:
        more = ["--positions", "cache,original"]
        return [sys.executable, "-m", "experiments.compare_policies", *command(place, out, *more, texts=("one", "two"))]

    subprocess.run(started(whole), check=True, **quiet)
    total, drawn, kills = len(Store(whole).rows()), random.Random(0), 0

    def size() -> int:
        return path.stat().st_size if (path := broken / "results.jsonl").exists() else 0

    while kills < 20:
        known = size()
        process = subprocess.Popen(started(broken), start_new_session=True, **quiet)
        while process.poll() is None and size() == known:
            time.sleep(0.001)
        time.sleep(drawn.random() / 20)
        assert process.poll() is None, f"ended before the kill number {kills + 1}"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills < len(Store(broken).rows()) < total
    subprocess.run(started(broken), check=True, **quiet)
    assert comparable(broken) == comparable(whole)
    assert len((broken / "results.jsonl").read_bytes().splitlines()) <= total + kills  # nothing was measured twice
    assert not [path for path in (broken / "scores").iterdir() if path.name.startswith(".")]


def test_workers_come_to_the_same_store_as_one_process(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path / "alone"))
    main(command(place, tmp_path / "workers", "--workers", "2"))
    assert comparable(tmp_path / "workers") == comparable(tmp_path / "alone")
    assert np.isfinite(rows(tmp_path / "workers")[0]["cost"]["ms_per_token"])
