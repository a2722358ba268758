"""Window: recent-only, the oldest token goes first.

Idea: what was read last matters most. The baseline that StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453, section
3.1) calls window attention; models whose attention leans on the first token collapse when it is evicted.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.policy import Entries, Policy


@dataclass(frozen=True)
class Window(Policy):
    """Evicts the oldest token: a layer holds the newest `budget` tokens of the stream."""

    convention: ClassVar[str] = "cache"

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return torch.zeros(entries.positions.shape, device=entries.positions.device)  # of equals, the newer stays
