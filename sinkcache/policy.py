"""What an eviction policy is: a score for every token a layer holds, of which the greatest are kept.

A policy is a frozen dataclass of hyperparameters with one method. It owns no tensor, so one object serves every layer
and every stream, compares by `==` and pickles. The budget is not the policy's: it belongs to the cache.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Entries:
    """The tokens a layer holds, as a policy sees them; slots are in no particular order.

    `positions` counts from 0 at the start of the stream; `seen` is the number of tokens read when the policy is asked,
    these included.
    """

    positions: Int[Tensor, "batch num_kv_heads kv_len"]
    seen: int


@dataclass(frozen=True)
class Policy(ABC):
    """An eviction policy; write your own by subclassing it with `@dataclass(frozen=True)` and one `score`.

    `convention` is the position convention ("cache" or "original") a cache uses unless it is told another.
    """

    convention: ClassVar[str] = "original"

    @abstractmethod
    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        """The worth of each token: greater is kept, `inf` is never evicted while any other can be, NaN is an error."""

    def check(self, budget: int) -> None:  # noqa: B027 - optional: most policies can live with any budget
        """Raises ValueError if this policy cannot do its work within `budget` tokens."""


def keep(
    scores: Float[Tensor, "batch num_kv_heads kv_len"],
    positions: Int[Tensor, "batch num_kv_heads kv_len"],
    budget: int,
) -> Int[Tensor, "batch num_kv_heads kept"]:
    """Indices into `kv_len`, ascending, of the `budget` greatest scores; of equal scores the newer token stays.

    Raises ValueError if a score is NaN.
    """
    _check(scores)
    by_age = positions.argsort(dim=-1)
    by_worth = scores.gather(-1, by_age).argsort(dim=-1, stable=True)
    best = by_age.gather(-1, by_worth)[..., max(scores.shape[-1] - budget, 0) :]
    return best.sort(dim=-1).values


def weakest(scores: Float[Tensor, " kv_len"], positions: Int[Tensor, " kv_len"]) -> int:
    """The index of the one token that `keep` would not keep if all others stay: of equal scores, the oldest.

    Raises ValueError if a score is NaN.
    """
    _check(scores)
    return int(positions.masked_fill(scores != scores.min(), torch.iinfo(positions.dtype).max).argmin())


def _check(scores: Tensor) -> None:
    if scores.isnan().any():
        raise ValueError("a policy scored NaN: scores must be comparable, use -inf for what should go first")
