import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from conftest import VOCABULARY, build
from rich.console import Console
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments import progress, stream_perplexity
from experiments.measure import Told, perplexity_from
from experiments.progress import Bar
from experiments.results import Results
from experiments.runs import Setting, grid, key, labels
from experiments.stream_perplexity import main

pytest.importorskip("matplotlib")

_WORDS = "".join(f"w{index * 7 % 90} " for index in range(120))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model (`model`), its tokenizer, and a text of 120 tokens (`text.txt`)."""
    folder = tmp_path_factory.mktemp("place")
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"w{index}": index + 2 for index in range(VOCABULARY - 2)}}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>").save_pretrained(
        folder / "model"
    )
    network: Any = build("llama", torch.float32)
    network.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(_WORDS)
    return folder


def command(place: Path, out: Path, *more: str) -> list[str]:
    model, text = str(place / "model"), str(place / "text.txt")
    plain = ["--model", model, "--text", text, "--tokens", "100", "--budget", "16", "--chunk", "8", "--bucket", "20"]
    return [*plain, "--out", str(out), *more]


def refused(capsys: pytest.CaptureFixture, argv: list[str]) -> str:
    """The one line with which `argv` is refused."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    output = capsys.readouterr()
    lines = output.err.strip().splitlines()
    assert len(lines) == 1, output.err
    return lines[0]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_every_method_is_in_the_file_the_table_and_the_report(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    methods = "full,window,sinks,recompute,reread"
    assert main(command(place, tmp_path, "--method", methods, "--sinks", "1,4", "--recompute-every", "5")) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    made = rows(tmp_path)
    assert [row["setting"]["method"] for row in made] == ["full", "window", "sinks", "sinks", "recompute", "reread"]
    for row in made:
        name = Setting(**row["setting"]).name
        assert name in printed
        assert f"<td>{name}</td>" in page
        assert row["scored"] == (99 if row["setting"]["method"] != "recompute" else 16 + 17)
        assert row["bytes"] > 0
    assert max(len(line) for line in printed.splitlines()) <= 100
    assert "<script" not in page
    assert page.count("<svg") == len(list(tmp_path.glob("*.png"))) == 3
    assert "does not remember what it evicted" in page


def test_a_sampled_recompute_is_labelled_and_compared_on_its_own_tokens(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    main(command(place, tmp_path, "--method", "full,sinks,recompute", "--recompute-every", "5"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "recompute 1/5" in printed
    assert "On the 17 tokens that recompute 1/5" in printed
    results = Results(tmp_path)
    full, _, sampled = (row["key"] for row in rows(tmp_path))
    scored = ~results.nll(sampled).isnan()
    assert scored.nonzero()[:, 0].tolist() == [*range(1, 17), *range(17, 100, 5)]
    there = perplexity_from(results.nll(full).masked_fill(~scored, torch.nan), 17)
    assert f"full {there:.2f} 1.00" in printed


def test_window_and_full_agree_until_the_first_eviction_and_not_after(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path, "--method", "full,window", "--chunk", "1"))
    results = Results(tmp_path)
    full, window = (results.nll(row["key"]) for row in rows(tmp_path))
    first = Setting("window", "none", budget=16).first_after
    torch.testing.assert_close(window[1:first], full[1:first], atol=1e-4, rtol=1e-4)  # float32 model
    assert (window[first:] - full[first:]).abs().max() > 0.1
    assert abs(float(window[first] - full[first])) > 1e-3


def test_a_bounded_cache_stays_flat_where_the_full_one_grows(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path, "--method", "full,window"))
    full, window = ([held for _, held in row["bytes_curve"]] for row in rows(tmp_path))
    assert full == sorted(set(full))
    assert len(set(window)) == 1
    assert full[-1] * 16 == window[-1] * 100


def test_finished_runs_are_not_done_again(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(command(place, tmp_path))
    before = (tmp_path / "results.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(stream_perplexity, "measure", None)  # would raise if called
        assert main(command(place, tmp_path)) == 0
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert "3 of 3 runs are done already" in capsys.readouterr().out
    main(command(place, tmp_path, "--fresh"))
    assert len(rows(tmp_path)) == 6


def test_a_line_cut_short_is_passed_over_and_its_run_redone(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path))
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    main(command(place, tmp_path))
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[3])["key"] == json.loads(whole.splitlines()[2])["key"]
    assert len({row["key"] for row in map(Results(tmp_path).__getitem__, [json.loads(lines[0])["key"]])}) == 1


def test_ctrl_c_keeps_finished_runs_and_says_how_to_go_on(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stream_perplexity.measure

    def interrupted(subject: Any, setting: Setting, *arguments: Any) -> Any:
        if setting.method == "window":
            raise KeyboardInterrupt
        return real(subject, setting, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stream_perplexity, "measure", interrupted)
        assert main(command(place, tmp_path)) == 130
    assert "1 of 3 runs are finished" in " ".join(capsys.readouterr().out.split())
    assert main(command(place, tmp_path)) == 0
    assert len(rows(tmp_path)) == 3


def test_ctrl_c_in_a_long_run_leaves_a_checkpoint_and_says_where(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ["--method", "sinks", "--checkpoint-every", "40"]
    assert main(command(place, tmp_path / "whole", *long)) == 0
    real = Bar.tell

    def interrupting(self: Bar, told: Any) -> None:
        real(self, told)
        if told.upto == 56:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "tell", interrupting)
        assert main(command(place, tmp_path, *long)) == 130
    printed = " ".join(capsys.readouterr().out.split())
    assert "sinks: checkpoint at token 40 of 100, perplexity of the newest stretch" in printed
    assert "goes on with the other 1, the first from token 64 of 100." in printed
    assert main(command(place, tmp_path, *long)) == 0
    assert "sinks: goes on from token 64 of 100" in " ".join(capsys.readouterr().out.split())
    (whole,), (row,) = rows(tmp_path / "whole"), rows(tmp_path)
    assert row["resumed_at"] == [64]
    assert row["perplexity"] == whole["perplexity"]
    assert row["curve"] == whole["curve"]
    assert not list((tmp_path / "checkpoints").iterdir())


def test_fresh_begins_a_long_run_anew(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ["--method", "sinks", "--checkpoint-every", "40"]

    def interrupting(self: Bar, told: Any) -> None:
        if told.upto == 56:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "tell", interrupting)
        assert main(command(place, tmp_path, *long)) == 130
    assert main(command(place, tmp_path, *long, "--fresh")) == 0
    assert "resumed_at" not in rows(tmp_path)[0]


def test_what_a_killed_process_left_of_a_filed_run_is_deleted(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path, "--method", "sinks"))
    left = tmp_path / "checkpoints" / rows(tmp_path)[0]["key"]
    left.mkdir(parents=True)
    (left / "state.json").write_text("{}")
    main(command(place, tmp_path, "--method", "sinks"))
    assert not left.exists()


def test_several_texts_are_one_stream_with_their_beginnings_marked(place: Path, tmp_path: Path) -> None:
    texts = ["--text", str(place / "text.txt"), str(place / "text.txt"), "--tokens", "200"]
    main(command(place, tmp_path, "--method", "full,window", *texts))
    for row in rows(tmp_path):
        assert row["text"] == "text.txt + text.txt"
        assert row["begins"] == [[0, "text.txt"], [120, "text.txt"]]
    assert (tmp_path / "report.html").read_text().count("another text begins") == 1
    main(command(place, tmp_path / "one", "--method", "full"))
    assert "begins" not in rows(tmp_path / "one")[0]
    assert "another text begins" not in (tmp_path / "one" / "report.html").read_text()


def test_positions_are_rebased_in_long_texts_alone_and_the_key_says_so(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(command(place, tmp_path, "--method", "sinks"))
    monkeypatch.setattr(stream_perplexity, "REBASE_AT", 50)
    main(command(place, tmp_path, "--method", "sinks"))
    short, long = rows(tmp_path)
    assert "rebase_at" not in short
    assert long["rebase_at"] == 50
    assert long["key"] != short["key"]


def test_time_left_does_not_count_what_a_checkpoint_held(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    console = Console(record=True, width=200)
    bar = Bar(console, 2, 1000)
    bar.run("sinks")
    bar.tell(Told(600, 600, 30.0, 2**20))
    clock[0] += 10
    bar.tell(Told(700, 700, 31.0, 2**20))
    said = console.export_text()
    assert "goes on from token 600 of 1,000" in said
    assert "10 tokens/s, 0:00:30 left" in said
    assert bar.progress.tasks[0].completed == 700


def test_a_key_changes_with_everything_that_matters() -> None:
    identity = {
        "model": "a",
        "weights": "1",
        "dtype": "float32",
        "text_sha256": "2",
        "tokens": 9,
        "versions": {"torch": "3"},
    }
    base = Setting("sinks", "none", 16, 4, "cache", 8, "held")
    fields = {"method": "window", "bos": "prepend", "budget": 17, "sinks": 3, "positions": "original", "chunk": 9}
    fields |= {"attend": "token", "every": 2}
    settings = [Setting(**{**vars(base), name: value}) for name, value in fields.items()]
    identities = [{**identity, name: "other"} for name in identity]
    keys = [key(each, identity) for each in (base, *settings)] + [key(base, each) for each in identities]
    assert len(set(keys)) == len(keys)
    assert key(base, dict(reversed(identity.items()))) == keys[0]


def test_other_weights_under_the_same_name_are_another_run(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path, "--method", "full"))
    network: Any = build("llama", torch.float32, seed=5)
    moved = tmp_path / "model"
    for path in (place / "model").iterdir():
        moved.mkdir(exist_ok=True)
        (moved / path.name).write_bytes(path.read_bytes())
    argv = [
        str(moved) if each == str(place / "model") else each
        for each in command(place, tmp_path / "b", "--method", "full")
    ]
    main(argv)
    network.save_pretrained(moved)
    main(argv)
    first, second = rows(tmp_path / "b")
    assert first["weights"] != second["weights"]
    assert first["weights"] == rows(tmp_path)[0]["weights"]


def test_a_bos_is_context_and_the_first_token_is_scored_behind_it(place: Path, tmp_path: Path) -> None:
    main(command(place, tmp_path, "--method", "full,sinks,recompute,reread", "--bos", "none,prepend"))
    for row in rows(tmp_path):
        assert row["scored"] == (100 if row["setting"]["bos"] == "prepend" else 99)


def test_zero_sinks_are_the_window_and_each_setting_is_there_once() -> None:
    settings = grid(["full", "window", "sinks"], [16, 32], [0, 4], ["cache"], [8, 4], ["held"], ["none"], 1, [64])
    names = [each.label for each in settings]
    assert len(names) == len(set(names)) == 1 + 2 * 2 * 2
    assert sum(each.method == "full" for each in settings) == 1
    assert sum(each.method == "window" for each in settings) == 4


def test_labels_leave_out_what_all_runs_share() -> None:
    settings = [Setting("full", "none", chunk=8), Setting("sinks", "none", 16, 1, "cache", 8, "held")]
    assert labels(settings) == ["full", "sinks, 1 sink"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--budget", "0"], "got '0'"),
        (["--budget", "many"], "got 'many'"),
        (["--budget", "100"], "--budget 100 evicts nothing from --tokens 100"),
        (["--sinks", "16"], "num_sinks=16 with budget=16"),
        (["--method", "windows"], "'windows' is none of full"),
        (["--tokens", "121"], "has 120 tokens, got --tokens 121"),
        (["--tokens", "5000"], "5000"),
        (["--attend", "token"], "--positions original or --chunk 1"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--model", "./nowhere"], "nowhere"),
        (["--config", "c"], "--dataset"),
        (["--dataset", "d"], "exclude each other"),
    ],
)
def test_a_users_mistake_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], said: str
) -> None:
    assert said in refused(capsys, command(place, tmp_path, *more))


def test_settings_are_refused_before_the_model_is_loaded(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_perplexity, "load", None)  # would raise if called
    for more in (["--sinks", "16"], ["--attend", "token"], ["--text", "nowhere.txt"], ["--budget", "200"]):
        refused(capsys, command(place, tmp_path, *more))


def test_the_demo_generates_past_its_budget(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.demo._SECONDS", 1.0)
    assert main(command(place, tmp_path, "--demo")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Next: python -m experiments.stream_perplexity" in printed
    assert "The 32 held are the first 4" in printed
