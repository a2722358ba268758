"""What cannot be done with the rows of a padded batch, said before any work."""

from typing import Any, cast

from jaxtyping import Bool
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sinkcache.bounded import BoundedLayer


def check_told(model: nn.Module, tokens: Tensor) -> None:
    """Raises ValueError if a batch seems to be padded and the cache was not told."""
    if tokens.ndim != 2 or len(tokens) < 2:
        return
    config = cast(Any, model).config.get_text_config(decoder=True)
    pad, ends = getattr(config, "pad_token_id", None), (config.bos_token_id, config.eos_token_id)
    if pad is None or any(pad in (end if isinstance(end, list) else [end]) for end in ends):
        return
    padded = ((tokens[:, 0] == pad) | (tokens[:, -1] == pad)).nonzero()[:, 0]
    if len(padded):
        raise ValueError(
            f"row {int(padded[0])} begins or ends with the pad token {pad} and no attention_mask says what is padding: "
            "pass attention_mask (all ones if the token is text)"
        )


def check_padding(layers: list[Any], ledgers: list[Any], ordered: bool, mask: Any, attention: str, jumps: bool) -> bool:
    """Whether native layers read the true columns; raises ValueError where a padded batch cannot be served.

    `jumps`: the step is wider than the window of a bounded layer, whose mask counts columns.
    """
    lanes, real = ledgers[0].lanes, ledgers[0].lanes.real
    if isinstance(mask, dict):
        raise ValueError("a padded batch takes one attention_mask of shape [batch, tokens], not one for each kind")
    if ordered:
        raise ValueError(
            "padded batches are not supported for a model that goes by the order of its cache (ALiBi): run rows "
            "one by one"
        )
    if len(ledgers) > 1:
        raise ValueError("padded batches with budgets that differ between layers are not supported: give one budget")
    if real is not None and (lanes.seen > 0 or bool((real[:, 1:] < real[:, :-1]).any())):
        check_chunks(layers, real, 0)
    natives = any(isinstance(layer, CacheLayerMixin) and not isinstance(layer, BoundedLayer) for layer in layers)
    if (natives or jumps) and lanes.holed():
        raise ValueError(
            "pads behind a row's first token cannot be skipped beside sliding windows, which count them: pad in front "
            "of the whole row, or run rows one by one"
        )
    if natives and "flash" in attention:
        raise ValueError(
            f"padded batches beside sliding windows cannot be had with {attention} attention, which reads every mask "
            "from its end: use sdpa or eager attention"
        )
    if natives and not hasattr(Cache, "get_query_offset"):
        raise ValueError(
            "padded batches for a model with sliding-window layers need transformers 5.14 or later: run rows one by one"
        )
    return natives


def check_chunks(layers: list[Any], real: Bool[Tensor, "batch q_len"] | None, chunk: int) -> None:
    """Raises ValueError if layers with a recurrent state would be given pads behind the first `chunk` columns.

    `real`: which of the columns are not pads; None: all.
    """
    recurrent = any(hasattr(layer, "conv_states") for layer in layers)
    if recurrent and real is not None and not bool(real[:, chunk:].all()):
        raise ValueError(
            "linear-attention layers can skip pads only in front of a row and in the first pass: read the padded "
            "part of the prompt in one chunk"
        )
