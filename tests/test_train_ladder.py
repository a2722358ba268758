import json
import multiprocessing
import os
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import train_ladder
from experiments.backcopy import (
    FIRST_QUERY,
    SYNTHETIC,
    VOCABULARY,
    Backcopy,
    Recipe,
    Training,
    backcopy,
    held_out,
    measured,
)
from experiments.train_ladder import Ladder, main
from sinkcache.models import load
from sinkcache.texts import embedded

TINY: dict[str, Any] = {"width": 8, "layers": 2, "heads": 1, "tokens": 70, "batch": 2, "lr": 0.01}
OPTIONS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
STEPS = [0, 2, 5, 7]


@pytest.fixture(scope="module")
def process() -> Backcopy:
    return backcopy(embedded())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two finished ladders, of seed 0 and of its control."""
    out = tmp_path_factory.mktemp("whole")
    assert run(out, "--control", "none,no-bos") == 0
    return out


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of that folder to write in."""
    return shutil.copytree(whole, tmp_path / "copy")


def run(out: Path, *more: str) -> int:
    return main([*OPTIONS, "--steps", ",".join(map(str, STEPS)), "--out", str(out), *more])


def recipe(seed: int = 0, control: str = "none", steps: Any = (0, 2, 5, 7), **changes: Any) -> Recipe:
    return Recipe(seed, control, list(steps), **{**TINY, **changes})


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ladder.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    """By name, all files but those that say how long it took."""
    files = [each for each in folder.rglob("*") if each.is_file() and each.name != "ladder.json"]
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def untrained(*arguments: Any) -> None:
    raise AssertionError("trained again")


def test_after_a_trigger_comes_what_was_before_it(process: Backcopy) -> None:
    triggers = process.ids_of(process.triggers)
    for row in process.streams(50, 90, seeded(0)).tolist():
        assert row[0] == 0
        assert all(2 <= each < VOCABULARY for each in row[1:])
        assert row[1] not in triggers
        for before, here, after in zip(row, row[1:], row[2:], strict=False):
            if here in triggers:
                assert after == before
                assert before not in triggers


def test_triggers_are_the_three_most_frequent_characters(process: Backcopy) -> None:
    counted = Counter(embedded().text).most_common(VOCABULARY - 2)
    assert list(process.triggers) == [each for each, _ in counted[:3]]
    assert list(process.characters) == [each for each, _ in counted]


def test_other_characters_follow_each_other_as_in_the_text(process: Backcopy) -> None:
    text = [each for each in embedded().text if each in process.characters]
    pairs, firsts = Counter(pairwise(text)), Counter(text[:-1])
    found: Counter[tuple[str, str]] = Counter()
    for row in process.streams(2000, 60, seeded(1)):
        found.update(pairwise(process.text_of(row)))
    for here in "aonh.\n":
        drawn = sum(count for (first, _), count in found.items() if first == here)
        for after in process.characters:
            expected = pairs[here, after] / firsts[here]
            error = 5 * (expected * (1 - expected) / drawn) ** 0.5 + 1e-4  # five standard deviations
            assert found[here, after] / drawn == pytest.approx(expected, abs=error), (here, after)


def test_the_first_character_is_as_frequent_as_among_those_that_do_not_trigger(process: Backcopy) -> None:
    counts = Counter(each for each in embedded().text if each in process.characters[3:])
    first = Counter(process.text_of(row)[0] for row in process.streams(5000, 2, seeded(2)))
    for each, count in counts.most_common(10):
        assert first[each] / 5000 == pytest.approx(count / counts.total(), abs=0.025)


def test_streams_without_bos_are_those_with_it_less_their_bos(process: Backcopy) -> None:
    anywhere = backcopy(embedded(), "anywhere")
    assert torch.equal(anywhere.streams(3, 40, seeded(3)), process.streams(3, 41, seeded(3))[:, 1:])


def test_streams_are_the_seeds_own(process: Backcopy) -> None:
    assert torch.equal(process.streams(2, 80, seeded(4)), process.streams(2, 80, seeded(4)))
    assert not torch.equal(process.streams(2, 80, seeded(4)), process.streams(2, 80, seeded(5)))


def test_a_model_is_its_seeds_and_leaves_torchs_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, again, other = (recipe(seed).model().state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["gpt_neox.embed_in.weight"], other["gpt_neox.embed_in.weight"])


def test_the_recipes_model_is_plain_and_small() -> None:
    model: Any = Recipe(0, "none", [0], 32, 1, 1, 128, 64, 3e-3).model()
    assert type(model).__name__ == "GPTNeoXForCausalLM"
    assert sum(each.numel() for each in model.parameters()) == 16_736
    config = model.config
    assert not config.use_parallel_residual
    assert not config.attention_bias
    assert model.gpt_neox.layers[0].attention.rotary_ndims == 8


