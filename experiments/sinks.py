"""What experiments tell of a model's attention sinks on one text, as plain numbers fit for JSON."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from sinkcache.sinks import FIRST_QUERY, attention_sinks

FOUR = range(4)  # positions that a cache of four sinks holds
THRESHOLDS, PLACES, SEGMENT = (0.2, 0.3, 0.5, 0.8), 8, 64  # of Sink_k^eps: eps, how many k, tokens of a segment


def attention_facts(model: nn.Module, ids: Int[Tensor, "1 kv_len"], first_query: int = FIRST_QUERY) -> dict[str, Any]:
    """How a text's attention falls; lists are by layer of attention, and within it by query head.

    Shares are of the queries from `first_query` on. Norms are those of the first token over the mean of the others.
    Raises ValueError if there is more than one text, and as `attention_sinks` does.
    """
    if len(ids) != 1:
        raise ValueError(f"facts are of one text at a time, got {len(ids)}")
    found = attention_sinks(model, ids, first_query)
    layers, ranges = found.layers, found.layers[0].ranges[1:]
    return {
        "tokens": found.tokens,
        "first_query": first_query,
        "layers": [layer.index for layer in layers],
        "uniform": [layer.uniform() for layer in layers],
        "share": [_listed(layer.share()[0]) for layer in layers],
        "share_four": [_listed(layer.share(FOUR)[0]) for layer in layers],
        "ranges": [list(each) for each in ranges],
        "share_by_range": [_by_range(layer.received[0, :, 1:, 0], ranges) for layer in layers],
        "uniform_by_range": [_by_range(layer.even[None, 1:, 0], ranges) for layer in layers],
        "first_choice": [_listed(layer.first_choice[0, :, 0]) for layer in layers],
        "entropy": [_weighted(layer.entropy[0, :, 1:], ranges) for layer in layers],
        "learned": [None if layer.learned is None else _weighted(layer.learned[0, :, 1:], ranges) for layer in layers],
        "cosine": [_listed(layer.cosine[0, :, 0]) for layer in layers],
        "top": [_top(layer.columns()[0].mean(0)) for layer in layers],
        "key_norm": [_over_others(layer.key_norms[0].mean(0)) for layer in layers],
        "value_norm": [_over_others(layer.value_norms[0].mean(0)) for layer in layers],
        "massive": [
            {"ratio": float(state.massive[0]), "position": int(state.position[0]), "channel": int(state.channel[0])}
            for state in found.states
        ],
        "state_norm": [_over_others(state.norms[0]) for state in found.states],
    }


def sink_rates(model: nn.Module, segments: Int[Tensor, "batch kv_len"]) -> dict[str, list[float]]:
    """Sink_k^eps of segments of equal length, a list for each eps: k from 1, the first token, to 8.

    Per segment, layer and head the k-th token is a sink if it receives more than eps, mean over the queries from it on;
    the rate is the part of these.
    """
    counts = {str(eps): torch.zeros(PLACES, dtype=torch.float64) for eps in THRESHOLDS}
    total = 0
    for batch in segments.split(16):
        importance = [layer.importance()[..., :PLACES] for layer in attention_sinks(model, batch, 1).layers]
        for eps in THRESHOLDS:
            counts[str(eps)] += sum((each > eps).double().sum(dim=(0, 1)) for each in importance)
        total += sum(each.shape[0] * each.shape[1] for each in importance)
    return {eps: _listed(count / total) for eps, count in counts.items()}


def _listed(values: Tensor) -> list[float]:
    return values.tolist()


def _by_range(sums: Tensor, ranges: Any) -> list[float]:
    lengths = torch.tensor([stop - start for start, stop in ranges])
    return _listed(sums.mean(dim=0) / lengths)


def _weighted(means: Tensor, ranges: Any) -> list[float]:
    lengths = torch.tensor([stop - start for start, stop in ranges], dtype=means.dtype)
    return _listed((means * lengths).sum(dim=-1) / lengths.sum())


def _top(columns: Tensor) -> list[list[float]]:
    best = columns.topk(min(PLACES, len(columns)))
    return [[int(place), float(value)] for value, place in zip(best.values, best.indices, strict=True)]


def _over_others(norms: Tensor) -> float:
    return float(norms[0] / norms[1:].mean())
