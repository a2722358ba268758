"""Reading prompts and streams of any length in bounded memory.

Both read in chunks, each of which attends to what the cache holds and to its own past. `stream` also re-bases
positions: before the model's own would pass `rebase_at` they start again from 0 and the stored keys are moved to fit,
so that float32 angles are as exact after four million tokens as after a thousand.

Ctrl-C takes effect between steps, never within one, so that all layers of the cache hold the same tokens.
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import Cache

from sinkcache.book import Book
from sinkcache.cache import SinkCache
from sinkcache.devices import device_of
from sinkcache.guard import arguments, cache_argument, guard
from sinkcache.padding import check_chunks

_REBASE_AT = 32_768  # tokens; float32 angles are off by 2e-4 there, 2.5e-2 at four million


def prefill(
    model: nn.Module,
    cache: SinkCache,
    input_ids: Int[Tensor, "batch q_len"],
    chunk: int = 512,
    attention_mask: Shaped[Tensor, "batch kv_len"] | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Reads a prompt into `cache`, `chunk` tokens at a time; returns the logits after its last token.

    Positions stay those of the stream, so that `model.generate` can go on from here. `attention_mask` covers the tokens
    seen and the new ones; rows are padded on the left, or with holes. Raises ValueError if the prompt or a row of it is
    empty, or `chunk` is below 1.
    """
    _check_prompt(cache, input_ids, attention_mask)
    _check_chunk(chunk)
    guard(model)
    if cache.seen == 0:
        cache.reset()  # of what a pass that failed may have settled
    if attention_mask is not None:
        _announce(model, cache, input_ids, chunk, attention_mask)
    else:
        cache.lanes.real = None  # as a pass that failed may have left it
    cache.resolve(input_ids.shape[1])
    logits = None
    pieces = input_ids.split(chunk, dim=1)
    try:
        for number, piece in enumerate(pieces, start=1):
            mask = None if attention_mask is None else attention_mask[:, : cache.seen + piece.shape[1]]
            cache.unfinished = number < len(pieces)
            positions = _positions(cache, piece) if mask is None else None  # with a mask the cache tells them itself
            logits = step(model, cache, piece, attention_mask=mask, position_ids=positions, last_only=True)
    finally:
        cache.unfinished = False
    assert logits is not None
    return logits[:, -1]


def stream(
    model: nn.Module,
    cache: SinkCache,
    tokens: Iterable[int | Tensor],
    chunk: int = 1,
    rebase_at: int | None = None,
) -> Iterator[Float[Tensor, "batch vocab"]]:
    """Yields the logits after each token of an endless iterable, in constant memory and time per token.

    `tokens` are ids, or int64 `[batch]` tensors of one id per row; they are taken `chunk` at a time, and with `chunk=1`
    each is taken only after the logits of the one before were yielded, so an iterable may sample from them.
    `rebase_at`: positions the model is given stay below it; by default 32,768 or the trained length, whichever is
    less. Raises ValueError, before anything is read, if `chunk` is below 1 or above `rebase_at`, the budget is a share
    of a prompt not read yet, or some layer's rotation is unknown.
    """
    _check_chunk(chunk)
    if isinstance(tokens, Tensor) and tokens.ndim != 1:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} would be read row by row: give input_ids[0] for one row, or "
            "input_ids.T.unbind() for a batch"
        )
    book: Book = cache.ledgers[0].books[0]
    if any(ledger.capacity is None for ledger in cache.ledgers):
        raise ValueError(
            f"budget={book.asked} is a share of a prompt and a stream has none: read the prompt with prefill "
            "first, or give the budget in tokens"
        )
    cache.check_rebase()
    config = cast(Any, model).config.get_text_config(decoder=True)
    trained = getattr(config, "max_position_embeddings", None) or _REBASE_AT
    limit = book.limit
    if rebase_at is None:
        rebase_at = min(_REBASE_AT, trained) if limit is None else limit - 1
    if chunk > rebase_at:
        raise ValueError(f"chunk must not exceed rebase_at, got {chunk} with rebase_at={rebase_at}: use smaller chunks")
    guard(model)
    return _stream(model, cache, iter(tokens), chunk, rebase_at)