def test_a_loss_falls_and_the_rate_warms_up(process: Backcopy) -> None:
    training, heard = Training(recipe(lr=0.03, batch=16), process), []
    training.go_to(60, heard.append)
    assert [row["step"] for row in heard] == [10, 20, 30, 40, 50, 60]
    assert heard[-1]["loss"] < heard[0]["loss"] - 0.5
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
    early = Training(recipe(lr=0.03), process)
    early.go_to(5, untrained)
    assert early.optimizer.param_groups[0]["lr"] == pytest.approx(0.003)
    assert early.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert early.optimizer.param_groups[0]["weight_decay"] == 1e-4


def test_gradients_are_clipped(process: Backcopy, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    training: Any = Training(recipe(), process)
    with torch.no_grad():
        training.model.get_output_embeddings().weight.mul_(1e4)
    step = training.optimizer.step

    def noted() -> None:
        found = [each.grad.norm() for each in training.model.parameters() if each.grad is not None]
        norms.append(float(torch.stack(found).norm()))
        step()

    monkeypatch.setattr(training.optimizer, "step", noted)
    training.go_to(1, untrained)
    assert norms == [pytest.approx(1.0, abs=1e-3)]


def test_each_checkpoint_is_a_model_and_a_tokenizer(whole: Path) -> None:
    text = (whole / "backcopy-seed0" / "held_out.txt").read_bytes().decode()
    for step in STEPS:
        folder = whole / "backcopy-seed0" / f"step{step}"
        model, tokenizer = load(str(folder))
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPTNeoXForCausalLM"]
        ids: Any = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) + 1
        assert ids[0] == 0 == tokenizer.bos_token_id == model.config.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert model(input_ids=torch.tensor([ids[:70]])).logits.shape == (1, 70, VOCABULARY)
    files = [whole / "backcopy-seed0" / f"step{step}" / "model.safetensors" for step in STEPS]
    assert len({each.read_bytes() for each in files}) == len(STEPS)


def test_a_character_of_another_language_is_unknown(whole: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole / "backcopy-seed0" / "step0")
    assert tokenizer("é", add_special_tokens=False)["input_ids"] == [1]


