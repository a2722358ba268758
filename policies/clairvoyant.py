"""Clairvoyant: the tokens that the next queries will attend to. An oracle: a bound to compare with, not to deploy.

Idea: Belady's rule for paging, evict what will be needed last, with need measured by attention: the text is read once
with a full cache, and then again by a cache that knows what is to come.
Source: Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 5(2), 1966.

Differs: pages are needed or not; here a token is worth the attention that a model which evicts nothing pays it. That is
a strong reference and no proof of optimality: a model that has evicted attends otherwise, and attention is not error.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.policies.protect import whole
from sinkcache.policy import Entries, Policy, Watch
from sinkcache.recording import Recording


@dataclass(frozen=True)
class Clairvoyant(Policy):
    """Evicts the token that the next `horizon` queries of the text recorded attend to least.

    The one policy that holds tensors: `recording`, by whose identity it is compared, and which no file can hold. It is
    for that text alone, one row, read from its start. Tokens that receive nothing, all of them at the text's end, are
    equal, so the newer stays. Raises ValueError for tokens, layers and heads that were not recorded.
    """

    recording: Recording
    horizon: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.recording, Recording):
            raise ValueError(f"recording must be what sinkcache.recording.record returns, got {self.recording!r}")
        whole("horizon", self.horizon, least=1)

    def watch(self) -> Watch:
        return Watch(layer=True)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        positions, tokens = entries.positions.cpu().long(), self.recording.tokens
        if len(positions) != 1:
            raise ValueError(f"a recording is of one text, got a batch of {len(positions)}: use a cache for each row")
        if int(positions.max()) >= tokens:
            raise ValueError(
                f"the recording ends after {tokens} tokens, got position {int(positions.max())}: record the whole text"
            )
        coming = self.recording.coming(entries.layer, int(entries.seen), self.horizon)
        if len(coming) != positions.shape[1]:
            raise ValueError(
                f"the recording has {len(coming)} key heads, got {positions.shape[1]}: record the model that reads"
            )
        scores = coming.gather(-1, positions[0].clamp_min(0))[None]
        return scores.masked_fill(positions < 0, -torch.inf).to(entries.positions.device)
