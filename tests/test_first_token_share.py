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
from transformers import PreTrainedTokenizerFast

from experiments import first_token_share
from experiments.first_token_share import main
from experiments.share_report import figures
from experiments.share_tables import by_layer
from experiments.sinks import attention_facts, sink_rates
from sinkcache import SinkCache
from sinkcache.metrics import perplexity
from sinkcache.models import EMBEDDED, load
from sinkcache.policies import StreamingLLM
from sinkcache.sinks import attention_sinks
from sinkcache.texts import from_file, tokenize

pytest.importorskip("matplotlib")

SMALL = ["--tokens", "100", "--first-query", "16", "--segments", "1"]
NOVELS = Path(__file__).parents[1].parent / "shared" / "data"
EXPECTED = {  # percent of the attention, mean over layers and heads, queries from the 65th on
    512: {"persuasion": 31.09, "emma": 30.71, "prideprejudice": 29.92},
    2048: {"persuasion": 27.39},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model (`model`), its tokenizer, and two texts of 120 tokens (`one.txt`, `two.txt`)."""
    folder = tmp_path_factory.mktemp("place")
    vocabulary = {"<unk>": 0, **{f"w{index}": index + 1 for index in range(VOCABULARY - 1)}}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    for name, more in (("model", {"bos_token": "w0"}), ("plain", {})):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", **more)
        tokenizer.save_pretrained(folder / name)
        network: Any = build("llama", torch.float32)
        network.save_pretrained(folder / name)
    for name, factor in (("one", 7), ("two", 11)):
        (folder / f"{name}.txt").write_text("".join(f"w{1 + index * factor % 90} " for index in range(120)))
    return folder


def run(place: Path, out: Path, *more: str, texts: tuple[str, ...] = ("one",), model: str = "model") -> int:
    files = [str(place / f"{name}.txt") for name in texts]
    return main(["--model", str(place / model), "--out", str(out), *SMALL, *more, "--text", *files])


def results(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "results.json").read_text())


def unmeasured(*arguments: Any) -> None:
    raise AssertionError("measured again")


def test_every_number_is_what_the_library_measures(place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path, "--sinks", "0,4", "--budget", "24", texts=("one", "two")) == 0
    network, tokenizer = load(str(place / "model"))
    for name, row in zip(("one", "two"), results(tmp_path), strict=True):
        ids = tokenize(from_file(place / f"{name}.txt"), tokenizer, 100)
        assert row["facts"] == json.loads(json.dumps(attention_facts(network, ids, 16)))
        shares = torch.stack([layer.share() for layer in attention_sinks(network, ids, 16).layers])
        assert row["mean"] == pytest.approx(float(shares.mean()))
        assert row["uniform"] == pytest.approx(sum(1 / i for i in range(17, 101)) / 84)
        assert row["first_token"] == repr(tokenizer.decode(ids[0, :1]))
        assert row["rates"]["none"] == sink_rates(network, ids[:, :64])
        bos = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids[:, :63]], dim=1)
        assert row["rates"]["prepend"] == sink_rates(network, bos)
        for sinks in (0, 4):
            value = perplexity(network, SinkCache(network, StreamingLLM(sinks), 24), ids, 64).value
            assert row["perplexity"][str(sinks)] == pytest.approx(value, rel=1e-4)


def test_a_bos_comes_in_front_and_is_told(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(place, tmp_path, "--bos", "prepend")
    network, tokenizer = load(str(place / "model"))
    ids = tokenize(from_file(place / "one.txt"), tokenizer, 99)
    whole = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], dim=1)
    (row,) = results(tmp_path)
    assert row["facts"] == json.loads(json.dumps(attention_facts(network, whole, 16)))
    assert (row["first_token"], row["bos"]) == ("'w0'", "prepend")
    assert "to the first token, 'w0'" in capsys.readouterr().out


def test_what_is_written_agrees(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(place, tmp_path, "--sinks", "0,1", "--budget", "24", texts=("one", "two"))
    rows, printed = results(tmp_path), capsys.readouterr().out
    with open(tmp_path / "layers.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(line["text"], line["layer"]) for line in table] == [(f"{t}.txt", n) for t in ("one", "two") for n in "01"]
    for line in table:
        facts = next(row["facts"] for row in rows if row["text"] == line["text"])
        assert float(line["share"]) == pytest.approx(sum(facts["share"][int(line["layer"])]) / 4)
        assert float(line["uniform"]) == facts["uniform"][int(line["layer"])]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "src=" not in page
    over = sum(row["mean"] for row in rows) / 2
    for told in (page, printed):
        assert f"{100 * over:.2f}" in told
        assert f"{100 * rows[0]['uniform']:.2f}" in told
    for name in ("share_by_head", "share_by_layer", "share_by_query", "perplexity_by_sinks"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.unfinished"))


def test_the_uniform_share_is_in_each_figure_of_shares(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path)
    rows = results(tmp_path)
    drawn = figures(rows)
    uniform = [100 * each for each in rows[0]["facts"]["uniform"]]
    for name, expected in (
        ("share_by_layer", uniform),
        ("share_by_query", [100 * each for each in rows[0]["facts"]["uniform_by_range"][0]]),
    ):
        lines = {line.get_label(): list(line.get_ydata()) for line in drawn[name][1].axes[0].lines}
        assert lines["uniform"] == pytest.approx(expected)
    heat, bar = drawn["share_by_head"][1].axes
    assert bar.lines[0].get_ydata()[0] == pytest.approx(uniform[0])
    shown = torch.tensor(heat.collections[0].get_array().data).reshape(2, 4)
    torch.testing.assert_close(shown, 100 * torch.tensor(rows[0]["facts"]["share"]))


def test_layers_are_means_over_texts() -> None:
    facts = {"layers": [3], "uniform": [0.1], "share": [[0.2, 0.6]], "share_four": [[0.4, 0.8]], "top": [[[2, 0.5]]]}
    facts |= {"entropy": [[0.5, 0.5]], "first_choice": [[0, 1]], "value_norm": [0.5], "learned": [[0.1, 0.3]]}
    facts["massive"] = [{"ratio": float(index)} for index in range(4)]
    (line,) = by_layer([{"facts": facts}, {"facts": {**facts, "share": [[0.4, 0.4]], "uniform": [0.3]}}])
    assert line["share"] == pytest.approx(0.4)
    assert line["uniform"] == pytest.approx(0.2)
    assert line["times_uniform"] == pytest.approx(2.0)
    assert (line["largest_head"], line["head"]) == (pytest.approx(0.5), 1)
    assert (line["elsewhere"], line["massive"], line["learned"]) == (2, 3.0, pytest.approx(0.2))


def test_finished_cells_are_not_measured_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place, tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    for name in ("attention_facts", "sink_rates"):
        monkeypatch.setattr(first_token_share, name, unmeasured)
    assert run(place, tmp_path) == 0
    assert (tmp_path / "results.json").read_bytes() == before
    for more in (["--fresh"], ["--first-query", "17"], ["--tokens", "99"], ["--bos", "prepend"]):
        with pytest.raises(AssertionError, match="measured again"):
            run(place, tmp_path, *more)


def test_what_was_measured_before_ctrl_c_is_kept(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = first_token_share.attention_facts, []

    def interrupted(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(first_token_share, "attention_facts", interrupted)
    assert run(place, tmp_path, texts=("one", "two")) == 130
    assert "finished cells are kept" in " ".join(capsys.readouterr().out.split())
    assert len(list((tmp_path / "cells").glob("*.json"))) == 3  # share, and rates without and with BOS
    assert run(place, tmp_path, texts=("one", "two")) == 0
    assert len(asked) == 3


def test_the_preset_is_the_default() -> None:
    parser = first_token_share._parser()
    plain = vars(parser.parse_args([]))
    assert {name: plain[name] for name in ("tokens", "first_query", "bos")} == first_token_share.PRESETS["seed"]


def test_a_preset_gives_way_to_what_is_said(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path, "--preset", "seed")
    assert results(tmp_path)[0]["tokens"] == 100


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tokens", "16"], "--first-query 16 is not among --tokens 16"),
        (["--tokens", "5000"], "'one.txt' is shorter than --tokens 5000"),
        (["--sinks", "4", "--budget", "4"], "budget"),
        (["--sinks", "4", "--budget", "99"], "--budget 99 evicts nothing from --tokens 100"),
        (["--first-query", "0"], "must be a whole number, 1 or more"),
        (["--text", "nowhere.txt"], "'nowhere.txt' cannot be read"),
    ],
)
def test_a_users_mistake_is_one_line_before_a_model_is_loaded(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(first_token_share, "load", unmeasured)
    given = ["--model", str(place / "model"), "--out", str(tmp_path), *SMALL, "--text", str(place / "one.txt"), *more]
    with pytest.raises(SystemExit) as stop:
        main(given)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(said, line), line


@pytest.mark.parametrize(
    ("more", "model", "said"),
    [
        (["--tokens", "125"], "model", "has 120 tokens, got --tokens 125"),
        (["--tokens", "129"], "model", "exceeds the trained length, 128"),
        (["--bos", "prepend"], "plain", "has no BOS token"),
        ([], "nowhere", "nowhere"),
    ],
)
def test_what_a_model_cannot_do_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], model: str, said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(place, tmp_path, *more, model=model)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_model_outside_the_attention_interface_is_refused_in_a_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zoo

    network, tokenizer = zoo.build("BLOOM"), load(str(place / "model"))[1]
    monkeypatch.setattr(first_token_share, "load", lambda *_: (network, tokenizer))
    with pytest.raises(SystemExit) as stop:
        run(place, tmp_path)
    assert stop.value.code == 2
    *_, line = capsys.readouterr().err.strip().splitlines()  # before it, what transformers may say of BLOOM
    assert "the attention of BloomForCausalLM cannot be measured" in line


@pytest.mark.slow
@pytest.mark.parametrize("tokens", EXPECTED)
def test_the_embedded_model_gives_its_first_token_what_was_measured(tokens: int) -> None:
    missing = [name for name in EXPECTED[tokens] if not (NOVELS / f"{name}.txt").exists()]
    if missing:
        pytest.skip(f"no {', '.join(missing)} in {NOVELS}")
    try:
        network, tokenizer = load(EMBEDDED)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    for name, expected in EXPECTED[tokens].items():
        facts = attention_facts(network, tokenize(from_file(NOVELS / f"{name}.txt"), tokenizer, tokens))
        layers = [sum(each) / len(each) for each in facts["share"]]
        assert 100 * sum(layers) / len(layers) == pytest.approx(expected, abs=0.05), name
        if name == "persuasion":  # of the others layer 18 may be level with it
            assert layers.index(max(layers)) == 23
        assert max(layers[:3] + layers[10:12]) < 0.025


def test_facts_are_of_one_text() -> None:
    with pytest.raises(ValueError, match="one text at a time, got 2"):
        attention_facts(build("llama"), torch.ones(2, 80, dtype=torch.int64))
