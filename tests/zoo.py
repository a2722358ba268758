"""Every kind of decoder that transformers has, tiny and random, against a reference, in every way a cache is used.

    .venv/bin/python tests/zoo.py [--markdown docs/support.md] [--families "Llama;Qwen3"]

A cell is one family, policy, position convention and usage. It is "ok" if every logit is the reference's; "refused" if
SinkCache raised ValueError, TypeError or NotImplementedError before it had read a token, and `SERVED` knows that it
does; "transformers" if the family goes wrong in the same usage with transformers' own unbounded cache. All else is
"WRONG" or "crash", and the command then ends with 1.

The reference, `by_layer`, holds no cache: the model reads the stream in one pass, and each full-attention module is run
once for each step of the rule in oracles.py, on the hidden states of the tokens held and new alone, with the rotary
angles of the positions they are to be read at. All other layers are the model's own.
"""

import argparse
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the library beside this file, wherever another is installed

import oracles
import torch
import transformers as tf
from conftest import VOCABULARY, exact_rotary
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LogitsProcessor

from sinkcache import SinkCache, prefill, turn
from sinkcache.guard import arguments, cache_argument
from sinkcache.layer import SinkLayer
from sinkcache.policies import StreamingLLM, Window
from sinkcache.policy import Policy

BUDGET = 8
POLICIES: dict[str, tuple[Policy, oracles.Select]] = {
    "Window": (Window(), oracles.sinks_and_recent(0)),
    "StreamingLLM": (StreamingLLM(num_sinks=2), oracles.sinks_and_recent(2)),
}
CONVENTIONS = ("cache", "original")
REFUSALS = (ValueError, TypeError, NotImplementedError)
FINE, ROUGH = 1e-9, 1e-4  # of the largest logit: rounding in float64, and in float32
TELLING = 1e-2  # of the largest logit: by so much eviction must change what a family says, or its cells prove nothing

# the animals

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_HEAD = {**_GROUPED, "head_dim": 24}
_SLIDING = {
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_SHARING = {
    **_HEAD,
    "num_hidden_layers": 5,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 48}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_CONVOLVING = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]}
_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_NAMED_AS_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_NEMOTRON_H = {
    **_GROUPED,
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "attention", "mlp"],
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "chunk_size": 8,
    "head_dim": 16,
}


