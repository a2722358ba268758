"""Flash attention that is shown to layers, and what it has each query see.

`show`: a model's flash attention keeps its name, in which transformers looks for "flash", and its kernel. What is
registered under the name is called by `attend`, registered in its place, at once and with nothing changed unless the
module is one of a model that was given to `show` and some layer waits to be shown what it attends to.

`Columns`: transformers gives flash attention no mask of queries and keys. It is told of pads, which are taken out of
each row before attention, and counts from a row's end: the last query sees every key of its row, the one before it all
but the last. A sliding window counts what is left of a row. Keys that were held come before the step's own, so that
order among them does not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from transformers import AttentionInterface

from sinkcache.guard import shown_to
from sinkcache.observe import Kernel, attention

_BLOCK = 128  # queries at a time
_MARK = "_shown_by_sinkcache"  # on modules: those of other models compile as before, without a break


def is_flash(name: Any) -> bool:
    """Whether flash attention of some kind is registered under `name`; paged attention knows of no cache of ours."""
    return "flash" in str(name) and not str(name).startswith("paged|") and name in AttentionInterface()


def show(model: nn.Module, name: str, watched: Callable[..., Any]) -> None:
    """Has `watched` asked for the attention of `model`, whose flash attention `name` is, wherever a layer waits for it.

    More than once is as good as once. What is registered under the name later is not shown, until the next call.
    """
    if not shows(name):
        AttentionInterface.register(name, partial(attend, AttentionInterface()[name], watched))
    for module in model.modules():
        setattr(module, _MARK, True)


def shows(name: str) -> bool:
    """Whether what is registered under `name` is `attend`."""
    return getattr(AttentionInterface().get(name), "func", None) is attend


def attend(
    flash: Callable[..., Any],
    watched: Callable[..., Any],
    module: nn.Module,
    query: Float[Tensor, "batch num_heads q_len head_dim"],
    key: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    value: Float[Tensor, "batch num_kv_heads kv_len value_dim"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of a step's queries, as `flash` computes it, or for a layer that waits for it, as `watched` does."""
    if not getattr(module, _MARK, False) or (layer := shown_to()) is None:
        return flash(module, query, key, value, attention_mask, **kwargs)
    columns = Columns(attention_mask, kwargs.get("sliding_window"))
    own = partial(flash, **kwargs)
    return watched(layer, module, query, key, value, attention_mask, own, columns=columns, **kwargs)


@dataclass(frozen=True)
class Columns:
    """The keys of a step: `real` is 0 where a key is a pad, None: none is; of those, queries see the last `window`."""

    real: Shaped[Tensor, "batch kv_len"] | None
    window: int | None = None

    def received(
        self,
        queries: Float[Tensor, "batch num_heads q_len head_dim"],
        keys: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
        kernel: Kernel,
        weights: Float[Tensor, "rows q_len"] | None = None,
        heads: int | None = None,
        group: str = "mean",
    ) -> Float[Tensor, "batch heads kv_len"]:
        """The probability each key received from the step's last queries, as `observe.attention` sums it.

        A mask is made of a block of queries at a time: never a [q_len, kv_len] matrix.
        """
        wide = torch.promote_types(keys.dtype, torch.float32)
        nothing = keys.new_empty(*keys.shape[:3], 0, dtype=wide)  # values of no width: no output is computed
        if self.plain(keys.shape[2]):
            return attention(queries, keys, nothing, None, kernel, weights, heads, group)[1]
        received = []
        for start in range(0, queries.shape[2], _BLOCK):
            block = queries[:, :, start : start + _BLOCK]
            shown = self.mask(queries.shape[2], keys, slice(start, start + _BLOCK))
            mine = None if weights is None else weights[:, start : start + _BLOCK]
            sums = attention(block, keys, nothing, shown, kernel, mine, heads, group)[1]
            received = [received[0].add_(sums) if received else sums]
        return received[0]

    def mask(
        self, q_len: int, keys: Float[Tensor, "batch num_kv_heads kv_len head_dim"], block: slice = slice(None)
    ) -> Bool[Tensor, "rows 1 queries kv_len"]:
        """Which keys those of the last `q_len` queries see that are in `block`."""
        kv_len = keys.shape[2]
        real = torch.ones(1, kv_len, dtype=torch.bool, device=keys.device) if self.real is None else self.real.bool()
        place = real.cumsum(dim=-1)
        key, query = place[:, None], place[:, kv_len - q_len :][:, block, None]
        shown = real[:, None] & (key <= query)
        if self.window is not None:
            shown &= key > query - self.window
        return shown[:, None]

    def plain(self, kv_len: int) -> bool:
        """Whether each query sees all keys up to its own."""
        return self.real is None and (self.window is None or kv_len <= self.window)
