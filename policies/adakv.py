"""AdaKV: the heads of a layer compete for its budget.

Idea: some heads attend to a few tokens, others to many; a budget shared by the greatest scores of all heads loses less
attention than the same number for each.
Source: Feng, Lv, Cao, Xie, Zhou, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", NeurIPS 2025, section 3, arXiv 2407.11550. Reference code: github.com/FFY0/AdaKV.

Differs: the code rounds each head's share to a number of its own, so that a layer holds up to 4 tokens less or 1 more
than its budget, and compresses prompts alone, one at a time; here all heads of a row and layer hold exactly
`num_kv_heads * budget`, in every step. Its guarantee is added to what a head wins; here it is the least a head keeps.
Heads of one layer compete, not layers. What has no number to compare heads by, such as StreamingLLM, is as it was.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class AdaKV(Policy):
    """Scores as `policy` does, but evicts the token of least score of all the heads of a layer.

    Each head keeps the best `floor` of its budget in any case. Scores must mean the same in every head: attention, a
    probability, does (H2O, SnapKV, TOVA with `per="head"`). Norms do not (Knorm, ExpectedAttention), nor does what is
    counted against the head's other tokens (KeyDiff, LagKV, RKV).
    Raises ValueError if `floor` is not in (0, 1], or is less than one token of the budget it meets.
    """

    policy: Policy
    floor: int | float = 0.5

    across_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise ValueError(f"policy must be a policy object, such as H2O(), got {self.policy!r}")
        if isinstance(self.floor, bool) or not isinstance(self.floor, (int, float)) or not 0 < self.floor <= 1:
            raise ValueError(f"floor must be a share of the budget, in (0, 1], got {self.floor!r}")

    @property
    def convention(self) -> str:  # type: ignore[override]  # that of the policy held
        return self.policy.convention

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return self.policy.score(entries)

    def watch(self) -> Watch:
        return self.policy.watch()

    def check(self, budget: int) -> None:
        self.policy.check(budget)
        if self.floor * budget < 1:
            raise ValueError(
                f"floor must leave each head one token at least, got floor={self.floor} with budget={budget}: raise "
                f"it to {1 / budget:.3g}, or the budget"
            )
