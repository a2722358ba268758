"""What the caches of transformers hold: `DynamicCache`, `StaticCache`, `QuantizedCache`.

Rules read in and measured on transformers 5.24, `cache_utils.py`. Latent attention stores its latents since 5.20 (pull
request 47761); earlier versions stored each head's keys and values.
"""

from dataclasses import dataclass
from typing import ClassVar

from sinkcache.planner.engines import Engine, refuse
from sinkcache.planner.kinds import Layer, Model, check_tokens, size, state_bytes

RULES = "transformers 5.24"


@dataclass(frozen=True)
class Dynamic(Engine):
    """`DynamicCache(config)`: grows token by token, each layer by its kind.

    A sliding layer's tensors show `window - 1` tokens, but are views of the `window` that the last step attended to.
    `chunk`: tokens the prompt is read at a time; None: all at once, after which a sliding layer holds the whole prompt
    until the next token.
    """

    chunk: int | None = None
    source: int = 0
    rules: ClassVar[str] = RULES

    @property
    def name(self) -> str:
        """What tables call it."""
        prompt = "at once" if self.chunk is None else f"by {self.chunk:,}"
        return f"DynamicCache, prompt {prompt}"

    def held(self, model: Model, tokens: int) -> int:
        """Bytes of storage while decoding, the last token read included."""
        return sum(self.stored(layer, model.dtype, tokens, 1) for layer in model.layers)

    def peak(self, model: Model, tokens: int) -> int:
        """Bytes of storage when the prompt has been read."""
        last = tokens if self.chunk is None else min(tokens, self.chunk)
        return max(
            sum(self.stored(layer, model.dtype, tokens, last) for layer in model.layers), self.held(model, tokens)
        )

    def shown(self, layer: Layer, dtype: str, tokens: int) -> int:
        """Bytes of what a layer's tensors show, which is all that can be counted on the meta device."""
        if layer.slides and layer.window is not None:
            tokens = min(tokens, layer.window - 1)
        return self.stored(layer, dtype, tokens)

    def stored(self, layer: Layer, dtype: str, tokens: int, last: int | None = None) -> int:
        """Bytes of a layer that has read so many tokens, the `last` of them in one step (None: whatever it shows)."""
        check_tokens("tokens", tokens, 0)
        if layer.kind == "cross":
            return size(layer.row * self.source, dtype)
        if layer.slides and last is not None and layer.window is not None:
            tokens = min(tokens, layer.window - 1 + last)
        held = size(layer.row * tokens, dtype) if layer.grows or layer.slides else 0
        if layer.state is not None:
            held += state_bytes(layer.state, dtype, layer.state.kernel)  # as many columns as the kernel is wide
        return held


@dataclass(frozen=True)
class Unaware(Engine):
    """`DynamicCache()` without a config: every layer grows, sliding ones too."""

    rules: ClassVar[str] = RULES

    @property
    def name(self) -> str:
        """What tables call it."""
        return "DynamicCache() without config"

    def held(self, model: Model, tokens: int) -> int:
        check_tokens("tokens", tokens, 0)
        refuse(self.name, model, ("linear", "conv", "hybrid", "cross"), "it has layers of keys and values alone")
        return sum(size(layer.row * tokens, model.dtype) for layer in model.layers)


@dataclass(frozen=True)
class Static(Engine):
    """`StaticCache`: all of its length is allocated with the first token."""

    rules: ClassVar[str] = RULES

    @property
    def name(self) -> str:
        """What tables call it."""
        return "StaticCache"

    def held(self, model: Model, tokens: int) -> int:
        check_tokens("tokens", tokens, 0)
        refuse(self.name, model, ("cross",), "it has no layer for another sequence")
        total = 0
        for layer in model.layers:
            length = min(tokens, layer.window or tokens) if layer.slides else tokens
            total += size(layer.row * length, model.dtype)
            if layer.state is not None:
                total += state_bytes(layer.state, model.dtype, layer.state.kernel)
        return total


@dataclass(frozen=True)
class Quantized(Engine):
    """`QuantizedCache("quanto")`, tokens all quantised: `bits` each, a scale and a zero of 16 bits for each `group`.

    Decoding keeps up to `residual` newest tokens in the model's dtype and then quantises everything again; `peak` has
    them, and one layer that is dequantised to be read.
    """

    bits: int = 4
    group: int = 64
    residual: int = 128
    rules: ClassVar[str] = RULES

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits must be 2 or 4, which quanto has, got {self.bits}")

    @property
    def name(self) -> str:
        """What tables call it, its bits included."""
        return f"QuantizedCache, {self.bits} bits"

    def held(self, model: Model, tokens: int) -> int:
        check_tokens("tokens", tokens, 0)
        refuse(self.name, model, ("sliding", "chunked", "linear", "conv", "hybrid", "cross", "shared", "none"),
               "transformers quantises full attention alone")  # fmt: skip
        numbers = sum(layer.row * tokens for layer in model.layers)
        return round(numbers * grouped_bits(self.bits, self.group)) // 8

    def peak(self, model: Model, tokens: int) -> int:
        newest = sum(size(layer.row * min(self.residual, tokens), model.dtype) for layer in model.layers)
        widest = max((size(layer.row * tokens, model.dtype) for layer in model.layers), default=0)
        return self.held(model, tokens) + newest + widest


def grouped_bits(bits: int, group: int, scale: int = 16, zero: int = 16) -> float:
    """Bits of a number that is quantised in groups with a scale and a zero of their own.

    >>> grouped_bits(4, 128)
    4.25
    """
    return bits + (scale + zero) / group
