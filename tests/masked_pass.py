"""What a bounded cache would predict, by one pass over the whole text without any cache, under a mask of its own.

In each layer the loops of score_oracle.py say what every query would be shown; all it has of the library is its rules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import score_oracle as oracle
import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def masked_nll(model: Any, ids: Tensor, budgets: Sequence[int], chunk: int, scorer: Callable[[int], Any]) -> Tensor:
    """Negative log-likelihoods of tokens 1 on; `scorer` makes the oracle of a layer, `budgets` has one for each."""
    chunks = [len(piece) for piece in ids[0].split(chunk)]
    inv_freq = model.model.rotary_emb.inv_freq.double().numpy()

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        q, k, v = (each[0].double().numpy() for each in (query, key, value))
        stream = oracle.new_stream(q, k, v, scaling, bare=_unturned(q, inv_freq), inv_freq=inv_freq)
        oracle.library(stream, chunks, budgets[module.layer_idx], scorer(module.layer_idx))
        shown = torch.zeros(query.shape[1:3] + key.shape[2:3], dtype=torch.bool)
        for head, rows in enumerate(stream.rows):
            for number, row in enumerate(rows):
                shown[list(stream.group(head)), number] = torch.isin(torch.arange(key.shape[2]), torch.tensor([*row]))
        group = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (key, value))
        out = functional.scaled_dot_product_attention(query, keys, values, shown[None], scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("masked_pass", attend)
    model.set_attn_implementation("masked_pass")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    finally:
        model.set_attn_implementation(before)
    return functional.cross_entropy(logits.double(), ids[0, 1:], reduction="none")


def _unturned(queries: Any, inv_freq: Any) -> Any:
    """Queries without the rotation to their positions; the first `2 * len(inv_freq)` channels are turned."""
    found, half = queries.copy(), len(inv_freq)
    one, other = queries[..., :half], queries[..., half : 2 * half]
    angles = torch.arange(queries.shape[1]).double()[:, None] * torch.from_numpy(inv_freq)
    cos, sin = angles.cos().numpy(), angles.sin().numpy()
    found[..., :half], found[..., half : 2 * half] = one * cos + other * sin, other * cos - one * sin
    return found


def clairvoyant(model: Any, ids: Tensor, horizon: int) -> Callable[[int], Any]:
    """The scorer of each layer that knows what the uncompressed model will attend to."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        paid = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation(before)

    def of_layer(layer: int) -> Any:
        def score(stream: oracle.Stream, head: int) -> dict[int, float]:
            rows = paid[layer][0, list(stream.group(head)), stream.seen : stream.seen + horizon].double()
            coming = rows.sum(dim=1).mean(dim=0)
            return {position: float(coming[position]) for position in stream.held[head]}

        return oracle.each_head(score)

    return of_layer
