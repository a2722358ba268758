"""TOVA: the tokens that the last query attends to.

Idea: a transformer with a bounded cache is a recurrent network; let its last query decide what the state forgets. The
newest token competes like any other, and all heads of a layer keep the same tokens.
Source: Oren, Hassid, Yarden, Adi, Schwartz, "Transformers are Multi-State RNNs", EMNLP 2024, section 3, arXiv
2401.06104. Reference code: github.com/schwartz-lab-NLP/TOVA, commit 9c7d09b.

Differs: the newest token of a step outlives that step, whatever its score, and competes before the next; the paper's
code may drop it at once. `per="head"` lets each key head decide, for which the paper has worse perplexities. Both
`num_sinks` and `recent` are ours. In the paper's extrapolation gaps between positions shrink; here they do not.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policy import Entries, Policy, Watch


@dataclass(frozen=True)
class TOVA(Policy):
    """Evicts the token that the last query attends to least, on average over the layer's heads or per key head.

    Raises ValueError if the protected tokens fill the budget.
    """

    per: Literal["layer", "head"] = "layer"
    num_sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        if self.per not in ("layer", "head"):
            raise ValueError(f'per must be "layer" or "head", got {self.per!r}')
        whole("num_sinks", self.num_sinks)
        whole("recent", self.recent)

    def watch(self) -> Watch:
        return Watch(mass=True, decay=0.0)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        last = entries.mass
        if self.per == "layer":
            alike = bool((entries.positions == entries.positions[:, :1]).all())  # as long as all were evicted so
            last = last.mean(dim=1, keepdim=True).expand_as(last) if alike else _over_heads(last, entries.positions)
        return protected(last, entries, self.num_sinks, self.recent)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self.recent)


def _over_heads(
    received: Float[Tensor, "batch num_kv_heads kv_len"], positions: Int[Tensor, "batch num_kv_heads kv_len"]
) -> Float[Tensor, "batch num_kv_heads kv_len"]:
    """Each token's mean over heads, whatever slot it has in each; a head that has evicted it gives it none."""
    flat = positions.flatten(1)
    order = flat.argsort(dim=-1, stable=True)
    ranked = flat.gather(-1, order)
    token = torch.zeros_like(order)
    token[:, 1:] = (ranked[:, 1:] != ranked[:, :-1]).cumsum(dim=-1)
    totals = torch.zeros_like(flat, dtype=received.dtype)
    totals.scatter_add_(-1, token, received.flatten(1).gather(-1, order))
    means = torch.empty_like(totals).scatter(-1, order, totals.gather(-1, token)) / positions.shape[1]
    return means.unflatten(1, positions.shape[1:])
