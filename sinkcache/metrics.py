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
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache

from sinkcache.cache import SinkCache
from sinkcache.devices import device_of
from sinkcache.layer import SinkLayer
from sinkcache.slots import Slots
from sinkcache.streaming import last_logits_alone, step

Attend = Literal["held", "token"]


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
        return math.exp(self.nll / self.tokens) if self.tokens else math.nan

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
            ((index + 1) * self.bucket, math.exp(total / count))
            for index, (count, total) in sorted(self.buckets.items())
        ]


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

    `bos` is an id to put before the text, or None. Raises ValueError, before anything is read, if there are fewer than
    two tokens to read, the cache is not empty, `chunk` is below 1, or `attend="token"` cannot be had.
    """
    if bos is not None and input_ids.ndim == 2:
        input_ids = torch.cat([input_ids.new_full((len(input_ids), 1), bos), input_ids], dim=1)
    _check(input_ids, chunk=chunk)
    if cache.get_seq_length() != 0:
        raise ValueError(f"the cache has seen {cache.get_seq_length()} tokens already: call reset() or use a fresh one")
    if attend not in ("held", "token"):
        raise ValueError(f'attend must be "held" or "token", got {attend!r}')
    if attend == "token" and chunk == 1:
        attend = "held"  # the same
    if attend == "token":
        _check_token(model, cache)
    if isinstance(cache, SinkCache):
        cache.resolve(input_ids.shape[1])
        if attend == "token":
            _rehearse(cache.slots, input_ids.shape[1], chunk)
    return _score(model, cache, input_ids, chunk, first=0 if bos is None else -1, attend=attend)


def _score(
    model: nn.Module, cache: Cache, input_ids: Tensor, chunk: int, first: int, attend: Attend
) -> Iterator[Scored]:
    before: Tensor | None = None  # the logits after the token before this chunk
    read = 0
    for piece in input_ids.split(chunk, dim=1):
        mask = _token_mask(model, cast(SinkCache, cache), piece.shape[1]) if attend == "token" else None
        logits = step(model, cache, piece, attention_mask=mask)[0]
        given = logits[:-1] if before is None else torch.cat([before, logits[:-1]])
        targets = piece[0, 1:] if before is None else piece[0]
        if len(targets):
            yield Scored(first + read + (before is None), _nll(given, targets))
        before = logits[-1:].clone()
        read += piece.shape[1]


def _check_token(model: nn.Module, cache: Cache) -> None:
    implementation = str(getattr(cast(Any, model).config, "_attn_implementation", None))
    if not isinstance(cache, SinkCache) or not all(isinstance(layer, SinkLayer) for layer in cache.layers):
        raise ValueError(
            f'attend="token" needs a SinkCache that bounds every layer, got {type(cache).__name__}: use "held"'
        )
    if "flash" in implementation or "flex" in implementation:
        raise ValueError(
            f'attend="token" needs a mask, which {implementation} attention does not take: use sdpa or chunk=1'
        )


def _rehearse(slots: Slots, tokens: int, chunk: int) -> None:
    book = slots.rehearsal()
    while (left := tokens - book.seen) > 0:
        book.visible(min(chunk, left))  # raises where no mask will do
        book.step(min(chunk, left))


def _token_mask(model: nn.Module, cache: SinkCache, q_len: int) -> Float[Tensor, "1 1 q_len kv_len"] | None:
    if q_len == 1:
        return None
    dtype = cast(Any, model).get_input_embeddings().weight.dtype
    hidden = ~cache.slots.visible(q_len).to(device_of(model))
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill(hidden, torch.finfo(dtype).min)[None, None]


def recompute(
    model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], budget: int, every: int = 1, batch: int = 8
) -> Iterator[Scored]:
    """The window read anew for each token, without a cache: StreamingLLM's baseline, exact and slow.

    Each query sees the newest `budget` tokens, itself included, at positions from 0. Tokens within the first window
    come from one pass; of the later ones every `every`-th is scored, `batch` windows at a time. Raises ValueError if
    `budget`, `every` or `batch` is below 1 or there are fewer than two tokens.
    """
    _check(input_ids, budget=budget, every=every, batch=batch)
    return _recompute(model, input_ids, budget, every, batch)


def _recompute(model: nn.Module, input_ids: Tensor, budget: int, every: int, batch: int) -> Iterator[Scored]:
    length = input_ids.shape[1]
    with torch.no_grad():
        logits = model(input_ids=input_ids[:, : min(budget, length - 1)], use_cache=False).logits[0]
    yield Scored(1, _nll(logits, input_ids[0, 1 : len(logits) + 1]))
    later = range(budget + 1, length, every)
    for at in range(0, len(later), batch):
        targets = list(later[at : at + batch])
        windows = torch.stack([input_ids[0, target - budget : target] for target in targets])
        with torch.no_grad():
            logits = model(input_ids=windows, use_cache=False, **last_logits_alone(model)).logits[:, -1]
        for target, one in zip(targets, _nll(logits, input_ids[0, targets]), strict=True):
            yield Scored(target, one[None])


def reread(model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], budget: int, every: int) -> Iterator[Scored]:
    """The window read anew every `every` tokens, without a cache in between: the cheap form of `recompute`.

    Each stretch of `every` tokens is read in one pass behind the `budget - 1` tokens before it, at positions from 0, so
    a query sees between `budget` and `budget - 1 + every` tokens. Raises ValueError as `recompute` does.
    """
    _check(input_ids, budget=budget, every=every)
    return _reread(model, input_ids, budget, every)


def _reread(model: nn.Module, input_ids: Tensor, budget: int, every: int) -> Iterator[Scored]:
    length = input_ids.shape[1]
    for start in range(0, length - 1, every):
        end = min(start + every, length - 1)
        first = max(0, start - (budget - 1))
        with torch.no_grad():
            logits = model(input_ids=input_ids[:, first:end], use_cache=False).logits[0, start - first :]
        yield Scored(start + 1, _nll(logits, input_ids[0, start + 1 : end + 1]))


def _nll(logits: Float[Tensor, "tokens vocab"], targets: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none").cpu().double()


def _check(input_ids: Tensor, **counts: int) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids must be one text, [1, tokens], got shape {tuple(input_ids.shape)}")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if input_ids.shape[1] < 2:
        raise ValueError(f"a text needs at least two tokens to be scored, got {input_ids.shape[1]}")
