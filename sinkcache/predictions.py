"""What a model says of each token of a text, read by any method: the logits from which it is scored or compared.

Chunks, the first token, BOS and `attend` are as `sinkcache.metrics` has them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
class Predicted:
    """Consecutive `targets` of a text, the first of which is its token `start`, and the logits before each of them."""

    start: int
    logits: Float[Tensor, "tokens vocab"]
    targets: Int[Tensor, " tokens"]

    @property
    def nll(self) -> Float[Tensor, " tokens"]:
        """Negative log-likelihoods in nats, computed in float32, on the CPU in float64."""
        return torch.nn.functional.cross_entropy(self.logits.float(), self.targets, reduction="none").cpu().double()


def cached(
    model: nn.Module,
    cache: Cache,
    input_ids: Int[Tensor, "1 kv_len"],
    chunk: int = 64,
    bos: int | None = None,
    attend: Attend = "held",
) -> Iterator[Predicted]:
    """Reads a text through any transformers cache, yielding what is predicted with each chunk as it is read.

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
    return _cached(model, cache, input_ids, chunk, first=0 if bos is None else -1, attend=attend)


def _cached(
    model: nn.Module, cache: Cache, input_ids: Tensor, chunk: int, first: int, attend: Attend
) -> Iterator[Predicted]:
    before: Tensor | None = None  # the logits after the token before this chunk
    read = 0
    for piece in input_ids.split(chunk, dim=1):
        mask = _token_mask(model, cast(SinkCache, cache), piece.shape[1]) if attend == "token" else None
        logits = step(model, cache, piece, attention_mask=mask)[0]
        given = logits[:-1] if before is None else torch.cat([before, logits[:-1]])
        targets = piece[0, 1:] if before is None else piece[0]
        if len(targets):
            yield Predicted(first + read + (before is None), given, targets)
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


def recomputed(
    model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], budget: int, every: int = 1, batch: int = 8
) -> Iterator[Predicted]:
    """The window read anew for each token, without a cache: StreamingLLM's baseline, exact and slow.

    Each query sees the newest `budget` tokens, itself included, at positions from 0. Tokens within the first window
    come from one pass; of the later ones every `every`-th is scored, `batch` windows at a time. Raises ValueError if
    `budget`, `every` or `batch` is below 1 or there are fewer than two tokens.
    """
    _check(input_ids, budget=budget, every=every, batch=batch)
    return _recomputed(model, input_ids, budget, every, batch)


def _recomputed(model: nn.Module, input_ids: Tensor, budget: int, every: int, batch: int) -> Iterator[Predicted]:
    length = input_ids.shape[1]
    with torch.no_grad():
        logits = model(input_ids=input_ids[:, : min(budget, length - 1)], use_cache=False).logits[0]
    yield Predicted(1, logits, input_ids[0, 1 : len(logits) + 1])
    later = range(budget + 1, length, every)
    for at in range(0, len(later), batch):
        targets = list(later[at : at + batch])
        windows = torch.stack([input_ids[0, target - budget : target] for target in targets])
        with torch.no_grad():
            logits = model(input_ids=windows, use_cache=False, **last_logits_alone(model)).logits[:, -1]
        for target, one in zip(targets, logits, strict=True):
            yield Predicted(target, one[None], input_ids[0, target : target + 1])


def reread(model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], budget: int, every: int) -> Iterator[Predicted]:
    """The window read anew every `every` tokens, without a cache in between: the cheap form of `recomputed`.

    Each stretch of `every` tokens is read in one pass behind the `budget - 1` tokens before it, at positions from 0, so
    a query sees between `budget` and `budget - 1 + every` tokens. Raises ValueError as `recomputed` does.
    """
    _check(input_ids, budget=budget, every=every)
    return _reread(model, input_ids, budget, every)


def _reread(model: nn.Module, input_ids: Tensor, budget: int, every: int) -> Iterator[Predicted]:
    length = input_ids.shape[1]
    for start in range(0, length - 1, every):
        end = min(start + every, length - 1)
        first = max(0, start - (budget - 1))
        with torch.no_grad():
            logits = model(input_ids=input_ids[:, first:end], use_cache=False).logits[0, start - first :]
        yield Predicted(start + 1, logits, input_ids[0, start + 1 : end + 1])


def _check(input_ids: Tensor, **counts: int) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids must be one text, [1, tokens], got shape {tuple(input_ids.shape)}")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if input_ids.shape[1] < 2:
        raise ValueError(f"a text needs at least two tokens to be scored, got {input_ids.shape[1]}")
