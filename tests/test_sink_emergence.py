import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
import torch
from conftest import VOCABULARY, build
from tokenizers import models, pre_tokenizers, processors
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, PreTrainedTokenizerFast

from experiments import emergence_measure, emergence_report, emergence_run
from experiments.documents import Refused, of_ids, stretches
from experiments.emergence_curves import BANDS, Curve, Point
from experiments.emergence_measure import REPEATED, SHUFFLED, Probe, control_ids, heads_with_a_sink, segments, shuffle
from experiments.revisions import STEPS, listed, preset, step_of
from experiments.sink_emergence import main
from experiments.sinks import attention_facts, sink_rates
from sinkcache import SinkCache
from sinkcache.metrics import perplexity
from sinkcache.models import load
from sinkcache.policies import StreamingLLM, Window
from sinkcache.sinks import attention_sinks
from sinkcache.texts import embedded, from_file, tokenize

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
SMALL = ["--tokens", "48", "--first-query", "16", "--budget", "8", "--chunk", "8", "--draws", "20"]
MEASURED = ["a_share.png", "b_layers.png", "c_rates.png", "d_norms.png", "e_eviction.png", "emergence.csv"]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"w{index}": index + 2 for index in range(VOCABULARY - 2)}}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ladder of three tiny models (`tiny/step0`, 2 and 8) and two texts of 120 tokens."""
    folder = tmp_path_factory.mktemp("place")
    for seed, step in enumerate((0, 2, 8)):
        network: Any = build("gpt_neox", torch.float32, seed=seed, max_position_embeddings=64)
        network.save_pretrained(folder / "tiny" / f"step{step}")
        tokenizer().save_pretrained(folder / "tiny" / f"step{step}")
    for name, factor in (("one", 7), ("two", 11)):
        (folder / f"{name}.txt").write_text("".join(f"w{index * factor % 90} " for index in range(120)))
    return folder


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures out, which take most of the time."""
    monkeypatch.setattr(emergence_report, "figures", lambda *rest: {})


def words(place: Path, out: Path, *more: str) -> list[str]:
    texts = ["--text", str(place / "one.txt"), str(place / "two.txt")]
    return ["--ladder", str(place / "tiny"), "--out", str(out), *SMALL, *texts, *more]


def cells(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]


def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders from which models are loaded from now on."""
    seen: list[str] = []

    def noted(name: str, *rest: Any) -> Any:
        seen.append(Path(name).name)
        return load(name, *rest)

    monkeypatch.setattr(emergence_run, "load", noted)
    return seen


def refused(capsys: pytest.CaptureFixture, argv: list[str]) -> str:
    """The one line with which `argv` is refused."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_every_cell_is_what_the_library_measures(place: Path, tmp_path: Path, bare: None) -> None:
    assert main(words(place, tmp_path)) == 0
    found = {(row["asked"]["step"], row["asked"]["document"]): row for row in cells(tmp_path)}
    assert set(found) == {(step, text) for step in (0, 2, 8) for text in ("one.txt", "two.txt")}
    for (step, text), row in found.items():
        model, tokens = load(str(place / "tiny" / f"step{step}"))
        ids = tokenize(from_file(place / text), tokens, 48)
        assert row["facts"] == attention_facts(model, ids, 16)
        assert row["rates"] == sink_rates(model, ids)  # shorter than 64: one segment
        assert row["rates_bos"] == sink_rates(model, torch.cat([torch.tensor([[1]]), ids[:, :-1]], dim=1))
        caches = {"full": DynamicCache(config=model.config), "window": SinkCache(model, Window(), 8, "cache")}
        caches |= {f"sinks{count}": SinkCache(model, StreamingLLM(count), 8, "cache") for count in (1, 4)}
        for name, cache in caches.items():
            read = perplexity(model, cache, ids, 8, bucket=8)
            assert row["perplexity"][name]["all"] == pytest.approx(read.value)
            later = [read.buckets[index] for index in range(1, 6)]
            mean = sum(nll for _, nll in later) / sum(count for count, _ in later)
            assert row["perplexity"][name]["after"] == pytest.approx(float(torch.tensor(mean).exp()))
        assert (row["status"], row["tokens"], row["segments"]) == ("done", 48, 1)


