import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from conftest import VOCABULARY, build
from tokenizers import models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from experiments import calibrated, policy_quality
from experiments.contestants import HORIZONS, POLICIES, made
from experiments.policy_quality import figure, main, markdown, over_texts
from sinkcache import SinkCache
from sinkcache.budgets import scaled
from sinkcache.calibration import calibrate
from sinkcache.metrics import perplexity
from sinkcache.models import load
from sinkcache.policies import H2O
from sinkcache.policies.clairvoyant import Clairvoyant
from sinkcache.recording import Recording, recall, record
from sinkcache.texts import embedded, from_file, tokenize

pytest.importorskip("matplotlib")

SMALL = ["--tokens", "60", "--budget", "12,16", "--chunk", "6", "--policy", "H2O,TOVA"]
ROWS = [
    {"name": "full", "text": "a", "budget": None, "perplexity": 10.0, "recall": 1.0},
    {"name": "Window", "text": "a", "budget": 8, "perplexity": 90.0, "recall": 0.25, "gap": -3.0},
    {"name": "H2O", "text": "a", "budget": 8, "perplexity": 20.0, "recall": 0.75, "gap": 0.5},
    {"name": "best per query", "text": "a", "budget": 8, "recall": 0.875},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model (`model`), its tokenizer, and two texts of 80 tokens (`one.txt`, `two.txt`)."""
    folder = tmp_path_factory.mktemp("place")
    vocabulary = {"<unk>": 0, **{f"w{index}": index + 1 for index in range(VOCABULARY - 1)}}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(folder / "model")
    network: Any = build("llama", torch.float32)
    network.save_pretrained(folder / "model")
    for name, factor in (("one", 7), ("two", 11)):
        (folder / f"{name}.txt").write_text("".join(f"w{index * factor % 90} " for index in range(80)))
    return folder


def run(place: Path, out: Path, *more: str, texts: tuple[str, ...] = ("one",)) -> int:
    files = [str(place / f"{name}.txt") for name in texts]
    return main(["--model", str(place / "model"), "--out", str(out), *SMALL, *more, "--text", *files])


def cells(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "cells.json").read_text())


def unmeasured(*arguments: Any) -> None:
    raise AssertionError("measured again")


def test_every_cell_is_what_the_library_measures(place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path) == 0
    network, tokenizer = load(str(place / "model"))
    ids = tokenize(from_file(place / "one.txt"), tokenizer, 60)[:, :60]
    recorded = record(network, ids, 6)
    names = ("Window", "StreamingLLM", "Clairvoyant", "H2O", "TOVA")
    rows = {(row["name"], row["budget"]): row for row in cells(tmp_path)}
    assert set(rows) == {("full", None), *((name, b) for name in (*names, "best per query") for b in (12, 16))}
    full = perplexity(network, DynamicCache(config=network.config), ids, 6).value
    assert rows["full", None]["perplexity"] == pytest.approx(full, rel=1e-4)  # float32, kernels of another shape
    for budget in (12, 16):
        policies = [made(name, budget, lambda: recorded) for name in names]
        *shares, best = recall(network, ids, policies, budget, 6)
        assert rows["best per query", budget]["recall"] == pytest.approx(best)
        sinks = rows["StreamingLLM", budget]["perplexity"]
        for name, policy, share in zip(names, policies, shares, strict=True):
            row = rows[name, budget]
            value = perplexity(network, SinkCache(network, policy, budget, "original"), ids, 6).value
            assert row["perplexity"] == pytest.approx(value, rel=1e-4)  # the same
            assert row["recall"] == pytest.approx(share)
            assert row["gap"] == pytest.approx((sinks - row["perplexity"]) / (sinks - rows["full", None]["perplexity"]))
            assert row["policy"] == repr(policy)


def test_what_is_written_agrees(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(place, tmp_path, texts=("one", "two"))
    printed = capsys.readouterr().out
    rows = cells(tmp_path)
    with open(tmp_path / "cells.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["name"] for row in table] == [row["name"] for row in rows]
    assert [row["recall"] for row in table] == [str(row["recall"]) for row in rows]
    for text in ("one.txt", "two.txt"):
        assert markdown([row for row in rows if row["text"] == text]) in printed
    assert markdown(over_texts(rows)) in printed
    assert (tmp_path / "perplexity_over_budget.png").stat().st_size > 10_000


def test_finished_cells_are_not_measured_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place, tmp_path)
    before = (tmp_path / "cells.csv").read_bytes()
    with monkeypatch.context() as patch:
        for name in ("perplexity", "recall", "record"):
            patch.setattr(policy_quality, name, unmeasured)
        assert run(place, tmp_path) == 0
        assert (tmp_path / "cells.csv").read_bytes() == before
        with pytest.raises(AssertionError, match="measured again"):
            run(place, tmp_path, "--fresh")
        with pytest.raises(AssertionError, match="measured again"):
            run(place, tmp_path, texts=("two",))


def test_a_new_policy_is_measured_alone(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    real = policy_quality.recall

    def noted(model: Any, ids: Any, policies: Any, budget: int, chunk: int) -> list[float]:
        asked.append([type(policy).__name__ for policy in policies])
        return real(model, ids, policies, budget, chunk)

    run(place, tmp_path)
    monkeypatch.setattr(policy_quality, "recall", noted)
    run(place, tmp_path, "--policy", "H2O,TOVA-head")
    assert asked == [["TOVA"], ["TOVA"]]
    assert len(list((tmp_path / "cells").glob("*.json"))) == 1 + 2 * 7


def test_calibrated_budgets_are_found_once_and_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "BUDGET", 32)
    monkeypatch.setattr(calibrated, "TOKENS", 80)
    more = ["--policy", "H2O-calibrated", "--budget", "24,32"]
    run(place, tmp_path, *more)
    (kept,) = tmp_path.glob("calibrated-*.json")
    network, tokenizer = load(str(place / "model"))
    found = calibrate(network, tokenize(embedded(), tokenizer, 80), calibrated.POLICY, 32)
    assert json.loads(kept.read_text())["budgets"] == found
    rows = {row["budget"]: row for row in cells(tmp_path) if row["name"] == "H2O-calibrated"}
    ids = tokenize(from_file(place / "one.txt"), tokenizer, 60)[:, :60]
    for budget in (24, 32):
        budgets = scaled(found, budget, 21)
        assert rows[budget]["budgets"] == budgets
        value = perplexity(network, SinkCache(network, calibrated.POLICY, budgets, "original"), ids, 6).value
        assert rows[budget]["perplexity"] == pytest.approx(value, rel=1e-4)  # float32, kernels of another shape
        assert rows[budget]["recall"] == pytest.approx(recall(network, ids, [calibrated.POLICY], budgets, 6)[0])
    for name in ("perplexity", "recall", "record"):
        monkeypatch.setattr(policy_quality, name, unmeasured)
    monkeypatch.setattr(calibrated, "calibrate", unmeasured)
    assert run(place, tmp_path, *more) == 0


def test_the_stored_list_is_the_embedded_models() -> None:
    ((weights, told),) = json.loads(calibrated.STORED.read_text()).items()
    assert len(weights) == 16
    assert len(told["budgets"]) == 30
    assert sum(told["budgets"]) == 30 * calibrated.BUDGET
    assert told["command"].startswith("python -m sinkcache calibrate ")
    assert repr(calibrated.POLICY).startswith("H2O(recent=16, num_sinks=4, half_life=256, reduce='mean'")


def test_what_was_measured_before_ctrl_c_is_kept(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = policy_quality.perplexity, []

    def interrupted(*arguments: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(policy_quality, "perplexity", interrupted)
        assert run(place, tmp_path) == 130
    assert "finished cells are kept" in " ".join(capsys.readouterr().out.split())
    found = [json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()]
    assert sum("perplexity" in cell for cell in found) == 3
    assert run(place, tmp_path) == 0
    assert len(cells(tmp_path)) == 13


def test_a_cell_is_another_for_other_settings(place: Path, tmp_path: Path) -> None:
    for more in ([], ["--chunk", "4"], ["--tokens", "50"], ["--budget", "20"]):
        run(place, tmp_path, *more)
    found = [json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()]
    assert {(cell["chunk"], cell["tokens"]) for cell in found} == {(6, 60), (4, 60), (6, 50)}
    assert len(found) == 13 + 13 + 13 + 6


def test_a_table_puts_the_best_first_and_the_bounds_at_its_ends() -> None:
    assert markdown(ROWS).splitlines() == [
        "| policy | perplexity 8 | gap 8 | recall 8 |",
        "|---|---:|---:|---:|",
        "| full | 10.00 | - | 1.000 |",
        "| H2O | 20.00 | 50% | 0.750 |",
        "| Window | 90.00 | -300% | 0.250 |",
        "| best per query | - | - | 0.875 |",
    ]


def test_texts_are_averaged_geometrically_in_perplexity() -> None:
    other = [{**row, "text": "b", "recall": row["recall"] / 2} for row in ROWS]
    for row in other:
        row["perplexity"] = row.get("perplexity", 0) * 4
    merged = over_texts([*ROWS, *other])
    assert [row["name"] for row in merged] == [row["name"] for row in ROWS]
    assert merged[2]["perplexity"] == pytest.approx(40.0)
    assert (merged[2]["recall"], merged[2]["gap"]) == (0.5625, 0.5)
    assert "perplexity" not in merged[3]


def test_a_figure_has_a_line_for_each_policy_and_the_full_cache() -> None:
    more = [{**row, "budget": 16, "perplexity": row.get("perplexity", 0) / 2} for row in ROWS[1:3]]
    (axes,) = figure([*ROWS, *more]).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["H2O"] == [[8, 20.0], [16, 10.0]]
    assert set(lines) == {"full", "Window", "H2O"}


@pytest.mark.parametrize("name", [*POLICIES, *HORIZONS])
@pytest.mark.parametrize("budget", [128, 256, 512])
def test_every_policy_can_live_with_the_default_budgets(name: str, budget: int) -> None:
    recorded = Recording(64, 4096, {})
    policy = made(name, budget, lambda: recorded)
    policy.check(budget)
    assert isinstance(policy, Clairvoyant) == (name in HORIZONS)


def test_h2o_is_as_published() -> None:
    assert POLICIES["H2O"](256) == H2O(recent=128)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "H3O"], "'H3O' is none of"),
        (["--policy", "SnapKV"], "observation_window|num_sinks \\+ recent"),
        (["--budget", "60"], "--budget 60 evicts nothing from --tokens 60"),
        (["--tokens", "81"], "has 80 tokens, got --tokens 81"),
        (["--model", "./nowhere"], "nowhere"),
    ],
)
def test_a_users_mistake_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(place, tmp_path, *more)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(said, line), line
