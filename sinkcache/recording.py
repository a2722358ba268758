"""A text read with a full cache, and what its queries attend to: what an oracle knows and policies are measured by.

Nothing of size [tokens, tokens] is made: a text is read in chunks, attention is computed by blocks of queries, and of
each block what every position received is kept, or how much of it falls on what policies hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkcache.attention import Onlooker, reveal
from sinkcache.devices import device_of
from sinkcache.guard import arguments, cache_argument, show_to
from sinkcache.lanes import Lanes
from sinkcache.observe import Kernel, attention
from sinkcache.policy import Policy, Watch
from sinkcache.positions import Rotation
from sinkcache.ragged import RaggedLayer
from sinkcache.scored import ScoredLayer
from sinkcache.support import decoder_config, rotations_of
from sinkcache.tally import Tallies, Tally

_SEES = Watch(queries=True)  # queries are shown, no sums are made


@dataclass(frozen=True, eq=False)
class Recording:
    """The attention that each token of a text received, by blocks of `chunk` queries, of a model that evicts nothing.

    `received[layer][block]`: summed over the block's queries, mean over the query heads of each key head; positions up
    to the block's end. A block takes as many bytes for each head and position as `record` was told, so a layer takes
    about `num_kv_heads * tokens ** 2 / (2 * chunk)` times as many. Compared by identity; not to be written to.
    """

    chunk: int
    tokens: int
    received: dict[int, list[Float[Tensor, "num_kv_heads _"]]] = field(repr=False)

    def coming(self, layer: int, seen: int, horizon: int) -> Float[Tensor, "num_kv_heads kv_len"]:
        """What each position will receive from the queries `seen` to `seen + horizon - 1`, float32.

        Queries beyond the end of the text give nothing. Of a block that falls among these queries in part, the same
        part of its sum is counted: exact where `seen` and `horizon` are multiples of `chunk`. Raises ValueError if
        the layer was not recorded, or the text has fewer than `seen` tokens.
        """
        if layer not in self.received:
            known = ", ".join(map(str, self.received))
            raise ValueError(f"layer {layer} was not recorded, whose attention is not full: layers {known} were")
        if seen > self.tokens:
            raise ValueError(f"the recording ends after {self.tokens} tokens, got {seen}: record the whole text")
        blocks, end = self.received[layer], min(seen + horizon, self.tokens)
        total = torch.zeros(blocks[0].shape[0], self.tokens)
        for number in range(seen // self.chunk, -(-end // self.chunk)):
            start, stop = number * self.chunk, min((number + 1) * self.chunk, self.tokens)
            part = (min(end, stop) - max(seen, start)) / (stop - start)
            total[:, :stop].add_(blocks[number], alpha=part)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recording":
        return self


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


def record(
    model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], chunk: int = 64, dtype: torch.dtype = torch.float32
) -> Recording:
    """What the tokens of a text receive when `model` reads it, `chunk` tokens at a time, and evicts nothing.

    Sums are float32 at least and kept in `dtype`, on the CPU: 47 MB for 4,096 tokens of SmolLM2-135M (30 layers, 3 key
    heads), 24 MB in float16, which loses sums below 6e-8. Raises as `overhear` does.
    """
    received: dict[int, list[Tensor]] = {}

    def note(heard: Heard) -> None:
        assert heard.received is not None
        received.setdefault(heard.layer, []).append(heard.received[0].to("cpu", dtype))

    overhear(model, input_ids, chunk, note, sums=True)
    return Recording(chunk, input_ids.shape[1], received)


def recall(
    model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], policies: Sequence[Policy], budget: int, chunk: int
) -> list[float]:
    """The attention recall of each of `policies`, one at least, and last the best of all; NaN if nothing is evicted.

    Of the attention that a query pays where nothing is evicted, the share that falls on what a policy would show it at
    that moment: what it holds and the chunk's own past. Mean over the queries of each step that would miss a token, and
    over query heads and layers. The model reads the text once with a full cache; beside each layer runs a shadow for
    each policy, which is given the same keys, values and queries, in original positions. The best is, for each query,
    the tokens that it attends to most, as many as it would be shown where heads hold alike. Raises as `overhear` does.
    """
    rotations = rotations_of(model)
    books = [Tallies(Tally(policy, budget, None), Lanes()) for policy in policies]
    shadows: dict[int, list[Any]] = {}
    sums, queries = torch.zeros(len(policies) + 1, dtype=torch.float64), 0

    def follow(heard: Heard) -> None:
        nonlocal sums, queries
        if heard.layer not in shadows:
            known = rotations[heard.layer]
            rotation = known if isinstance(known, Rotation) else None
            shadows[heard.layer] = [
                (_RaggedShadow if policy.across_heads else _Shadow)(book, rotation, False, policy, heard.layer, False)
                for book, policy in zip(books, policies, strict=True)
            ]
        mine, q_len = shadows[heard.layer], heard.queries.shape[2]
        for shadow in mine:
            shadow.follow(heard)
        if mine[0].most + q_len < heard.keys.shape[2]:
            sums += _shares(heard, mine)
            queries += heard.queries.shape[1] * q_len

    overhear(model, input_ids, chunk, follow)
    return (sums / queries).tolist()


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
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be one text, [1, tokens], got shape {tuple(input_ids.shape)}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
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


class _Beside:
    """What a layer beside one of a full cache does; `attended`: positions its last step's queries would have seen.

    Heads that would see fewer are filled up with -1.
    """

    attended: Int[Tensor, "batch num_kv_heads kv_len"]
    most: int  # tokens kept for the last step's queries beside its own

    def follow(self: Any, heard: Heard) -> None:
        """Takes the step that the other layer has made."""
        new = slice(-heard.queries.shape[2], None)
        keys, values = self.update(heard.keys[:, :, new], heard.values[:, :, new])
        if self.reads_attention:
            received, weights = None, self.weights()
            if self.watch.mass:
                shown, group = self.mask(), self.watch.group
                received = attention(heard.queries, keys, values, shown, heard.kernel, weights, group=group)[1]
            self.observe(heard.queries, received, heard.kernel)

    def _settle(self: Any) -> None:
        step, joined = self._under_way
        self.most = step.most
        self.attended = (self._slots(step.most + 1) if joined is None else joined.fields)["positions"].long()
        mixed: Any = super()
        mixed._settle()


class _Shadow(_Beside, ScoredLayer):
    """A shadow whose heads all hold as many."""


class _RaggedShadow(_Beside, RaggedLayer):
    """A shadow whose heads compete."""


def _shares(heard: Heard, shadows: Sequence[Any]) -> Float[Tensor, " shares"]:
    """Of each query's attention the share that each shadow would show it, and at last its best; sums over queries."""
    q_len, kv_len, most = heard.queries.shape[2], heard.keys.shape[2], shadows[0].most
    shown = torch.ones(q_len, kv_len, dtype=torch.bool, device=heard.keys.device).tril(kv_len - q_len)
    paid = heard.kernel.probabilities(heard.queries, heard.keys, shown[None, None])[0]
    held = paid.new_zeros(len(shadows), paid.shape[0], kv_len + 1)  # and a place for none
    for mine, shadow in zip(held, shadows, strict=True):
        mine.scatter_(-1, shadow.attended[0] % (kv_len + 1), 1)  # -1, none, is the last
    on_held = torch.matmul(paid.flatten(1, 2), held[..., :-1].permute(1, 2, 0)).unflatten(1, paid.shape[1:3])
    last = torch.arange(most, most + q_len, device=paid.device).expand(paid.shape[:-1])[..., None]
    on_best = paid.topk(most + q_len, dim=-1).values.cumsum(dim=-1).gather(-1, last)
    shares = torch.cat([on_held, on_best], dim=-1) / paid.sum(dim=-1, keepdim=True)
    return shares.double().sum(dim=(0, 1, 2)).cpu()
