"""References for policies that read attention, keys or values: loops over positions, float64, nothing of the library.

A stream is read in steps. `library` is the library's rule: before a step of q tokens each key head trims what it holds
to `budget - 1` by the scores then known, the q are appended and attend to what is held and to their own past in the
step, and what is held is reduced to `budget`, where the newest token stays. `paper` is the rule of the worked examples:
append, attend, reduce to `budget`. A scorer reads a `Stream` and gives each key head's positions a score each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Scores = list[dict[int, float]]


@dataclass
class Stream:
    """What has been read: Q `[heads, tokens, dim]`, K and V `[key heads, tokens, dim]`, K as queries read them.

    `held`: per key head the positions held, ascending. `rows[head][query][position]`: the attention which that query
    paid, when it was read, by each query head of the group. `bare`: Q without its rotation; `inv_freq` and `pairs`, the
    channels of each pair, are that rotation.
    """

    Q: Array
    K: Array
    V: Array
    scale: float
    bare: Array
    inv_freq: Array
    pairs: list[tuple[int, int]]
    seen: int = 0
    new: int = 0
    held: list[list[int]] = field(default_factory=list)
    rows: list[list[dict[int, Array]]] = field(default_factory=list)

    def group(self, head: int) -> range:
        """The query heads that read key head `head`."""
        size = len(self.Q) // len(self.K)
        return range(head * size, (head + 1) * size)

    def attention(self, head: int, query: int) -> dict[int, Array]:
        """Over the tokens held now, those at `query` or before, per query head of the group."""
        seen = [position for position in self.held[head] if position <= query]
        if not seen:
            return {}
        logits = self.Q[self.group(head), query] @ self.K[head, seen].T * self.scale
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return {position: weights[:, index] for index, position in enumerate(seen)}


Scorer = Callable[[Stream], Scores]


def new_stream(Q: Any, K: Any, V: Any, scale: float | None = None, bare: Any = None, inv_freq: Any = ()) -> Stream:
    Q, K, V = (np.asarray(each, dtype=np.float64) for each in (Q, K, V))
    half = len(inv_freq)
    stream = Stream(
        Q,
        K,
        V,
        Q.shape[-1] ** -0.5 if scale is None else scale,
        Q if bare is None else np.asarray(bare, dtype=np.float64),
        np.asarray(inv_freq, dtype=np.float64),
        [(channel, channel + half) for channel in range(half)],
    )
    stream.held = [[] for _ in K]
    stream.rows = [[] for _ in K]
    return stream


def read(stream: Stream, tokens: int) -> None:
    """Appends `tokens` tokens, which attend."""
    for held in stream.held:
        held += range(stream.seen, stream.seen + tokens)
    for head, rows in enumerate(stream.rows):
        rows += [stream.attention(head, query) for query in range(stream.seen, stream.seen + tokens)]
    stream.seen, stream.new = stream.seen + tokens, tokens


def best(scores: dict[int, float], room: int) -> list[int]:
    """The positions of the `room` greatest scores, ascending; of equals the newer."""
    order = sorted(scores, key=lambda position: (scores[position], position), reverse=True)
    return sorted(order[:room])


def compete(scores: Scores, room: int, least: int) -> list[list[int]]:
    """Per head the positions that stay when the worst of all heads goes, one by one, until `room` a head are left.

    Of equals the oldest goes, then that of the later head; the best `least` of a head do not go.
    """
    left = [sorted(head, key=lambda position: (head[position], position)) for head in scores]  # the worst first
    while sum(map(len, left)) > room * len(left):
        worst = [(scores[head][mine[0]], mine[0], -head) for head, mine in enumerate(left) if len(mine) > least]
        left[-min(worst)[2]].pop(0)
    return [sorted(mine) for mine in left]


def library(
    stream: Stream,
    chunks: list[int],
    budget: int,
    scorer: Scorer,
    evict_every: int = 1,
    floor: float | None = None,
) -> tuple[list[list[list[int]]], list[Scores]]:
    """Per step who is held after it, and the scores of every decision; a trim makes room for `evict_every` tokens.

    `floor`: heads compete, and each keeps that share of its budget.
    """

    def reduced(scores: Scores, room: int) -> list[list[int]]:
        if floor is None:
            return [best(head, room) for head in scores]
        return compete(scores, room, min(int(floor * budget + 1e-9), room))

    kept, decisions = [], []
    for tokens in chunks:
        if sum(map(len, stream.held)) > (budget - 1) * len(stream.held):
            decisions.append(scorer(stream))
            stream.held = reduced(decisions[-1], budget - evict_every)
        read(stream, tokens)
        if sum(map(len, stream.held)) > budget * len(stream.held):
            decisions.append(scorer(stream))
            newest = {stream.seen - 1: np.inf}
            stream.held = reduced([{**_finite(scores), **newest} for scores in decisions[-1]], budget)
        kept.append([list(held) for held in stream.held])
    return kept, decisions


def paper(stream: Stream, chunks: list[int], budget: int, scorer: Scorer) -> list[list[list[int]]]:
    """Per step who is held after it."""
    kept = []
    for tokens in chunks:
        read(stream, tokens)
        if len(stream.held[0]) > budget:
            stream.held = [best(scores, budget) for scores in scorer(stream)]
        kept.append([list(held) for held in stream.held])
    return kept


def _finite(scores: dict[int, float]) -> dict[int, float]:
    """Protected tokens stay above all others, and below the newest."""
    return {position: min(score, 1e300) for position, score in scores.items()}


# what a token has received


def mass(stream: Stream, head: int, decay: float = 1.0, group: str = "mean") -> dict[int, float]:
    totals = dict.fromkeys(stream.held[head], 0.0)
    for query, row in enumerate(stream.rows[head]):
        for position in totals:
            if position in row:
                totals[position] += decay ** (stream.seen - 1 - query) * _one(row[position], group)
    return totals


def window(stream: Stream, head: int, queries: int, reduce: str = "sum", group: str = "mean") -> dict[int, float]:
    totals = dict.fromkeys(stream.held[head], 0.0)
    for query in range(max(stream.seen - queries, 0), stream.seen):
        for position, weights in stream.attention(head, query).items():
            one = _one(weights, group)
            totals[position] = totals[position] + one if reduce == "sum" else max(totals[position], one)
    return totals


def _one(weights: Array, group: str) -> float:
    return float(weights.mean() if group == "mean" else weights.max())


# scorers


def guarded(scores: dict[int, float], stream: Stream, num_sinks: int, recent: int) -> dict[int, float]:
    safe = {*range(num_sinks), *range(stream.seen - recent, stream.seen)}
    return {position: np.inf if position in safe else score for position, score in scores.items()}


def each_head(score: Callable[[Stream, int], dict[int, float]], num_sinks: int = 0, recent: int = 0) -> Scorer:
    def scorer(stream: Stream) -> Scores:
        return [guarded(score(stream, head), stream, num_sinks, recent) for head in range(len(stream.K))]

    return scorer


def recency(num_sinks: int = 0) -> Scorer:
    return each_head(lambda stream, head: dict.fromkeys(stream.held[head], 0.0), num_sinks)


def h2o(recent: int, num_sinks: int = 0, decay: float = 1.0, mean: bool = False, group: str = "mean") -> Scorer:
    def score(stream: Stream, head: int) -> dict[int, float]:
        totals = mass(stream, head, decay, group)
        if not mean:
            return totals
        weights = {p: sum(decay**age for age in range(stream.seen - p)) for p in totals}
        return {position: total / weights[position] for position, total in totals.items()}

    return each_head(score, num_sinks, recent)


def snapkv(
    queries: int,
    kernel: int = 5,
    pooling: str = "avg",
    reduce: str = "sum",
    group: str = "mean",
    num_sinks: int = 0,
    recent: int | None = None,
) -> Scorer:
    safe = queries if recent is None else recent

    def score(stream: Stream, head: int) -> dict[int, float]:
        return pool(window(stream, head, queries, reduce, group), stream.seen - safe, kernel, pooling)

    return each_head(score, num_sinks, safe)


def pool(scores: dict[int, float], end: int, kernel: int, pooling: str) -> dict[int, float]:
    """Of positions before `end` the average or maximum over neighbours; `padded` counts what is not there as 0."""
    past = sorted(position for position in scores if position < end)
    pooled = dict(scores)
    for index, position in enumerate(past if pooling != "none" else []):
        near = [scores[p] for p in past[max(index - kernel // 2, 0) : index + kernel // 2 + 1]]
        pooled[position] = max(near) if pooling == "max" else sum(near) / (kernel if pooling == "padded" else len(near))
    return pooled


def tova(per: str = "layer", num_sinks: int = 0, recent: int = 0) -> Scorer:
    def scorer(stream: Stream) -> Scores:
        rows = [mass(stream, head, decay=0.0) for head in range(len(stream.K))]
        if per == "layer":
            rows = [{p: sum(row.get(p, 0.0) for row in rows) / len(rows) for p in row} for row in rows]
        return [guarded(row, stream, num_sinks, recent) for row in rows]

    return scorer


def moments(stream: Stream, head: int, skip: int) -> tuple[Array, Array]:
    """Mean and covariance of the bare queries of query head `head` from position `skip` on."""
    queries = stream.bare[head, skip : stream.seen]
    if len(queries) == 0:
        return np.zeros(stream.bare.shape[-1]), np.zeros((stream.bare.shape[-1],) * 2)
    mean = queries.mean(axis=0)
    return mean, (queries - mean).T @ (queries - mean) / len(queries)


def turn(stream: Stream, position: int) -> Array:
    """The rotation of a query to `position`, as a matrix."""
    matrix = np.eye(stream.bare.shape[-1])
    for (one, other), frequency in zip(stream.pairs, stream.inv_freq, strict=True):
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        matrix[one, one], matrix[one, other], matrix[other, one], matrix[other, other] = cos, -sin, sin, cos
    return matrix


def expected_attention(
    horizon: int, num_sinks: int, recent: int = 0, covariance: bool = True, epsilon: float = 0.0
) -> Scorer:
    def score(stream: Stream, head: int) -> dict[int, float]:
        scale = stream.K.shape[-1] ** -0.5
        ahead = np.mean([turn(stream, stream.seen + step) for step in range(horizon)], axis=0)
        others = [position for position in stream.held[head] if position >= num_sinks]
        expected = np.zeros(len(others))
        for query_head in stream.group(head):
            mean, spread = moments(stream, query_head, num_sinks)
            keys = stream.K[head, others]
            logits = keys @ (ahead @ mean) * scale
            if covariance:
                logits += np.array([k @ ahead @ spread @ ahead.T @ k for k in keys]) * scale**2 / 2
            expected += softmax(logits) / len(stream.group(head))
        norms = np.linalg.norm(stream.V[head, others], axis=1)
        scores = dict.fromkeys(stream.held[head], 0.0)
        return scores | dict(zip(others, ((expected + epsilon) * norms).tolist(), strict=True))

    return each_head(score, num_sinks, recent)


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(initial=-np.inf))
    return weights / weights.sum()


def keydiff(num_sinks: int = 0, recent: int = 0) -> Scorer:
    def score(stream: Stream, head: int) -> dict[int, float]:
        directions = {p: stream.K[head, p] / np.linalg.norm(stream.K[head, p]) for p in stream.held[head]}
        anchor = sum(directions.values()) / len(directions)
        return {p: float(-(one @ anchor) / np.linalg.norm(anchor)) for p, one in directions.items()}

    return each_head(score, num_sinks, recent)


def knorm(num_sinks: int = 0, recent: int = 0) -> Scorer:
    def score(stream: Stream, head: int) -> dict[int, float]:
        return {position: -float(np.linalg.norm(stream.K[head, position])) for position in stream.held[head]}

    return each_head(score, num_sinks, recent)


def lagkv(num_sinks: int, lag: int, value_weight: float = 1.0) -> Scorer:
    def score(stream: Stream, head: int) -> dict[int, float]:
        scores = dict.fromkeys(stream.held[head], np.inf)
        others = [position for position in stream.held[head] if position >= num_sinks]
        for start in range(0, len(others) - 2 * lag + 1, lag):
            chunk, lagged = others[start : start + lag], others[start + lag : start + 2 * lag]
            total = np.zeros(lag)
            for states, weight in ((stream.K[head], 1.0), (stream.V[head], value_weight)):
                low, high = states[lagged].min(axis=0), states[lagged].max(axis=0)
                normal = (states[chunk] - low) / (high - low + 1e-6)
                total += weight * softmax(normal.std(axis=1, ddof=1))
            scores |= dict(zip(chunk, total.tolist(), strict=True))
        return scores

    return each_head(score, num_sinks)


def rkv(queries: int, kernel: int, weight: float, likeness: float = 0.5, num_sinks: int = 0) -> Scorer:
    def score(stream: Stream, head: int) -> dict[int, float]:
        held = stream.held[head]
        attention = window(stream, head, queries)
        attention = {position: total / min(queries, stream.seen) for position, total in attention.items()}
        attention = pool(attention, stream.seen - queries, kernel, "max")
        cosine = np.zeros((len(held), len(held)))
        for i, one in enumerate(held):
            for j, other in enumerate(held):
                a, b = stream.K[head, one], stream.K[head, other]
                cosine[i, j] = a @ b / np.linalg.norm(a) / np.linalg.norm(b) if i != j else 0.0
            alike = np.nonzero(cosine[i] > likeness)[0]
            cosine[i, alike[-1:]] = 0.0
        redundancy = softmax(cosine.mean(axis=0))
        return {p: weight * attention[p] - (1 - weight) * redundancy[i] for i, p in enumerate(held)}

    return each_head(score, num_sinks, queries)


def by_chance(seed: int) -> Scorer:
    def mix(number: int) -> int:
        number %= 2**32
        for constant in (0x7FEB352D, 0x31848BAB):
            number = (number ^ number >> 16) * constant % 2**32
        return number ^ number >> 16

    def score(stream: Stream, head: int) -> dict[int, float]:
        return {position: mix(mix(position + mix(seed + 1))) // 2**8 / 2**24 for position in stream.held[head]}

    return each_head(score)


def protect(inner: Scorer, num_sinks: int, recent: int) -> Scorer:
    return lambda stream: [guarded(scores, stream, num_sinks, recent) for scores in inner(stream)]


def phases(prefill: Scorer, decode: Scorer) -> Scorer:
    return lambda stream: (prefill if stream.new > 1 else decode)(stream)
