"""What an eviction policy is: a score for every token a layer holds, of which the greatest are kept.

A policy is a frozen dataclass of hyperparameters with one method. It owns no tensor, so one object serves every layer
and every stream, compares by `==` and pickles: what a token has received lives in the cache and moves with the token. A
policy that reads more than positions says in `watch` what it wants to be told. The budget belongs to the cache.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkcache.positions import Rotation


@dataclass(frozen=True)
class Watch:
    """What a policy reads of each token beside its position; what it does not ask for is neither computed nor stored.

    `mass`: the attention a token has received since it was read, itself included, summed over queries; each query
    counts `decay` times the one after it; 0: the last query alone.
    `window`: the attention it receives from the newest `window` queries, over the tokens held now; `reduce` says
    whether their sum or the greatest of them.
    `group`: of the query heads that share a key head, the mean probability of each query, or the greatest.
    `keys`, `values`: what is stored of a token, keys as the next query reads them.
    `queries`: the mean and covariance of all queries from stream position `skip` on, before their rotation.
    `layer`: which layer it is that asks; else layers may ask at once, as rows of one batch.
    """

    mass: bool = False
    decay: float = 1.0
    window: int = 0
    reduce: Literal["sum", "max"] = "sum"
    group: Literal["mean", "max"] = "mean"
    keys: bool = False
    values: bool = False
    queries: bool = False
    skip: int = 0
    layer: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        for name in ("window", "skip"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if self.reduce not in ("sum", "max") or self.group not in ("mean", "max"):
            raise ValueError(f'reduce is "sum" or "max" and group "mean" or "max", got {self.reduce!r}, {self.group!r}')

    @property
    def attention(self) -> bool:
        """Whether queries must be seen, so that the model's attention has to be one of ours."""
        return self.mass or self.window > 0 or self.queries

    @property
    def anything(self) -> bool:
        """Whether a policy reads more than positions, so that each layer, row and head decides for itself."""
        return self.attention or self.own

    @property
    def own(self) -> bool:
        """Whether a policy reads what each layer has for itself, so that layers cannot ask at once."""
        return self.window > 0 or self.queries or self.keys or self.values or self.layer


@dataclass(frozen=True)
class Queries:
    """What is known of a layer's queries: moments of them as they would be at position 0, in float32.

    `position`: where the next query will be rotated to, an int or int64 `[batch, 1, 1]`; `rotation`: how, None where
    keys carry no position.
    """

    mean: Float[Tensor, "batch num_heads head_dim"]
    covariance: Float[Tensor, "batch num_heads head_dim head_dim"]
    position: int | Tensor
    rotation: Rotation | None


@dataclass(frozen=True)
class Entries:
    """The tokens a layer holds, as a policy sees them; slots are in no particular order.

    `positions` counts from 0 at the start of the stream, -1 where a row of a padded batch has no token. `seen` is the
    number of tokens read when the policy is asked, these included: an int, or int64 `[batch, 1, 1]` where rows differ.
    `new`: how many tokens the last step had; `layer`: which layer asks, from 0.
    The other properties raise AttributeError unless the policy's `watch` asks for them.
    """

    positions: Int[Tensor, "batch num_kv_heads kv_len"]
    seen: int | Tensor
    new: int = 1
    layer: int = 0
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def ages(self) -> Int[Tensor, "batch num_kv_heads kv_len"]:
        """How many queries each token has had, its own included: 1 for the newest."""
        return self.seen - self.positions

    @property
    def valid(self) -> Bool[Tensor, "batch num_kv_heads kv_len"]:
        """Where there is a token; scores elsewhere do not matter, but sums and extremes must leave them out."""
        return self.positions >= 0

    @property
    def mass(self) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        """Attention received from all queries so far, float32."""
        return self._told("mass", "mass=True")

    @property
    def window(self) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        """Attention received from the newest queries, float32."""
        return self._told("window", "window=32")

    @property
    def keys(self) -> Float[Tensor, "batch num_kv_heads kv_len head_dim"]:
        """Keys, rotated."""
        return self._told("keys", "keys=True")

    @property
    def values(self) -> Float[Tensor, "batch num_kv_heads kv_len value_dim"]:
        """Values."""
        return self._told("values", "values=True")

    @property
    def queries(self) -> Queries:
        """Moments of the queries so far."""
        return self._told("queries", "queries=True")

    def _told(self, name: str, way: str) -> Any:
        if name not in self.told:
            raise AttributeError(f"entries.{name} was not asked for: have the policy's watch() return Watch({way})")
        return self.told[name]


