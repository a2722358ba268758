"""What a model says of each token of a text, read by any method: the logits from which it is scored or compared.

Chunks, the first token, BOS and `attend` are as `sinkcache.metrics` has them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache

from sinkcache.cache import SinkCache
from sinkcache.devices import device_of
from sinkcache.layer import SinkLayer
from sinkcache.streaming import last_logits_alone, step

Attend = Literal["held", "token"]
REBASE_AT = 32_768  # tokens; float32 angles are off by 2e-4 there, 2.5e-2 at four million


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
    reader = Reader(model, cache, bos is not None, attend if chunk > 1 else "held")
    if isinstance(cache, SinkCache):
        cache.resolve(input_ids.shape[1])
    reader.check(input_ids.shape[1], chunk)
    return _cached(reader, input_ids.split(chunk, dim=1))


def _cached(reader: "Reader", pieces: Iterable[Tensor]) -> Iterator[Predicted]:
    for piece in pieces:
        predicted = reader.predict(piece)
        if len(predicted.targets):
            yield predicted


class Reader:
    """Reads a text through a cache, piece by piece, from its start or from where an earlier reader left it.

    Between two pieces all that the rest depends on is the cache, how many tokens were `read`, the BOS included, and the
    logits `before` the next token. Positions are re-based as `sinkcache.stream` does, from token `REBASE_AT` on, so
    that float32 angles are as exact there as at the start; a shorter text is read at positions that the model gives.
    """

    def __init__(self, model: nn.Module, cache: Cache, bos: bool, attend: Attend = "held") -> None:
        self.model, self.cache, self.attend = model, cache, attend
        self.read, self.before = 0, cast("Tensor | None", None)
        self._first = -1 if bos else 0

    def check(self, tokens: int, chunk: int) -> None:
        """Raises ValueError if `tokens` tokens, the BOS included, cannot be read so in chunks."""
        if self.attend == "token":
            _check_token(self.model, self.cache)
            book = cast(SinkCache, self.cache).slots.rehearsal()
            while (left := tokens - book.seen) > 0:
                book.visible(min(chunk, left))  # raises where no mask will do
                book.step(min(chunk, left))
        if tokens > REBASE_AT and isinstance(self.cache, SinkCache) and not self.cache.ordered:
            self.cache.check_rebase()

    def predict(self, piece: Int[Tensor, "1 q_len"]) -> Predicted:
        """Reads the next tokens; what was predicted of them, of the text's first token nothing."""
        positions = _rebased(self.cache, piece) if isinstance(self.cache, SinkCache) else None
        mask = None
        if self.attend == "token":
            mask = _token_mask(self.model, cast(SinkCache, self.cache), piece.shape[1])
        logits = step(self.model, self.cache, piece, attention_mask=mask, position_ids=positions)[0]
        given = logits[:-1] if self.before is None else torch.cat([self.before, logits[:-1]])
        targets = piece[0, 1:] if self.before is None else piece[0]
        predicted = Predicted(self._first + self.read + (self.before is None), given, targets)
        self.before = logits[-1:].clone()
        self.read += piece.shape[1]
        return predicted


def _rebased(cache: SinkCache, piece: Tensor) -> Int[Tensor, "1 q_len"] | None:
    """The positions to read `piece` at, None for those the model gives: as long as none was moved."""
    (book,) = cache.ledgers[0].books
    at, limit = REBASE_AT if book.limit is None else book.limit - 1, book.seen - book.shift + piece.shape[1]
    if not cache.ordered and limit > at:
        cache.rebase(book.seen)
    return cache.next_positions(piece.shape[1]).to(piece.device) if book.shift else None


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
