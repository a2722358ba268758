"""What a model is to a bounded cache: its layers, the positions it allows, its attention sink, the sinks it needs.

Nothing is taken from a model's name. Layers come from the cache transformers would make, rotations from the probe, and
the sink from attention weights: of the queries from the 65th on, how much of their attention a key position receives,
mean over heads and queries. A head that attends to all it sees alike gives the first token 1/i at query i (counted from
1); the mean of that over the same queries is the uniform baseline. How many sinks are enough is measured too: the
perplexity of the text's first tokens under a small budget, with 0 to 8 sinks. Both hold for the text that was read.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from sinkcache.bounded import BoundedLayer
from sinkcache.cache import SinkCache
from sinkcache.metrics import perplexity
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.positions import Rotation
from sinkcache.streaming import step
from sinkcache.support import Positions

FIRST_QUERY = 64  # index of the first query counted: earlier ones see few tokens, and the first among them always
SINKS, BUDGET, CHUNK, SAMPLE = (0, 1, 2, 4, 8), 128, 64, 1024  # tokens, all but the first: numbers of sinks tried


class Refused(ValueError):
    """A model that no SinkCache can bound exactly; the message says why."""


@dataclass(frozen=True)
class LayerFacts:
    """One layer. `bytes_per_token` of one row of a batch, None where memory does not grow with tokens; shares are None
    where attention could not be read, or where a sliding window hides the first token from some of the queries."""

    index: int
    kind: str
    rope: str
    bounded: bool
    bytes_per_token: int | None
    first_share: float | None
    top_position: int | None
    top_share: float | None


@dataclass(frozen=True)
class Sinks:
    """Perplexity of the first `tokens` tokens for each number of sinks, and the smallest number within 1% of the best.

    `recommended` is None, and `perplexity` empty, where the text or the trained length is shorter than two budgets.
    """

    budget: int
    tokens: int
    chunk: int
    positions: str
    perplexity: dict[int, float]
    recommended: int | None


@dataclass(frozen=True)
class Inspection:
    """All that was found; `positions` gives for each convention None if it is possible, else why it is not."""

    tokens: int
    first_token: str
    positions: dict[str, str | None]
    layers: list[LayerFacts]
    uniform: float
    sinks: Sinks

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, fit for JSON."""
        return dataclasses.asdict(self)


def inspect(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, input_ids: Int[Tensor, "1 kv_len"], tokens: int = 512
) -> Inspection:
    """Inspects `model` on the first `tokens` of a text, and its sinks on the first 1,024; leaves the model as it was.

    Attention is computed eagerly, one layer's weights at a time: `4 * num_heads * tokens ** 2` bytes, in float32.
    Raises Refused if the model cannot be bounded, ValueError if `tokens` is below 65 or above the trained length, or
    the text has fewer than 65 tokens.
    """
    if tokens <= FIRST_QUERY:
        raise ValueError(f"tokens must be at least {FIRST_QUERY + 1}, as queries count from there on, got {tokens}")
    if input_ids.shape[1] <= FIRST_QUERY:
        raise ValueError(
            f"the text has {input_ids.shape[1]} tokens, at least {FIRST_QUERY + 1} are needed: give a longer one"
        )
    caches = _caches(model)
    possible = {name: cache for name, cache in caches.items() if isinstance(cache, SinkCache)}
    if not possible:
        raise Refused(caches["cache"])
    config: PreTrainedConfig = cast(Any, model).config.get_text_config(decoder=True)
    trained = getattr(config, "max_position_embeddings", None) or SAMPLE
    if tokens > trained:
        raise ValueError(
            f"tokens must not exceed the trained length, {trained} for this model, got {tokens}: ask for fewer"
        )
    sample = input_ids[:, :tokens]
    native = DynamicCache(config=config)
    received = attention_received(model, native, sample)
    held = next(iter(possible.values()))
    return Inspection(
        tokens=sample.shape[1],
        first_token=str(tokenizer.decode(sample[0, :1])),
        positions={name: cache if isinstance(cache, str) else None for name, cache in caches.items()},
        layers=[_layer(index, native, held, config, received.get(index)) for index in range(config.num_hidden_layers)],
        uniform=uniform_share(sample.shape[1]),
        sinks=_sinks(model, next(iter(possible)), input_ids[:, : min(SAMPLE, trained)]),
    )


def uniform_share(tokens: int) -> float:
    """The first token's share under uniform attention: the mean of 1/i over the queries from the 65th to the last."""
    return math.fsum(1 / i for i in range(FIRST_QUERY + 1, tokens + 1)) / (tokens - FIRST_QUERY)


