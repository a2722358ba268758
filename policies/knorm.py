"""Knorm: the tokens whose keys are short.

Idea: in many models a key of small norm goes with much attention, whatever the query.
Source: Devoto, Zhao, Scardapane, Minervini, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
EMNLP 2024, section 3, arXiv 2406.11430. Reference code: github.com/alessiodevoto/l2compress, commit f93d6ca.

Differs: the paper leaves the first two layers uncompressed and keeps a share of the prompt; here every layer has its
budget. `num_sinks` and `recent` are ours, and a stream needs both. Models that normalise keys defeat the idea.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class Knorm(Policy):
    """Evicts the token with the longest key.

    Raises ValueError if the protected tokens fill the budget.
    """

    num_sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        whole("num_sinks", self.num_sinks)
        whole("recent", self.recent)

    def watch(self) -> Watch:
        return Watch(keys=True)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        wide = torch.promote_types(entries.keys.dtype, torch.float32)
        return protected(-entries.keys.to(wide).norm(dim=-1), entries, self.num_sinks, self.recent)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self.recent)
