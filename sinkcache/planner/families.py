"""Architectures whose caches are known, by `model_type`: what their config files leave out, and what they read.

A config file may omit any field that equals the default of its class; the defaults here are those of transformers 5.24,
against which a test holds them. What a table of defaults cannot say (which layer is of which kind) is named in
`pattern` and decided in `sinkcache.planner.configs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Pattern = Literal[
    "alike",  # all layers slide if there is a window, else all keep everything
    "period",  # the last of every `sliding_window_pattern` layers keeps everything
    "upper",  # layers from `max_window_layers` on slide, if `use_sliding_window`
    "rotary",  # layers without rotation keep everything; the others are chunked or sliding
    "interval",  # the last of every `full_attention_interval` layers has attention, the others a state
    "listed",  # a field of its own lists the layers that have attention
    "states",  # every layer has a state
    "both",  # every layer has attention and a state
    "cross",  # some layers read another sequence
]


@dataclass(frozen=True)
class Family:
    """One architecture: `defaults` of its class, `names` its files use for ours, and which signs of storage it `reads`.

    `rotary`: the share of a head's channels that turn with the position. `decoder`: it has an encoder too.
    """

    defaults: Mapping[str, Any]
    pattern: Pattern = "alike"
    names: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    rotary: int | float = 1
    decoder: bool = False


def _family(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    pattern: Pattern = "alike",
    names: Mapping[str, str] | None = None,
    reads: tuple[str, ...] = (),
    rotary: int | float = 1,
    decoder: bool = False,
    **more: Any,
) -> Family:
    """A family whose class has these defaults; None where the class has none, so that the rule of it applies."""
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    optional = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    given = {name: value for name, value in optional.items() if value is not None}
    return Family({**shape, **given, **more}, pattern, names or {}, reads, rotary, decoder)


def _latent(layers: int, hidden: int, heads: int, rank: int = 512, rope: int = 64, nope: int = 128, value: int = 128,
            **more: Any) -> Family:  # fmt: skip
    reads = ("kv_lora_rank", *(["index_head_dim"] if "index_head_dim" in more else []))
    dims: dict[str, Any] = {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
    }
    return _family(layers, hidden, heads, heads, reads=reads, **dims, **more)


def _delta(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Family:
    """Gated DeltaNet between layers of full attention."""
    numbers: dict[str, Any] = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
               "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}  # fmt: skip
    return _family(layers, hidden, heads, kv_heads, head_dim, "interval", None, ("linear_conv_kernel_dim",), 0.25,
                   **numbers)  # fmt: skip


def _mamba(layers: int, hidden: int, heads: int, kv_heads: int | None, pattern: Pattern, reads: tuple[str, ...],
           head_dim: int | None = None, **more: Any) -> Family:  # fmt: skip
    reads = ("mamba_d_state", *reads)
    return _family(layers, hidden, heads, kv_heads, head_dim, pattern, None, reads, **more)


_GPT = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
_MPT = {"num_hidden_layers": "n_layers", "hidden_size": "d_model", "num_attention_heads": "n_heads"}
_BART = {"num_hidden_layers": "decoder_layers", "hidden_size": "d_model",
         "num_attention_heads": "decoder_attention_heads"}  # fmt: skip
_T5 = {"num_hidden_layers": "num_decoder_layers", "hidden_size": "d_model", "num_attention_heads": "num_heads",
       "head_dim": "d_kv"}  # fmt: skip
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
                           "mamba_expand": 2}  # fmt: skip
_WINDOW: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_SHARED = ("num_kv_shared_layers", "per_layer_config")

_STATE = ("state_size", "conv_kernel")
_LLAMA = _family(32, 4096, 32)
_MAMBA = _family(32, 768, 1, pattern="states", reads=_STATE, state_size=16, conv_kernel=4, expand=2)
_LFM = _family(32, 2560, 32, 8, pattern="listed", reads=("conv_L_cache",), conv_L_cache=3)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("apertus", "granite", "granitemoe", "hunyuan_v1_dense", "llama", "olmo", "olmo2"), _LLAMA),
    **dict.fromkeys(("falcon_mamba", "mamba"), _MAMBA),
    **dict.fromkeys(("glm", "glm4"), _family(40, 4096, 32, 2, 128, rotary=0.5)),
    "lfm2": _LFM,
    "lfm2_moe": replace(_LFM, defaults={**_LFM.defaults, "hidden_size": 2048}),
    **dict.fromkeys(("ministral", "mistral"), _family(32, 4096, 32, 8, sliding_window=4096)),
    "arcee": _family(32, 2560, 32),
    "bamba": _mamba(32, 4096, 32, 8, "listed", ("attn_layer_indices",), rotary=0.5, **_MAMBA2),
    "bart": _family(12, 1024, 16, names=_BART, pattern="cross", rotary=0, decoder=True),
    "bloom": _family(2, 64, 8, names=_GPT | {"hidden_size": "n_embed"}, rotary=0),
    "cohere": _family(40, 8192, 64),
    "cohere2": _family(40, 8192, 64, pattern="period", sliding_window=4096, sliding_window_pattern=4),
    "deepseek_v2": _latent(32, 4096, 32),
    "deepseek_v3": _latent(61, 7168, 128),
    "deepseek_v32": _latent(61, 7168, 128, index_head_dim=128),
    "ernie4_5": _family(18, 1024, 16, 2, 128),
    "exaone4": _family(32, 4096, 32, 32, pattern="period", sliding_window=4096, sliding_window_pattern=4),
    "falcon": _family(32, 4544, 71, names={"hidden_size": "n_embed"}, multi_query=True, new_decoder_architecture=False),
    "falcon_h1": _mamba(32, 4096, 32, 8, "both", (), mamba_d_ssm=1024, **_MAMBA2),
    "gemma": _family(28, 3072, 16, 16, 256),
    "gemma2": _family(26, 2304, 8, 4, 256, "period", sliding_window=4096, sliding_window_pattern=2),
    "gemma3_text": _family(26, 2304, 8, 4, 256, "period", sliding_window=4096, sliding_window_pattern=6),
    "gemma3n_text": _family(
        35,
        2048,
        8,
        2,
        256,
        "period",
        reads=_SHARED,
        sliding_window=512,
        sliding_window_pattern=5,
        num_kv_shared_layers=15,
    ),
    "gemma4_text": _family(
        30,
        2304,
        8,
        4,
        256,
        "period",
        reads=_SHARED,
        sliding_window=512,
        sliding_window_pattern=6,
        num_kv_shared_layers=0,
        global_head_dim=512,
    ),
    "glm4_moe": _family(46, 4096, 96, 8, rotary=0.5),
    "glm4_moe_lite": _latent(47, 2048, 20, nope=192, value=256),
    "glm_moe_dsa": _latent(78, 6144, 64, nope=192, value=256, index_head_dim=128),
    "gpt2": _family(12, 768, 12, names=_GPT, rotary=0),
    "gpt_neox": _family(44, 6144, 64, rotary=0.25),
    "gpt_oss": _family(36, 2880, 64, 8, 64, "period", sliding_window=128, sliding_window_pattern=2),
    "gptj": _family(28, 4096, 16, names=_GPT, rotary=0.25),
    "granitemoehybrid": _mamba(32, 4096, 32, None, "states", ("layers_block_type",), **_MAMBA2),
    "helium": _family(24, 2560, 20, 20, 128),
    "jamba": _mamba(
        32,
        4096,
        32,
        8,
        "listed",
        (),
        rotary=0,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "llama4_text": _family(
        48,
        5120,
        40,
        8,
        128,
        "rotary",
        reads=("attention_chunk_size",),
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
    ),
    "mamba2": _family(
        64,
        4096,
        1,
        pattern="states",
        reads=_STATE,
        state_size=128,
        num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        conv_kernel=4,
        expand=2,
        names={"mamba_head_dim": "head_dim"},
    ),
    "minicpm3": _latent(62, 2560, 40, rank=256, rope=32, nope=64, value=64),
    "minimax_m2": _family(62, 3072, 48, 8, 128),
    "ministral3": _family(34, 4096, 32, 8, 128),
    "mixtral": _family(32, 4096, 32, 8),
    "mllama_text_model": _family(
        40,
        4096,
        32,
        8,
        pattern="cross",
        reads=("cross_attention_layers",),
        cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
    ),
    "mpt": _family(24, 2048, 16, names=_MPT, rotary=0),
    "nemotron": _family(32, 6144, 48, None, 128, rotary=0.5),
    "nemotron_h": _family(
        4,
        4096,
        32,
        8,
        128,
        "listed",
        reads=("ssm_state_size", "hybrid_override_pattern", "layers_block_type", "conv_kernel"),
        rotary=0,
        ssm_state_size=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        conv_kernel=4,
    ),
    "olmo3": _family(32, 4096, 32, pattern="period", sliding_window=4096, sliding_window_pattern=4),
    "olmoe": _family(16, 2048, 16),
    "opt": _family(12, 768, 12, rotary=0),
    "persimmon": _family(36, 4096, 64, rotary=0.5),
    "phi": _family(24, 2048, 32, rotary=0.5),
    "phi3": _family(32, 3072, 32),
    "phimoe": _family(32, 4096, 32, 8),
    "qwen2": _family(32, 4096, 32, 32, pattern="upper", **_WINDOW),
    "qwen2_moe": _family(24, 2048, 16, 16, pattern="upper", **_WINDOW),
    "qwen3": _family(32, 4096, 32, 32, 128, "upper", **_WINDOW),
    "qwen3_5_moe_text": _delta(40, 2048, 16, 2, 256),
    "qwen3_5_text": _delta(32, 4096, 16, 4, 256),
    "qwen3_moe": _family(24, 2048, 32, 4, pattern="alike", use_sliding_window=False, sliding_window=4096),
    "qwen3_next": _delta(48, 2048, 16, 2, 256),
    "seed_oss": _family(64, 4096, 80, 8, 128),
    "smollm3": _family(36, 2048, 16, 4, pattern="rotary", use_sliding_window=False, no_rope_layer_interval=4),
    "stablelm": _family(32, 2560, 32, 32, rotary=0.25),
    "starcoder2": _family(30, 3072, 24, 2),
    "t5": _family(6, 512, 8, None, 64, names=_T5, pattern="cross", rotary=0, decoder=True),
    "whisper": _family(4, 384, 6, names=_BART, pattern="cross", rotary=0, decoder=True, max_source_positions=1500),
}