def attention_received(
    model: nn.Module, cache: DynamicCache, input_ids: Int[Tensor, "1 kv_len"]
) -> dict[int, Float[Tensor, " kv_len"]]:
    """Per layer, the share of attention that each key position receives, mean over heads and queries from the 65th on.

    Reads the text into `cache` in one pass, with eager attention for its length. Layers that give no weights for all
    pairs of tokens are left out.
    """
    received: dict[int, Tensor] = {}

    def reduce(module: nn.Module, args: Any, output: Any) -> Any:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[-2:] != 2 * input_ids.shape[-1:]:
            return None
        received[cast(Any, module).layer_idx] = weights[0, :, FIRST_QUERY:].float().mean(dim=(0, 1)).cpu()
        return (*output[:1], None, *output[2:])

    attentions = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    hooks = [module.register_forward_hook(reduce) for module in attentions]
    try:
        with _eager(model):
            step(model, cache, input_ids.to(cast(Any, model).device), last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return received


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _caches(model: nn.Module) -> dict[str, SinkCache | str]:
    caches: dict[str, SinkCache | str] = {}
    for positions in ("cache", "original"):
        try:
            caches[positions] = SinkCache(model, StreamingLLM(), BUDGET, cast(Positions, positions))
        except ValueError as refusal:
            caches[positions] = str(refusal)
    return caches


def _layer(
    index: int, native: DynamicCache, held: SinkCache, config: PreTrainedConfig, received: Tensor | None
) -> LayerFacts:
    if index >= len(native.layers):
        return LayerFacts(index, "shared", "another layer's keys", False, None, None, None, None)
    layer: Any = native.layers[index]
    window = getattr(layer, "sliding_window", None)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    head_dim, size = 0, None
    if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == 4:
        head_dim, size = keys.shape[-1], (keys[:, :, 0].nbytes + values[:, :, 0].nbytes) // keys.shape[0]
    if received is None or (window is not None and window < len(received)):
        shares = (None, None, None)
    else:
        shares = (float(received[0]), int(received.argmax()), float(received.max()))
    rope = _rope(held.rotations[index], head_dim, config)
    return LayerFacts(index, _kind(layer, window), rope, isinstance(held.layers[index], BoundedLayer), size, *shares)


def _kind(layer: Any, window: int | None) -> str:
    if type(layer) is DynamicLayer:
        return "full"
    if "LinearAttention" in type(layer).__name__:
        return "linear"
    return type(layer).__name__ if window is None else f"sliding {window}"


def _rope(rotation: Rotation | str | None, head_dim: int, config: PreTrainedConfig) -> str:
    """The layout, the channels turned, and theta where the frequencies are powers of one, else the scaling's name."""
    if rotation is None:
        return "none"
    if isinstance(rotation, str):
        return "unknown"
    layout = "half-split" if rotation.layout == "half" else rotation.layout
    described = f"{layout}, {rotation.channels} of {head_dim} channels"
    frequencies = rotation.inv_freq
    if len(frequencies) < 2 or float(frequencies.min()) <= 0:
        return described
    slope = (frequencies[-1] / frequencies[0]).log() / (len(frequencies) - 1)  # log frequency falls by this a pair
    line = frequencies[0].log() + slope * torch.arange(len(frequencies))
    if not torch.allclose(frequencies.log(), line, rtol=0, atol=1e-4):  # a float32 buffer, if not one cast to bfloat16
        parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        kinds = {str(each["rope_type"]) for each in (parameters, *nested) if "rope_type" in each} - {"default"}
        return f"{described}, {' or '.join(sorted(kinds)) or 'unknown'} scaling"
    factor = 1 / float(frequencies[0])
    theta = f"theta {math.exp(-float(slope) * len(frequencies)):,.0f}"
    return f"{described}, {theta}" + (f", linear scaling {factor:.3g}" if abs(factor - 1) > 1e-3 else "")


def _sinks(model: nn.Module, positions: str, input_ids: Tensor) -> Sinks:
    tokens = input_ids.shape[1]
    input_ids = input_ids.to(cast(Any, model).device)
    measured: dict[int, float] = {}
    if tokens >= 2 * BUDGET:
        for num_sinks in SINKS:
            cache = SinkCache(model, StreamingLLM(num_sinks), BUDGET, cast(Positions, positions))
            measured[num_sinks] = perplexity(model, cache, input_ids, CHUNK).value
    best = min(measured.values(), default=math.nan)
    recommended = next((num_sinks for num_sinks, value in measured.items() if value <= 1.01 * best), None)
    return Sinks(BUDGET, tokens, CHUNK, positions, measured, recommended)
