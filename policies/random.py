"""Random: any token goes, with equal chance; the baseline that a policy must beat.

Idea: each position has a score drawn once and for all, by hashing it (Wellons, "Prospecting for Hash Functions", 2018,
whose rounds these are, with other constants). So one seed keeps the same tokens however a stream is cut into steps, and
in every head and layer.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.policies.protect import protected, whole
from sinkcache.policy import Entries, Policy

LOW = 2**32 - 1


@dataclass(frozen=True)
class Random(Policy):
    """Evicts the token whose position has the lowest of random scores, uniform in [0, 1); `seed` draws others."""

    seed: int = 0

    def __post_init__(self) -> None:
        whole("seed", self.seed)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        start = int(_mix(torch.tensor(self.seed + 1 & LOW)))
        hashed = _mix(_mix(entries.positions.long() + start))
        return protected((hashed >> 8).float() / 2**24, entries, num_sinks=0, recent=0)


def _mix(numbers: Int[Tensor, "*dims"]) -> Int[Tensor, "*dims"]:
    """Scatters whole numbers over [0, 2 ** 32), one to one; products stay below 2 ** 63."""
    numbers = numbers & LOW
    for constant in (0x7FEB352D, 0x31848BAB):
        numbers = ((numbers ^ (numbers >> 16)) * constant) & LOW
    return numbers ^ (numbers >> 16)
