"""SnapKV: the tokens that the newest queries attend to, with their neighbours.

Idea: what the last queries of a prompt look at is what the answer will look at; averaging over neighbours keeps
passages whole.
Source: Li, Huang, Yang, Venkitesh, Locatelli, Ye, Cai, Lewis, Chen, "SnapKV: LLM Knows What You are Looking for Before
Generation", NeurIPS 2024, section 4, arXiv 2404.14469. Reference code: github.com/FasterDecoding/SnapKV, commit
e216ddc. MorphKV (Ghadia et al., 2025, arXiv 2503.00979) is nearly `SnapKV(pooling="none", reduce="max")`.

Differs: the paper compresses a prompt once; here every step over the budget evicts, by the newest `observation_window`
queries. Grouped heads share one choice, by their mean probability (MorphKV: the softmax of summed logits). Averages
leave out what is beyond the ends, which the paper's code counts as zeros: that leaves the first token, often the sink,
60% of its score. In streaming, `pooling="none"` recovered more attention (SmolLM2-135M, budget 192: 0.916 and 0.894).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class SnapKV(Policy):
    """Evicts the token that the newest queries attend to least; never the newest `recent`, which do not pool.

    `kernel`: tokens that pool, in order of position. `recent=None` is `observation_window`.
    Raises ValueError if the protected tokens fill the budget.
    """

    observation_window: int = 32
    kernel: int = 5
    pooling: Literal["avg", "max", "none"] = "avg"
    reduce: Literal["sum", "max"] = "sum"
    group: Literal["mean", "max"] = "mean"
    num_sinks: int = 0
    recent: int | None = None

    def __post_init__(self) -> None:
        whole("observation_window", self.observation_window, least=1)
        odd("kernel", self.kernel)
        whole("num_sinks", self.num_sinks)
        whole("recent", self._recent)
        if self.pooling not in ("avg", "max", "none"):
            raise ValueError(f'pooling must be "avg", "max" or "none", got {self.pooling!r}')
        self.watch()

    @property
    def _recent(self) -> int:
        return self.observation_window if self.recent is None else self.recent

    def watch(self) -> Watch:
        return Watch(window=self.observation_window, reduce=self.reduce, group=self.group)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        scores = entries.window
        if self.pooling != "none":
            scores = pooled(scores, entries, self._recent, self.kernel, self.pooling)
        return protected(scores, entries, self.num_sinks, self._recent)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self._recent)


def pooled(
    scores: Float[Tensor, "batch num_kv_heads kv_len"],
    entries: Entries,
    recent: int,
    kernel: int,
    pooling: Literal["avg", "max"],
) -> Float[Tensor, "batch num_kv_heads kv_len"]:
    """Each score's average or maximum with its neighbours by position, of all tokens but the newest `recent`.

    What is returned for those, and where there is no token, means nothing.
    """
    past = entries.valid & (entries.ages > recent)
    order = entries.positions.masked_fill(~past, torch.iinfo(entries.positions.dtype).max).argsort(dim=-1)
    there, ranked = past.gather(-1, order), scores.gather(-1, order)
    if pooling == "max":
        ranked = F.max_pool1d(ranked.masked_fill(~there, -torch.inf), kernel, stride=1, padding=kernel // 2)
    else:
        total = F.avg_pool1d(ranked.masked_fill(~there, 0), kernel, stride=1, padding=kernel // 2)
        share = F.avg_pool1d(there.to(ranked.dtype), kernel, stride=1, padding=kernel // 2)
        ranked = total / share.clamp(min=0.5 / kernel)
    return torch.empty_like(ranked).scatter(-1, order, ranked)


def odd(name: str, number: int) -> None:
    """Raises ValueError unless `number` is odd, so that as many neighbours pool on either side."""
    whole(name, number, least=1)
    if number % 2 == 0:
        raise ValueError(f"{name} must be odd, as many neighbours on either side, got {number}")
