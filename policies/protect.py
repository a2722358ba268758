"""Protect: tokens that another policy may not evict.

Idea: nearly every score is better with the first tokens and the newest ones out of its reach; published policies differ
in which they protect, and this makes it a choice. The sinks are those of StreamingLLM (Xiao et al., ICLR 2024, arXiv
2309.17453), the recent half that of H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class Protect(Policy):
    """Scores as `policy` does, but never evicts the first `num_sinks` tokens of the stream and the newest `recent`.

    Raises ValueError if a count is negative, or both do not leave room for one token in the budget they meet.
    """

    policy: Policy
    num_sinks: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise ValueError(f"policy must be a policy object, such as KeyDiff(), got {self.policy!r}")
        whole("num_sinks", self.num_sinks)
        whole("recent", self.recent)

    @property
    def convention(self) -> str:  # type: ignore[override]  # that of the policy held
        return self.policy.convention

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return protected(self.policy.score(entries), entries, self.num_sinks, self.recent)

    def watch(self) -> Watch:
        return self.policy.watch()

    def check(self, budget: int) -> None:
        self.policy.check(budget)
        check_room(budget, self.num_sinks, self.recent)


def protected(
    scores: Float[Tensor, "batch num_kv_heads kv_len"], entries: Entries, num_sinks: int, recent: int
) -> Float[Tensor, "batch num_kv_heads kv_len"]:
    """`scores` with `inf` for the first `num_sinks` tokens of the stream and its newest `recent`, `-inf` for none."""
    safe = (entries.positions < num_sinks) | (entries.ages <= recent)
    return scores.masked_fill(safe, torch.inf).masked_fill(~entries.valid, -torch.inf)


def check_room(budget: int, num_sinks: int, recent: int) -> None:
    """Raises ValueError unless one token more than those protected fits: a layer makes room before each step."""
    if num_sinks + recent >= budget:
        raise ValueError(
            "num_sinks + recent must be less than the budget, "
            f"got {num_sinks} + {recent} with budget={budget}: raise the budget or protect fewer tokens"
        )


def whole(name: str, number: object, least: int = 0) -> None:
    """Raises ValueError unless `number` is a whole number, `least` or more."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, got {number!r}")
