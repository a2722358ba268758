"""The command line says what the library computes, and what is wrong in one line."""

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as tf
from conftest import build
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from sinkcache import SinkCache, __version__, cli, generation, inspection, policies
from sinkcache.calibration import calibrate
from sinkcache.cli import main
from sinkcache.guard import cache_argument
from sinkcache.policies import H2O, KeyDiff, Protect, StreamingLLM, Window
from sinkcache.policy import Policy

WORDS = [f"w{index}" for index in range(96)]
PROMPT = " ".join(WORDS[index * 7 % 96] for index in range(40))


def save(folder: Path, family: str = "llama", **changes) -> str:
    cast(Any, build(family, dtype=torch.float32, **changes)).save_pretrained(folder)
    words = Tokenizer(
        WordLevel({"[UNK]": 0, **{word: index + 1 for index, word in enumerate(WORDS)}}, unk_token="[UNK]")
    )
    words.pre_tokenizer = Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(WORDS[index * index % 89] for index in range(600)))
    return str(file)


def expected(folder: str, new: int, policy: Policy, budget: Any, evict_every: int = 1) -> str:
    model: Any = tf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    cache = SinkCache(model, policy, budget, evict_every=evict_every)
    out = model.generate(
        input_ids=inputs.input_ids, max_new_tokens=new, do_sample=False, **{cache_argument(model): cache}
    )
    return tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("budget", ["16", "0.5"])
def test_generates_what_generate_does(llama, capsys, budget):
    code = main(["generate", "--model", llama, "--prompt", PROMPT, "--budget", budget, "--max-new-tokens", "30"])
    out, err = capsys.readouterr()
    number = float(budget) if "." in budget else int(budget)
    assert code == 0
    assert out == expected(llama, 30, StreamingLLM(), number) + "\n"
    assert err.count("\n") == 1
    assert "30 tokens generated" in err
    assert f"69 seen, {number if isinstance(number, int) else math.ceil(number * 40)} held" in err


