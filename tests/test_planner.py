"""What a plan reads, assumes and refuses, how many users it finds, and what the command prints."""

import csv
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sinkcache.planner import command, default_choices, plan
from sinkcache.planner.capacity import Class, knobs, largest_budget, longest, mixed, recomputed, shared_out, users
from sinkcache.planner.command import main
from sinkcache.planner.configs import from_config
from sinkcache.planner.in_llamacpp import LlamaCpp
from sinkcache.planner.in_sinkcache import Bounded, bounded
from sinkcache.planner.in_transformers import Dynamic, Quantized, Static
from sinkcache.planner.in_vllm import VLLM
from sinkcache.planner.kinds import FORMATS, Layer, Model, State, size, tally
from sinkcache.planner.sources import model_of
from sinkcache.planner.weights import bytes_of, in_folder, parsed

CONFIGS = json.loads((Path(__file__).parent / "data" / "planner_models.json").read_text())["models"]
QWEN, GEMMA = CONFIGS["Qwen3-8B"], CONFIGS["gemma-3-4b"]


def kinds(config: dict[str, Any]) -> dict[Any, int]:
    return dict(tally(from_config(config).layers))


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def write(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder / "config.json")


# What config files say, and leave out.


def test_a_window_that_is_missing_is_the_class_default_and_null_is_none():
    mistral = CONFIGS["Mistral-7B-v0.3"]
    assert kinds(mistral) == {"full": 32}
    missing = from_config(without(mistral, "sliding_window"))
    assert {(layer.kind, layer.window) for layer in missing.layers} == {("sliding", 4096)}
    assert "sliding_window = 4096, the default of mistral" in missing.assumed


def test_a_window_that_is_not_used_is_none():
    used = {**QWEN, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}
    assert kinds({**used, "use_sliding_window": False}) == {"full": 36}
    assert kinds(used) == {"full": 28, "sliding": 8}


def test_heads_of_gptoss_are_64_wide_and_never_45():
    config = without(CONFIGS["gpt-oss-20b"], "head_dim")
    model = from_config(config)
    assert model.layers[0].key_dim == 64
    assert "head_dim = 64, the default of gpt_oss" in model.assumed
    with pytest.raises(ValueError, match=r"hidden_size 2880 / num_attention_heads 64 = 45 cannot be it.*Give head_dim"):
        from_config({**config, "head_dim": None})


def test_defaults_that_are_used_are_listed():
    assumed = from_config(GEMMA).assumed
    assert list(assumed) == [
        "sliding_window_pattern = 6, the default of gemma3_text",
        "num_attention_heads = 8, the default of gemma3_text",
        "num_key_value_heads = 4, the default of gemma3_text",
        "head_dim = 256, the default of gemma3_text",
    ]
    assert from_config({**QWEN, "layer_types": ["full_attention"] * 36}).assumed == ()
    mistral = from_config(without(CONFIGS["Mistral-7B-v0.3"], "torch_dtype"))
    assert list(mistral.assumed) == [
        "head_dim = 128, hidden_size / num_attention_heads",
        "dtype = bf16, as nothing says",
    ]
    assert "num_key_value_heads = 8, as many as attention heads" in from_config(CONFIGS["Pythia-1B"]).assumed


def test_older_names_of_fields_are_read():
    assert {layer.key_dim for layer in from_config({"model_type": "bloom", "n_embed": 1024, "n_head": 16}).layers} == {
        64
    }
    assert kinds({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 3}) == {"full": 3, "cross": 3}
    legacy = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    assert kinds(legacy) == {"full": 2}  # its class keeps the last layer whole


