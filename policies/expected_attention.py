"""ExpectedAttention: the tokens that queries to come will attend to, if they are like those so far.

Idea: queries of a head are close to normally distributed, so the expected attention logit and its exponential over the
next `horizon` positions have a closed form; it weighs the norm of the value.
Source: Devoto, Jeblick, Jégou, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", 2025, section 3, arXiv 2510.00636. Reference code: github.com/NVIDIA/kvpress, commit 8bb29b9.

Differs: moments are those of all queries of the stream, not of a prompt or of the last 128; positions to come follow
the next query's (kvpress: the length of what it was given). Logits are scaled by `head_dim ** -0.5`: a model which
scales otherwise is ranked by a flatter or steeper distribution. A horizon near the number of tokens read between
evictions recovers more attention than the paper's 512 (SmolLM2-135M, 128: 0.890 and 0.881 at budget 256). `epsilon` is
0 as in kvpress: the paper's 0.02 outweighs what most of a few hundred tokens can expect (recall 0.916 and 0.795).
"""

from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from sinkcache.policies.protect import check_room, protected, whole
from sinkcache.policy import Entries, Policy, Queries, Watch


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Evicts the token of least expected attention, times its value's norm; never the first `num_sinks`.

    The sinks' queries and keys count in no moment and no softmax. `epsilon` is added to the attention. Without
    `covariance`, the mean query alone decides. Raises ValueError if the protected tokens fill the budget.
    """

    horizon: int = 512
    num_sinks: int = 4
    recent: int = 0
    covariance: bool = True
    epsilon: int | float = 0.0

    def __post_init__(self) -> None:
        whole("horizon", self.horizon, least=1)
        whole("num_sinks", self.num_sinks)
        whole("recent", self.recent)
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be 0 or more, got {self.epsilon}")

    def watch(self) -> Watch:
        return Watch(queries=True, keys=True, values=True, skip=self.num_sinks)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        keys, queries = entries.keys, entries.queries
        keys, heads = keys.to(queries.mean.dtype), {"h": keys.shape[1]}
        scale = keys.shape[-1] ** -0.5
        mean = rearrange(self._ahead(queries.mean[:, :, None], queries), "b (h g) 1 d -> b h g d", **heads)
        logits = einsum(keys, mean, "b h k d, b h g d -> b h g k") * scale
        if self.covariance:
            spread = self._ahead(self._ahead(queries.covariance, queries).mT, queries)
            spread = rearrange(spread, "b (h g) d e -> b h g d e", **heads)
            turned = einsum(keys, spread, "b h k d, b h g d e -> b h g k e")
            logits = logits + einsum(turned, keys, "b h g k e, b h k e -> b h g k") * (scale**2 / 2)
        others = entries.valid & (entries.positions >= self.num_sinks)
        logits = logits.masked_fill(~others[:, :, None], torch.finfo(logits.dtype).min)
        expected = logits.softmax(dim=-1).mean(dim=2) + self.epsilon
        return protected(expected * entries.values.to(keys.dtype).norm(dim=-1), entries, self.num_sinks, self.recent)

    def check(self, budget: int) -> None:
        check_room(budget, self.num_sinks, self.recent)

    def _ahead(self, vectors: Float[Tensor, "batch num_heads rows head_dim"], queries: Queries) -> Tensor:
        """`vectors` under the mean rotation of the next `horizon` positions."""
        rotation = queries.rotation
        if rotation is None:
            return vectors
        if rotation.values:
            raise ValueError(
                "ExpectedAttention needs keys that carry their position, and this model's latent keys do not: "
                "use a policy that reads attention itself, such as SnapKV"
            )
        place, device = queries.position, vectors.device
        place = place.flatten() if isinstance(place, Tensor) else torch.full((1,), place, device=device)
        coming = rotation.phases(torch.arange(self.horizon, device=device), vectors).mean(dim=0)
        turn = rotation.phases(place, vectors) * coming
        turned = vectors.clone()
        rotation.put(turned, rotation.pick(vectors) * turn[:, None, None])
        return turned
