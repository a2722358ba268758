"""A model's config file as a plan reads it: fields by name, what a class fills in, and what is refused.

Nothing is guessed: a field that is missing is the default of its class in transformers 5.24 and is listed as assumed; a
field that is null stays null; an architecture that is not in `families` is refused, as is a field that says how a layer
stores and that its family does not read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkcache.planner.families import FAMILIES
from sinkcache.planner.fields import Fields
from sinkcache.planner.kinds import Model
from sinkcache.planner.layouts import layers_of

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_ASSUMED_DTYPE = "bf16"

# Fields that say how a layer stores what it stores: one that a family does not read is not ignored, but refused.
_SIGNS = (
    "attention_chunk_size",
    "attn_layer_indices",
    "block_configs",
    "conv_L_cache",
    "conv_kernel",
    "cross_attention_layers",
    "hybrid_override_pattern",
    "index_head_dim",
    "kv_lora_rank",
    "layers_block_type",
    "linear_conv_kernel_dim",
    "mamba_d_state",
    "num_kv_shared_layers",
    "per_layer_config",
    "ssm_state_size",
    "state_size",
)


def from_file(path: Path, model_type: str | None = None) -> Model:
    """The model of a `config.json`; raises ValueError, which names the file, if it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"config {str(path)!r} cannot be read: {reason}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config {str(path)!r} is no JSON object but a {type(config).__name__}")
    return from_config(config, path.parent.name or str(path), model_type)


def from_config(config: Mapping[str, Any], name: str = "", model_type: str | None = None) -> Model:
    """The model that a config describes; `model_type` overrides the one it names.

    Raises ValueError for an unknown architecture, and for fields that are missing, contradictory or of unknown meaning;
    the message names the field.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    known = _known(model_type or text.get("model_type") or config.get("model_type"))
    family = FAMILIES[known]
    fields = Fields(text, known, family)
    for sign in _SIGNS:
        if text.get(sign) and sign not in family.reads and family.names.get(sign) != sign:
            raise ValueError(
                f"config field {sign} = {_short(text[sign])} says how layers store, and no rule is known for it in a "
                f"{known}: refused, as any figure would be a guess"
            )
    if bool(config.get("is_encoder_decoder", family.decoder)) != family.decoder:
        raise ValueError(f"config field is_encoder_decoder = {config['is_encoder_decoder']} contradicts {known}")
    layers = layers_of(fields)
    dtype, said = _dtype(text, config)
    length = text.get("max_position_embeddings")
    return Model(
        name or known,
        layers,
        dtype,
        known,
        length if isinstance(length, int) and length > 0 else None,
        assumed=(*fields.assumed.values(), *said),
    )


def _known(model_type: Any) -> str:
    """The family of a `model_type`; raises ValueError if there is none."""
    if model_type is None:
        raise ValueError("config field model_type is missing, which says what the others mean: give it, or --as llama")
    if not isinstance(model_type, str):
        raise ValueError(f"config field model_type must be a name, got {_short(model_type)}")
    for each in (model_type, f"{model_type}_text", f"{model_type}_text_model"):
        if each in FAMILIES:
            return each
    raise ValueError(
        f"config field model_type = {model_type!r} is none whose cache is known (transformers 5.24): refused, as any "
        "figure would be a guess. If its layers store as a known type's do, say so: --as llama"
    )


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The dtype of the weights, which the cache takes over, and what was assumed of it."""
    for source in (text, config):
        for name in ("dtype", "torch_dtype"):
            value = source.get(name)
            if value is not None:
                short = str(value).removeprefix("torch.")
                if short not in _DTYPES:
                    raise ValueError(f"config field {name} = {value!r} is no dtype a cache has: {', '.join(_DTYPES)}")
                return _DTYPES[short], []
    return _ASSUMED_DTYPE, [f"dtype = {_ASSUMED_DTYPE}, as nothing says"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
