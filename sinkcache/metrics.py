"""Perplexity of a stream under a bounded cache, each token scored once.

The logits after the last token of a chunk score the first token of the next, so no token is skipped or scored twice at
a chunk's edge, and the mean is over tokens, not over chunks. The first token has nothing before it: it is scored only
where a BOS token is put in front, which is then counted as context and recorded in the result.

What a token sees depends on how it is read. `attend="held"` is what the cache does in use: a chunk of q sees at most
`budget - 1 + q` tokens. `attend="token"` masks the chunk so that each token sees what it would have seen read on its
own, exactly; the figure then does not depend on the chunk.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache

from sinkcache import predictions
from sinkcache.predictions import Attend, Predicted


@dataclass(frozen=True)
class Scored:
    """Negative log-likelihoods, in nats, of consecutive tokens of a text, the first of which is its token `start`."""

    start: int
    nll: Float[Tensor, " tokens"]


@dataclass
class Perplexity:
    """A running perplexity: add what was scored, read `value` at any time.

    `bos` is the id put before the text, None if there was none. `buckets` holds, per stretch of `bucket` tokens of the
    text, how many were scored and the sum of their negative log-likelihoods in nats.
    """

    bos: int | None = None
    bucket: int = 256
    tokens: int = 0
    nll: float = 0.0
    buckets: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """exp of the mean negative log-likelihood over all tokens so far; NaN before the first."""
        return exponential(self.nll / self.tokens) if self.tokens else math.nan

    def add(self, scored: Scored) -> None:
        """Counts tokens in; each token of a text must be added once."""
        nll = scored.nll.double()
        self.tokens += len(nll)
        self.nll += float(nll.sum())
        where = (scored.start + torch.arange(len(nll))) // self.bucket
        for index in where.unique().tolist():
            mine = nll[where == index]
            count, total = self.buckets.get(index, (0, 0.0))
            self.buckets[index] = (count + len(mine), total + float(mine.sum()))

    def curve(self) -> list[tuple[int, float]]:
        """(end of the stretch in tokens, perplexity within it), in order."""
        return [
            ((index + 1) * self.bucket, exponential(total / count))
            for index, (count, total) in sorted(self.buckets.items())
        ]


def exponential(nll: float) -> float:
    """exp of a mean negative log-likelihood; infinity where that is beyond all floats."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def perplexity(
    model: nn.Module,
    cache: Cache,
    input_ids: Int[Tensor, "1 kv_len"],
    chunk: int = 64,
    bos: int | None = None,
    attend: Attend = "held",
    bucket: int = 256,
) -> Perplexity:
    """The perplexity of a text read through `cache`; see `score` for the arguments and the errors."""
    result = Perplexity(bos=bos, bucket=bucket)
    for scored in score(model, cache, input_ids, chunk, bos, attend):
        result.add(scored)
    return result


def score(
    model: nn.Module,
    cache: Cache,
    input_ids: Int[Tensor, "1 kv_len"],
    chunk: int = 64,
    bos: int | None = None,
    attend: Attend = "held",
) -> Iterator[Scored]:
    """Reads a text through any transformers cache, yielding the scores of each chunk as it is read.

    `bos` is an id to put before the text, or None. Raises as `predictions.cached` does, before anything is read.
    """
    return map(_scored, predictions.cached(model, cache, input_ids, chunk, bos, attend))


def recompute(
    model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], budget: int, every: int = 1, batch: int = 8
) -> Iterator[Scored]:
    """The scores of a window read anew for each token; see `predictions.recomputed`."""
    return map(_scored, predictions.recomputed(model, input_ids, budget, every, batch))


def reread(model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], budget: int, every: int) -> Iterator[Scored]:
    """The scores of a window read anew every `every` tokens; see `predictions.reread`."""
    return map(_scored, predictions.reread(model, input_ids, budget, every))


def _scored(predicted: Predicted) -> Scored:
    return Scored(predicted.start, predicted.nll)
