"""A model heard while it reads a text with a full cache: of each step and layer the queries, and what they attend to.

Nothing of size [tokens, tokens] is made: a text is read in chunks, and attention is computed by blocks of queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkcache.attention import reveal
from sinkcache.devices import device_of
from sinkcache.guard import arguments, cache_argument, show_to
from sinkcache.observe import Kernel
from sinkcache.onlooker import Onlooker
from sinkcache.policy import Watch
from sinkcache.support import decoder_config

_SEES = Watch(queries=True)  # queries are shown, no sums are made


@dataclass(frozen=True)
class Heard:
    """A step of one layer of the model: `queries`, and `keys` and `values` of all tokens so far, the step's last.

    `received`: what each key received from these queries, mean over the query heads of a key head; None if not asked.
    """

    layer: int
    queries: Float[Tensor, "batch num_heads q_len head_dim"]
    keys: Float[Tensor, "batch num_kv_heads kv_len head_dim"]
    values: Float[Tensor, "batch num_kv_heads kv_len value_dim"]
    received: Float[Tensor, "batch num_kv_heads kv_len"] | None
    kernel: Kernel


def overhear(
    model: nn.Module,
    input_ids: Int[Tensor, "1 kv_len"],
    chunk: int,
    tell: Callable[[Heard], None],
    sums: bool = False,
) -> None:
    """Has `model` read a text with a full cache, and tells of each step of each layer of full attention.

    `sums` asks for what each key received. Raises ValueError if the text is not one row of a token at least, `chunk` is
    below 1, no layer has full attention, or the model's attention cannot be shown.
    """
    check_text(input_ids, chunk)
    cache = DynamicCache(config=decoder_config(model, "original"))
    layers = cast(list[Any], cache.layers)
    full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not full:
        raise ValueError(f"{type(model).__name__} has no layer of full attention to listen to")
    for index in full:
        layers[index] = _Witness(index, tell, Watch(mass=True) if sums else _SEES)
    before = cast(Any, model).config._attn_implementation
    reveal(model)
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in arguments(model) else {}
    try:
        with torch.no_grad():
            for piece in input_ids.to(device_of(model)).split(chunk, dim=1):
                model(input_ids=piece, use_cache=True, **{cache_argument(model): cache}, **more)
    finally:
        show_to(None)  # should a pass have failed between keys and queries
        cast(Any, model).set_attn_implementation(before)


def check_text(input_ids: Tensor, chunk: int) -> None:
    """Raises ValueError if the text is not one row of a token at least, or `chunk` is below 1."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be one text, [1, tokens], got shape {tuple(input_ids.shape)}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")


class _Witness(Onlooker, DynamicLayer):
    """Keeps every token, and tells of each step once it has attended."""

    def __init__(self, index: int, tell: Callable[[Heard], None], watch: Watch) -> None:
        super().__init__()
        self.index, self.tell, self.watch = index, tell, watch

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        attended = super().update(key_states, value_states, *args, **kwargs)
        show_to(self)
        return attended

    def heads(self, key: Tensor) -> int:
        return cast(Tensor, self.keys).shape[1]

    def observe(self, queries: Tensor, received: Tensor | None, kernel: Kernel) -> None:
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        self.tell(Heard(self.index, queries, keys, values, received, kernel))
