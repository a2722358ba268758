"""What the layers of a model store: kinds, sizes in values and bytes. No tensor is needed to say it, nor torch.

A layer stores of each token a row of keys and one of values, for as long as its kind says; or of each conversation a
state of fixed size; or both; or nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "nope", "sliding", "chunked", "mla", "linear", "conv", "hybrid", "cross", "shared", "none"]

KINDS: dict[Kind, str] = {
    "full": "every token, for as long as the conversation",
    "nope": "every token, without a position",
    "sliding": "the newest tokens, as many as its window",
    "chunked": "the tokens of its chunk, or as many",
    "mla": "of every token one latent for all heads (multi-head latent attention)",
    "linear": "a state of fixed size (linear attention, state-space models)",
    "conv": "the last inputs of a short convolution",
    "hybrid": "every token, and a state of fixed size",
    "cross": "the tokens of another sequence: an encoder's, or an image's",
    "shared": "nothing: it reads an earlier layer's keys",
    "none": "nothing: it has no attention",
}

# Bytes of a block of so many values. Blocks of 32 with their scales: llama.cpp, ggml-common.h.
FORMATS: dict[str, tuple[int, int]] = {
    "f64": (8, 1),
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "fp8": (1, 1),
    "q8_0": (34, 32),
    "q5_1": (24, 32),
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
}

_MOST_TOKENS = 2**62
FLOATS = ("f64", "f32", "f16", "bf16")  # what a model computes in, and its cache by default


@dataclass(frozen=True)
class State:
    """What does not grow: the last `kernel` inputs of a convolution in `channels`, and `recurrent` numbers.

    `wide`: those are float32, whatever the model's dtype.
    """

    channels: int
    kernel: int
    recurrent: int = 0
    wide: bool = True


@dataclass(frozen=True)
class Layer:
    """One layer, of one conversation.

    `key_dim`, `value_dim`: numbers stored of a token in each of `kv_heads`, which `heads` query heads read. `rotary`:
    channels of a key that turn with its position. `window`: tokens a query sees at most, itself included. `extra`:
    numbers stored of a token beside keys and values (an indexer's keys). `unpacked`: numbers of a token, were latents
    stored as each head's keys and values.
    """

    kind: Kind
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    rotary: int = 0
    window: int | None = None
    state: State | None = None
    extra: int = 0
    unpacked: int = 0

    @property
    def row(self) -> int:
        """Numbers stored of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim) + self.extra

    @property
    def grows(self) -> bool:
        """Whether it stores every token of the conversation."""
        return self.kind in ("full", "nope", "mla", "hybrid")

    @property
    def slides(self) -> bool:
        """Whether it stores the newest tokens alone."""
        return self.kind in ("sliding", "chunked")


@dataclass(frozen=True)
class Model:
    """The layers that a cache has, and what else of a model a plan needs.

    `assumed`: what the source did not say, and where it was taken from. `parameters`: how many weights, `weights`:
    their bytes as they are stored; None where the source does not tell.
    """

    name: str
    layers: tuple[Layer, ...]
    dtype: str = "bf16"
    model_type: str = ""
    max_length: int | None = None
    parameters: int | None = None
    weights: int | None = None
    assumed: tuple[str, ...] = ()


def size(numbers: int, dtype: str) -> int:
    """Bytes of so many numbers stored as `dtype`; raises ValueError where they fill no whole block.

    >>> size(1024, "q8_0")
    1088
    """
    if dtype not in FORMATS:
        raise ValueError(f"no cache is known that is stored as {dtype!r}: give one of {', '.join(FORMATS)}")
    block_bytes, block = FORMATS[dtype]
    if numbers % block:
        raise ValueError(f"{dtype} stores blocks of {block} numbers, and a row here has {numbers}: use f16")
    return numbers // block * block_bytes


def per_token(layers: Iterable[Layer], dtype: str) -> int:
    """Bytes that one more token of a long conversation takes: of the layers that grow."""
    return sum(size(layer.row, dtype) for layer in layers if layer.grows)


def unbounded(layers: Iterable[Layer], dtype: str) -> int:
    """Bytes of one token if every layer that stores tokens stored all of them."""
    return sum(size(layer.row, dtype) for layer in layers if layer.grows or layer.slides)


def within_window(layers: Iterable[Layer], tokens: int, dtype: str) -> int:
    """Bytes of the keys and values that some later query can see: windows hold no more than their size."""
    return sum(size(layer.row, dtype) * visible(layer, tokens) for layer in layers)


def visible(layer: Layer, tokens: int) -> int:
    """Of so many tokens, those that a layer's next query can see."""
    if layer.grows:
        return tokens
    return min(tokens, layer.window or tokens) if layer.slides else 0


def state_bytes(state: State, dtype: str, columns: int, wide: str = "f32") -> int:
    """Bytes of a state: `columns` inputs of the convolution in `dtype`, the recurrent part in `wide` if it is wide."""
    return size(state.channels * columns, dtype) + size(state.recurrent, wide if state.wide else dtype)


def tally(layers: Iterable[Layer]) -> dict[Kind, int]:
    """How many layers there are of each kind, in the order of `KINDS`."""
    each = [layer.kind for layer in layers]
    return {kind: each.count(kind) for kind in KINDS if kind in each}


def check_tokens(name: str, tokens: int, least: int = 1) -> None:
    """Raises ValueError unless `tokens` is a whole number of at least `least`."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < least:
        raise ValueError(f"{name} must be a whole number of tokens, {least} or more, got {tokens!r}")
    if tokens > _MOST_TOKENS:
        raise ValueError(f"{name} must be at most 2**62 tokens, got a number of {len(str(tokens))} digits")
