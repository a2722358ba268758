"""A plan held against tensors: the model is run and what its cache stores is counted, layer by layer.

On the meta device nothing is computed or stored, so that a model of any size is run in seconds; tensors there have no
storage, and what they show is counted. On a real device bytes of storage are counted.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedConfig

from sinkcache.guard import cache_argument
from sinkcache.memory import storage, tensors_of
from sinkcache.planner.configs import from_config
from sinkcache.planner.in_transformers import Dynamic
from sinkcache.planner.kinds import Model
from sinkcache.planner.sources import model_of

_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
_ENOUGH, _MOST = 64, 16_384  # tokens: without windows, and at most with them


@dataclass(frozen=True)
class Verdict:
    """Bytes of each layer as planned and as counted after `tokens`; `storage`: of storage, not of what tensors show."""

    tokens: int
    planned: list[int]
    counted: list[int]
    storage: bool

    @property
    def exact(self) -> bool:
        """Whether they are the same in every layer."""
        return self.planned == self.counted

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, fit for JSON."""
        return {
            "tokens": self.tokens,
            "planned_bytes": sum(self.planned),
            "counted_bytes": sum(self.counted),
            "exact": self.exact,
            "what": "storage" if self.storage else "what tensors on the meta device show",
        }


def verify_config(
    source: Mapping[str, Any] | Path, tokens: int | None = None, model_type: str | None = None
) -> Verdict:
    """Runs the model of a config, or of a `config.json`, on the meta device; as a `model_type`, if one is given.

    Raises ValueError if there is no plan for it, or this transformers cannot make it or run it.
    """
    fields = json.loads(source.read_text(encoding="utf-8")) if isinstance(source, Path) else dict(source)
    planned = from_config(fields, model_type=model_type)
    if model_type is not None:
        fields = {**(fields.get("text_config") or fields), "model_type": planned.model_type}
    try:
        config = AutoConfig.for_model(**fields)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fields that this transformers gave another name
            auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model = auto.from_config(config, dtype=_DTYPES[planned.dtype]).eval()
        return verify(model, tokens, planned)
    except Exception as error:  # a model's code and its config's checks raise whatever they like
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"this transformers cannot run a {planned.model_type} to verify: {reason}") from error


def verify(model: nn.Module, tokens: int | None = None, planned: Model | None = None) -> Verdict:
    """Runs `model` on so many tokens, one step and one token more on a real device, and counts what its cache holds.

    By default enough tokens to fill its windows.
    """
    config: PreTrainedConfig = model.config  # pyright: ignore[reportAssignmentType] - every transformers model has one
    planned = planned or model_of(model)
    windows = [layer.window for layer in planned.layers if layer.window]
    length = tokens or min(max(windows, default=0) + _ENOUGH, _MOST)
    device = next(model.parameters()).device
    on_meta = device.type == "meta"
    ids = torch.ones(1, length, dtype=torch.long, device=device)
    layers = _run(model, config, ids, on_meta)
    rule = Dynamic(source=length if config.is_encoder_decoder else 0)
    dtype = planned.dtype
    expected = [
        rule.shown(each, dtype, length) if on_meta else rule.stored(each, dtype, length, 1) for each in planned.layers
    ]
    counted = [_bytes(tensors_of(layer), on_meta) for layer in layers]
    return Verdict(length, expected, counted + [0] * (len(expected) - len(counted)), not on_meta)


def _run(model: nn.Module, config: PreTrainedConfig, ids: Tensor, at_once: bool) -> list[Any]:
    """The cache's layers after `ids`: all in one step, or the last on its own, after which windows hold no more."""
    with torch.no_grad():
        if config.is_encoder_decoder:
            cache = model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
            own, other = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
            return [layer for pair in zip(own, other, strict=True) for layer in pair]
        cache = DynamicCache(config=config)
        for part in [ids] if at_once else [ids[:, :-1], ids[:, -1:]]:
            model(input_ids=part, use_cache=True, **{cache_argument(model): cache})
    return cache.layers


def _bytes(tensors: list[Tensor], on_meta: bool) -> int:
    held = [each for each in tensors if each.ndim > 0]  # a window's size is a tensor too
    return sum(each.numel() * each.element_size() for each in held) if on_meta else storage(held)