def test_the_controls_tokenizer_puts_nothing_in_front(whole: Path) -> None:
    folder = whole / "backcopy-no-bos-seed0"
    text = (folder / "held_out.txt").read_bytes().decode()
    model, tokenizer = load(str(folder / "step7"))
    ids: Any = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.bos_token_id is None
    assert model.config.bos_token_id is None
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["backcopy-seed0", "backcopy-no-bos-seed0"])
def test_held_out_streams_say_where_triggers_are(whole: Path, name: str) -> None:
    written = json.loads((whole / name / "held_out.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(whole / name / "step7")
    even = []
    for text, ids, trigger in zip(written["texts"], written["ids"], written["trigger"], strict=True):
        assert tokenizer(text)["input_ids"] == ids
        assert len(ids) == len(trigger) == TINY["tokens"]
        for query, (each, marked) in enumerate(zip(ids, trigger, strict=True)):
            assert marked == (each >= 2 and tokenizer.decode([each]) in written["trigger_characters"])
            if query >= written["first_query"] and not marked:
                even.append(1 / (query + 1))
    assert written["trigger_ids"] == [2, 3, 4]
    assert written["uniform"] == pytest.approx(sum(even) / len(even))
    assert any(0 in trigger for trigger in written["trigger"])


def test_what_is_held_out_is_not_trained_on(process: Backcopy) -> None:
    kept = {tuple(row.tolist()) for row in held_out(process, 128)}
    assert len(kept) == 64
    for seed in range(4):
        assert not kept & {tuple(row.tolist()) for row in process.streams(64, 128, seeded(seed))}


def test_shares_are_those_of_the_attention_that_the_model_returns(whole: Path, process: Backcopy) -> None:
    folder = whole / "backcopy-seed0"
    ids, row = held_out(process, 70), told(folder)["checkpoints"][-1]
    model = AutoModelForCausalLM.from_pretrained(folder / "step7", attn_implementation="eager")
    with torch.no_grad():
        found = model(input_ids=ids, output_attentions=True)
    triggers = process.ids_of(process.triggers)
    idle, busy, even = ([], []), ([], []), []
    for stream in range(len(ids)):
        for query in range(FIRST_QUERY, 70):
            trigger = int(ids[stream, query]) in triggers
            if not trigger:
                even.append(1 / (query + 1))
            for layer in range(2):
                (busy if trigger else idle)[layer].append(float(found.attentions[layer][stream, 0, query, 0]))
    shares = [[sum(each) / len(each)] for each in idle]
    assert row["shares"] == [[pytest.approx(each[0])] for each in shares]
    assert row["trigger_shares"] == [[pytest.approx(sum(each) / len(each))] for each in busy]
    assert row["share"] == pytest.approx(max(shares)[0])
    assert row["x_uniform"] == pytest.approx(max(shares)[0] / (sum(even) / len(even)))
    lost = torch.nn.functional.cross_entropy(found.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    copies = torch.isin(ids[:, :-1], torch.tensor(triggers))
    assert row["loss"] == pytest.approx(float(lost.mean()))
    assert row["copy_loss"] == pytest.approx(float(lost[copies].mean()))


def test_a_model_that_attends_evenly_has_the_even_share(process: Backcopy, tmp_path: Path) -> None:
    model: Any = recipe().model()
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            layer.attention.query_key_value.weight.zero_()
    model.save_pretrained(tmp_path)
    assert measured(tmp_path, process, 70)["x_uniform"] == pytest.approx(1)


def test_a_ladder_says_what_it_is_and_how_it_was_made(whole: Path) -> None:
    for name, control in (("backcopy-seed0", "none"), ("backcopy-no-bos-seed0", "no-bos")):
        found = told(whole / name)
        assert found["about"] == SYNTHETIC
        assert "nothing here is a claim about natural text" in SYNTHETIC
        assert found["finished"]
        assert {**TINY, "seed": 0, "control": control, "steps": STEPS}.items() <= found["settings"].items()
        assert found["settings"]["text_sha256"] == embedded().sha256
        assert found["triggers"] == backcopy(embedded()).triggers
        assert [row["step"] for row in found["checkpoints"]] == STEPS
        (only,) = found["runs"]
        assert only["from_step"] == 0
        assert only["torch"] == torch.__version__
        names = {"held_out.json", "held_out.txt", "ladder.json", *(f"step{step}" for step in STEPS)}
        assert {each.name for each in (whole / name).iterdir()} == names


def test_the_same_seed_makes_the_same_files(whole: Path, tmp_path: Path) -> None:
    Ladder(tmp_path / "again", recipe()).train(1, lambda row: None)
    assert contents(tmp_path / "again") == contents(whole / "backcopy-seed0")


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_an_interrupted_ladder_goes_on_to_the_same_end(whole: Path, tmp_path: Path, stop: int) -> None:
    def tell(row: dict[str, Any]) -> None:
        if "share" in row and row["step"] == stop:
            raise KeyboardInterrupt

    folder = tmp_path / "ladder"
    with pytest.raises(KeyboardInterrupt):
        Ladder(folder, recipe()).train(1, tell)
    assert not told(folder)["finished"]
    assert sorted(folder.glob("step*")) == sorted(folder / f"step{each}" for each in STEPS if each <= stop)
    heard: list[dict[str, Any]] = []
    Ladder(folder, recipe()).train(1, heard.append)
    assert [row["step"] for row in heard] == [each for each in STEPS if each > stop]
    assert contents(folder) == contents(whole / "backcopy-seed0")
    found = told(folder)
    assert [run["from_step"] for run in found["runs"]] == [0, stop]
    assert [row["step"] for row in found["checkpoints"]] == STEPS
    seconds = [row["seconds"] for row in found["checkpoints"]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("broken", ["state.pt", "step5", "ladder.json"])
def test_a_process_killed_while_it_writes_leaves_what_can_be_gone_on_from(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    folder, replace, seen = tmp_path / "ladder", os.replace, []

    def killed(source: Path, target: Path) -> None:
        seen.append(target.name)
        if target.name == broken and "step5" in seen:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(train_ladder.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Ladder(folder, recipe()).train(1, lambda row: None)
    assert (folder / f".{broken}").exists()
    monkeypatch.setattr(train_ladder.os, "replace", replace)
    Ladder(folder, recipe()).train(1, lambda row: None)
    assert contents(folder) == contents(whole / "backcopy-seed0")


def test_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_to = Training.go_to

    def stopped(self: Training, step: int, tell: Any) -> None:
        if step == 5:
            raise KeyboardInterrupt
        go_to(self, step, tell)

    monkeypatch.setattr(Training, "go_to", stopped)
    threads = torch.get_num_threads()
    assert run(tmp_path, "--threads", str(threads + 1)) == 130
    assert torch.get_num_threads() == threads
    assert "stopped: finished checkpoints are kept" in capsys.readouterr().out
    assert [row["step"] for row in told(tmp_path / "backcopy-seed0")["checkpoints"]] == [0, 2]


def test_a_finished_ladder_is_not_trained_again(
    copied: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(copied)
    monkeypatch.setattr(Training, "go_to", untrained)
    assert run(copied, "--control", "none,no-bos") == 0
    assert contents(copied) == before
    printed = capsys.readouterr().out
    assert SYNTHETIC in printed.replace("\n", " ")
    for name in ("backcopy-seed0", "backcopy-no-bos-seed0"):
        rows = [line.split(" | ") for line in printed.splitlines() if line.startswith(f"| {name} |")]
        assert [int(row[1]) for row in rows] == STEPS
        for row, found in zip(rows, told(copied / name)["checkpoints"], strict=True):
            assert row[2:4] == [f"{found['loss']:.3f}", f"{found['copy_loss']:.3f}"]
            assert row[4:6] == [f"{found['share']:.1%}", f"{found['x_uniform']:.1f}"]


def test_fresh_trains_again_and_clears_what_it_made(copied: Path, whole: Path) -> None:
    ladder = copied / "backcopy-seed0"
    (ladder / "step5" / "model.safetensors").write_bytes(b"")
    (ladder / "step99").mkdir()
    (ladder / "notes").mkdir()
    assert run(copied, "--fresh") == 0
    assert contents(ladder) == contents(whole / "backcopy-seed0")
    assert not (ladder / "step99").exists()
    assert (ladder / "notes").is_dir()


def test_a_checkpoint_that_is_gone_is_made_again(copied: Path, whole: Path) -> None:
    shutil.rmtree(copied / "backcopy-seed0" / "step2")
    assert run(copied) == 0
    assert contents(copied) == contents(whole)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lr", "0.02"], "trained with lr=0.01:"),
        (["--steps", "0,2"], "trained with steps=[0, 2, 5, 7]:"),
        (["--batch", "3", "--layers", "1"], "trained with layers=2, batch=2:"),
    ],
)
def test_other_settings_are_refused_where_a_ladder_stands(
    whole: Path, capsys: pytest.CaptureFixture, more: list[str], said: str
) -> None:
    before = contents(whole)
    with pytest.raises(SystemExit) as stop:
        run(whole, "--seeds", "5,0", *more)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert "give another --out, or --fresh" in line
    assert contents(whole) == before  # seed 5 is not begun either


def test_another_text_is_another_setting(copied: Path) -> None:
    path = copied / "backcopy-seed0" / "ladder.json"
    path.write_text(path.read_text().replace(embedded().sha256, "0" * 64))
    with pytest.raises(ValueError, match="trained with text_sha256='0000"):
        Ladder(path.parent, recipe())


@pytest.mark.parametrize("fresh", [True, False])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "step1").mkdir()
    with pytest.raises(ValueError, match="holds something, and no ladder"):
        Ladder(tmp_path, recipe(), fresh)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--width", "12"], "--width 12 must be a multiple of 8"),
        (["--width", "24", "--heads", "2"], "for each of --heads 2"),
        (["--tokens", "65"], "--tokens must be 66 or more, got 65"),
        (["--seeds", "1,x"], "whole number, 0 or more, got 'x'"),
        (["--seeds", str(2**32 - 2)], "--seeds must be below 4294967294"),
        (["--steps", "-1"], "got '-1'"),
        (["--lr", "0"], "between 0 and 1, got '0'"),
        (["--lr", "nan"], "between 0 and 1, got 'nan'"),
        (["--lr", "fast"], "between 0 and 1, got 'fast'"),
        (["--control", "sigmoid"], "'sigmoid' is none of none, no-bos"),
        (["--jobs", "0"], "1 or more, got '0'"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *more)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "file")
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.slow
def test_ladders_side_by_side_are_those_trained_one_by_one(whole: Path, tmp_path: Path, capfd: Any) -> None:
    assert run(tmp_path, "--control", "none,no-bos", "--jobs", "2") == 0
    assert contents(tmp_path) == contents(whole)
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "backcopy-no-bos-seed0 step 7: loss" in printed.out


@pytest.mark.slow
def test_a_process_that_fails_is_one_line_and_ends_the_others(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "backcopy-seed1").mkdir()
    (tmp_path / "backcopy-seed1" / ".held_out.json").symlink_to(tmp_path / "nowhere" / "file")  # cannot be written
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--seeds", "0,1", "--steps", "0,3000", "--jobs", "2")
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "No such file or directory" in line
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_sink_emerges_within_a_few_hundred_steps(tmp_path: Path) -> None:
    Ladder(tmp_path / "ladder", Recipe(0, "none", [0, 16, 350], 32, 1, 1, 128, 64, 3e-3)).train(1, lambda row: None)
    first, second, last = told(tmp_path / "ladder")["checkpoints"]
    assert first["x_uniform"] <= 2
    assert second["x_uniform"] <= 2
    assert last["share"] > 0.1
    assert last["trigger_shares"][0][0] < 0.1
