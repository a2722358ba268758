"""Tiny random models: 2 layers or a few more, 4 query heads on 2 key heads, weights wide enough for a bug to show.

At transformers' default `initializer_range=0.02` the classic position bug moves logits by 0.007 and no test fails; at
0.3 it moves them by several units. Rotary angles, which transformers computes in float32 whatever the model's dtype,
are computed in float64 here, so that float64 oracles can be met to rounding.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers as tf
from torch import nn

VOCABULARY = 97
PADS_BESIDE_WINDOWS = hasattr(tf.Cache, "get_query_offset")  # else a padded batch of a hybrid is refused, as tested

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 24}),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": None}),
    "gpt_neox": ("GPTNeoX", _COMMON),
    "phi": ("Phi", _COMMON),
    "gemma3": (
        "Gemma3",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("Olmo2", _GROUPED),
    "glm": ("Glm", {**_GROUPED, "head_dim": 24}),
    "smollm3": ("SmolLM3", {**_GROUPED, "num_hidden_layers": 4}),
    "cohere": ("Cohere", _GROUPED),
}


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> nn.Module:
    """A random causal LM of `family`, in eval mode; `changes` go to its config."""
    name, settings = FAMILIES[family]
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    try:
        config = getattr(tf, config_name)(**{**settings, **changes})
    except Exception as error:
        if family == "olmo2" and tf.__version__.startswith("5.4."):
            pytest.skip(f"transformers {tf.__version__} cannot build an Olmo2Config: {str(error).splitlines()[0]}")
        raise
    torch.manual_seed(seed)
    model = getattr(tf, f"{name}ForCausalLM")(config).to(dtype).eval()
    if dtype == torch.float64:
        exact_rotary(model)
    return model


def exact_rotary(model: nn.Module) -> None:
    """Has the model's rotary module compute angles, cosines and sines in float64 (half or interleaved layout alike)."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _exact(module)


def _exact(module: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    original = module.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = original(x.double(), position_ids, *args, **kwargs)  # runs dynamic updates, tells the layout
        layer_type = kwargs.get("layer_type", args[0] if args else None)
        prefix = f"{layer_type}_" if layer_type and hasattr(module, f"{layer_type}_inv_freq") else ""
        inv_freq = getattr(module, f"{prefix}inv_freq").double()
        scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
        angles = position_ids[:, :, None].double() * inv_freq
        exact = []
        for value, function in zip(rounded, (torch.cos, torch.sin), strict=True):
            half = function(angles) * scaling
            layouts = [half, torch.cat([half, half], -1), half.repeat_interleave(2, -1)]
            alike = (each for each in layouts if each.shape == value.shape)
            exact.append(next(each for each in alike if torch.allclose(each, value.double(), atol=1e-3)))
        return tuple(exact)

    return forward


def recurrent() -> Any:
    """A Qwen3-Next, in float32: layers of full attention between layers of linear attention."""
    if not hasattr(tf.DynamicCache, "has_previous_state"):
        pytest.skip(f"the DynamicCache of transformers {tf.__version__} cannot serve Qwen3-Next")
    config = tf.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return tf.Qwen3NextForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture(scope="session")
def model() -> Callable[..., nn.Module]:
    """`model(family, **changes)`: a tiny model, built once per session for the same arguments."""
    built: dict[str, nn.Module] = {}

    def get(family: str, **arguments: Any) -> nn.Module:
        key = repr((family, sorted(arguments.items(), key=str)))
        if key not in built:
            built[key] = build(family, **arguments)
        return built[key]

    return get