def _scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {**_GROUPED, "rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


@dataclass(frozen=True)
class Family:
    """The prefix of its classes in transformers and the settings of its config.

    `rough`: it computes something in float32 whatever its dtype is. `exact`: its angles need not be part of that.
    `dtype`: float32 where eager attention would round the float64 number that hides a key to infinity. `remark`: why
    transformers is wrong where it is.
    """

    name: str
    settings: dict[str, Any]
    rough: bool = False
    exact: bool = True
    dtype: torch.dtype = torch.float64
    remark: str = ""


_SINGLE: dict[str, Any] = {"rough": True, "exact": False, "dtype": torch.float32}

FAMILIES: dict[str, Family] = {
    "Llama": Family("Llama", _GROUPED),
    "Llama, linear scaling": Family("Llama", _scaled("linear", factor=4.0)),
    "Llama, llama3 scaling": Family(
        "Llama",
        _scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "Llama, yarn scaling": Family("Llama", _scaled("yarn", factor=4.0, original_max_position_embeddings=64)),
    "Llama, dynamic scaling": Family("Llama", _scaled("dynamic", factor=2.0)),
    "Mistral": Family("Mistral", {**_GROUPED, "sliding_window": None}),
    "Mistral, sliding": Family("Mistral", {**_GROUPED, "sliding_window": 6}),
    "Ministral": Family("Ministral", {**_GROUPED, **_SLIDING, "head_dim": 16}),
    "Mixtral": Family("Mixtral", {**_GROUPED, **_EXPERTS}),
    "Qwen2": Family("Qwen2", _GROUPED),
    "Qwen2-MoE": Family("Qwen2Moe", {**_GROUPED, **_EXPERTS, **_SHARED_EXPERT}),
    "Qwen3": Family("Qwen3", _HEAD),
    "Qwen3-MoE": Family("Qwen3Moe", {**_HEAD, **_EXPERTS}),
    "Qwen3-Next": Family("Qwen3Next", {**_HEAD, **_EXPERTS, **_DELTA, **_SHARED_EXPERT}, rough=True),
    "Qwen3.5": Family("Qwen3_5", {**_GROUPED, **_DELTA, "head_dim": 32}, rough=True, exact=False),
    "Qwen3.5-MoE": Family(
        "Qwen3_5Moe", {**_GROUPED, **_EXPERTS, **_DELTA, **_SHARED_EXPERT, "head_dim": 32}, rough=True, exact=False
    ),
    "Gemma": Family("Gemma", _HEAD),
    "Gemma 2": Family("Gemma2", {**_HEAD, **_SLIDING}, **_SINGLE),
    "Gemma 3": Family("Gemma3", {**_HEAD, **_SLIDING}),
    "Gemma 3n": Family("Gemma3n", {**_SHARING, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 5}),
    "Gemma 4": Family("Gemma4", {**_SHARING, "global_head_dim": 32}),
    "VaultGemma": Family("VaultGemma", {**_HEAD, **_SLIDING}, **_SINGLE),
    "GPT-OSS": Family("GptOss", {**_HEAD, **_EXPERTS, **_SLIDING}),
    "Phi": Family("Phi", _COMMON),
    "Phi-3": Family("Phi3", _GROUPED),
    "Phi-3, longrope": Family(
        "Phi3",
        {
            **_scaled("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8),
            "original_max_position_embeddings": 64,
        },
    ),
    "Phi-MoE": Family("Phimoe", {**_GROUPED, **_EXPERTS}),
    "StableLM": Family("StableLm", _GROUPED),
    "GPT-NeoX": Family("GPTNeoX", _COMMON),
    "Falcon": Family("Falcon", {**_COMMON, "alibi": False}),
    "Falcon, ALiBi": Family("Falcon", {**_COMMON, "alibi": True}),
    "StarCoder2": Family("Starcoder2", {**_GROUPED, "sliding_window": None}),
    "Granite": Family("Granite", _GROUPED),
    "GraniteMoE": Family("GraniteMoe", {**_GROUPED, **_EXPERTS}),
    "OLMo": Family("Olmo", _GROUPED),
    "OLMo 2": Family("Olmo2", _GROUPED),
    "OLMo 3": Family("Olmo3", {**_GROUPED, **_SLIDING}),
    "OLMoE": Family("Olmoe", {**_GROUPED, **_EXPERTS}),
    "FlexOlmo": Family("FlexOlmo", {**_GROUPED, **_EXPERTS}),
    "Cohere": Family("Cohere", _GROUPED),
    "Cohere 2": Family("Cohere2", {**_GROUPED, **_SLIDING}),
    "EXAONE 4": Family("Exaone4", {**_GROUPED, **_SLIDING}),
    "GLM": Family("Glm", _HEAD),
    "GLM-4": Family("Glm4", _HEAD),
    "GLM-4-MoE": Family("Glm4Moe", {**_HEAD, **_ROUTED, **_ONE_GROUP}, rough=True),
    "SmolLM3": Family("SmolLM3", {**_GROUPED, "num_hidden_layers": 4}),
    "ERNIE 4.5": Family("Ernie4_5", _HEAD),
    "ERNIE 4.5 MoE": Family(
        "Ernie4_5_Moe",
        {**_GROUPED, **_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
        rough=True,
    ),
    "Llama 4": Family(
        "Llama4",
        {
            **_GROUPED,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
        },
        rough=True,
        exact=False,
    ),
    "Nemotron": Family("Nemotron", _GROUPED),
    "Persimmon": Family("Persimmon", _COMMON),
    "Helium": Family("Helium", {**_GROUPED, "head_dim": 16}),
    "Arcee": Family("Arcee", _GROUPED),
    "Apertus": Family("Apertus", _GROUPED),
    "Seed-OSS": Family("SeedOss", _HEAD),
    "HunYuan": Family("HunYuanDenseV1", {**_GROUPED, "head_dim": 16}, rough=True),
    "DiffLlama": Family("DiffLlama", _GROUPED),
    "BitNet": Family("BitNet", _GROUPED),
    "nanochat": Family("NanoChat", _GROUPED),
    "Doge": Family("Doge", _GROUPED),
    "DBRX": Family(
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": VOCABULARY,
            "max_seq_len": 256,
            "initializer_range": 0.3,
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},
        },
    ),
    "JetMoe": Family("JetMoe", {**_GROUPED, **_EXPERTS, "kv_channels": 16}),
    "MiniMax-M2": Family("MiniMaxM2", {**_HEAD, **_EXPERTS}, rough=True),
    "LFM2": Family("Lfm2", {**_GROUPED, **_CONVOLVING}),
    "LFM2-MoE": Family("Lfm2Moe", {**_GROUPED, **_EXPERTS, **_CONVOLVING, "num_dense_layers": 1}),
    "DeepSeek-V2": Family(
        "DeepseekV2", {**_COMMON, **_ROUTED, **_ONE_GROUP, **_LATENT, "q_lora_rank": None}, rough=True, exact=False
    ),
    "DeepSeek-V3": Family("DeepseekV3", {**_COMMON, **_ROUTED, **_ONE_GROUP, **_LATENT, "q_lora_rank": 16}, rough=True),
    "MiniCPM3": Family("MiniCPM3", {**_COMMON, **_LATENT, "q_lora_rank": 16}),
    "LongCat-Flash": Family(
        "LongcatFlash",
        {
            **_COMMON,
            **_LATENT,
            "num_layers": 1,
            "q_lora_rank": 16,
            "head_dim": 8,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 48,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        rough=True,
    ),
    "GPT-J": Family("GPTJ", {**_COMMON, **_NAMED_AS_GPT2, "rotary_dim": 8}, rough=True, exact=False),
    "CodeGen": Family("CodeGen", {**_COMMON, **_NAMED_AS_GPT2, "n_ctx": 256, "rotary_dim": 8}, rough=True, exact=False),
    "GPT-2": Family("GPT2", {**_COMMON, **_NAMED_AS_GPT2}),
    "GPT-BigCode": Family("GPTBigCode", {**_COMMON, **_NAMED_AS_GPT2}),
    "GPT-Neo": Family(
        "GPTNeo",
        {
            **_COMMON,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
        },
    ),
    "OPT": Family("OPT", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "BLOOM": Family("Bloom", {**_COMMON, "n_layer": 2, "n_head": 4}, **_SINGLE),
    "MPT": Family("Mpt", {**_COMMON, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, **_SINGLE),
    "Mamba": Family("Mamba", {**_COMMON, "state_size": 8}),
    "Mamba 2": Family(
        "Mamba2", {**_COMMON, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
    ),
    "RWKV": Family("Rwkv", _COMMON),
    "RecurrentGemma": Family(
        "RecurrentGemma", {**_GROUPED, "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6}
    ),
    "Kimi Linear": Family(
        "KimiLinear",
        {
            **_COMMON,
            **_EXPERTS,
            **_LATENT,
            "num_hidden_layers": 3,
            "layer_types": _DELTA["layer_types"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        rough=True,
    ),
    "Jamba": Family(
        "Jamba",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        rough=True,
        remark="a pass of several tokens starts from an empty state",
    ),
    "Bamba": Family(
        "Bamba",
        {**_GROUPED, **_MAMBA, "attn_layer_indices": [1, 2]},
        rough=True,
        remark="without position_ids each pass counts from 0 again",
    ),
    "Falcon-H1": Family("FalconH1", {**_GROUPED, **_MAMBA, "mamba_d_ssm": 128}, rough=True),
    "Granite 4": Family(
        "GraniteMoeHybrid",
        {
            **_GROUPED,
            **_MAMBA,
            "layer_types": ["mamba", "attention", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
        rough=True,
    ),
    "Nemotron-H": Family("NemotronH", _NEMOTRON_H, rough=True, remark="single tokens ignore time_step_min"),
    "Nemotron-H, no least time step": Family("NemotronH", {**_NEMOTRON_H, "time_step_min": 1e-9}, rough=True),
    "OLMo Hybrid": Family("OlmoHybrid", {**_GROUPED, **_DELTA}, rough=True),
    "MiniMax": Family(
        "MiniMax",
        {
            **_GROUPED,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "block_size": 8,
            "layer_types": _DELTA["layer_types"],
        },
    ),
    "Zamba 2": Family(
        "Zamba2",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "use_mem_rope": True,
            "adapter_rank": 8,
        },
    ),
}

SERVED: dict[str, tuple[str, ...]] = {  # the conventions a family can be had in, where not in both
    **dict.fromkeys(["Llama, dynamic scaling", "BLOOM", "MPT"], ("cache",)),
    **dict.fromkeys(["HunYuan", "nanochat", "GPT-J", "CodeGen"], ("original",)),
    **dict.fromkeys(["Mistral, sliding", "RecurrentGemma", "Mamba", "Mamba 2", "RWKV"], ()),
    **dict.fromkeys(["GPT-2", "GPT-BigCode", "GPT-Neo", "OPT", "Falcon, ALiBi", "Phi-3, longrope"], ()),
    **dict.fromkeys(["Falcon-H1", "Zamba 2", "MiniMax"], ()),
}
MAY_REFUSE: dict[str, tuple[str, ...]] = {  # families that, although served, may refuse a usage
    "padded": ("BLOOM", "MPT"),
    "padded, chunks": tuple(FAMILIES),
}


if not hasattr(tf.Cache, "get_query_offset"):  # before transformers 5.14 pads beside sliding windows are refused
    MAY_REFUSE["padded"] = tuple(FAMILIES)


def build(label: str) -> nn.Module | str:
    """The model of a family, in float64 and eval mode; or why this transformers has none."""
    family = FAMILIES[label]
    model_class = getattr(tf, f"{family.name}ForCausalLM", None) or getattr(tf, f"{family.name}LMHeadModel", None)
    if model_class is None:
        return f"no {family.name}ForCausalLM"
    config_class = getattr(tf, f"{family.name}TextConfig", None) or getattr(tf, f"{family.name}Config")
    torch.manual_seed(0)
    try:
        model = model_class(config_class(**family.settings)).to(family.dtype).eval()
    except Exception as error:
        return f"{family.name} cannot be built: {str(error).splitlines()[0]}"
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    if family.exact:
        exact_rotary(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms begin as ones, which would hide one that comes after the rotation
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model


# the reference


@torch.no_grad()
def by_layer(
    model: nn.Module, ids: list[int], chunks: list[int], budget: int, select: oracles.Select, convention: str
) -> Tensor:
    """Logits `[tokens, vocab]` of one pass in which each full-attention module is run step by step, without a cache."""
    steps = [(held, new) for held, new, _ in oracles.steps(chunks, budget, select)]
    shared: list[dict] = [{} for _ in steps]  # the keys and values that later layers of a family reuse

    with ExitStack() as stack:
        for module in attention_modules(model):
            stack.enter_context(_replaced(module, steps, shared, convention))
        return cast(Any, model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that attend to all that came before."""
    kinds = getattr(cast(Any, model).config, "layer_types", None)
    found = [module for module in model.modules() if type(module).__name__.endswith(("Attention", "MLA"))]
    if kinds is None:
        return found
    return [module for module in found if kinds[cast(Any, module).layer_idx] in ("full_attention", "attention")]


@contextmanager
def _replaced(
    module: nn.Module, steps: list[tuple[list[int], list[int]]], shared: list[dict], convention: str
) -> Iterator[None]:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(inspect.signature(original).parameters, args, strict=False)), **kwargs}
        outputs, others = [], ()
        for (held, new), reused in zip(steps, shared, strict=True):
            result = original(**_gathered(given, held, new, convention, reused))
            attended, others = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            outputs.append(attended[:, len(held) :])
        joined = torch.cat(outputs, dim=1)
        return joined if others is None else (joined, *others)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _gathered(given: dict[str, Any], held: list[int], new: list[int], convention: str, reused: dict) -> dict[str, Any]:
    """What an attention module is given, of the tokens `held` and `new` alone, at the positions of the convention."""
    tokens = held + new
    places = list(range(len(tokens))) if convention == "cache" else tokens
    result = {**given, "hidden_states": given["hidden_states"][:, tokens]}
    result["attention_mask"] = _causal(given.get("attention_mask"), result["hidden_states"])
    changes: dict[str, Callable[[Any], Any]] = {
        "residual": lambda each: each[:, tokens],
        "position_embeddings": lambda each: each[:, places],
        "position_ids": lambda each: each[:, places],
        "alibi": lambda each: each[:, :, places],
        "position_bias": lambda each: each[:, :, places],
        "shared_kv_states": lambda _: reused,
    }
    for name, change in changes.items():
        if (value := given.get(name)) is not None:
            result[name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
    return result


def _causal(given: Tensor | None, hidden: Tensor) -> Tensor:
    """A causal mask, of the kind that was given: numbers to add, True for what is seen, or True for what is not."""
    shown = torch.ones(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    if given is not None and given.dtype == torch.bool:
        return ~shown if given[0, 0, 0, -1] else shown
    return torch.zeros(shown.shape, dtype=hidden.dtype).masked_fill(~shown, torch.finfo(hidden.dtype).min)


# the usages


@dataclass
class Trial:
    """What is tried: `make` gives a cache, `expect` the logits `[tokens, vocab]` of ids read in chunks."""

    model: Any
    make: Callable[[], Cache]
    expect: Callable[[list[int], list[int]], Tensor]
    caches: list[Cache] = field(default_factory=list)

    def cache(self) -> Any:
        self.caches.append(self.make())
        return self.caches[-1]


Pairs = Iterator[tuple[Tensor, Tensor]]


def tokens(length: int, batch: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


def in_chunks(*chunks: int, positions: bool) -> Callable[[Trial], Pairs]:
    """Plain passes, each with its positions as `generate` gives them, or without any."""

    def usage(trial: Trial) -> Pairs:
        ids, cache = tokens(sum(chunks)), trial.cache()
        told = positions and "position_ids" in arguments(trial.model)
        where = torch.arange(sum(chunks))[None].split(list(chunks), dim=1)
        with torch.no_grad():
            passes = [
                _pass(trial.model, cache, piece, **({"position_ids": at} if told else {}))
                for piece, at in zip(ids.split(list(chunks), dim=1), where, strict=True)
            ]
        yield torch.cat(passes, dim=1)[0], trial.expect(ids[0].tolist(), list(chunks))

    return usage


def _pass(model: Any, cache: Any, ids: Tensor, **extra: Any) -> Tensor:
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **extra).logits


def padded(trial: Trial) -> Pairs:
    """Rows of 21, 16 and 9 tokens, read and gone on from by `generate`."""
    yield from _generated(trial, trial.cache(), *_rows(), [[21], [16], [9]], 6)


def padded_chunks(trial: Trial) -> Pairs:
    """The same rows, read in chunks of 8, the last token apart, before `generate` goes on from them."""
    (ids, mask), cache = _rows(), trial.cache()
    _prefill(trial.model, cache, ids[:, :20], mask[:, :20])
    yield from _generated(trial, cache, ids, mask, [[8, 8, 4, 1], [3, 8, 4, 1], [4, 4, 1]], 6)


def _rows() -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, 21, dtype=torch.int64)
    mask[1, :5] = mask[2, :12] = 0
    return tokens(21, batch=3) * mask, mask


def _prefill(model: Any, cache: Cache, ids: Tensor, mask: Tensor) -> None:
    if isinstance(cache, SinkCache):
        prefill(model, cache, ids, chunk=8, attention_mask=mask)
        return
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        for start in range(0, ids.shape[1], 8):
            end = min(start + 8, ids.shape[1])
            _pass(model, cache, ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end])


def beams(trial: Trial) -> Pairs:
    """Three beams for ten tokens; a prompt below the budget, so that beams part before anything is evicted."""
    ids = tokens(6)
    yield from _generated(trial, trial.cache(), ids, torch.ones_like(ids), [[6]] * 3, 10, num_beams=3)


class _Heard(LogitsProcessor):
    """Notes which ids each row has when its next token is chosen, and the logits of the pass that chooses."""

    def __init__(self) -> None:
        self.passes: list[Tensor] = []
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append((input_ids.clone(), self.passes[-1]))
        return scores


def _generated(
    trial: Trial, cache: Any, ids: Tensor, mask: Tensor, chunks: list[list[int]], count: int, **options: Any
) -> Pairs:
    """Of each row there is in the last step: the logits by which each of its tokens was chosen, and the reference's."""
    heard, model = _Heard(), trial.model
    handle = model.register_forward_hook(lambda module, args, output: heard.passes.append(output.logits[:, -1].clone()))
    options |= {"attention_mask": mask, "do_sample": False, "use_cache": True, cache_argument(model): cache}
    try:
        model.generate(ids, max_new_tokens=count, logits_processor=[heard], **options)
    finally:
        handle.remove()
    assert len(heard.steps) == count
    pads = (mask == 0).sum(1).tolist() if len(mask) > 1 else [0] * len(chunks)
    for row, sizes, pad in zip(heard.steps[-1][0], chunks, pads, strict=True):
        whole = row[pad:].tolist()
        expected = trial.expect(whole, [*sizes, *[1] * (len(whole) - sum(sizes))])
        actual = [_of(row, histories, logits) for histories, logits in heard.steps]
        yield torch.stack(actual), expected[-count:]


def _of(row: Tensor, histories: Tensor, logits: Tensor) -> Tensor:
    """The logits of the history that `row` goes on from."""
    matches = (histories == row[: histories.shape[1]]).all(1).nonzero()
    return logits[int(matches[0])]


USAGES: dict[str, Callable[[Trial], Pairs]] = {
    "one shot": in_chunks(21, *[1] * 6, positions=True),
    "chunks": in_chunks(7, 9, 5, 1, 1, 3, 1, positions=True),
    "token by token": in_chunks(*[1] * 24, positions=False),
    "padded": padded,
    "padded, chunks": padded_chunks,
    "beams": beams,
}


# the cells


@dataclass(frozen=True)
class Cell:
    """What came of one family, policy, convention and usage, and the message or measure that says why."""

    family: str
    policy: str
    convention: str
    usage: str
    verdict: str
    why: str = ""


_KINDS = {
    SinkLayer.__name__: "bounded",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "DummyLayer": "without",
}


class Animal:
    """A family's model and what is known of it."""

    def __init__(self, label: str, model: nn.Module) -> None:
        self.label, self.model = label, cast(Any, model)
        self.tolerance = ROUGH if FAMILIES[label].rough else FINE
        self._own: dict[str, tuple[str, str]] = {}

    def cell(self, policy: str, convention: str, usage: str) -> Cell:
        trial = self._bounded(policy, convention)
        verdict, why = self._outcome(trial, usage)
        served = convention in SERVED.get(self.label, CONVENTIONS)
        if verdict == "refused" and served and not (trial.caches and self.label in MAY_REFUSE.get(usage, ())):
            verdict, why = "WRONG", f"refused, though it is served: {why}"  # a broken probe refuses what it cannot tell
        elif verdict in ("WRONG", "crash"):
            own, measured = self._transformers(usage)
            if own in ("crash", verdict):
                verdict, why = "transformers", measured
        return Cell(self.label, policy, convention, usage, verdict, why)

    def cells(self) -> list[Cell]:
        """All of them."""
        return [
            self.cell(policy, convention, usage)
            for usage in USAGES
            for convention in CONVENTIONS
            for policy in POLICIES
        ]

    def layers(self) -> str:
        """Which of its layers are bounded, and which keep a cache of their own kind."""
        for convention in CONVENTIONS:
            try:
                layers = SinkCache(self.model, Window(), BUDGET, cast(Any, convention)).layers
            except Exception:
                continue
            kinds = Counter(_KINDS.get(type(each).__name__, type(each).__name__) for each in layers)
            return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return "none"

    def _bounded(self, policy: str, convention: str) -> Trial:
        chosen, select = POLICIES[policy]

        def make() -> SinkCache:
            return SinkCache(self.model, chosen, BUDGET, cast(Any, convention))

        def expect(ids: list[int], chunks: list[int]) -> Tensor:
            expected = by_layer(self.model, ids, chunks, BUDGET, select, convention)
            if _error(expected, self._whole(ids, chunks)) < TELLING:
                raise AssertionError("eviction changes nothing here: this cell proves nothing")
            return expected

        return Trial(self.model, make, expect)

    @torch.no_grad()
    def _whole(self, ids: list[int], chunks: list[int]) -> Tensor:
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def _outcome(self, trial: Trial, usage: str) -> tuple[str, str]:
        try:
            worst = max(_error(actual, expected) for actual, expected in USAGES[usage](trial))
        except REFUSALS as error:
            if not trial.caches or getattr(trial.caches[-1], "seen", 1) == 0:
                return "refused", str(error)
            return "crash", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "crash", f"{type(error).__name__}: {error}"
        return ("ok", "") if worst <= self.tolerance else ("WRONG", f"off by {worst:.0e} of the largest logit")

    def _transformers(self, usage: str) -> tuple[str, str]:
        """What comes of this usage with transformers' own unbounded cache, and why."""
        if usage not in self._own:
            config = self.model.config.get_text_config(decoder=True)
            verdict, why = self._outcome(Trial(self.model, lambda: DynamicCache(config=config), self._whole), usage)
            remark = FAMILIES[self.label].remark
            self._own[usage] = verdict, f"DynamicCache: {why}" + (f"; {remark}" if remark else "")
        return self._own[usage]


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest logit; infinite if anything is not a number."""
    assert actual.shape == expected.shape
    error = float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())
    return error if error == error else float("inf")


# the page


_HEAD_OF_PAGE = """# What SinkCache supports

Generated by `python tests/zoo.py --markdown docs/support.md`, with torch {torch} and transformers {transformers}. Tiny
random models are read with a budget of {budget} under {policies},
in both position conventions. A usage is "ok" if every logit is that of a reference without a cache, to {fine} of the
largest logit in float64, or {rough} where a family computes in float32 whatever its dtype is. "original only" and
"cache only" name the convention that is ok; the other is refused. Where transformers' own unbounded cache is wrong in
the same usage, the word is "transformers".

* one shot: a prompt of 21 tokens in one pass, then decoding. chunks: passes of 7, 9, 5, 1, 1, 3 and 1 tokens. token by
  token: 24 passes without position_ids.
* padded: rows of 21, 16 and 9 tokens, padded on the left, equal the same rows alone, by `generate`. padded, chunks: by
  `prefill` in chunks of 8, then `generate`.
* beams: every probability that `generate(num_beams=3)` chose by, for 10 tokens after 6.

Layers: how many are bounded, and how many keep their native cache (sliding, linear) or are without one.
"""


def page(rows: dict[str, str], cells: list[Cell], left_out: dict[str, str]) -> str:
    """The Markdown page; `rows` says which layers of each family are bounded."""
    notes = _notes(cells)
    lines = [
        _HEAD_OF_PAGE.format(
            torch=torch.__version__.split("+")[0],
            transformers=tf.__version__,
            budget=BUDGET,
            policies=" and ".join(f"`{policy!r}`" for policy, _ in POLICIES.values()),
            fine=f"{FINE:.0e}",
            rough=f"{ROUGH:.0e}",
        ),
        f"| family | layers | {' | '.join(USAGES)} |",
        f"|---|---|{'---|' * len(USAGES)}",
        *(f"| {label} | {layers} | {' | '.join(_words(label, cells, notes))} |" for label, layers in rows.items()),
        "",
    ]
    for title, verdicts in _SECTIONS.items():
        mine = {note: number for note, number in notes.items() if note[0] in verdicts}
        if mine:
            lines += [f"## {title}", "", *(_line(note, number, cells) for note, number in mine.items()), ""]
    if left_out:
        lines += ["## Left out", "", *(f"* {label}: {why}" for label, why in left_out.items()), ""]
    lines += [
        "## Refused in use, whatever the model",
        "",
        *(f"* {what}: `{why}`" for what, why in misused().items()),
        "",
    ]
    return "\n".join([*lines, "## Counts", "", _counts(cells), ""])


def misused() -> dict[str, str]:
    """What a user must not ask of a cache, and the message that says so, as the code raises it."""
    llama, gemma = (cast(Any, build(label)) for label in ("Llama", "Gemma 3"))
    ids, mask = torch.ones(2, 12, dtype=torch.int64), torch.ones(2, 12, dtype=torch.int64)
    left, right, hole = mask.clone(), mask.clone(), mask.clone()
    left[1, :3], right[1, 9:], hole[1, 5:8] = 0, 0, 0

    def cache(model: Any = llama, budget: Any = 4) -> SinkCache:
        read = SinkCache(model, Window(), budget)
        prefill(model, read, ids)
        return read

    asked: dict[str, Callable[[], Any]] = {
        "a batch padded on the right": lambda: prefill(llama, SinkCache(llama, Window(), 4), ids, 8, right),
        "pads behind a row's first token, beside sliding windows": lambda: prefill(
            gemma, SinkCache(gemma, Window(), 4), ids, 8, hole
        ),
        "padding, with budgets that differ between layers": lambda: prefill(
            llama, SinkCache(llama, Window(), [4, 5]), ids, 8, left
        ),
        "another past in the mask": lambda: prefill(llama, cache(), ids, 8, torch.cat([left, mask], dim=1)),
        "another batch": lambda: prefill(llama, cache(), ids[:1]),
        "tokens taken back after an eviction": lambda: cache().crop(-2),
        "a next turn for more rows than are held": lambda: turn(llama, cache(), ids[:1].expand(3, -1)),
        "budgets that differ, without the model": lambda: SinkCache(llama.config, Window(), [4, 5], "original"),
    }
    told = {}
    for what, ask in asked.items():
        try:
            ask()
        except REFUSALS as error:
            told[what] = str(error)
    assert told.keys() == asked.keys()
    return told


_SECTIONS = {"Wrong": ("WRONG", "crash"), "Refused": ("refused",), "Wrong in transformers": ("transformers",)}
Notes = dict[tuple[str, str], int]  # (verdict, why) -> number


def _notes(cells: list[Cell]) -> Notes:
    found = dict.fromkeys((cell.verdict, cell.why) for cell in cells if cell.verdict != "ok")
    ordered = [note for verdicts in _SECTIONS.values() for note in found if note[0] in verdicts]
    return {note: number for number, note in enumerate(ordered, start=1)}


def _words(label: str, cells: list[Cell], notes: Notes) -> Iterator[str]:
    """For each usage what came of it, with the numbers of the notes."""
    for usage in USAGES:
        mine = [cell for cell in cells if (cell.family, cell.usage) == (label, usage)]
        verdicts = {each: {cell.verdict for cell in mine if cell.convention == each} for each in CONVENTIONS}
        numbers = sorted({notes[cell.verdict, cell.why] for cell in mine if cell.verdict != "ok"})
        word = " / ".join(sorted({cell.verdict for cell in mine}))
        for one, other in (CONVENTIONS, CONVENTIONS[::-1]):
            if (verdicts[one], verdicts[other]) == ({"ok"}, {"refused"}):
                word = f"{one} only"
        yield word + (f" [{', '.join(map(str, numbers))}]" if numbers else "")


def _line(note: tuple[str, str], number: int, cells: list[Cell]) -> str:
    concerned = [cell for cell in cells if (cell.verdict, cell.why) == note]
    families = "; ".join(dict.fromkeys(cell.family for cell in concerned))
    usages = list(dict.fromkeys(cell.usage for cell in concerned))
    conventions = {cell.convention for cell in concerned}
    where = "" if len(usages) == len(USAGES) else f", {', '.join(usages)}"
    which = "" if len(conventions) == len(CONVENTIONS) else f', positions="{conventions.pop()}"'
    text = f"`{note[1]}`" if note[0] == "refused" else note[1]
    return f"{number}. {text} ({families}{where}{which})"


def _counts(cells: list[Cell]) -> str:
    count = Counter(cell.verdict for cell in cells)
    return (
        f"{len({cell.family for cell in cells})} families, {len(cells)} cells: {count['ok']} ok, {count['refused']} "
        f"refused, {count['WRONG'] + count['crash']} wrong, {count['transformers']} wrong in transformers itself, "
        "0 without a reference."
    )


def main(arguments: list[str]) -> int:
    """Runs the zoo and prints its page; 1 if any cell is wrong."""
    parser = argparse.ArgumentParser(description="Every kind of decoder against a reference.")
    parser.add_argument("--markdown", type=Path, help="write the page there")
    parser.add_argument("--families", help="only these, separated by semicolons")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    tf.logging.set_verbosity_error()
    torch.set_num_threads(1)  # tiny models: threads cost more than they give
    chosen = options.families.split(";") if options.families else list(FAMILIES)
    rows: dict[str, str] = {}
    left_out: dict[str, str] = {}
    cells: list[Cell] = []
    for label in chosen:
        model = build(label)
        if isinstance(model, str):
            left_out[label] = model
            continue
        animal = Animal(label, model)
        rows[label] = animal.layers()
        cells += animal.cells()
        print(f"{label:32}{_counts(cells)}", file=sys.stderr)
    text = page(rows, cells, left_out)
    print(text)
    if options.markdown:
        options.markdown.parent.mkdir(exist_ok=True)
        options.markdown.write_text(text, encoding="utf-8")
    return int(any(cell.verdict in ("WRONG", "crash") for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