@dataclass(frozen=True)
class Policy(ABC):
    """An eviction policy; write your own by subclassing it with `@dataclass(frozen=True)` and one `score`.

    `convention` is the position convention ("cache" or "original") a cache uses unless it is told another.
    `across_heads`: the heads of a layer compete, so scores must mean the same in all of them; such a policy has a field
    `floor`, the share of its budget that each head keeps in any case.
    """

    convention: ClassVar[str] = "original"
    across_heads: ClassVar[bool] = False

    @abstractmethod
    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        """The worth of each token: greater is kept, `inf` is never evicted while any other can be, NaN is an error."""

    def watch(self) -> Watch:
        """What `score` reads beside positions."""
        return Watch()

    def check(self, budget: int) -> None:  # noqa: B027 - optional: most policies can live with any budget
        """Raises ValueError if this policy cannot do its work within `budget` tokens."""


def score(policy: Policy, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
    """What `policy` makes of `entries`; raises ValueError unless that is one real number for each."""
    scores: Any = policy.score(entries)
    if not isinstance(scores, Tensor):
        raise ValueError(f"{policy!r} scored a {type(scores).__name__}: return a tensor, one score for each entry")
    if scores.shape != entries.positions.shape:
        raise ValueError(
            f"{policy!r} scored shape {tuple(scores.shape)} for {tuple(entries.positions.shape)} tokens: return one "
            "score for each entry"
        )
    if scores.is_complex():
        raise ValueError(f"{policy!r} scored {scores.dtype}: return real numbers, which can be compared")
    return scores if scores.is_floating_point() else scores.float()


def keep(
    scores: Float[Tensor, "batch num_kv_heads kv_len"],
    positions: Int[Tensor, "batch num_kv_heads kv_len"],
    budget: int,
) -> Int[Tensor, "batch num_kv_heads kept"]:
    """Indices into `kv_len`, ascending, of the `budget` greatest scores; of equal scores the newer token stays.

    Raises ValueError if a score is NaN.
    """
    check_scores(scores)
    return ranked(scores, positions)[..., :budget].sort(dim=-1).values


def ranked(
    scores: Float[Tensor, "batch num_kv_heads kv_len"], positions: Int[Tensor, "batch num_kv_heads kv_len"]
) -> Int[Tensor, "batch num_kv_heads kv_len"]:
    """Indices into `kv_len` by score, the greatest first; of equal scores the newer token first."""
    by_age = positions.argsort(dim=-1, descending=True)
    return by_age.gather(-1, scores.gather(-1, by_age).argsort(dim=-1, descending=True, stable=True))


def weakest(scores: Float[Tensor, "*heads kv_len"], positions: Int[Tensor, "*heads kv_len"]) -> Int[Tensor, "*heads"]:
    """The index of the one token that `keep` would not keep if all others stay: of equal scores, the oldest."""
    lowest = scores.amin(dim=-1, keepdim=True)
    return positions.masked_fill(scores != lowest, torch.iinfo(positions.dtype).max).argmin(dim=-1)


def check_scores(scores: Tensor) -> None:
    """Raises ValueError if a score is NaN."""
    if scores.isnan().any():
        raise ValueError("a policy scored NaN: scores must be comparable, use -inf for what should go first")
