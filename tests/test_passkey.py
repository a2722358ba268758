import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from conftest import build
from test_retrieval import TOKENIZER
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments import passkey
from experiments.passkey import main
from experiments.reports.drawing import Style
from experiments.reports.retrieval import tasks
from experiments.results import Row
from experiments.retrieval import cell as cells
from experiments.retrieval.report import by_distance, lines_of, write

pytest.importorskip("matplotlib")

SMALL = ["--length", "400", "--depth", "0,1", "--budget", "60", "--trials", "1", "--chunk", "64"]
WAYS = ["--policy", "StreamingLLM(num_sinks=4)", "H2O(recent=budget//2)"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, trained to read 4,096 tokens, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("model")
    network: Any = build("llama", torch.float32, vocab_size=257, max_position_embeddings=4096)
    network.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def run(place: Path, out: Path, *more: str) -> int:
    return main(["--model", str(place), "--out", str(out), "--workers", "0", "--threads", "1", *SMALL, *WAYS, *more])


def rows(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def row(name: str, hits: list[int], visible: list[int], **asked: Any) -> Row:
    """A finished cell of a policy, the full cache if that is its name."""
    full = name == "full"
    told = {"task": "passkey", "language": "en", "length": 512, "depth": 0.5, "model": "m", "name": name, "seed": 0}
    told |= {"method": "full" if full else "policy", "policy": None if full else name, "budgets": None}
    told |= {"budget": None if full else 64, "positions": None if full else "cache", "chunk": None if full else 8}
    told |= {"prompts_sha256": "0", **asked}
    figures = {"hits": hits, "visible": visible, "held_share": [each / 2 for each in visible]}
    return {"key": name, "date": "", "status": "done", "asked": told, "figures": figures, "command": ["python"]}


@pytest.mark.slow
def test_every_task_is_answered_by_every_method_in_every_setting(place: Path, tmp_path: Path) -> None:
    more = ["--task", "passkey,multikey,late,early,streameval", "--length", "700", "--depth", "0", "--trials", "2"]
    more += ["--distance", "1,3", "--every", "2", "--positions", "cache,original", "--policy", "H2O()"]
    assert run(place, tmp_path, *more) == 0
    found = rows(tmp_path)
    assert {each["status"] for each in found} == {"done"}
    assert len(found) == (4 + 2) * (1 + 2 * 2)  # tasks and distances; full, two policies in two conventions
    assert len({each["key"] for each in found}) == len(found)
    for each in found:
        asked, figures = each["asked"], each["figures"]
        assert each["kind"] == asked["kind"] == "retrieval"
        assert len(figures["hits"]) == len(figures["visible"]) == len(figures["answers"]) == asked["trials"] == 2
        assert figures["accuracy"] == sum(figures["hits"]) / 2
        assert (asked["positions"] is None) == (asked["method"] == "full")
        assert set(figures["tokens"]) == {asked["length"]}
        if asked["method"] == "full":
            assert figures["visible"] == [1, 1]
        if asked["name"] == "window" and asked["depth"] == 0:
            assert figures["visible"] == [0, 0]


@pytest.mark.slow
def test_finished_cells_are_not_measured_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, real = [], cells.measure

    def noted(cell: Any) -> Any:
        measured.append(cell.key)
        return real(cell)

    monkeypatch.setattr(cells, "measure", noted)
    assert run(place, tmp_path) == 0
    assert len(measured) == len(set(measured)) == 8
    assert run(place, tmp_path) == 0
    assert len(measured) == 8
    assert run(place, tmp_path, "--depth", "0,0.5,1") == 0
    assert len(measured) == 12
    for more in (["--seed", "1"], ["--chunk", "whole"], ["--trials", "2"], ["--positions", "cache"]):
        before = len(measured)
        run(place, tmp_path, *more)
        assert len(measured) - before == (6 if more[0] in ("--chunk", "--positions") else 8)  # full has neither


def test_what_was_measured_before_ctrl_c_is_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    done, real = [], cells.measure

    def interrupted(cell: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell)
        return real(cell)

    with monkeypatch.context() as patch:
        patch.setattr(cells, "measure", interrupted)
        assert run(place, tmp_path) == 130
    assert "finished cells are kept" in " ".join(capsys.readouterr().out.split())
    assert len(rows(tmp_path)) == 3
    assert run(place, tmp_path) == 0
    assert len(rows(tmp_path)) == 8


def test_a_cell_that_fails_is_told_and_the_rest_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = cells.measure

    def broken(cell: Any) -> Any:
        if cell.asked["name"] == "window":
            raise RuntimeError("no such thing")
        return real(cell)

    monkeypatch.setattr(cells, "measure", broken)
    assert run(place, tmp_path) == 1
    assert "2 of 8 cells failed" in " ".join(capsys.readouterr().out.split())
    assert [each["status"] for each in rows(tmp_path)].count("failed") == 2


def test_the_window_that_was_asked_for_is_not_measured_twice(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path, "--policy", "Window()", "TOVA()", "TOVA(per='layer')", "--depth", "1")
    assert [each["asked"]["name"] for each in rows(tmp_path)] == ["full", "window", "TOVA()"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "H3O()"], "no policy is named H3O: did you mean H2O"),
        (["--policy", "H2O(recnt=3)"], "H2O has no field recnt"),
        (["--policy", "Clairvoyant(horizon=64)"], "must have seen the text attended to in advance"),
        (["--policy", "Protect(Clairvoyant(), 4)"], "must have seen the text attended to in advance"),
        (["--policy", "H2O(recent=90)"], "recent"),
        (["--depth", "1.1"], "must be numbers from 0 to 1, got '1.1'"),
        (["--depth", "nan"], "must be numbers from 0 to 1"),
        (["--depth", "deep"], "must be numbers from 0 to 1, got 'deep'"),
        (["--budget", "400"], "--budget 400 evicts nothing from --length 400: lower the budget"),
        (["--task", "haystack"], "'haystack' is none of passkey, multikey, late, early, streameval"),
        (["--language", "fr"], "'fr' is none of en, ko"),
        (["--chunk", "half"], "must be a whole number"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_users_mistake_is_one_line_before_a_model_is_looked_for(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(passkey, "network", None)
    assert said in line_of(place, tmp_path, capsys, *more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "./nowhere"], "nowhere"),
        (["--length", "150"], "--length 150 is too short for passkey: it takes "),
        (["--length", "5000"], "5,000 tokens are more than the 4,096 that"),
        (["--length", "5000", "--no-full"], "and so many positions: shorter ones, or --positions cache"),
        (
            ["--task", "streameval", "--every", "1", "--distance", "1", "--budget", "150"],
            "evicts nothing from a stream",
        ),
        (["--task", "streameval", "--distance", "999999"], "names and 1,000,000 are needed"),
        (["--length", "4097"], "so that its full cache sets no standard"),
    ],
)
def test_a_users_mistake_is_one_line_before_weights_are_loaded(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(cells, "loaded", None)
    assert said in line_of(place, tmp_path, capsys, *more)


def line_of(place: Path, out: Path, capsys: pytest.CaptureFixture, *more: str) -> str:
    with pytest.raises(SystemExit) as stop:
        run(place, out, *more)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert not (out / "results.jsonl").exists()
    return line


def test_past_the_trained_length_the_full_cache_can_be_left_out(place: Path, tmp_path: Path) -> None:
    more = ["--length", "4200", "--depth", "1", "--trials", "1", "--chunk", "512", "--policy", "StreamingLLM()"]
    assert run(place, tmp_path, *more, "--no-full", "--positions", "cache") == 0
    assert [each["asked"]["name"] for each in rows(tmp_path)] == ["window", "StreamingLLM()"]


def test_a_table_tells_what_is_gone_from_what_is_held_and_missed() -> None:
    measured = [
        row("full", [1, 1, 1, 1], [1, 1, 1, 1]),
        row("full", [1, 1, 1, 0], [1, 1, 1, 1], depth=0.9),
        row("H2O", [1, 0, 0, 1], [1, 1, 0, 0]),
        row("H2O", [1, 1, 1, 1], [1, 1, 1, 1], depth=0.9),
        row("window", [0, 0, 0, 0], [0, 0, 0, 0]),
        row("window", [1, 1, 0, 1], [1, 1, 1, 1], depth=0.9),
        row("window", [1, 1, 1, 1], [1, 1, 1, 1], budget=128),
        row("window", [1, 1, 1, 1], [1, 1, 1, 1], budget=128, depth=0.9),
    ]
    heads, lines = lines_of(tasks(measured))
    assert heads[3:] == ["right", "95%", "held", "of heads", "held, missed", "gone, found", "at 0.5", "at 0.9"]
    assert lines == [
        ["-", "  full", "8", "88%", "53-98", "100%", "50%", "12%", "0%", "100%", "75%"],
        ["64", "* H2O", "8", "75%", "41-93", "75%", "38%", "12%", "12%", "50%", "100%"],
        ["64", "= window", "8", "38%", "14-69", "50%", "25%", "12%", "0%", "0%", "75%"],
        ["128", "  window", "8", "100%", "68-100", "100%", "50%", "0%", "0%", "100%", "100%"],
    ]


def test_accuracy_is_drawn_over_tokens_back_with_the_budget_as_a_line() -> None:
    back = [{"lines": 5, "tokens": 60}, {"lines": 20, "tokens": 240}]
    measured = [
        row("window", hits, hits, task="streameval", depth=None, distance=distance)
        for hits, distance in zip(([1, 1], [0, 1]), back, strict=True)
    ]
    (task,) = tasks(measured)
    right, held = by_distance(task, Style(["window"])).axes
    for axes in (right, held):
        (dotted,) = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert np.asarray(dotted.get_xdata()).tolist() == [64, 64]
    drawn: Any = next(each for each in right.containers if each.get_label() == "window")
    assert drawn.lines[0].get_xydata().tolist() == [[60, 100], [240, 50]]
    assert "5 lines are 60, 20 lines are 240" in held.get_xlabel()


def test_other_prose_makes_other_cells(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cell: Any) -> Any:
        raise ValueError("not now")

    monkeypatch.setattr(cells, "measure", fails)
    (prose := tmp_path / "prose.txt").write_text(
        " ".join(f"He saw the {a}{b} go by." for a in "abcdefgh" for b in "aeiou")
    )
    run(place, tmp_path / "out")
    before = len(rows(tmp_path / "out"))
    run(place, tmp_path / "out", "--text", str(prose))
    assert len(rows(tmp_path / "out")) == 2 * before


def test_commands_on_the_page_can_be_given_to_a_shell(tmp_path: Path) -> None:
    told = row("H2O", [1], [1])
    told["command"] = ["python", "--policy", "H2O(recent=4)", "<a>"]
    assert (
        "<pre>python --policy &#x27;H2O(recent=4)&#x27; &#x27;&lt;a&gt;&#x27;</pre>"
        in write(tmp_path, [told]).read_text()
    )


def test_a_tokenizer_without_digits_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    shutil.copytree(place, folder := tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    assert "has no tokens for digits" in line_of(folder, tmp_path / "out", capsys)


def test_the_page_has_every_table_and_figure_and_needs_nothing_else(tmp_path: Path) -> None:
    back = {"lines": 5, "tokens": 60}
    measured = [row("full", [1], [1]), row("H2O", [1], [1]), row("H2O", [0], [0], language="ko")]
    measured.append(row("H2O", [0], [0], task="streameval", depth=None, distance=back))
    page = write(tmp_path, measured).read_text()
    assert page.count("<table>") == 3
    assert page.count("<svg") == 3
    assert "src=" not in page
    assert 'href="http' not in page