@pytest.mark.parametrize("budget", ["[12, 20]", "12,20", "12, 0.5"])
def test_takes_a_budget_for_each_layer_as_calibrate_prints_it(llama, capsys, budget):
    asked = ["generate", "--model", llama, "--prompt", PROMPT, "--budget", budget, "--max-new-tokens", "30"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert out == expected(llama, 30, StreamingLLM(), [12, 20]) + "\n"
    assert out != expected(llama, 30, StreamingLLM(), [20, 12]) + "\n"
    assert "20 held" in err


@pytest.mark.parametrize(
    ("asked", "policy", "evict_every"),
    [
        (["--policy", "window"], Window(), 1),
        (["--policy", "streaming-llm", "--sinks", "6"], StreamingLLM(6), 1),
        (["--policy", "StreamingLLM(num_sinks=3)"], StreamingLLM(3), 1),
        (["--policy", "H2O(recent=6)"], H2O(recent=6), 1),
        (["--policy", "Protect(KeyDiff, num_sinks=1, recent=4)", "--evict-every", "3"], Protect(KeyDiff(), 1, 4), 3),
    ],
    ids=["window", "sinks", "named", "h2o", "nested"],
)
def test_generates_with_any_policy_by_name(llama, capsys, asked, policy, evict_every):
    generate = ["generate", "--model", llama, "--prompt", PROMPT, "--budget", "16", "--max-new-tokens", "30"]
    assert main([*generate, *asked]) == 0
    out, err = capsys.readouterr()
    assert out == expected(llama, 30, policy, 16, evict_every) + "\n"
    assert "69 seen, 1" in err


def test_policies_are_listed_with_fields_and_what_they_read_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["policies"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    for name in policies.__all__:
        assert f"\n{name}(" in "\n" + out
    joined = " ".join(out.split())
    for said in (
        "H2O(recent=32, num_sinks=0, half_life=None, reduce='sum', group='mean') Evicts the token that has received",
        "reads attention of all queries; arXiv 2306.14048",
        "Protect(policy, num_sinks=4, recent=32) Scores as `policy` does",
        "reads what its policies read",
        "reads attention of 32 queries; arXiv 2404.14469",
        "reads positions; arXiv 2309.17453",
    ):
        assert said in joined


def test_output_to_a_pipe_has_no_control_codes(llama, capsys):
    main(["generate", "--model", llama, "--prompt", PROMPT, "--max-new-tokens", "5"])
    assert "\x1b" not in "".join(capsys.readouterr())


def test_stops_at_the_end_of_text(llama, tmp_path, capsys):
    words = expected(llama, 30, StreamingLLM(), 16).split()
    folder = save(tmp_path, max_position_embeddings=512)
    tf.GenerationConfig(eos_token_id=[WORDS.index(words[3]) + 1]).save_pretrained(folder)
    assert main(["generate", "--model", folder, "--prompt", PROMPT, "--budget", "16", "--max-new-tokens", "30"]) == 0
    assert capsys.readouterr().out.split() == words[: words.index(words[3])]


def test_seed_repeats_a_sample(llama, capsys):
    def sample(seed: str) -> str:
        asked = ["--max-new-tokens", "20", "--temperature", "5", "--top-p", "0.9", "--seed", seed]
        assert main(["generate", "--model", llama, "--prompt", PROMPT, *asked]) == 0
        return capsys.readouterr().out

    assert sample("1") == sample("1") != sample("2")


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {generation.sample(1.0, 0.6, generator, logits) for _ in range(200)}
    assert drawn == {1, 2}


def test_interrupt_keeps_what_was_generated(llama, monkeypatch, capsys):
    calls = []

    def choose(logits: torch.Tensor) -> int:
        calls.append(None)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return 5

    monkeypatch.setattr(cli, "_chooser", lambda args: choose)
    assert main(["generate", "--model", llama, "--prompt", PROMPT]) == 130
    out, err = capsys.readouterr()
    assert out == "w4 w4 w4\n"
    assert "interrupted" in err


def test_text_pieces_join_to_the_whole_across_split_characters():
    single = Tokenizer(BPE({byte: index for index, byte in enumerate(sorted(ByteLevel.alphabet()))}, []))
    single.pre_tokenizer, single.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=single)
    text = "naïve 😀 \ufffd end"
    pieces = list(generation.pieces(iter(tokenizer(text).input_ids), tokenizer))
    assert "".join(pieces) == text
    assert "😀" in pieces


GENERATE = ["generate", "--model", "./missing", "--prompt", "w1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*GENERATE, "--sinks", "8", "--budget", "8"], "num_sinks=8 with budget=8"),
        ([*GENERATE, "--budget", "0"], "at least 1 token, got 0"),
        ([*GENERATE, "--budget", "1.5"], "(0, 1], got '1.5'"),
        ([*GENERATE, "--budget", "0.0"], "(0, 1], got '0.0'"),
        ([*GENERATE, "--budget", "many"], "got 'many'"),
        ([*GENERATE, "--budget", "16,"], "got ''"),
        ([*GENERATE, "--budget", "[16, 8]", "--sinks", "8"], "num_sinks=8 with budget=8"),
        ([*GENERATE, "--sinks", "-1"], "got '-1'"),
        ([*GENERATE, "--policy", "h3o"], "no policy is named h3o: did you mean H2O?"),
        ([*GENERATE, "--policy", "H2O(recnt=3)"], "H2O has no field recnt: did you mean recent?"),
        ([*GENERATE, "--policy", "H2O(recent=64", "--budget", "99"], "written as H2O(recent=64), got 'H2O(recent=64'"),
        ([*GENERATE, "--policy", "H2O(64)", "--budget", "64"], "got 0 + 64 with budget=64: raise the budget"),
        ([*GENERATE, "--policy", "H2O(61)", "--budget", "64", "--evict-every", "4"], "evict_every=4 leaves 60 of 64"),
        ([*GENERATE, "--policy", "H2O(9)", "--sinks", "4"], "--sinks 4 is for --policy streaming-llm"),
        ([*GENERATE, "--evict-every", "0"], "must be a whole number, 1 or more, got '0'"),
        ([*GENERATE, "--policy", "window", "--sinks", "2"], "--sinks 2 is for"),
        ([*GENERATE, "--top-p", "0.5"], "add a --temperature"),
        ([*GENERATE, "--temperature", "1", "--top-p", "0"], "--top-p must be in (0, 1]"),
        ([*GENERATE, "--temperature", "nan"], "got 'nan'"),
        ([*GENERATE, "--device", "nowhere"], "'nowhere' cannot be used"),
        (["generate", "--prompt", ""], "prompt is empty"),
        (["generate", "--prompt-file", "/no/such/file"], "'/no/such/file' cannot be read"),
        (["generate"], "--prompt"),
        (GENERATE, "'./missing' does not exist"),
        (["inspect", "--tokens", "64"], "65 or more, got '64'"),
        (["inspect", "--text", "/no/such/file"], "'/no/such/file' cannot be read"),
        (["inspect", "--model", "nobody/nothing"], "'nobody/nothing'"),
        (["calibrate", "--budget", "64", "--tokens", "64"], "--budget 64 evicts nothing from --tokens 64"),
        (["calibrate", "--even", "1.5"], "even must be between 0 (as found) and 1 (all alike), got 1.5"),
        (["calibrate", "--budget", "0.5"], "must be a whole number, 1 or more, got '0.5'"),
        (["calibrate", "--policy", "H2O(recent=64)", "--budget", "64"], "got 0 + 64 with budget=64: raise the budget"),
        (["calibrate", "--policy", "H3O"], "no policy is named H3O: did you mean H2O?"),
        (["calibrate", "--text", "/no/such/file"], "'/no/such/file' cannot be read"),
        (["dance"], "'dance'"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_share_too_small_for_the_sinks_is_a_mistake(llama, capsys):
    assert main(["generate", "--model", llama, "--prompt", PROMPT, "--budget", "0.1"]) == 2
    assert "num_sinks=4 with budget=4" in capsys.readouterr().err


def test_a_list_of_another_length_than_the_models_layers_is_a_mistake(llama, capsys):
    assert main(["generate", "--model", llama, "--prompt", PROMPT, "--budget", "16,16,16"]) == 2
    assert "budget has 3 entries for 2 bounded layers" in capsys.readouterr().err


def test_chat_needs_a_template(llama, capsys):
    assert main(["generate", "--model", llama, "--prompt", "w1", "--chat"]) == 2
    assert "leave --chat out" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["generate"], ["inspect"], ["calibrate"], ["policies"]])
def test_help_fits_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_calibrated_list_is_json_alone_on_standard_output(llama, text, capsys):
    asked = ["calibrate", "--model", llama, "--text", text, "--tokens", "90", "--chunk", "9"]
    assert main([*asked, "--budget", "16", "--policy", "H2O(recent=4, reduce='mean')"]) == 0
    out, err = capsys.readouterr()
    model: Any = tf.AutoModelForCausalLM.from_pretrained(llama)
    ids = tf.AutoTokenizer.from_pretrained(llama)(Path(text).read_text(), return_tensors="pt").input_ids[:, :90]
    assert out.count("\n") == 1
    assert json.loads(out) == calibrate(model, ids, H2O(recent=4, reduce="mean"), 16, chunk=9)
    assert "H2O(recent=4" in err
    assert "90 tokens of text.txt" in err


def test_a_text_that_is_too_short_to_calibrate_on_is_a_mistake(llama, text, capsys):
    assert main(["calibrate", "--model", llama, "--text", text, "--tokens", "5000"]) == 2
    assert "has 600 tokens, got --tokens 5000: lower it" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"sinkcache {__version__}\n"


def report(folder: str, text: str, capsys, tokens: int = 100) -> dict:
    assert main(["inspect", "--model", folder, "--text", text, "--tokens", str(tokens), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_shares_are_those_of_the_attention_weights(llama, text, capsys):
    found = report(llama, text, capsys)
    model = tf.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokenizer = tf.AutoTokenizer.from_pretrained(llama)
    ids = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids[:, :100]
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    for layer, weights in zip(found["layers"], attentions, strict=True):
        received = [
            sum(float(weights[0, head, query, key]) for head in range(4) for query in range(64, 100)) / (4 * 36)
            for key in range(100)
        ]
        assert layer["first_share"] == pytest.approx(received[0], rel=1e-4)
        assert layer["top_position"] == max(range(100), key=received.__getitem__)
        assert layer["top_share"] == pytest.approx(max(received), rel=1e-4)
    assert found["uniform"] == pytest.approx(sum(1 / (query + 1) for query in range(64, 100)) / 36)


def test_layers_of_a_llama(llama, text, capsys):
    found = report(llama, text, capsys)
    assert [layer["kind"] for layer in found["layers"]] == ["full", "full"]
    assert {layer["rope"] for layer in found["layers"]} == {"half-split, 16 of 16 channels, theta 10,000"}
    assert {layer["bytes_per_token"] for layer in found["layers"]} == {2 * 2 * 16 * 4}
    assert found["positions"] == {"cache": None, "original": None}


@pytest.mark.parametrize(
    ("family", "kinds", "ropes"),
    [
        ("gemma3", ["sliding 16", "full", "sliding 16"], {"half-split, 24 of 24 channels"}),
        ("smollm3", ["full"] * 4, {"half-split, 16 of 16 channels", "none"}),
        ("gpt_neox", ["full"] * 2, {"half-split, 4 of 16 channels"}),
        ("cohere", ["full"] * 2, {"interleaved, 16 of 16 channels"}),
    ],
)
def test_layers_are_told_apart(family, kinds, ropes, tmp_path, text, capsys):
    layers = report(save(tmp_path, family), text, capsys)["layers"]
    assert [layer["kind"] for layer in layers] == kinds
    assert {layer["rope"].split(", theta")[0] for layer in layers} == ropes
    assert [layer["bounded"] for layer in layers] == [kind == "full" for kind in kinds]
    assert [layer["first_share"] is None for layer in layers] == [kind != "full" for kind in kinds]


def test_recommends_the_fewest_sinks_within_one_percent(llama, text, capsys):
    sinks = report(llama, text, capsys)["sinks"]
    measured = {int(number): value for number, value in sinks["perplexity"].items()}
    assert (sinks["tokens"], list(measured)) == (512, [0, 1, 2, 4, 8])
    assert sinks["recommended"] == min(n for n, value in measured.items() if value <= 1.01 * min(measured.values()))


def test_inspection_leaves_the_model_as_it_was(text):
    model: Any = build("llama", dtype=torch.float32)
    before = {name: len(module._forward_hooks) for name, module in model.named_modules() if name}
    ids = torch.arange(100)[None] % 97
    inspection.attention_received(model, tf.DynamicCache(config=model.config), ids)
    assert model.config._attn_implementation == "sdpa"
    assert {name: len(module._forward_hooks) for name, module in model.named_modules() if name} == before


def test_report_for_people_shows_baseline_table_and_caveat(llama, text, capsys):
    assert main(["inspect", "--model", llama, "--text", text, "--tokens", "100"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for said in ("0-1", "uniform attention would give it 1.2%", "perplexity", "Recommended: ", "this sample alone"):
        assert said in " ".join(out.split())


@pytest.mark.parametrize("as_json", [True, False])
def test_refused_model_is_reported_with_exit_code_1(as_json, tmp_path, text, capsys):
    config = tf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3)
    save(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    tf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    code = main(["inspect", "--model", str(tmp_path), "--text", text, "--tokens", "100", *["--json"] * as_json])
    out, err = capsys.readouterr()
    assert (code, err) == (1, "")
    assert "learned or sinusoidal" in (json.loads(out)["refused"] if as_json else out)


def test_more_tokens_than_trained_for_is_a_mistake(llama, text, capsys):
    assert main(["inspect", "--model", llama, "--text", text, "--tokens", "513"]) == 2
    assert "512 for this model, got 513" in capsys.readouterr().err