def _stream(
    model: nn.Module, cache: SinkCache, tokens: Iterator[int | Tensor], chunk: int, rebase_at: int
) -> Iterator[Tensor]:
    device = device_of(model)
    while piece := list(islice(tokens, chunk)):
        input_ids = _column(piece).to(device)
        if not cache.ordered and int(cache.next_positions(len(piece)).max()) >= rebase_at:
            cache.rebase([book.seen for book in cache.ledgers[0].books])
        logits = step(model, cache, input_ids, position_ids=_positions(cache, input_ids))
        yield from logits.unbind(dim=1)


def _positions(cache: SinkCache, input_ids: Int[Tensor, "batch q_len"]) -> Int[Tensor, "batch q_len"]:
    return cache.next_positions(input_ids.shape[1]).to(input_ids.device).expand(input_ids.shape[0], -1)


def _column(piece: list[int | Tensor]) -> Int[Tensor, "batch q_len"]:
    if any(isinstance(token, Tensor) for token in piece):
        return torch.stack([torch.as_tensor(token).reshape(-1) for token in piece], dim=1)
    return torch.tensor([piece])


def step(
    model: nn.Module,
    cache: Cache,
    input_ids: Int[Tensor, "batch q_len"],
    attention_mask: Tensor | None = None,
    position_ids: Int[Tensor, "batch q_len"] | None = None,
    last_only: bool = False,
) -> Float[Tensor, "batch out_len vocab"]:
    """One pass over `input_ids` with any transformers cache; Ctrl-C waits for its end. Logits, of the last token alone
    where the model can do so and `last_only` asks for it."""
    extra: dict[str, Any] = {cache_argument(model): cache}
    if last_only:
        extra |= last_logits_alone(model)
    if position_ids is not None and "position_ids" in arguments(model):
        extra["position_ids"] = position_ids
    if attention_mask is not None:
        extra["attention_mask"] = attention_mask
    with torch.no_grad(), _uninterrupted():
        return model(input_ids=input_ids, use_cache=True, **extra).logits


def last_logits_alone(model: nn.Module) -> dict[str, int]:
    """The argument that has `model` compute no logits but the last token's; empty where it takes none."""
    return {"logits_to_keep": 1} if "logits_to_keep" in arguments(model) else {}


def _check_prompt(cache: Any, input_ids: Any, attention_mask: Tensor | None) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor [batch, tokens], got {type(input_ids).__name__}: pass its input_ids"
        )
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [batch, tokens], one token at least, got shape {tuple(input_ids.shape)}")
    if not isinstance(cache, SinkCache):
        raise TypeError(
            f"prefill reads into a SinkCache, got {type(cache).__name__}: give the prompt to model.generate"
        )
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, tokens], got shape {tuple(attention_mask.shape)}")
        if bool((empty := ~attention_mask[:, cache.seen :].any(dim=1)).any()):
            raise ValueError(f"attention_mask hides all of row {int(empty.int().argmax())}: leave that row out")


def _announce(model: nn.Module, cache: SinkCache, input_ids: Tensor, chunk: int, attention_mask: Tensor) -> None:
    """Has the cache refuse the whole of a prompt before the first chunk of it is read."""
    cache.chunk = chunk
    try:
        cache.begin_step(model, input_ids, attention_mask, None)  # refuse before the first chunk is read
    finally:
        cache.chunk = None
    cache._before = None  # no pass is under way yet, should the next lines refuse
    check_chunks(cache.layers, cache.lanes.real, chunk)


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")


@contextmanager
def _uninterrupted():
    """Holds back Ctrl-C until the block ends, then hands it to whoever handled it before; a second is not held back."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # signals go to the main thread alone; a process that ignores them, or handles them in C, is left to it
        return
    caught: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(caught) == 1:
        before(*caught[0])