def test_kinds_of_every_sort_are_told_apart():
    assert kinds(CONFIGS["Qwen3.5-9B"]) == {"full": 8, "linear": 24}
    assert kinds(CONFIGS["DeepSeek-V2-Lite"]) == {"mla": 27}
    assert kinds({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}) == {
        "full": 4, "sliding": 16, "shared": 15}  # fmt: skip
    assert {layer.row for layer in from_config({"model_type": "deepseek_v32"}).layers} == {
        512 + 64 + 128
    }  # its indexer
    assert kinds({"model_type": "smollm3"}) == {"full": 27, "nope": 9}
    assert kinds(CONFIGS["Llama-4-Scout"]) == {"nope": 12, "chunked": 36}
    assert kinds({"model_type": "falcon_h1"}) == {"hybrid": 32}
    assert kinds({"model_type": "t5", "is_encoder_decoder": True}) == {"full": 6, "cross": 6}
    assert kinds({"model_type": "mllama_text_model"}) == {"full": 32, "cross": 8}
    assert kinds({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-E"}) == {"full": 1, "linear": 1, "none": 2}
    assert kinds({"model_type": "lfm2", "full_attn_idxs": [0], "num_hidden_layers": 3}) == {"full": 1, "conv": 2}


REFUSED = [
    ({"num_hidden_layers": 2}, "model_type is missing"),
    ({"model_type": "brand_new"}, "model_type = 'brand_new' is none whose cache is known"),
    ({**QWEN, "kv_lora_rank": 512}, "kv_lora_rank = 512 says how layers store, and no rule is known for it in a qwen3"),
    ({**QWEN, "mamba_d_state": 16}, "mamba_d_state = 16"),
    ({**QWEN, "layer_types": ["full_attention"] * 35}, "layer_types has 35 entries, num_hidden_layers is 36"),
    ({**QWEN, "layer_types": ["sparse_attention"] * 36}, r"layer_types\[0\] = 'sparse_attention' is a kind of layer"),
    ({**QWEN, "layer_types": ["linear_attention"] * 36}, r"'linear_attention' is no kind of layer that qwen3 has"),
    ({**QWEN, "layer_types": ["indexed_attention"] * 36}, r"'indexed_attention' is no kind of layer that qwen3 has"),
    ({**QWEN, "layer_types": ["chunked_attention"] * 36}, "attention_chunk_size of qwen3 is missing"),
    ({**CONFIGS["Qwen3.5-9B"]["text_config"], "layer_types": ["hybrid"] * 32}, "'hybrid' is no kind of layer"),
    ({**CONFIGS["Qwen3.5-9B"]["text_config"], "layer_types": ["conv"] * 32}, "'conv' is no kind of layer"),
    ({**QWEN, "layer_types": ["sliding_attention"] * 36}, "and sliding_window is null or not used"),
    ({**QWEN, "layer_types": "full_attention"}, "layer_types must be a list with an entry for each layer"),
    ({"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
    ({**CONFIGS["DeepSeek-V3"], "kv_lora_rank": None}, "kv_lora_rank of deepseek_v3 is null"),
    ({**QWEN, "num_hidden_layers": -3}, "num_hidden_layers must be a whole number, 1 or more, got -3"),
    ({**QWEN, "num_hidden_layers": 36.0}, "num_hidden_layers must be a whole number, 1 or more, got 36.0"),
    ({**QWEN, "num_hidden_layers": None}, "num_hidden_layers of qwen3 is null"),
    ({**QWEN, "num_key_value_heads": 0}, "num_key_value_heads must be a whole number, 1 or more, got 0"),
    ({**QWEN, "num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of 5"),
    ({**QWEN, "torch_dtype": "int8"}, "torch_dtype = 'int8' is no dtype a cache has"),
    ({**QWEN, "is_encoder_decoder": True}, "is_encoder_decoder = True contradicts qwen3"),
    (
        {"model_type": "glm4_moe"},
        "head_dim is null or missing, and hidden_size 4096 / num_attention_heads 96 = 42.6667",
    ),
    ({"model_type": "gemma3n", "num_kv_shared_layers": 35}, "num_kv_shared_layers = 35 leaves no layer of 35"),
    ({"model_type": "nemotron_h"}, "hybrid_override_pattern and layers_block_type are missing"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern has 'X'"),
    ({**CONFIGS["gpt-oss-20b"], "sliding_window": -1}, "sliding_window must be a whole number, 1 or more, got -1"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_missing_contradictory_or_unknown_is_refused_by_field(config, said, tmp_path, capsys):
    with pytest.raises(ValueError, match=said):
        from_config(config)
    assert main([write(tmp_path, config)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("sinkcache: ")


def test_an_unknown_type_can_be_read_by_the_rules_of_a_known_one(tmp_path, capsys):
    path = write(tmp_path, {**QWEN, "model_type": "brand_new"})
    assert main([path, "--json"]) == 2
    assert "--as llama" in capsys.readouterr().err
    assert main([path, "--as", "qwen3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 147_456


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "-5"], "must be a whole number, 1 or more, got '-5'"),
        (["--lengths", "12,x"], "must be a whole number, 1 or more, got 'x'"),
        (["--memory", "0"], "at least 1 byte"),
        (["--memory", "many"], "a size is written as 24GiB"),
        (["--memory", "1GiB", "--gpu", "1GiB"], "give one of them"),
        (["--gpu", "80GB"], "do not tell the size of its weights"),
        (["--gpu", "80GB", "--weights", "q4_0"], "--weights q4_0 needs the number of weights"),
        (["--gpu", "8GB", "--weights", "16GB"], "leave nothing of 90% of 8,000,000,000 bytes"),
        (["--gpu", "8GB", "--weights", "1GB", "--utilisation", "2"], "--utilisation must be in (0, 1], got 2.0"),
        (["--mix", "10:10:1"], "need to know the memory"),
        (["--users", "4"], "need to know the memory"),
        (["--memory", "1GiB", "--mix", "10:10"], "a class is written as IN:OUT:SHARE, got '10:10'"),
        (["--memory", "1GiB", "--mix=-4:10:1"], "input must be a whole number of tokens, 1 or more, got -4"),
        (["--memory", "1GiB", "--mix", "10:10:0.5"], "shares of the classes must sum to 1, got 0.5"),
        (["--policy", "H3O"], "no plan is known for policy H3O"),
        (["--policy", "StreamingLLM(num_sinks=2000)"], "num_sinks must be less than the budget, got 2000"),
        (["--policy", "H2O(recent=f())"], "a policy is written as StreamingLLM(num_sinks=4), with literals"),
        (["--block-size", "0"], "must be a whole number, 1 or more, got '0'"),
        (["--dtype", "int3"], "'int3'"),
        (["--dance"], "--dance"),
        (["--json", "--csv"], "not allowed with argument"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, tmp_path, capsys):
    assert main([write(tmp_path, QWEN), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "cannot be read"), ("[1]", "is no JSON object but a list"), ("", "cannot be read")],
)
def test_a_file_that_is_no_config_is_refused(text, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        model_of(write(tmp_path, text))


def test_sources_that_are_not_there_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for source, said in (
        ("./missing", "is no file or folder here"),
        ("nobody/nothing", "not in this machine's hub cache"),
        ("", "is no file or folder here"),
        (str(tmp_path), "neither a config.json nor a GGUF file"),
    ):
        with pytest.raises(ValueError, match=said):
            model_of(source)
    with pytest.raises(TypeError, match="got int"):
        model_of(7)


def test_a_hub_id_is_found_in_the_cache_and_its_weights_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--something" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (tmp_path / "models--someone--something" / "refs").mkdir()
    (tmp_path / "models--someone--something" / "refs" / "main").write_text("abc\n")
    write(folder, QWEN)
    for index in range(2):
        save_file({"weight": torch.zeros(3, 5, dtype=torch.bfloat16)}, folder / f"model-{index}.safetensors")
    for model in (model_of("someone/something"), model_of("someone/something", revision="abc")):
        assert (model.name, model.parameters, model.weights) == ("someone/something", 30, 60)
    with pytest.raises(ValueError, match="at 'v2' is not in this machine's hub cache"):
        model_of("someone/something", revision="v2")


def test_a_truncated_safetensors_file_is_refused(tmp_path):
    save_file({"weight": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:20])
    with pytest.raises(ValueError, match="is truncated: its header is not all there"):
        in_folder(tmp_path)


def test_a_loaded_model_and_its_config_tell_the_same():
    model: Any = build("gemma3", dtype=torch.bfloat16)
    loaded, config = model_of(model), model_of(model.config)
    assert loaded.layers == config.layers
    assert (loaded.dtype, loaded.parameters) == ("bf16", sum(each.numel() for each in model.parameters()))
    assert loaded.weights == sum(each.nbytes for each in model.parameters())


# GGUF files.


def packed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    if isinstance(value, list):
        inner = [packed(each) for each in value]
        return (
            struct.pack("<I", 9) + inner[0][:4] + struct.pack("<Q", len(value)) + b"".join(each[4:] for each in inner)
        )
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf(path: Path, fields: dict[str, Any], numbers: int = 64) -> str:
    body = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields))
    for name, value in fields.items():
        body += struct.pack("<Q", len(name)) + name.encode() + packed(value)
    body += struct.pack("<Q", 6) + b"weight" + struct.pack("<IQQIQ", 2, 4, numbers // 4, 0, 0)
    path.write_bytes(body + bytes(4 * numbers))
    return str(path)


def of(architecture: str, **fields: Any) -> dict[str, Any]:
    sizes = {"block_count": 6, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
             "context_length": 512}  # fmt: skip
    given = {**sizes, **{name.replace("__", "."): value for name, value in fields.items()}}
    words = {"tokenizer.ggml.tokens": [f"word{index}" for index in range(5000)], "general.name": "tiny"}
    return {"general.architecture": architecture, **words, **{f"{architecture}.{n}": v for n, v in given.items()}}


def test_a_gguf_file_is_read_without_its_weights(tmp_path):
    model = model_of(gguf(tmp_path / "a.gguf", of("llama")))
    assert (model.name, model.max_length, model.parameters, model.weights) == ("tiny", 512, 64, 256)
    assert set(model.layers) == {Layer("full", 4, 2, 16, 16, 16)}
    assert "llama.attention.key_length = 16, embedding_length / head_count" in model.assumed


GGUFS = [
    ("gemma3", {"attention__sliding_window": 32}, {"full": 1, "sliding": 5}),
    ("gpt-oss", {"attention__sliding_window": 32}, {"full": 3, "sliding": 3}),
    ("phi3", {}, {"full": 6}),
    ("qwen35", {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16, "ssm__group_count": 2,
                "full_attention_interval": 3}, {"full": 2, "linear": 4}),
    ("lfm2", {"attention__head_count_kv": [0, 2, 0, 0, 2, 0], "shortconv__l_cache": 3}, {"full": 2, "conv": 4}),
    ("falcon-h1", {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16}, {"hybrid": 6}),
    ("gemma3n", {"attention__sliding_window": 32, "attention__shared_kv_layers": 2},
     {"full": 0, "sliding": 4, "shared": 2}),
    ("gemma2", {"attention__sliding_window": 32, "attention__sliding_window_pattern": [1, 0, 0, 0, 0, 0]},
     {"full": 5, "sliding": 1}),
    ("deepseek2", {"attention__kv_lora_rank": 24, "attention__key_length": 32, "attention__value_length": 24,
                   "attention__head_count_kv": 1, "attention__key_length_mla": 20, "attention__value_length_mla": 12},
     {"mla": 6}),
    ("deepseek2", {"attention__key_length": 20, "attention__value_length": 12, "attention__head_count_kv": 4},
     {"full": 6}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "fields", "wanted"), GGUFS, ids=[str(each[:2]) for each in GGUFS])
def test_kinds_of_layers_in_a_gguf_file(architecture, fields, wanted, tmp_path):
    model = model_of(gguf(tmp_path / "a.gguf", of(architecture, **fields)))
    assert tally(model.layers) == {kind: number for kind, number in wanted.items() if number}
    first = model.layers[0]
    if architecture == "qwen35":
        assert first.state == State(64 + 2 * 2 * 16, 4, 64 * 16)
    if first.kind == "mla":
        assert (first.row, first.rotary, first.unpacked) == (32, 8, 4 * 32)
        assert LlamaCpp().held(model, 256) == 6 * 256 * 32 * 2
    if wanted == {"full": 6} and architecture == "deepseek2":
        assert LlamaCpp().held(model, 256) == 6 * 256 * 4 * 32 * 2


def test_the_embedded_models_gguf_is_read():
    try:
        model = model_of("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    assert tally(model.layers) == {"full": 30}
    assert {(layer.kv_heads, layer.key_dim) for layer in model.layers} == {(3, 64)}
    assert model.parameters == 134_515_008


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:40], "is truncated: "),
        (lambda data: data[: len(data) // 2], "is truncated: "),
        (lambda data: b"GGML" + data[4:], "does not begin with the letters GGUF"),
        (lambda data: b"", "is no GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "is of version 9"),
    ],
)
def test_a_gguf_file_that_is_damaged_is_refused(change, said, tmp_path, capsys):
    path = tmp_path / "a.gguf"
    gguf(path, of("llama"))
    path.write_bytes(change(path.read_bytes()))
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_gguf_file_without_a_field_or_of_an_unknown_architecture_is_refused(tmp_path):
    fields = of("llama")
    for lack, said in (("block_count", "llama.block_count"), ("attention.head_count", "llama.attention.head_count")):
        path = gguf(tmp_path / "a.gguf", without(fields, f"llama.{lack}"))
        with pytest.raises(ValueError, match=said):
            model_of(path)
    model = model_of(gguf(tmp_path / "a.gguf", without(fields, "llama.attention.head_count_kv")))
    assert {layer.kv_heads for layer in model.layers} == {4}
    assert "llama.attention.head_count_kv = 4, as many as head_count" in model.assumed
    with pytest.raises(ValueError, match=r"general\.architecture = 'brand_new'"):
        model_of(gguf(tmp_path / "b.gguf", of("brand_new")))


# Engines.


def test_engines_say_what_they_have_no_rule_for():
    hybrid, sparse = from_config(CONFIGS["Qwen3.5-9B"]), from_config({"model_type": "deepseek_v32"})
    crossed = from_config({"model_type": "t5", "is_encoder_decoder": True})
    mixed_sizes = from_config({"model_type": "gemma4_text"})
    for engine, model, said in (
        (Quantized(), hybrid, "cannot hold linear layers"),
        (LlamaCpp(), sparse, "indexer"),
        (VLLM(), sparse, "indexer"),
        (LlamaCpp(), crossed, "cannot hold cross layers"),
        (VLLM(), crossed, "cannot hold cross layers"),
        (VLLM(), mixed_sizes, "pages of different sizes"),
        (VLLM(), from_config({"model_type": "mamba"}), "no layer of keys and values"),
        (Bounded(), from_config({"model_type": "mamba"}), "there is no layer to bound"),
        (Bounded(), from_config({"model_type": "falcon_h1"}), "cannot hold hybrid layers"),
        (Bounded(), sparse, "indexer"),
        (Static(), crossed, "cannot hold cross layers"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.held(model, 4096)
    with pytest.raises(ValueError, match="blocks of 32 numbers"):
        LlamaCpp(keys="q8_0").held(Model("odd", (Layer("full", 1, 1, 20, 20),)), 256)
    with pytest.raises(ValueError, match="bits must be 2 or 4"):
        Quantized(8)


def test_keys_and_values_of_llamacpp_have_types_of_their_own():
    model = from_config(QWEN)
    both = LlamaCpp(keys="q8_0", values="q4_0").held(model, 4096)
    assert both == 36 * 4096 * (size(1024, "q8_0") + size(1024, "q4_0"))


@pytest.mark.parametrize(("name", "mib"), [("gemma-3-4b", 1162), ("gpt-oss-20b", 792), ("Qwen3.5-9B", 1225)])
def test_llama_server_takes_four_slots_by_default(name, mib):
    rows = plan(CONFIGS[name], [32_768]).engines
    found = next(row for row in rows if row.name == "llama.cpp f16, -ub 512, -np 4 -kvu")
    assert found.held == (mib * 2**20,)


def test_slots_of_llamacpp_are_as_long_as_the_longest_unless_they_are_unified():
    model = from_config(QWEN)
    row = 36 * size(2048, "f16")
    assert LlamaCpp().together(model, {1024: 2, 4096: 1}) == 3 * 4096 * row
    assert LlamaCpp(unified=True).together(model, {1024: 2, 4096: 1}) == (2 * 1024 + 4096) * row
    assert LlamaCpp().together(model, {}) == 0


def test_what_cross_layers_read_counts_once():
    model = from_config({"model_type": "t5", "is_encoder_decoder": True})
    assert Dynamic(source=100).held(model, 10) == 6 * 2 * 512 * 2 * (100 + 10)
    assert Dynamic().held(model, 10) == 6 * 2 * 512 * 2 * 10


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(1, 5000), more=st.integers(1, 5000), name=st.sampled_from(sorted(CONFIGS)))
def test_more_tokens_never_need_less(tokens, more, name):
    model = from_config(CONFIGS[name])
    for engine in (Dynamic(), Static(), LlamaCpp(), VLLM(), bounded("H2O", 100), bounded("StreamingLLM", 100, 64)):
        try:
            before, after = engine.held(model, tokens), engine.held(model, tokens + more)
        except ValueError:
            continue
        assert before <= after
        assert engine.peak(model, tokens) >= before


def test_a_sinkcache_is_planned_as_the_seed_of_its_numbers():
    model = from_config(CONFIGS["Qwen3-0.6B"])
    assert Dynamic().held(model, 8192) == 896 * 2**20
    assert bounded("Window", 1024).held(model, 8192) == 112 * 2**20
    assert bounded("Window", 256).held(model, 8192) == 28 * 2**20
    assert bounded("Window", 1024, 64).peak(model, 8192) == 112 * 2**20 + (1023 + 64) * 4096  # one layer is joined


# The inverse.


@settings(deadline=None, max_examples=30)
@given(memory=st.integers(1, 2**36), length=st.integers(1, 200_000), index=st.integers(0, 5))
def test_as_many_users_fit_as_are_found_and_not_one_more(memory, length, index):
    model = from_config(CONFIGS["gemma-3-4b"])
    engines = [Dynamic(512), Static(), LlamaCpp(), LlamaCpp(unified=True), VLLM(), bounded("StreamingLLM", 256, 64)]
    engine = engines[index]
    found = users(engine, model, memory, length)
    assert found == 0 or engine.together(model, {length: found}) <= memory
    assert engine.together(model, {length: found + 1}) > memory


def test_users_of_the_articles_gpus_are_a_bound_above_what_was_measured():
    small, large = from_config(CONFIGS["Qwen3-0.6B"]), from_config(QWEN)
    assert users(Dynamic(1), small, 16 * 2**30 - 2 * 596_049_920, 1036) == 134
    assert users(Dynamic(1), large, 32 * 2**30 - 2 * 8_190_735_360, 1036) == 117


def test_the_longest_conversation_is_the_longest_that_fits():
    model = from_config(QWEN)
    assert longest(Dynamic(1), model, 2**30) == 2**30 // 147_456
    assert longest(LlamaCpp(), model, 2**30) == 2**30 // 147_456 // 256 * 256
    assert longest(Dynamic(1), model, 2**30, count=3) == 2**30 // 3 // 147_456
    assert longest(Dynamic(1), model, 1000) == 0


def test_a_mix_is_shared_out_by_largest_remainders():
    classes = [Class(1000, 200, 0.5), Class(30_000, 500, 0.3), Class(100, 0, 0.2)]
    assert list(shared_out(classes, 7).values()) == [4, 2, 1]
    assert sum(shared_out(classes, 1).values()) == 1
    model, engine = from_config(QWEN), Dynamic(1)
    found = mixed(engine, model, 40 * 2**30, classes)
    taken = sum(number * engine.held(model, each.length) for each, number in found.items())
    assert taken <= 40 * 2**30
    more = shared_out(classes, sum(found.values()) + 1)
    assert sum(number * engine.held(model, each.length) for each, number in more.items()) > 40 * 2**30


def test_the_largest_budget_fits_and_one_token_more_does_not():
    model, lengths, memory = from_config(QWEN), {32_768: 8}, 8 * 2**30
    found = largest_budget(lambda budget: bounded("StreamingLLM", budget, 512), model, memory, lengths)
    assert bounded("StreamingLLM", found, 512).together(model, lengths) <= memory
    assert bounded("StreamingLLM", found + 1, 512).together(model, lengths) > memory
    assert largest_budget(lambda budget: bounded("StreamingLLM", budget), model, 1000, lengths) == 0
    assert largest_budget(lambda budget: bounded("Window", budget), model, 2**50, {100: 1}) == 100


def test_settings_are_listed_by_what_they_save():
    model = from_config(GEMMA)
    swa = knobs(LlamaCpp(swa_full=True), model, 32_768, default_choices(LlamaCpp(swa_full=True)))
    assert (swa[0].name, swa[0].saved) == ("without --swa-full", (4352 - 814) * 2**20)
    batched = knobs(VLLM(), model, 32_768, default_choices(VLLM()))
    assert batched[0].name == "--max-num-batched-tokens 512"
    assert [each.saved for each in batched] == sorted((each.saved for each in batched), reverse=True)
    ours = knobs(Dynamic(), model, 32_768, default_choices(Dynamic()))
    assert [each.name for each in ours] == ["SinkCache(StreamingLLM(4), 1024)"]  # QuantizedCache refuses windows


def test_what_a_cache_saves_in_tokens():
    assert recomputed(4000, 500) == (2_124_750, 4500)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("1.5 mib", 3 * 2**19), ("512", 512), ("2g", 2 * 10**9)],
)
def test_sizes_are_read(text, wanted):
    assert parsed(text) == wanted


def test_weights_are_sized_by_format():
    assert bytes_of("q4_0", 1000, None) == 32 * 18
    assert bytes_of("stored", None, 77) == 77
    assert set(FORMATS) >= {"f16", "q8_0", "q4_0"}


# The command.


def test_plan_of_a_config_does_without_torch_and_transformers(tmp_path):
    code = (
        "import sys; from sinkcache.__main__ import main;"
        f"sys.argv[1:] = ['plan', {write(tmp_path, QWEN)!r}, '--memory', '24GiB', '--mix', '1000:100:1'];"
        "assert main() == 0; heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'matplotlib'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "4,608.00" in outcome.stdout


def test_plan_of_a_gguf_file_does_without_torch_too(tmp_path):
    path = gguf(tmp_path / "a.gguf", of("llama"))
    code = (
        f"import sys; from sinkcache.planner.command import main; assert main([{path!r}]) == 0;"
        "assert 'torch' not in sys.modules"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_public_names_come_when_they_are_used():
    code = (
        "import sys, sinkcache; assert 'torch' not in sys.modules; assert sinkcache.__version__;"
        "from sinkcache import SinkCache, Policy, Entries, prefill, stream, turn; import sinkcache.cache;"
        "assert SinkCache is sinkcache.cache.SinkCache; assert sinkcache.policies.H2O;"
        "names = {}; exec('from sinkcache import *', names); assert names['SinkCache'] is SinkCache;"
        "assert not hasattr(sinkcache, 'nothing')"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_json_has_every_figure_in_bytes(tmp_path, capsys):
    asked = [write(tmp_path, GEMMA), "--json", "--lengths", "4096,32768", "--memory", "24GiB", "--mix", "1000:24:1"]
    assert main([*asked, "--users", "5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_per_token"] == 20_480
    assert told["least_bytes"][1] == 756 * 2**20
    assert [row["totals"][1] for row in told["kinds"]] == [640 * 2**20, 116 * 2**20]
    assert [row["formula"] for row in told["kinds"]] == ["20,480 T", "118,784 min(T, 1,024)"]
    engines = {row["name"]: row for row in told["engines"]}
    assert engines["llama.cpp f16, -ub 512"]["held"][1] == 814 * 2**20
    assert engines["vLLM, 8,192 batched tokens"]["held"][1] == 2681.875 * 2**20
    assert "cannot hold sliding layers" in engines["QuantizedCache, 4 bits"]["refused"]
    assert {row["rules"] for row in told["engines"]} == {"transformers 5.24", "llama.cpp b11434", "vLLM 0.29.0",
                                                         "sinkcache 0.1"}  # fmt: skip
    assert told["users"]["memory"] == 24 * 2**30
    assert told["users"]["budget"] == 1024  # tokens of the longest conversation
    assert told["assumed"][3] == "head_dim = 256, the default of gemma3_text"


def test_csv_has_a_line_for_each_engine_and_length(tmp_path, capsys):
    assert main([write(tmp_path, QWEN), "--csv", "--lengths", "4096", "--memory", "24GiB"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    llama = next(row for row in rows if row["name"] == "llama.cpp q8_0, -ub 512")
    assert (llama["rules"], llama["tokens"], llama["bytes"]) == ("llama.cpp b11434", "4096", str(306 * 2**20))
    assert llama["users"] == str(24 * 1024 // 306)
    assert {row["what"] for row in rows} == {"kind", "engine"}


def test_tables_fit_80_columns_and_say_what_is_assumed_and_not_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    asked = [write(tmp_path, GEMMA), "--gpu", "24GiB", "--weights", "bf16", "--parameters", "4.3e9"]
    assert main([*asked, "--mix", "1000:200:0.8,30000:500:0.2", "--users", "3"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    joined = " ".join(out.split())
    for said in ("814.00", "2,681.88", "Assumed: head_dim = 256", "Not counted: weights", "1,000+200 (80%)", "####",
                 "What saves most", "A SinkCache serves 3 such users", "Rules: transformers 5.24, llama.cpp b11434",
                 "2,805,989,376", "No figure: QuantizedCache, 4 bits cannot hold sliding layers"):  # fmt: skip
        assert said in joined


def test_lengths_past_the_trained_one_are_warned_of(tmp_path, capsys):
    main([write(tmp_path, QWEN)])
    assert "Warning: 131,072 tokens are past the trained length of 40,960" in " ".join(capsys.readouterr().out.split())


def test_no_user_at_all_is_exit_code_1(tmp_path, capsys):
    path = write(tmp_path, QWEN)
    assert main([path, "--memory", "10MiB"]) == 1
    assert main([path, "--memory", "24GiB"]) == 0
    assert main([path, "--memory", "24GiB", "--users", "100000"]) == 1
    assert "A SinkCache serves 100,000 such users with no budget" in " ".join(capsys.readouterr().out.split())


def test_a_plot_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert main([write(tmp_path, GEMMA), "--plot", str(tmp_path / "plot.png"), "--memory", "24GiB"]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert main([write(tmp_path, QWEN), "--plot", "/no/such/folder/plot.png"]) == 2
    assert "'/no/such/folder/plot.png' cannot be written" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([write(tmp_path, QWEN), "--plot", str(tmp_path / "plot.png")]) == 2
    assert "a plot needs matplotlib" in capsys.readouterr().err


def test_verify_of_a_gguf_file_is_a_mistake(tmp_path, capsys):
    assert main([gguf(tmp_path / "a.gguf", of("llama")), "--verify"]) == 2
    assert "--verify is for a config" in capsys.readouterr().err


def test_help_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_it_is_one_of_the_commands(tmp_path, capsys):
    from sinkcache import cli

    assert cli.main(["plan", write(tmp_path, QWEN), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 147_456
    assert cli.main(["plan", str(tmp_path / "missing.json")]) == 2


def test_interrupted_and_broken_pipes_have_their_codes(tmp_path, monkeypatch):
    def interrupt(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    assert main([write(tmp_path, QWEN)]) == 130


def test_policies_go_by_the_names_that_generate_takes():
    assert bounded("window", 9) == bounded("Window()", 9)
    assert bounded("streaming-llm", 9) == bounded("StreamingLLM(4)", 9) == bounded("StreamingLLM", 9)
    assert bounded("StreamingLLM(num_sinks=2)", 9).sinks == 2


def test_a_plan_from_python_needs_no_file():
    made = plan(QWEN, [32_768])
    assert made.per_token == 147_456
    assert made.kinds[0].totals == (4608 * 2**20,)
    assert plan(QWEN, [1], dtype="f32").per_token == 147_456 * 2
    assert VLLM(dtype="fp8").held(made.model, 32_768) == 2304 * 2**20
    with pytest.raises(ValueError, match="dtype must be one of f64, f32, f16, bf16, got 'fp8'"):
        plan(QWEN, [1], dtype="fp8")
    for wrong, said in (([], "lengths must have one"), ([0], "a length must be a whole number of tokens, 1 or more")):
        with pytest.raises(ValueError, match=said):
            plan(QWEN, wrong)
