"""LagKV: the tokens that stand out against those which follow.

Idea: what is held is cut into chunks; each channel of a chunk is normalised by the range it has in the next chunk, and
tokens whose channels then spread most, in keys and in values, carry what the next chunk does not. No query is needed.
Source: Liang, Zhang, Li, Li, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", 2025,
section 2, arXiv 2504.04704. Reference code: github.com/AI-Lab-China-Merchants-Bank/LagKV, commit 2a9d19e.

Differs: the paper keeps the same share of each chunk for good, so its cache grows with the stream. Here survivors are
chunked anew whenever the policy is asked, and all chunks compete by their scores, which sum to the same in each. A
channel that is constant in the next chunk gives the paper's code NaN; here a range has `EPSILON` added. The paper's
chunks are up to 1024 long, which no budget under 2064 could hold.
Channels are compared as the next query reads them, rotated: `stream`, which moves positions, may choose otherwise.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.policies.protect import protected, whole
from sinkcache.policy import Entries, Policy, Watch

EPSILON = 1e-6


@dataclass(frozen=True)
class LagKV(Policy):
    """Evicts the token that stands out least; never the first `num_sinks`, the last full chunk and what follows it.

    `lag`: tokens in a chunk. Raises ValueError if the budget does not hold the sinks and two chunks.
    """

    num_sinks: int = 16
    lag: int = 128
    value_weight: int | float = 1.0

    def __post_init__(self) -> None:
        whole("num_sinks", self.num_sinks)
        whole("lag", self.lag, least=2)
        if not self.value_weight >= 0:
            raise ValueError(f"value_weight must be 0 or more, got {self.value_weight}")

    def watch(self) -> Watch:
        return Watch(keys=True, values=True)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        others = entries.positions >= self.num_sinks
        order = entries.positions.masked_fill(~others, torch.iinfo(entries.positions.dtype).max).argsort(dim=-1)
        chunks = order[..., : order.shape[-1] // self.lag * self.lag]
        scores = torch.full(order.shape, torch.inf, device=order.device, dtype=torch.float32)
        if chunks.shape[-1] >= 2 * self.lag:
            spread = self._spread(entries.keys, chunks) + self.value_weight * self._spread(entries.values, chunks)
            scores = scores.to(spread.dtype)
            scores[..., : spread.shape[-1]] = spread
        followed = torch.arange(self.lag, order.shape[-1] + self.lag, device=order.device) // self.lag * self.lag
        last = followed + self.lag > others.sum(dim=-1, keepdim=True)  # no full chunk follows
        ranked = scores.masked_fill(last, torch.inf)
        return protected(torch.empty_like(ranked).scatter(-1, order, ranked), entries, self.num_sinks, recent=0)

    def check(self, budget: int) -> None:
        if self.num_sinks + 2 * self.lag > budget:
            raise ValueError(
                "num_sinks + 2 * lag must be at most the budget, "
                f"got {self.num_sinks} + 2 * {self.lag} with budget={budget}: raise the budget or shorten the lag"
            )

    def _spread(
        self, states: Float[Tensor, "batch num_kv_heads kv_len dims"], chunks: Int[Tensor, "batch num_kv_heads ranks"]
    ) -> Float[Tensor, "batch num_kv_heads scored"]:
        """Of all chunks but the last, in each the share of a token's deviation over its channels."""
        kv_len = states.shape[2]
        first = torch.arange(states.shape[0] * states.shape[1], device=states.device) * kv_len
        rows = (chunks.flatten(0, 1) + first[:, None]).flatten()
        wide = states.flatten(0, 2).index_select(0, rows).to(torch.promote_types(states.dtype, torch.float32))
        cut = wide.unflatten(0, (*chunks.shape[:2], -1, self.lag))
        low, high = cut.aminmax(dim=-2, keepdim=True)
        normal = (cut[:, :, :-1] - low[:, :, 1:]) / (high - low + EPSILON)[:, :, 1:]
        return normal.std(dim=-1).softmax(dim=-1).flatten(2)
