"""A plan equals what the models themselves store: on the meta device at real size, on a CPU in tiny versions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import build, recurrent
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sinkcache.planner.command import main
from sinkcache.planner.configs import from_config
from sinkcache.planner.families import FAMILIES
from sinkcache.planner.kinds import tally
from sinkcache.planner.verify import verify, verify_config

CONFIGS = json.loads((Path(__file__).parent / "data" / "planner_models.json").read_text())["models"]
REAL = ["Qwen3-8B", "Mistral-7B-v0.3", "gemma-3-4b", "gpt-oss-20b", "DeepSeek-V2-Lite", "Qwen3.5-9B",
        "Llama-3.1-8B", "Qwen3-0.6B", "Pythia-1B"]  # fmt: skip
NEWEST = tf.__version__.startswith("5.24")
pytestmark = pytest.mark.skipif(not NEWEST, reason="the rules are of transformers 5.24")


@pytest.mark.parametrize("name", [*REAL, pytest.param("DeepSeek-V3", marks=pytest.mark.slow)])
def test_a_model_of_real_size_stores_what_is_planned(name):
    found = verify_config(CONFIGS[name])
    assert found.planned == found.counted
    assert sum(found.counted) > 0
    assert not found.storage


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-8B", "Mistral-7B-v0.1", "gemma-3-4b", "gpt-oss-20b", "DeepSeek-V2-Lite"])
def test_so_it_does_at_32k(name):
    found = verify_config(CONFIGS[name], 32_768)
    assert found.exact
    assert found.tokens == 32_768


# What makes a family tiny enough to run, and what its class leaves without a value that it needs.
SMALL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 3},
    "gemma4_text": {"num_hidden_layers": 8, "num_kv_shared_layers": 1},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "jamba": {"num_hidden_layers": 6},
    "ministral": {"head_dim": 128},
    "mllama_text_model": {"num_hidden_layers": 5, "cross_attention_layers": [3]},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"hybrid_override_pattern": "M*-EM"},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 96},
}
WHOLE = ("bart", "t5", "whisper")  # encoders and decoders, whose layers are counted otherwise
CONFIGLESS = (
    "gemma3n_text",
    "mllama_text_model",
    "whisper",
    "bart",
)  # ask the device for values, or have no auto class


def small(family: str) -> dict[str, Any]:
    names = FAMILIES[family].names
    layers = {names.get("num_hidden_layers", "num_hidden_layers"): 6}
    changes = SMALL.get(family, {})
    if "hybrid_override_pattern" in changes:
        layers = {}
    return {"model_type": family, "dtype": "bfloat16", **layers, **changes}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CONFIGLESS)))
def test_each_family_stores_what_is_planned(family):
    found = verify_config(small(family))
    assert found.planned == found.counted
    assert sum(found.counted) > 0


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"nemotron_h", "glm4_moe"}))
def test_what_a_file_leaves_out_is_the_default_of_its_class(family):
    assert from_config({"model_type": family}).layers == from_config(CONFIG_MAPPING[family]().to_dict()).layers


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WHOLE) - set(CONFIGLESS)))
def test_layers_are_of_the_kinds_that_transformers_gives_them(family):
    fields = small(family)
    config = CONFIG_MAPPING[family](**{name: value for name, value in fields.items() if name != "model_type"})
    kinds = {
        "Dynamic": ("full", "nope", "mla"), "DynamicIndexed": ("mla",), "DynamicSlidingWindow": ("sliding", "chunked"),
        "LinearAttention": ("linear", "conv"), "LinearAttentionAndFullAttention": ("hybrid",),
        "Dummy": ("shared", "none")}  # fmt: skip
    layers = tf.DynamicCache(config=config).layers
    for planned, layer in zip(from_config(fields).layers, layers, strict=True):
        assert planned.kind in kinds[type(layer).__name__.removesuffix("Layer")]
        assert planned.window == getattr(layer, "sliding_window", None)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gpt_neox", "gemma3", "smollm3", "glm", "phi", "cohere"]
)
def test_storage_on_a_cpu_is_what_is_planned(family):
    for tokens in (3, 50):
        found = verify(build(family, dtype=torch.float32), tokens)
        assert found.planned == found.counted
        assert found.storage


def test_states_and_attention_between_them_are_planned_on_a_cpu():
    found = verify(recurrent(), 20)
    assert tally(from_config(recurrent().config.to_dict()).layers) == {"full": 1, "linear": 2}
    assert found.planned == found.counted


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "mamba2", "jamba"])
def test_other_states_are_planned_on_a_cpu(family):
    sizes = {
        "falcon_h1": {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4,
                      "mamba_d_state": 8, "mamba_d_head": 8},
        "lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2},
        "jamba": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2, "attn_layer_period": 2,
                  "attn_layer_offset": 1, "use_mamba_kernels": False},
    }[family]  # fmt: skip
    made: Any = CONFIG_MAPPING[family]
    config = made(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **sizes)
    model: Any = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = verify(model, 20)
    assert found.planned == found.counted
    assert found.storage


CROSSED = {
    "t5": {"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 3},
    "bart": {"d_model": 32, "decoder_layers": 2, "encoder_layers": 1, "decoder_attention_heads": 4,
             "encoder_attention_heads": 4, "decoder_ffn_dim": 16, "encoder_ffn_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(CROSSED))
def test_cross_layers_are_planned_on_a_cpu(family):
    made: Any = CONFIG_MAPPING[family]
    config = made(vocab_size=97, **CROSSED[family])
    model: Any = tf.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    found = verify(model, 20)
    assert tally(from_config(config.to_dict()).layers) == {"full": 2, "cross": 2}
    assert (found.planned, len(found.counted)) == (found.counted, 4)


def test_shared_layers_are_planned_on_a_cpu():
    config = tf.Gemma3nTextConfig(
        vocab_size=97, vocab_size_per_layer_input=97, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        sliding_window=16, num_kv_shared_layers=3, laurel_rank=4, activation_sparsity_pattern=[0.0] * 10)  # fmt: skip
    model: Any = tf.Gemma3nForCausalLM(config).eval()
    found = verify(model, 40)
    assert tally(from_config(config.to_dict()).layers) == {"full": 1, "sliding": 6, "shared": 3}
    assert found.planned == found.counted
    assert found.counted[-3:] == [0, 0, 0]


def test_layers_that_read_an_image_hold_nothing_without_one():
    config = tf.models.mllama.MllamaTextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    found = verify(tf.MllamaForCausalLM(config).eval(), 12)
    assert tally(from_config(config.to_dict()).layers) == {"full": 2, "cross": 1}
    assert found.planned == found.counted


def test_a_plan_that_is_wrong_is_exit_code_1(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["Qwen3-0.6B"], "num_hidden_layers": 2}))
    assert main([str(tmp_path), "--verify", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["verified"]
    assert told["exact"]
    assert told["planned_bytes"] == told["counted_bytes"] == 64 * 2 * 8 * 128 * 2 * 2
    monkeypatch.setattr("sinkcache.planner.in_transformers.Dynamic.stored", lambda *each: 5)
    assert main([str(tmp_path), "--verify", "9"]) == 1
    assert "10 planned: NOT what was planned" in " ".join(capsys.readouterr().out.split())
