"""KeyDiff: the tokens whose keys are least like the others.

Idea: keys that point away from the mean direction belong to tokens that attention singles out; no query is needed.
Source: Park, Jones, Morse, Goel, Lee, Lott, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
Inference in Resource-Constrained Environments", 2025, section 3, arXiv 2504.15364. Reference code: that of
github.com/NVIDIA/kvpress, commit 8bb29b9.

Differs: the mean direction is that of the tokens held when the policy is asked, the step's own included; the paper
reads blocks of 128. `num_sinks` and `recent` are ours.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Evicts the token whose key has the greatest cosine with the mean direction of all keys held.

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
        directions = key_directions(entries)
        anchor = F.normalize(directions.sum(dim=2, keepdim=True), dim=-1)
        return protected(-(directions * anchor).sum(dim=-1), entries, self.num_sinks, self.recent)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self.recent)


def key_directions(entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len head_dim"]:
    """Keys of length 1, in float32 at least; 0 where there is no token."""
    wide = entries.keys.to(torch.promote_types(entries.keys.dtype, torch.float32))
    return F.normalize(wide.masked_fill(~entries.valid[..., None], 0), dim=-1)