def test_what_is_written_is_the_mean_of_the_cells(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(words(place, tmp_path, "--tokens-per-step", "1000", "--controls", "shuffled,random,repeated")) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    (series,) = json.loads((tmp_path / "emergence.json").read_text())["series"]
    with open(tmp_path / "emergence.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table] == ["0", "2", "8"]
    for row, told in zip(table, series["steps"], strict=True):
        mine = [each for each in cells(tmp_path) if each["asked"]["step"] == told["step"]]
        mine = [each for each in mine if each["asked"]["control"] is None]
        shares = torch.tensor([each["facts"]["share"] for each in mine], dtype=torch.float64)
        assert told["share"] == pytest.approx(float(shares.mean()))
        assert told["max_head"] == pytest.approx(float(shares.mean(0).max()))
        assert told["layers"] == pytest.approx(shares.mean((0, 2)).tolist())
        assert told["uniform"] == pytest.approx(sum(1 / i for i in range(17, 49)) / 32)
        assert told["heads_over"] == int((shares.mean(0) > 0.3).sum())
        assert float(row["share"]) == told["share"]
        assert told["perplexity_window"] == pytest.approx(
            float(torch.tensor([each["perplexity"]["window"]["all"] for each in mine]).log().mean().exp())
        )
        assert f"{100 * told['share']:.2f}%" in printed
        assert f"{100 * told['share']:.2f}%" in page
    assert all((tmp_path / name).stat().st_size for name in MEASURED)
    assert page.count("<svg") == 5
    assert "<script" not in page
    assert not re.search(r'(src|href)="http', page.replace("http://www.w3.org", ""))
    assert set(series["controls"]) == {"shuffled", "random", "repeated"}
    control = [row for row in cells(tmp_path) if (row["asked"]["control"], row["asked"].get("number")) == (REPEATED, 1)]
    model, _ = load(str(place / "tiny" / "step8"))
    ids = control_ids(REPEATED, range(2, 97), 48, 1)
    assert [row["facts"] for row in control] == [attention_facts(model, ids, 16)]
    shuffle(model, 0)
    ids = tokenize(from_file(place / "one.txt"), tokenizer(), 48)
    control = [row for row in cells(tmp_path) if (row["asked"]["control"], row["asked"].get("number")) == (SHUFFLED, 0)]
    assert [row["facts"] for row in control] == [attention_facts(model, ids, 16)]
    assert series["controls"]["repeated"]["x_uniform"] == pytest.approx(1, abs=0.2)  # by distance alone


def test_known_cells_are_not_measured_and_their_weights_not_loaded(
    place: Path, tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = loads(monkeypatch)
    one = ["--model", str(place / "tiny"), "--out", str(tmp_path), *SMALL, "--text", str(place / "one.txt")]
    assert main([*one, "--revisions", "step0,step8"]) == 0
    assert seen == ["step0", "step8"]
    assert main([*one, "--revisions", "step0,step8"]) == 0
    assert seen == ["step0", "step8"]
    assert main([*one, "--revisions", "step0,step2,step8"]) == 0
    assert seen == ["step0", "step8", "step2"]
    before = {path: path.read_bytes() for path in (tmp_path / "cells").iterdir()}
    assert main([*one, "--revisions", "step2", "--fresh"]) == 0
    assert seen == ["step0", "step8", "step2", "step2"]
    assert before == {path: path.read_bytes() for path in (tmp_path / "cells").iterdir()}


def test_other_settings_weights_or_texts_are_other_cells(
    place: Path, tmp_path: Path, bare: None, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "model-step7"
    build("gpt_neox", torch.float32, seed=5, max_position_embeddings=64).save_pretrained(folder)  # type: ignore[operator]
    tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text((place / "one.txt").read_text())
    argv = ["--model", str(folder), "--text", str(text), "--out", str(tmp_path / "out"), *SMALL]
    main(argv)
    for count, more in enumerate((["--bos", "prepend"], ["--chunk", "7"], ["--no-perplexity"], ["--segments", "3"]), 2):
        main([*argv, *more])
        assert len(cells(tmp_path / "out")) == count
    main([*argv, "--dtype", "float64"])
    assert len(cells(tmp_path / "out")) == 6
    assert "has changed" not in capsys.readouterr().out
    text.write_text((place / "two.txt").read_text())
    main(argv)
    assert "text.txt has changed since it was measured" in capsys.readouterr().out
    assert len(cells(tmp_path / "out")) == 7
    main(argv)
    assert "has changed" not in capsys.readouterr().out
    build("gpt_neox", torch.float32, seed=6, max_position_embeddings=64).save_pretrained(folder)  # type: ignore[operator]
    main(argv)
    assert len(cells(tmp_path / "out")) == 8


def test_a_half_written_cell_is_measured_again(
    place: Path, tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(words(place, tmp_path))
    before = {path: path.read_bytes() for path in (tmp_path / "cells").iterdir()}
    broken = sorted(path for path in before if b'"step": 2' in before[path])[0]
    broken.write_bytes(before[broken][:200])
    (tmp_path / "cells" / f".{broken.name}.123").write_bytes(before[broken][:100])
    seen = loads(monkeypatch)
    assert main(words(place, tmp_path)) == 0
    assert seen == ["step2"]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 7
    assert before == {path: path.read_bytes() for path in before}


def test_what_fails_is_filed_and_the_rest_goes_on(
    place: Path, tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "tiny"
    for step in (0, 8):
        (folder / f"step{step}").mkdir(parents=True)
        for file in (place / "tiny" / f"step{step}").iterdir():
            (folder / f"step{step}" / file.name).write_bytes(file.read_bytes())
    argv = ["--model", str(folder), "--revisions", "step0,step2,step8", "--text", str(place / "one.txt")]
    argv += ["--out", str(tmp_path / "out"), *SMALL]
    assert main(argv) == 1
    assert "tiny step2: folder" in capsys.readouterr().out
    assert [row["status"] for row in sorted(cells(tmp_path / "out"), key=lambda row: row["asked"]["step"])] == [
        "done",
        "failed",
        "done",
    ]
    (place / "tiny" / "step2").rename(folder / "step2")
    try:
        seen = loads(monkeypatch)
        assert main(argv) == 1
        assert seen == []
        assert main([*argv, "--retry-failed"]) == 0
        assert seen == ["step2"]
    finally:
        (folder / "step2").rename(place / "tiny" / "step2")
    assert [row["status"] for row in cells(tmp_path / "out")] == ["done"] * 3


def test_a_cell_without_memory_is_one_failure(
    place: Path, tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real, calls = emergence_run.Probe.measured, []

    def scarce(self: Any, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return real(self, *rest)

    monkeypatch.setattr(emergence_run.Probe, "measured", scarce)
    assert main(words(place, tmp_path)) == 1
    assert "failed: tiny step2: out of memory: CUDA out of memory." in capsys.readouterr().out
    assert len(calls) == 6
    told = json.loads((tmp_path / "emergence.json").read_text())
    assert [row["step"] for row in told["series"][0]["steps"]] == [0, 8]  # a step counts if all its documents do
    assert list(told["failed"]) == ["tiny step2"]
    assert "Not measured" in (tmp_path / "report.html").read_text()


def test_a_model_whose_attention_cannot_be_shown_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "bloom-step3"
    BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    argv = ["--model", str(folder), "--text", str(place / "one.txt"), "--out", str(tmp_path / "out"), *SMALL]
    assert main(argv) == 1
    assert "BloomForCausalLM" in capsys.readouterr().out
    (row,) = cells(tmp_path / "out")
    assert row["status"] == "failed"


def test_stopped_is_130_and_keeps_what_is_finished(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real, calls = emergence_run.Probe.measured, []

    def stopped(self: Any, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *rest)

    monkeypatch.setattr(emergence_run.Probe, "measured", stopped)
    assert main(words(place, tmp_path)) == 130
    assert "finished cells are kept" in capsys.readouterr().out
    assert [row["status"] for row in cells(tmp_path)] == ["done"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--first-query", "200", "--tokens", "300"], "was trained on 64 tokens"),
        (["--first-query", "48"], "has no query"),
        (["--budget", "47"], "evicts nothing"),
        (["--tokens", "64", "--documents", "2"], "has 56 tokens where 64 are to be read"),
        (["--ids", "x.json"], "exclude each other"),
        (["--steps", "3"], "are of a --model"),
        (["--controls", "sorted"], "none of shuffled, random, repeated"),
        (["--preset", "pythia-3b"], "none of pythia-14m"),
        (["--ladder", "/nowhere"], "no folders step0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    line: str,
) -> None:
    seen = loads(monkeypatch)
    assert line in refused(capsys, words(place, tmp_path, *more))
    assert seen == []


def test_a_short_text_is_refused_before_any_checkpoint_is_looked_for(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emergence_run, "weights_of", None)  # would raise if called
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    line = refused(capsys, words(place, tmp_path, "--text", str(tmp_path / "short.txt")))
    assert "'short.txt' is too short: queries are measured from --first-query 16 on" in line
    assert not (tmp_path / "cells").exists()


def test_a_step_is_read_from_the_name() -> None:
    assert [step_of(name) for name in ("step0", "step143000", "stage1-step1000-tokens3B", "checkpoint-500", "77")] == [
        *(0, 143000, 1000, 500, 77)
    ]
    with pytest.raises(ValueError, match="'main' names no training step"):
        step_of("main")
    assert [each.step for each in listed("org/name", ["main", "old"], [9, 3])] == [3, 9]
    with pytest.raises(ValueError, match="main and step9 are both of step 9"):
        listed("org/name", ["main", "step9"], [9, 9])
    with pytest.raises(ValueError, match="1 numbers for 2 revisions"):
        listed("org/name", ["a", "b"], [1])


def test_a_preset_has_the_thirteen_checkpoints() -> None:
    found = preset("pythia-410m")
    assert [(each.source, each.name, each.step) for each in found] == [
        ("EleutherAI/pythia-410m", f"step{step}", step) for step in STEPS
    ]
    assert len(found) == 13


def test_stretches_follow_each_other(place: Path) -> None:
    plain, text = tokenizer(), from_file(place / "one.txt")
    whole = tokenize(text, plain)
    found = [each.ids(plain, 30, None) for each in stretches([text], 4)]
    assert torch.cat(found, dim=1).equal(whole)
    led = [each.ids(plain, 30, 1) for each in stretches([text], 4)]
    assert all(int(each[0, 0]) == 1 and each.shape[1] == 30 for each in led)
    assert torch.cat([each[:, 1:] for each in led], dim=1).equal(whole[:, :116])
    with pytest.raises(Refused, match=r"'one\.txt 5' has 0 tokens"):
        stretches([text], 5)[4].ids(plain, 30, None)
    assert len({each.sha256 for each in stretches([embedded()], 3)}) == 1


def test_ids_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "held_out.json"
    path.write_text(json.dumps({"ids": [[1, 2, 3, 4], [5, 6, 7, 8]] * 20, "other": 1}))
    found = of_ids(path)
    assert len(found) == 16
    assert found[1].ids(tokenizer(), 3, None).tolist() == [[5, 6, 7]]
    assert [each.name for each in of_ids(path, 2)] == ["held_out.json 1", "held_out.json 2"]
    for content, line in (("{}", "list of lists"), ('[[1, "2"]]', "no id"), ("[[1", "not JSON")):
        path.write_text(content)
        with pytest.raises(ValueError, match=line):
            of_ids(path)
    path.write_text("[[1, 97]]")
    with pytest.raises(Refused, match="none of the tokenizer's 0 to 96"):
        of_ids(path)[0].ids(tokenizer(), 2, None)


def test_a_ladder_is_measured_on_what_it_held_out_and_its_own_figures_stand_beside(
    place: Path, tmp_path: Path, bare: None, capsys: pytest.CaptureFixture
) -> None:
    told = {"checkpoints": [{"step": 2, "share": 0.4321, "x_uniform": 38.5}], "settings": {"batch": 4, "tokens": 50}}
    ids = [[(row + 7 * index) % 90 for index in range(60)] for row in range(3)]
    for folder in ("tiny", "tiny-other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "held_out.json").write_text(json.dumps({"ids": ids}))
        for step in (0, 2):
            (tmp_path / folder / f"step{step}").symlink_to(place / "tiny" / f"step{step}")
    (tmp_path / "tiny" / "ladder.json").write_text(json.dumps(told))
    ladders = ["--ladder", str(tmp_path / "tiny"), str(tmp_path / "tiny-other")]
    assert main([*ladders, "--out", str(tmp_path / "out"), *SMALL]) == 0
    assert "| 43.21% | 38.50 |" in capsys.readouterr().out
    first, second = json.loads((tmp_path / "out" / "emergence.json").read_text())["series"]
    assert (first["series"], second["series"]) == ("tiny", "tiny-other")
    assert (first["tokens_per_step"], second["tokens_per_step"]) == (200, None)
    assert first["steps"] == second["steps"]
    model, _ = load(str(place / "tiny" / "step0"))
    shares = [attention_facts(model, torch.tensor([row[:48]]), 16)["share"] for row in ids]
    assert first["steps"][0]["share"] == pytest.approx(float(torch.tensor(shares).mean()))


def test_heads_are_counted_by_segment(place: Path) -> None:
    model, _ = load(str(place / "tiny" / "step2"))
    ids = torch.randint(2, VOCABULARY, (1, 200))
    pieces = segments(ids, 2, None)
    assert pieces.equal(ids[0, :128].view(2, 64))
    assert segments(torch.cat([torch.tensor([[1]]), ids], dim=1), 9, 1).equal(ids[0, :192].view(3, 64))
    counts = torch.zeros(2, 4, dtype=torch.int64)
    for piece in pieces:
        for layer in attention_sinks(model, piece[None], 1).layers:
            counts[layer.index] += layer.importance()[0, :, 0] > 0.3
    assert heads_with_a_sink(model, pieces) == counts.tolist()
    assert heads_with_a_sink(model, pieces.repeat(9, 1)) == (9 * counts).tolist()


def test_segments_begin_as_the_document_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emergence_measure, "ALIKE", 0.08)  # about even attention, so that heads differ
    model, _ = load(str(place / "tiny" / "step2"))
    ids = torch.randint(2, VOCABULARY, (1, 60))
    probe = Probe(16, 9, None, 8)
    for document, begins in ((ids, "plain"), (torch.cat([torch.tensor([[1]]), ids[:, :-1]], dim=1), "bos")):
        found = probe.measured(model, document, 1)
        pieces = segments(document, 9, 1)
        led = torch.cat([torch.tensor([[1]]), pieces[:, :-1]], dim=1)
        assert found["begins"] == begins
        heads = [heads_with_a_sink(model, each) for each in (pieces, led)]
        assert heads[0] != heads[1]
        assert found["heads"] == heads[begins == "bos"]
        assert found["rates"] == sink_rates(model, pieces)
        assert found["rates_bos"] == sink_rates(model, led)
        assert Point(0, [found]).rates == ("rates" if begins == "plain" else "rates_bos")


def test_a_bos_that_the_tokenizer_puts_in_front_is_left_out(place: Path) -> None:
    led, text = tokenizer(), from_file(place / "one.txt")
    cast(Any, led.backend_tokenizer).post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    assert int(tokenize(text, led)[0, 0]) == 1
    for mine, plain in zip(stretches([text], 4), stretches([text], 4), strict=True):
        assert mine.ids(led, 30, None).equal(plain.ids(tokenizer(), 30, None))
        assert mine.ids(led, 30, 1).equal(plain.ids(tokenizer(), 30, 1))


def test_a_shuffled_model_has_the_same_entries_elsewhere(place: Path) -> None:
    models_, moved = [load(str(place / "tiny" / "step0"))[0] for _ in range(3)], 0
    shuffle(models_[1], 3)
    shuffle(models_[2], 3)
    for (_, was), (_, one), (_, two) in zip(*(model.named_parameters() for model in models_), strict=True):
        assert one.equal(two)
        assert one.flatten().sort().values.equal(was.flatten().sort().values)
        moved += not one.equal(was)
    assert moved >= 8  # of biases and norms all entries are alike


def test_repeated_is_one_token_and_random_is_many() -> None:
    assert len(control_ids(REPEATED, range(2, 90), 64, 0).unique()) == 1
    drawn = control_ids("random", range(2, 90), 2000, 0)
    assert drawn.unique().tolist() == list(range(2, 90))
    assert drawn.equal(control_ids("random", range(2, 90), 2000, 0))
    assert not drawn.equal(control_ids("random", range(2, 90), 2000, 1))


def curve(shares: dict[int, list[float]], source: str = "EleutherAI/pythia-410m", tokens: int = 2048) -> Curve:
    """Of one document and one head a layer."""
    asked = {"first_query": 64, "bos": "none"}
    points = [
        Point(step, [{"facts": {"share": [[each] for each in layers]}, "tokens": tokens, "asked": asked}])
        for step, layers in shares.items()
    ]
    return Curve("pythia-410m", source, points, {}, None, {})


def test_the_published_curve_is_met_or_not_by_step() -> None:
    last = [0.002] * 6 + [0.25] * 17 + [0.35]
    found = curve(
        {512: [0.002] * 24, 1000: [0.004] * 24, 2000: [0.05] * 24, 3000: [0.1] * 24, 143000: last}
    ).published()
    assert [(row["figure"], row["met"]) for row in found] == [
        ("step 512", True),
        ("step 1000", True),
        ("step 2000", False),
        ("step 143000", True),
        ("last step, top layer", True),
        ("last step, most of layers 0 to 5", True),
    ]
    assert set(BANDS) <= set(STEPS)
    assert curve({512: [0.002]}, "EleutherAI/pythia-70m").published() == []
    assert curve({512: [0.002]}, tokens=1024).published() == []


def command(place: Path, out: Path) -> list[str]:
    texts = ["--documents", "2", "--text", str(place / "one.txt"), str(place / "two.txt")]
    more = ["--controls", "random,shuffled", "--threads", "1", *texts]
    return [
        sys.executable,
        "-m",
        "experiments.sink_emergence",
        "--ladder",
        str(place / "tiny"),
        "--out",
        str(out),
        *SMALL,
        *more,
    ]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_the_same_files(place: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    mute = subprocess.DEVNULL
    quiet: dict[str, Any] = {"cwd": ROOT, "env": environment(), "stdout": mute, "stderr": mute}
    subprocess.run(command(place, whole), check=True, **quiet)
    total, drawn, kills = len(cells(whole)), random.Random(0), 0
    while kills < 3:
        known = len(list((broken / "cells").glob("*.json")))
        process = subprocess.Popen(command(place, broken), start_new_session=True, **quiet)
        goal = known + drawn.randint(1, 4)
        while process.poll() is None and len(list((broken / "cells").glob("*.json"))) < goal:
            time.sleep(0.002)
        time.sleep(drawn.random() / 10)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 2
    subprocess.run(command(place, broken), check=True, **quiet)
    made = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.name != "log.jsonl")
    assert len(made) == total + len(MEASURED) + 2
    for name in made:
        mine, other = (folder.joinpath(name).read_bytes() for folder in (whole, broken))
        assert mine.replace(str(whole).encode(), b"") == other.replace(str(broken).encode(), b""), name
    assert sorted(path.name for path in (broken / "cells").glob("*.json")) == sorted(
        path.name for path in (whole / "cells").glob("*.json")
    )
    assert len((broken / "log.jsonl").read_text().splitlines()) <= total  # finished cells were never measured again


@pytest.fixture
def hub(place: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a cache of the hub with three revisions of org/name, each commit of which is one digit forty times."""

    def make() -> Path:
        repository = tmp_path / "home" / "hub" / "models--org--name"
        for commit, step in enumerate((0, 2, 8)):
            snapshot = repository / "snapshots" / (f"{commit}" * 40)
            for folder in (snapshot, repository / "refs", repository / "blobs"):
                folder.mkdir(parents=True, exist_ok=True)
            (repository / "refs" / f"step{commit}").write_text(f"{commit}" * 40)
            for file in (place / "tiny" / f"step{step}").iterdir():
                blob = repository / "blobs" / f"{file.name}-{commit if file.suffix == '.safetensors' else 'any'}"
                blob.write_bytes(file.read_bytes())
                (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
        return tmp_path / "home"

    return make


def run(argv: list[str], home: Path, **more: str) -> subprocess.CompletedProcess:
    whole = [sys.executable, "-m", "experiments.sink_emergence", *argv]
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(whole, cwd=ROOT, env=environment(HF_HOME=str(home), **more), **quiet)


def snapshots(home: Path) -> list[str]:
    """The first digits of the commits in the cache."""
    return sorted(path.name[0] for path in (home / "hub" / "models--org--name" / "snapshots").iterdir())


@pytest.mark.slow
def test_revisions_of_the_hub_are_read_from_its_cache(place: Path, tmp_path: Path, hub: Callable[[], Path]) -> None:
    home, out = hub(), tmp_path / "out"
    argv = ["--model", "org/name", "--text", str(place / "one.txt"), "--out", str(out), *SMALL]
    argv += ["--revisions", "step0,step1,step2"]
    done = run([*argv[:-1], "step0,step1,step2,step3"], home)
    assert done.returncode == 1, done.stdout
    assert "name step3: model 'org/name', revision 'step3', is not on this machine and the hub cannot be" in done.stdout
    found = {row["asked"]["revision"]: row for row in cells(out)}
    assert {name: (row["status"], row["weights"]) for name, row in found.items()} == {
        **{f"step{commit}": ("done", f"{commit}" * 40) for commit in range(3)},
        "step3": ("failed", None),
    }
    for commit, step in enumerate((0, 2, 8)):
        model, tokens = load(str(place / "tiny" / f"step{step}"))
        ids = tokenize(from_file(place / "one.txt"), tokens, 48)
        assert found[f"step{commit}"]["facts"] == attention_facts(model, ids, 16)
    (out / "downloads.json").write_text(json.dumps(["1" * 40]))  # as if a run before had fetched it, and been killed
    done = run([*argv, "--delete-weights"], home)
    assert done.returncode == 0, done.stdout
    assert "name step1: " in done.stdout
    assert "MiB of weights deleted" in done.stdout
    assert snapshots(home) == ["0", "2"]
    blobs = [path.name for path in (home / "hub" / "models--org--name" / "blobs").iterdir()]
    assert sorted(name for name in blobs if "safetensors" in name) == ["model.safetensors-0", "model.safetensors-2"]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = run(argv, home)  # the weights are on no disk, and what was found on them is
    assert done.returncode == 0, done.stdout
    changed = [path.name for path in before if path.read_bytes() != before[path] and path.name != "report.html"]
    assert changed == []


@pytest.fixture
def server(place: Path) -> Iterator[ThreadingHTTPServer]:
    """A hub on this machine with the same three revisions of org/name, and no other."""
    folders = {f"step{commit}": place / "tiny" / f"step{step}" for commit, step in enumerate((0, 2, 8))}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            folder = folders.get(parts[3]) if len(parts) == 5 and parts[:3] == ["org", "name", "resolve"] else None
            file = folder / parts[4] if folder is not None else None
            if file is not None and file.is_file():
                self.answer(200, {"ETag": f'"{sha256(file.read_bytes()).hexdigest()}"'}, file.read_bytes(), parts[3])
            elif file is not None or parts[0] == "api":  # about the repository: a hub may do without
                self.answer(404, {"X-Error-Code": "EntryNotFound"}, b"", parts[3] if file is not None else None)
            else:
                self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b"")

        do_GET = do_HEAD

        def answer(self, code: int, headers: dict[str, str], content: bytes, revision: str | None = None) -> None:
            self.send_response(code)
            commit = {"X-Repo-Commit": revision[-1] * 40} if revision else {}
            for name, value in {**headers, **commit, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.slow
def test_what_was_downloaded_is_deleted_and_nothing_else(
    place: Path, tmp_path: Path, hub: Callable[[], Path], server: ThreadingHTTPServer
) -> None:
    home, out = hub(), tmp_path / "out"
    repository = home / "hub" / "models--org--name"
    for digit in "12":
        (repository / "refs" / f"step{digit}").unlink()
        shutil.rmtree(repository / "snapshots" / (digit * 40))
        (repository / "blobs" / f"model.safetensors-{digit}").unlink()
    argv = ["--model", "org/name", "--revisions", "step0,step1,step2,step3", "--text", str(place / "one.txt")]
    argv += ["--out", str(out), "--no-perplexity", "--delete-weights", *SMALL]
    online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    done = run(argv, home, **online)
    assert done.returncode == 1, done.stdout
    assert "failed: name step3: model 'org/name' has no revision 'step3' on the hub" in done.stdout
    assert done.stdout.count("MiB of weights deleted") == 2
    assert snapshots(home) == ["0"]
    assert json.loads((out / "downloads.json").read_text()) == []
    assert all(path.exists() for path in (repository / "snapshots" / ("0" * 40)).iterdir())
    found = {row["asked"]["revision"]: row for row in cells(out) if row["status"] == "done"}
    assert {name: row["weights"] for name, row in found.items()} == {f"step{each}": f"{each}" * 40 for each in range(3)}
    model, tokens = load(str(place / "tiny" / "step8"))
    ids = tokenize(from_file(place / "one.txt"), tokens, 48)
    assert found["step2"]["facts"] == attention_facts(model, ids, 16)
