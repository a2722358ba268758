"""What one step asks of each layer: decided once by the book of slots, done by every layer's store."""

from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from sinkcache.positions import Rotation
from sinkcache.store import At, Index


@dataclass(frozen=True)
class Turns:
    """Keys to read at another position: `slots` (all below `top`) turned by `moves` tokens from how they arrived.

    `moves` is int64 `[slots]`, or `[1]` where all are alike; `fresh` are the slots that turn for the first time.
    """

    slots: Index | At
    fresh: Index | At | None
    top: int
    moves: Int[Tensor, " moved"]
    _phases: dict = field(default_factory=dict, repr=False, compare=False)

    def phase(self, rotation: Rotation, like: Tensor) -> Tensor:
        """The factors for `rotation`, complex `[slots or 1, freq]`; computed once per device for all layers."""
        key = (id(rotation), like.device, like.dtype)
        if key not in self._phases:
            self._phases[key] = rotation.phase(self.moves, like)
        return self._phases[key]


@dataclass(frozen=True)
class Step:
    """What a layer does with `q_len` new tokens, the first of which is at stream position `start`.

    Before attention: `dropped` is evicted, `turns` are applied. After: the new tokens `sources` are in slots `targets`
    and the first `length` slots are in use. `in_place`: everything attended to is held afterwards. Where rows differ,
    slots and sources are `At` and `dropped` is None: a mask hides what a row has dropped or does not have. `order`: the
    held slots in the order of their positions, for a model that goes by order.
    """

    start: int
    q_len: int
    held: int
    dropped: int | None
    turns: Turns | None
    targets: Index | At
    sources: Index | At
    length: int
    in_place: bool
    order: Int[Tensor, " held"] | None = None
