"""The next turn of a conversation, new tokens alone."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from sinkcache.cache import SinkCache
from sinkcache.guard import cache_argument


def turn(
    model: nn.Module,
    cache: SinkCache,
    input_ids: Int[Tensor, "batch new"],
    output: Int[Tensor, "batch said"] | None = None,
    attention_mask: Int[Tensor, "batch new"] | None = None,
) -> dict[str, Any]:
    """The arguments with which `model.generate` reads `input_ids` as what follows what `cache` has seen.

    `output`: what the last `generate` returned. It never reads the last token that it samples, so that one is put in
    front. `attention_mask` tells which of the new tokens are real, where turns of different lengths are padded on the
    left. What `generate` then returns begins with these tokens and not with the conversation: the reply is
    `out[:, given["input_ids"].shape[1] :]`. After a beam search the rows of the cache are the last beams, not the
    sequences returned. An `output` of an earlier turn cannot be told from that of the last: save it with the cache.

    Raises TypeError for what is no tensor or no SinkCache; ValueError if shapes disagree, `output` is longer than what
    was seen and one token more, or a row of it ended before the others: `generate` has fed it pads since, which the
    cache holds as text.
    """
    if not isinstance(cache, SinkCache):
        raise TypeError(f"turn continues a SinkCache, got {type(cache).__name__}: give generate the whole conversation")
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor [batch, tokens], got {type(input_ids).__name__}: pass its input_ids"
        )
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [batch, tokens], one token at least, got shape {tuple(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    elif attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} must cover the new tokens {list(input_ids.shape)}"
        )
    if output is not None:
        _check_ends(model, output)
        unread = _unread(cache, input_ids, output).to(input_ids.device)
        input_ids = torch.cat([unread, input_ids], dim=1)
        attention_mask = torch.cat([torch.ones_like(unread), attention_mask.to(unread)], dim=1)
    if cache.seen > 0 and (rows := cache.rows) != input_ids.shape[0]:
        raise ValueError(
            f"the cache holds a batch of {rows} and was given {input_ids.shape[0]} rows: cache.fork(n) repeats each "
            "row n times, history and all"
        )
    seen = torch.ones(input_ids.shape[0], cache.seen) if cache.lanes.shown is None else cache.lanes.shown
    mask = torch.cat([seen.to(attention_mask), attention_mask], dim=1)
    return {"input_ids": input_ids, "attention_mask": mask, cache_argument(model): cache}


def _check_ends(model: Any, output: Tensor) -> None:
    told = getattr(model, "generation_config", None)
    ends, pad = getattr(told, "eos_token_id", None), getattr(told, "pad_token_id", None)
    ends = torch.tensor([] if ends is None else ends if isinstance(ends, list) else [ends])
    if len(ends) == 0 or output.ndim != 2 or output.shape[1] < 2 or len(output) < 2:
        return
    pads = ends[:1] if pad is None else torch.tensor([pad])
    last, one_before = (torch.isin(output[:, at].cpu(), torch.cat([ends, pads])) for at in (-1, -2))
    if bool((early := last & one_before).any()):
        raise ValueError(
            f"row {int(early.int().argmax())} of output ended before the others, and generate has fed it pads since, "
            "which the cache holds as text: let rows that end at different times have a cache each"
        )


def _unread(cache: SinkCache, input_ids: Tensor, output: Tensor) -> Tensor:
    if output.ndim != 2 or output.shape[0] != input_ids.shape[0] or output.shape[1] == 0:
        raise ValueError(
            f"output of shape {list(output.shape)} is not what generate returned for a batch of {input_ids.shape[0]}"
        )
    if output.shape[1] >= cache.seen and output.shape[1] != cache.seen + 1:
        raise ValueError(
            f"output has {output.shape[1]} tokens and the cache has seen {cache.seen}, but generate leaves exactly one "
            "unread: give what the last generate with this cache returned, or put unread tokens in front yourself"
        )
    return output[:, -1:]
