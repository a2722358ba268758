"""A text read with a full cache, and what its queries attend to: what an oracle knows and policies are measured by.

Of each block of queries what every position received is kept, or how much of it falls on what policies hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from sinkcache.budgets import asked_budgets
from sinkcache.hearing import Heard, overhear
from sinkcache.lanes import Lanes
from sinkcache.policy import Policy
from sinkcache.shadows import shadow_of
from sinkcache.support import bounded_layers, decoder_config, rotations_of
from sinkcache.tally import Tallies, Tally


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
    model: nn.Module,
    input_ids: Int[Tensor, "1 kv_len"],
    policies: Sequence[Policy],
    budget: int | list[int],
    chunk: int,
) -> list[float]:
    """The attention recall of each of `policies`, one at least, and last the best of all; NaN if nothing is evicted.

    Of the attention that a query pays where nothing is evicted, the share that falls on what a policy would show it at
    that moment: what it holds and the chunk's own past. Mean over the queries of each step that would miss a token, and
    over query heads and layers. The model reads the text once with a full cache; beside each layer runs a shadow for
    each policy, which is given the same keys, values and queries, in original positions. The best is, for each query,
    the tokens that it attends to most, as many as it would be shown where heads hold alike. Of a list of budgets, one
    for each bounded layer, the queries are those that would miss a token at their mean. Raises as `overhear` does, and
    ValueError for a list of another length.
    """
    rotations, config = rotations_of(model), decoder_config(model, "original")
    bounded = bounded_layers(config, list(DynamicCache(config=config).layers), "native")
    asked = dict(zip(bounded, asked_budgets(budget, len(bounded)), strict=True))
    mean = sum(asked.values()) / len(asked)
    books = {each: [Tallies(Tally(policy, each, None), Lanes()) for policy in policies] for each in asked.values()}
    shadows: dict[int, list[Any]] = {}
    sums, queries = torch.zeros(len(policies) + 1, dtype=torch.float64), 0

    def follow(heard: Heard) -> None:
        nonlocal sums, queries
        layer, q_len = heard.layer, heard.queries.shape[2]
        if layer not in shadows:
            pairs = zip(policies, books[asked[layer]], strict=True)
            shadows[layer] = [shadow_of(policy, book, rotations[layer], layer) for policy, book in pairs]
        for shadow in shadows[layer]:
            shadow.follow(heard)
        if heard.keys.shape[2] - q_len >= mean:
            sums += _shares(heard, shadows[layer])
            queries += heard.queries.shape[1] * q_len

    overhear(model, input_ids, chunk, follow)
    return (sums / queries).tolist()


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
