"""H2O: the heavy hitters, tokens that have received most attention so far, and the newest.

Idea: few tokens receive most of the attention, and those which did so far go on receiving it.
Source: Zhang, Sheng, Zhou, Chen, Zheng, Cai, Song, Tian, Ré, Barrett, Wang, Chen, "H2O: Heavy-Hitter Oracle for
Efficient Generative Inference of Large Language Models", NeurIPS 2023, section 4, arXiv 2306.14048. Forgetting: Jo,
Shin, "A2SF", 2024, arXiv 2407.20485. Reference code: github.com/FMInference/H2O, commit ac75c2a.

Differs: the paper gives each half of the budget B to the heavy and to the newest: `recent=B // 2`; here the newest get
a fixed number. Its sum favours old tokens, which have had more queries; `half_life` (A2SF) and `reduce="mean"` remedy
that. It has no grouped heads (here: their mean), and the code of its evaluations lets later queries count.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class H2O(Policy):
    """Evicts the token that has received the least attention since it was read; never the newest `recent`.

    `half_life`: after so many queries, attention counts half; None for always in full. `reduce="mean"` divides by the
    queries a token has had, each at its weight. Raises ValueError if the protected tokens fill the budget.
    """

    recent: int = 32
    num_sinks: int = 0
    half_life: int | float | None = None
    reduce: Literal["sum", "mean"] = "sum"
    group: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        whole("recent", self.recent)
        whole("num_sinks", self.num_sinks)
        if self.half_life is not None and not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life must be more than 0 queries, got {self.half_life}: None is no decay")
        if self.reduce not in ("sum", "mean"):
            raise ValueError(f'reduce must be "sum" or "mean", got {self.reduce!r}')
        self.watch()

    def watch(self) -> Watch:
        return Watch(mass=True, decay=1.0 if self.half_life is None else 0.5 ** (1 / self.half_life), group=self.group)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        mass = entries.mass if self.reduce == "sum" else entries.mass / self._queries(entries).to(entries.mass.dtype)
        return protected(mass, entries, self.num_sinks, self.recent)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self.recent)

    def _queries(self, entries: Entries) -> Tensor:
        if self.half_life is None:
            return entries.ages
        rate = math.log(2) / self.half_life
        return (entries.ages.to(entries.mass.dtype) * -rate).expm1() / math.expm1(-rate)
