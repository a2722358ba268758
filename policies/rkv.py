"""RKV: the tokens that the newest queries attend to and whose keys are not like others.

Idea: long reasoning repeats itself, and attention favours all the repetitions; what others say too may go.
Source: Cai, Xiao, Sun, Luo, Zhang, Wan, Li, Zhou, Chang, Gu, Dong, Anandkumar, Asi, Hu, "R-KV: Redundancy-aware KV
Cache Compression for Reasoning Models", NeurIPS 2025, section 3, arXiv 2505.24133. Reference code:
github.com/Zefan-Cai/R-KV, commit d15c976.

Differs: the code takes the greatest logit of the grouped heads, a softmax over the past alone, and the redundancy of
the first row for the whole batch; here probabilities are averaged over the group, and each row has its own. Where
nothing is similar to a token, the code strikes out the first column, and so protects token 0; here nothing is. Evicts
in every step over the budget, not every 128. Its two terms scale differently with the budget, and so does `weight`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.policies.keydiff import key_directions
from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policies.snapkv import odd, pooled
from sinkcache.policy import Entries, Policy, Watch

BLOCK = 512  # keys compared with all others at a time


@dataclass(frozen=True)
class RKV(Policy):
    """Evicts the token of least `weight * attention - (1 - weight) * redundancy`; never the newest it observes with.

    Redundancy is the share of a key's mean cosine with all others; each key leaves out its newest likeness, of cosine
    above `likeness`, so that one of them stays. Takes 12 bytes per head, key held and key in a block of 512.
    Raises ValueError if the protected tokens fill the budget.
    """

    observation_window: int = 8
    kernel: int = 7
    weight: int | float = 0.1
    likeness: int | float = 0.5
    num_sinks: int = 0

    def __post_init__(self) -> None:
        whole("observation_window", self.observation_window, least=1)
        odd("kernel", self.kernel)
        whole("num_sinks", self.num_sinks)
        for name in ("weight", "likeness"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")

    def watch(self) -> Watch:
        return Watch(window=self.observation_window, keys=True)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        window = self.observation_window
        attention = pooled(entries.window / window, entries, window, self.kernel, "max")
        likeness = _mean_cosine(key_directions(entries), entries.positions, self.likeness)
        redundancy = likeness.masked_fill(~entries.valid, torch.finfo(likeness.dtype).min).softmax(dim=-1)
        scores = self.weight * attention - (1 - self.weight) * redundancy
        return protected(scores, entries, self.num_sinks, window)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self.observation_window)


def _mean_cosine(
    directions: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    positions: Int[Tensor, "batch num_kv_heads kv_len"],
    likeness: int | float,
) -> Float[Tensor, "batch num_kv_heads kv_len"]:
    """Of each token the mean cosine with all tokens, without itself and those whose newest likeness it is."""
    total = torch.zeros_like(directions[..., 0])
    for start in range(0, directions.shape[2], BLOCK):
        cosine = directions[:, :, start : start + BLOCK] @ directions.mT
        cosine.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
        position, newest = positions[:, :, None].where(cosine > likeness, -1).max(dim=-1)
        spared = cosine.gather(-1, newest[..., None])[..., 0].masked_fill(position < 0, 0)
        total += cosine.sum(dim=2).scatter_add(-1, newest, -spared)
    return total / (positions >= 0).sum(dim=-1, keepdim=True)
