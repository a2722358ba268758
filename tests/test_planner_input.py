"""What a plan makes of input that is odd: configs, files, sizes, policies and caches that contradict themselves."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build
from safetensors.torch import save_file
from test_planner import CONFIGS, QWEN, gguf, of, write
from transformers import DynamicCache, StaticCache

from sinkcache import policies
from sinkcache.guard import cache_argument
from sinkcache.planner import plan
from sinkcache.planner.capacity import Class, largest_budget, shared_out
from sinkcache.planner.command import main
from sinkcache.planner.configs import from_config
from sinkcache.planner.in_llamacpp import LlamaCpp
from sinkcache.planner.in_sinkcache import FIELDS, bounded
from sinkcache.planner.kinds import tally
from sinkcache.planner.sources import model_of
from sinkcache.planner.verify import verify_config
from sinkcache.planner.weights import in_folder

ODD = [
    ({**QWEN, "model_type": ["qwen3"]}, r"model_type must be a name, got \['qwen3'\]"),
    ({**QWEN, "layer_types": [["full_attention"]] * 36}, r"layer_types\[0\] = \['full_attention'\]"),
    ({**QWEN, "partial_rotary_factor": "0.5"}, r"must be in \[0, 1\], got '0.5'"),
    ({**QWEN, "partial_rotary_factor": float("inf")}, r"must be in \[0, 1\], got inf"),
    ({**QWEN, "rope_parameters": {"partial_rotary_factor": [1]}}, r"must be in \[0, 1\], got \[1\]"),
    ({**QWEN, "head_dim": 10**400}, "head_dim must be at most 2,147,483,647, got a number of 401 digits"),
    ({**QWEN, "num_hidden_layers": 10**7}, "num_hidden_layers = 10,000,000 is more layers than any model has"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": 5}, "hybrid_override_pattern must be a letter for each"),
    (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "num_hidden_layers": 5},
        "hybrid_override_pattern has 2 letters, num_hidden_layers is 5",
    ),
    ({"model_type": "lfm2", "full_attn_idxs": 5}, "full_attn_idxs must be a list of layers' numbers, got 5"),
    ({"model_type": "lfm2", "full_attn_idxs": [99]}, r"full_attn_idxs = \[99\] names layers that 32 layers have not"),
    ({"model_type": "bamba", "attn_layer_indices": ["3"]}, "attn_layer_indices must be a list of layers' numbers"),
    ({"model_type": "mllama_text_model", "cross_attention_layers": 3}, "cross_attention_layers must be a list"),
    (
        {"model_type": "llama4_text", "no_rope_layers": [1, 0]},
        "no_rope_layers has 2 entries, and there are more layers",
    ),
    (
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 0},
        "num_kv_heads must be a whole number, 1 or more, got 0",
    ),
    (
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": "8"},
        "num_kv_heads must be a whole number, 1 or more, got '8'",
    ),
    ({"model_type": "falcon_h1", "mamba_d_ssm": -5}, "mamba_d_ssm must be a whole number, 1 or more, got -5"),
    ({"model_type": "gptj", "rotary_dim": "64"}, "rotary_dim must be a whole number, 0 or more, got '64'"),
]


@pytest.mark.parametrize(("config", "said"), ODD, ids=[said for _, said in ODD])
def test_a_field_of_an_odd_value_is_refused_by_name(config, said, tmp_path, capsys):
    with pytest.raises(ValueError, match=said):
        from_config(config)
    assert main([write(tmp_path, config)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_a_pattern_is_not_asked_for_where_null_says_that_nothing_slides():
    odd = {"model_type": "exaone4", "num_hidden_layers": 3, "sliding_window": None, "sliding_window_pattern": None}
    assert tally(from_config(odd).layers) == {"full": 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a" * 5000], "cannot be read: File name too long"),
        (["~nosuchuser/config.json"], "cannot be read: Could not determine home directory"),
        (["org/name", "--revision", "x" * 5000], "cannot be read: File name too long"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "1e999GiB"], "no memory is as large as '1e999GiB'"),
        (["--lengths", "9" * 400], "must be at most 2**62 tokens, got a number of 400 digits"),
        (["--memory", "1GiB", "--mix", "9:9:0.5,9:9:0.5"], "the class 9:9:0.5 is there twice: add up its shares"),
        (["--policy", "StreamingLLM(num_sinks='x')"], "num_sinks must be a whole number of tokens, 0 or more, got 'x'"),
        (["--policy", "StreamingLLM(num_sinks=-3)"], "num_sinks must be a whole number of tokens, 0 or more, got -3"),
        (["--policy", "SnapKV(observation_window=None)"], "observation_window must be a whole number of tokens"),
        (["--policy", "StreamingLLM(sinks=3)"], "StreamingLLM has no field sinks: there is num_sinks"),
        (["--policy", "Window(3)"], "a policy is written as StreamingLLM(num_sinks=4)"),
        (["--policy", "H2O(recent=2000)"], "H2O needs a budget of 2001 tokens at least, got 1024"),
        (["--policy", "SnapKV", "--budget", "8"], "SnapKV needs a budget of 33 tokens at least, got 8"),
    ],
)
def test_options_of_no_sense_are_one_line(arguments, said, tmp_path, capsys):
    assert main([write(tmp_path, QWEN), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_config_nested_without_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: maximum recursion depth"):
        model_of(write(tmp_path, "[" * 100_000))


# Policies and budgets.


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_policies_are_those_that_they_have(name):
    policy = getattr(policies, name)
    assert FIELDS[name] == {each.name: each.default for each in dataclasses.fields(policy)}
    assert list(FIELDS[name]) == [each.name for each in dataclasses.fields(policy)]


@pytest.mark.parametrize("name", FIELDS)
def test_the_least_budget_is_the_policys_own(name):
    least = bounded(name, 10_000).room
    policy = getattr(policies, name)()
    policy.check(least)
    if least > 1:
        with pytest.raises(ValueError, match="budget"):
            policy.check(least - 1)
        with pytest.raises(ValueError, match="budget"):
            bounded(name, least - 1)


def test_fields_of_a_policy_can_go_by_their_place():
    assert bounded("SnapKV(16)", 99) == bounded("SnapKV(observation_window=16)", 99) == bounded(policies.SnapKV(16), 99)
    assert bounded("SnapKV(16)", 99).newest == 16


def test_a_budget_of_the_whole_conversation_is_found_though_one_token_less_needs_more():
    model = from_config(QWEN)
    memory = bounded("StreamingLLM", 100, 10).together(model, {100: 1})
    assert bounded("StreamingLLM", 99, 10).together(model, {100: 1}) > memory
    assert largest_budget(lambda budget: bounded("StreamingLLM", budget, 10), model, memory, {100: 1}) == 100


def test_a_class_that_is_there_twice_is_refused_and_not_lost():
    with pytest.raises(ValueError, match=r"the class 10:5:0\.5 is there twice"):
        shared_out([Class(10, 5, 0.5), Class(10, 5, 0.5)], 4)


def test_slots_without_a_cell_are_refused():
    with pytest.raises(ValueError, match="a context of 256 has no cell for each of 512 slots"):
        LlamaCpp(512).held(from_config(QWEN), 1)
    assert LlamaCpp(256).held(from_config(QWEN), 1) > 0


# Files of weights.


def test_weights_that_are_there_twice_count_once(tmp_path):
    write(tmp_path, QWEN)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in [*names, "consolidated.safetensors"]:
        save_file({"weight": torch.zeros(3, 5)}, tmp_path / name)
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert in_folder(tmp_path) == (30, 120)
    (tmp_path / names[1]).unlink()  # not all of them: no sum is known
    assert in_folder(tmp_path) == (None, None)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index of safetensors files"):
        in_folder(tmp_path)
    save_file({"weight": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    assert in_folder(tmp_path) == (15, 60)


@pytest.mark.parametrize("header", [[1], {"weight": {"dtype": "F32"}}, {"weight": 3}, {"w": {"shape": 3}}])
def test_a_header_that_describes_no_tensors_is_refused(header, tmp_path):
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="has a header that does not describe tensors"):
        in_folder(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path, capsys):
    path = write(tmp_path, QWEN)
    (tmp_path / "a.safetensors").mkdir()
    assert main([path]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


# GGUF files.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_count": 10**7}, "block_count = 10,000,000 is more layers than any model has"),
        ({"nextn_predict_layers": 6}, "block_count is 6, and 6 layers have no cache"),
        ({"attention__shared_kv_layers": 9}, "block_count is 6, and 9 layers have no cache"),
        (
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": [1, 0]},
            "sliding_window_pattern of .* has 2 entries for 6 layers",
        ),
        (
            {"attention__kv_lora_rank": 24, "attention__key_length": 16, "attention__key_length_mla": 20},
            "key_length is 16, and its latent is 24",
        ),
    ],
)
def test_fields_of_a_gguf_file_that_contradict_are_refused(fields, said, tmp_path):
    path = gguf(tmp_path / "a.gguf", of("llama", **fields))
    with pytest.raises(ValueError, match=said):
        model_of(path)


def test_fields_of_a_gguf_file_of_another_type_are_not_used(tmp_path):
    odd = {**of("llama", context_length="long"), "split.count": "two"}
    assert model_of(gguf(tmp_path / "a.gguf", odd)).max_length is None


def test_layers_of_nemotron_h_without_attention_have_a_state_unless_they_are_dense(tmp_path):
    state = {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16, "ssm__group_count": 2}
    lists = {"attention__head_count_kv": [0, 0, 2, 0, 0, 0], "feed_forward_length": [0, 96, 0, 0, 96, 96]}
    model = model_of(gguf(tmp_path / "a.gguf", of("nemotron_h", **state, **lists)))
    assert [layer.kind for layer in model.layers] == ["linear", "none", "full", "linear", "none", "none"]


def test_a_gguf_file_that_ends_before_its_weights_does_not_tell_their_size(tmp_path, capsys):
    path = gguf(tmp_path / "a.gguf", of("llama"))
    Path(path).write_bytes(Path(path).read_bytes()[:-256])
    model = model_of(path)
    assert (model.parameters, model.weights) == (64, None)
    assert "bytes of the weights are not known, as the file ends before them" in model.assumed
    assert main([path, "--gpu", "1GiB"]) == 2
    assert "do not tell the size of its weights" in capsys.readouterr().err


def test_a_gguf_file_is_known_by_its_letters_too(tmp_path, capsys):
    assert main([gguf(tmp_path / "blob", of("llama")), "--verify"]) == 2
    assert "--verify is for a config" in capsys.readouterr().err


# What is loaded.


def test_a_cache_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="the DynamicCache has no layer yet"):
        plan(DynamicCache())


def test_windows_of_a_static_cache_are_windows():
    model: Any = build("gemma3", dtype=torch.float32)
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(torch.ones(1, 40, dtype=torch.long), **{cache_argument(model): cache})
    live, said = plan(cache, [64]), plan(model, [64])
    assert [(row.kind, row.window, row.totals) for row in live.kinds] == [
        (row.kind, row.window, row.totals) for row in said.kinds
    ]


def test_a_dtype_is_that_of_the_cache_for_a_model_that_has_been_read():
    model = from_config(QWEN)
    assert plan(model, [1], dtype="f32").per_token == 2 * plan(model, [1]).per_token
    with pytest.raises(ValueError, match="model_type llama is for a config"):
        plan(model, [1], model_type="llama")


# Verification.


@pytest.mark.parametrize("odd", [{"vocab_size": -4}, {"vocab_size": "x"}, {"pad_token_id": 10**9}])
def test_what_transformers_cannot_run_is_one_line(odd, tmp_path, capsys):
    config = {"model_type": "llama", "num_hidden_layers": 1, **odd}
    assert main([write(tmp_path, config), "--verify"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "this transformers cannot run a llama to verify" in err


def test_a_model_is_verified_as_the_type_it_is_read_as():
    config = {**CONFIGS["Qwen3-0.6B"], "model_type": "brand_new", "num_hidden_layers": 2}
    assert verify_config(config, model_type="qwen3").exact
