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
    left. What `generate` then returns begins with these tokens and not with the conversation.

    Raises ValueError if shapes disagree, or if `output` is a whole conversation that is not one token ahead of `cache`.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [batch, tokens], one token at least, got shape {tuple(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    elif attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} must cover the new tokens {list(input_ids.shape)}"
        )
    if output is not None:
        unread = _unread(cache, input_ids, output).to(input_ids.device)
        input_ids = torch.cat([unread, input_ids], dim=1)
        attention_mask = torch.cat([torch.ones_like(unread), attention_mask.to(unread)], dim=1)
    seen = torch.ones(input_ids.shape[0], cache.seen) if cache.lanes.shown is None else cache.lanes.shown
    mask = torch.cat([seen.to(attention_mask), attention_mask], dim=1)
    return {"input_ids": input_ids, "attention_mask": mask, cache_argument(model): cache}


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
