"""StreamingLLM: the first tokens of the stream as attention sinks, and a rolling window of the newest.

Idea: softmax attention must put its mass somewhere, and trained models put the surplus on the first tokens; with those
evicted the model collapses, with those kept it reads on without end. It does not remember what left the window.
Source: Xiao, Tian, Chen, Han, Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, section
3.2, arXiv 2309.17453. Reference code: github.com/mit-han-lab/streaming-llm, commit 2e50426.

Differs: the paper's code evicts for a whole chunk before the chunk attends; here a chunk attends to what is held and
the layer is reduced to its budget afterwards. Token by token the two are the same.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.policy import Entries, Policy


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Never evicts the first `num_sinks` tokens of the stream; of the rest, evicts the oldest.

    Raises ValueError if `num_sinks` is negative, or not less than the budget it meets.
    """

    num_sinks: int = 4

    convention: ClassVar[str] = "cache"

    def __post_init__(self) -> None:
        if not isinstance(self.num_sinks, int) or isinstance(self.num_sinks, bool) or self.num_sinks < 0:
            raise ValueError(f"num_sinks must be a whole number, 0 or more, got {self.num_sinks!r}")

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        alike = torch.zeros(entries.positions.shape, device=entries.positions.device)  # of equals, the newer stays
        return alike.masked_fill(entries.positions < self.num_sinks, torch.inf)

    def check(self, budget: int) -> None:
        if self.num_sinks >= budget:
            raise ValueError(
                f"num_sinks must be less than the budget, got num_sinks={self.num_sinks} with budget={budget}: "
                "raise the budget or use fewer sinks"
            )
