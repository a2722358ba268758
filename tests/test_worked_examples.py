"""Worked examples beyond those of tests/test_policy_formulas.py: policies that do not ship, and what others score.

A tiny Llama's n-th word has at position n the fixture's n-th query, key and value, so that what a policy is told is
what a real cache tells. A cache of six tokens that gives up several at once asks, before the seventh, of all six, the
newest among them, as the examples do. Policies that do not ship are written as a user would; what `Entries` do not tell
them, they hold in a field. Kept sets and printed numbers are those of the papers' formulas, by numpy.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Literal

import pytest
import torch
from conftest import build
from jaxtyping import Float
from test_policy_formulas import F1, F2, F3, Fixture
from test_scored import Noted
from torch import Tensor
from torch.nn import functional as F

from sinkcache import SinkCache
from sinkcache import observe as observe_module
from sinkcache.budgets import pyramid, scaled
from sinkcache.guard import cache_argument
from sinkcache.hearing import Heard, overhear
from sinkcache.lanes import Lanes
from sinkcache.observe import Kernel, attention
from sinkcache.policies import (
    H2O,
    TOVA,
    AdaKV,
    Clairvoyant,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Protect,
    SnapKV,
    StreamingLLM,
    Window,
)
from sinkcache.policy import Entries, Policy, Watch
from sinkcache.recording import record
from sinkcache.scored import ScoredLayer
from sinkcache.tally import Tallies, Tally

Rows = tuple[tuple[float, ...], ...]
Scores = Float[Tensor, "batch num_kv_heads kv_len"]

SCALE = 2**-0.5
LATER = [[1.0, 1.0], [1.5, 0.5]]  # two queries after the text
UNSEEN = [-40.0, -40.0]  # a key to which they pay less than 1e-24


def _tensor(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# a model that reads the fixtures


def _llama(*layers: Fixture, bare: Literal["queries", "keys"] | None = None) -> Any:
    """A layer for each fixture, whose `bare` states are those before their rotation; all others are those after it."""
    (heads, kv_heads), words = (len(layers[0][0]), len(layers[0][1])), len(layers[0][0][0])
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2,
        "hidden_size": 24,
    }
    model: Any = build("llama", num_hidden_layers=len(layers), vocab_size=words, **sizes)
    back = torch.polar(torch.ones(words, dtype=torch.float64), -torch.arange(words, dtype=torch.float64))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(words, 24))
        for block, fixture in zip(model.model.layers, layers, strict=True):
            size = block.input_layernorm(model.model.embed_tokens.weight)[0, 0]
            for name, states in zip(("queries", "keys", "values"), fixture, strict=True):
                projected = _tensor(states)
                if name not in ("values", bare):
                    projected = torch.view_as_real(torch.view_as_complex(projected) * back)
                weight = getattr(block.self_attn, f"{name[0]}_proj").weight.zero_()
                weight[:, :words] = projected.transpose(1, 2).flatten(0, 1) / size
            if block is not model.model.layers[-1]:  # the next layer reads the words as they are
                block.self_attn.o_proj.weight.zero_()
                block.mlp.down_proj.weight.zero_()
    return model


def _and_later(fixture: Fixture) -> Fixture:
    """The six words and two more, which ask as `LATER` does and are not seen."""
    more = (LATER, [UNSEEN, UNSEEN], [[0.0, 0.0]] * 2)
    queries, keys, values = ([head + each for head in states] for states, each in zip(fixture, more, strict=True))
    return queries, keys, values


MODELS: dict[str, Callable[[], Any]] = {
    "F1": lambda: _llama(_and_later(F1)),
    "F1-bare-queries": lambda: _llama(_and_later(F1), bare="queries"),
    "F1-bare-keys": lambda: _llama(_and_later(F1), bare="keys"),
    "F2-bare-queries": lambda: _llama(_and_later(F2), bare="queries"),
    "F3": lambda: _llama(_and_later(F3)),
    "F3-apart": lambda: _llama(_and_later((F3[0], F3[1] * 2, F3[2] * 2))),  # each query head has keys of its own
    "F3-thrice": lambda: _llama(_and_later((F3[0][:1] * 3, F3[1] * 3, F3[2] * 3))),
    "F1-F2": lambda: _llama(_and_later(F1), _and_later(F2)),
}


@functools.cache
def _model(name: str) -> Any:
    return MODELS[name]()


def _read(model: Any, cache: SinkCache, words: list[int], **more: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([words]), **{cache_argument(model): cache}, **more).logits


def _held(cache: SinkCache, layer: int = 0) -> list[list[int]]:
    """What each head of the first row holds."""
    return [[position for position in head if position >= 0] for head in cache.kept(layer)[0].tolist()]


def _kept(name: str, policy: Policy, room: int, chunk: int = 6) -> list[list[int]]:
    """Of six tokens the `room` that each head keeps when the seventh comes."""
    cache = SinkCache(_model(name), policy, 6, evict_every=6 - room, positions="original")
    for start in range(0, 6, chunk):
        _read(_model(name), cache, list(range(start, start + chunk)))
    assert _held(cache) == [list(range(6))] * len(_held(cache))
    _read(_model(name), cache, [6])
    return [head[:-1] for head in _held(cache)]


def _trace(name: str, policy: Policy, room: int) -> list[list[int]]:
    """What is kept of each token's past when the next comes, read token by token; of one head."""
    cache, trace = SinkCache(_model(name), policy, room + 1), []
    for word in range(7):
        _read(_model(name), cache, [word])
        trace.append(_held(cache)[0][:-1])
    return trace[1:]


def _scores(name: str, policy: Policy, room: int) -> list[float]:
    """What the first head's six tokens are worth when `room` of them are to be kept, rounded as the examples are."""
    notes: list[list[Any]] = [[]]
    _kept(name, Noted(policy, notes), room)
    ((first, *_),) = notes[0]
    return [round(first[position], 4) for position in range(6)]


# policies that are not shipped


def _in_order(entries: Entries, states: Tensor) -> Tensor:
    """What slots hold, `[batch, num_kv_heads, kv_len, ...]`, by position."""
    order = entries.positions.argsort(dim=-1)
    return states.gather(2, order.reshape(*order.shape, *[1] * (states.ndim - 3)).expand_as(states))


def _to_slots(entries: Entries, scores: Scores) -> Scores:
    """What tokens by position are worth, by slot."""
    return torch.empty_like(scores).scatter(-1, entries.positions.argsort(dim=-1), scores)


@dataclass(frozen=True)
class Given(Policy):
    """What is known of each position, head by head."""

    worth: Rows

    def score(self, entries: Entries) -> Scores:
        return _tensor(self.worth)[None].gather(-1, entries.positions.long().clamp_min(0))


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Evicts the token that most of the newest queries paid less than an even share; `low` counts them."""

    low: tuple[int, ...]

    def score(self, entries: Entries) -> Scores:
        return -_tensor(self.low)[entries.positions.long().clamp_min(0)]


@dataclass(frozen=True)
class KVzip(Policy):
    """Evicts the token that a repetition of the whole text attends to least at its most; never the first.

    `queries`, `keys`: of the repetition, from the second token on. It goes by chunks, and each sees the first token,
    its own chunk of the text and its own past.
    """

    queries: Rows
    keys: Rows
    chunk: int

    def watch(self) -> Watch:
        return Watch(keys=True)

    def score(self, entries: Entries) -> Scores:
        text, queries, keys = _in_order(entries, entries.keys), _tensor(self.queries), _tensor(self.keys)
        greatest = torch.full(text.shape[:3], torch.inf, dtype=text.dtype)
        for start in range(1, text.shape[2], self.chunk):
            chunk, repeated = slice(start, start + self.chunk), slice(start - 1, start - 1 + self.chunk)
            seen = torch.cat([text[:, :, :1], text[:, :, chunk], keys[repeated].expand(*text.shape[:2], -1, -1)], dim=2)
            logits = queries[repeated] @ seen.mT * SCALE
            later = torch.ones_like(logits, dtype=torch.bool).triu(seen.shape[2] - logits.shape[2] + 1)
            paid = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
            greatest[..., chunk] = paid[..., 1 : 1 + logits.shape[2]].amax(dim=2)
        return _to_slots(entries, greatest)


@dataclass(frozen=True)
class Duo(Policy):
    """Heads of a gate below the quantile `sparsity` keep the first token and the newest two, others all they can."""

    gates: tuple[float, ...]
    sparsity: float
    floor: float = 0.2

    across_heads: ClassVar[bool] = True

    def score(self, entries: Entries) -> Scores:
        gates = _tensor(self.gates)
        streaming = (gates < gates.quantile(self.sparsity))[:, None]
        middle = (entries.positions > 0) & (entries.ages > 2)
        return torch.ones(middle.shape, dtype=torch.float64).masked_fill(streaming & middle, 0)


@dataclass(frozen=True)
class CriticalKV(Policy):
    """Keeps half of the past it has room for by attention, and the rest by attention times what the value becomes.

    `output`: how the model projects a head's values.
    """

    output: Rows
    budget: int
    observation_window: int = 2

    def watch(self) -> Watch:
        return Watch(window=self.observation_window, values=True)

    def score(self, entries: Entries) -> Scores:
        observing = entries.ages <= self.observation_window
        paid = (entries.window / self.observation_window).masked_fill(observing, -torch.inf)
        first = paid.topk((self.budget - self.observation_window) // 2, dim=-1).indices
        sizes = (entries.values @ _tensor(self.output)).abs().sum(dim=-1)
        return ((paid + 1e-4) * sizes).scatter(-1, first, torch.inf).masked_fill(observing, torch.inf)


@dataclass(frozen=True)
class TriAttention(Policy):
    """The logit that calibrated queries give a key, from some distances ahead; channels are one complex number.

    `mean`, `length`: of the queries before rotation, E q and E |q|; `offsets`: how far ahead they are.
    """

    mean: complex
    length: float
    frequency: float
    offsets: tuple[int, ...]

    def watch(self) -> Watch:
        return Watch(keys=True)

    def score(self, entries: Entries) -> Scores:
        turned = torch.view_as_complex(entries.keys)
        keys = turned * torch.exp(-1j * self.frequency * entries.positions)
        products = self.mean * keys.conj()
        ahead = (entries.seen - entries.positions)[..., None] + _tensor(self.offsets)
        waves = torch.cos(self.frequency * ahead + products.angle()[..., None]).mean(dim=-1)
        return products.abs() * waves + (self.length - abs(self.mean)) * keys.abs()


@dataclass(frozen=True)
class LeastError(Policy):
    """Keeps the `budget` tokens on which alone the outputs of `queries`, yet to come, change least; of one head."""

    queries: Rows
    budget: int

    def watch(self) -> Watch:
        return Watch(keys=True, values=True)

    def score(self, entries: Entries) -> Scores:
        def error(kept: tuple[int, ...]) -> float:
            return _error(_tensor(self.queries), entries.keys[0, 0], entries.values[0, 0], list(kept))

        best = min(combinations(range(entries.positions.shape[-1]), self.budget), key=error)
        scores = torch.zeros(entries.positions.shape)
        scores[..., list(best)] = 1
        return scores


def _error(
    queries: Float[Tensor, "q_len head_dim"],
    keys: Float[Tensor, "kv_len head_dim"],
    values: Float[Tensor, "kv_len head_dim"],
    kept: list[int],
) -> float:
    """The squared change of the queries' outputs when all keys but those `kept` are gone."""
    outputs = [
        (queries @ keys[index].T * SCALE).softmax(dim=-1) @ values[index] for index in (list(range(len(keys))), kept)
    ]
    return float((outputs[0] - outputs[1]).square().sum())


@dataclass(frozen=True)
class PastAlone(Policy):
    """Attention of the newest queries with a softmax over the past alone, without the tokens that they belong to.

    `queries[head][query]`. Of logits of the group the greatest (the code of R-KV) or their sum (MorphKV), or the sum of
    each head's probabilities; of queries, their sum or the greatest.
    """

    queries: tuple[Rows, ...]
    group: Literal["max of logits", "sum of logits", "each"] = "sum of logits"
    reduce: Literal["sum", "max"] = "sum"

    def watch(self) -> Watch:
        return Watch(keys=True)

    def score(self, entries: Entries) -> Scores:
        queries = _tensor(self.queries)
        observing = entries.ages <= queries.shape[1]
        logits = torch.einsum("gqd,bhkd->bhgqk", queries, entries.keys) * SCALE
        if self.group != "each":
            logits = logits.amax(2, keepdim=True) if self.group == "max of logits" else logits.sum(2, keepdim=True)
        paid = logits.masked_fill(observing[:, :, None, None], -torch.inf).softmax(dim=-1).sum(dim=2)
        return (paid.sum(dim=2) if self.reduce == "sum" else paid.amax(dim=2)).masked_fill(observing, torch.inf)


@dataclass(frozen=True)
class ReleasedRKV(Policy):
    """R-KV as its code has it: a key that is like no other strikes out its likeness to the first."""

    attention: PastAlone
    kernel: int
    weight: float

    def watch(self) -> Watch:
        return self.attention.watch()

    def score(self, entries: Entries) -> Scores:
        paid = _in_order(entries, self.attention.score(entries)) / len(self.attention.queries[0])
        pooled = F.max_pool1d(paid.masked_fill(paid.isinf(), -torch.inf), self.kernel, 1, self.kernel // 2)
        keys = F.normalize(_in_order(entries, entries.keys), dim=-1)
        cosines = (keys @ keys.mT).masked_fill(torch.eye(keys.shape[2], dtype=torch.bool), 0)
        newest = ((cosines > 0.5) * torch.arange(keys.shape[2])).amax(dim=-1, keepdim=True)
        redundancy = cosines.scatter(-1, newest, 0).mean(dim=2).softmax(dim=-1)
        scores = self.weight * pooled - (1 - self.weight) * redundancy
        return _to_slots(entries, scores.masked_fill(paid.isinf(), torch.inf))


@dataclass(frozen=True)
class ReleasedSnapKV(Policy):
    """SnapKV as its code has it: beyond the ends of the past there are zeros, which count."""

    observation_window: int
    kernel: int

    def watch(self) -> Watch:
        return Watch(window=self.observation_window)

    def score(self, entries: Entries) -> Scores:
        observing = entries.ages <= self.observation_window
        past = _in_order(entries, entries.window.masked_fill(observing, 0))
        pooled = F.avg_pool1d(past, self.kernel, 1, self.kernel // 2)
        return _to_slots(entries, pooled).masked_fill(observing, torch.inf)


@dataclass(frozen=True)
class DefensiveKV(Policy):
    """The greatest attention of any head and query, each pooled with its sum as it was, and at least their mean.

    `queries[head][query]`: the newest; `floor`: times the mean, the least a token is worth.
    """

    queries: tuple[Rows, ...]
    kernel: int
    floor: float = 1.0

    def watch(self) -> Watch:
        return Watch(keys=True)

    def score(self, entries: Entries) -> Scores:
        queries, keys = _tensor(self.queries), _in_order(entries, entries.keys)
        length, newest = keys.shape[2], queries.shape[1]
        logits = torch.einsum("gqd,bhkd->bhgqk", queries, keys) * SCALE
        shown = torch.ones(newest, length, dtype=torch.bool).tril(length - newest)
        past = logits.masked_fill(~shown, -torch.inf).softmax(dim=-1)[..., : length - newest]
        pooled = F.avg_pool1d(past.flatten(0, 3), self.kernel, 1, self.kernel // 2).unflatten(0, past.shape[:4])
        pooled = pooled * past.sum(dim=-1, keepdim=True) / pooled.sum(dim=-1, keepdim=True)
        greatest = pooled.amax(dim=(2, 3))
        greatest = greatest.maximum(self.floor * greatest.mean(dim=-1, keepdim=True))
        return _to_slots(entries, F.pad(greatest, (0, newest), value=torch.inf))


@dataclass(frozen=True)
class GreatestHead(Policy):
    """What a token is worth by `policy` in the head where it is worth most; heads keep the same tokens."""

    policy: Policy

    def watch(self) -> Watch:
        return self.policy.watch()

    def score(self, entries: Entries) -> Scores:
        scores = _in_order(entries, self.policy.score(entries))
        return _to_slots(entries, scores.amax(dim=1, keepdim=True).expand_as(scores))


@dataclass(frozen=True)
class Overheard(Policy):
    """Scores as `policy` does, and puts down what each position has received whenever it is asked."""

    policy: Policy
    notes: dict[int, float]

    def watch(self) -> Watch:
        return self.policy.watch()

    def score(self, entries: Entries) -> Scores:
        heard = zip(entries.positions[0, 0].tolist(), entries.mass[0, 0].tolist(), strict=True)
        self.notes.update({position: round(mass, 4) for position, mass in heard})
        return self.policy.score(entries)


# what they keep


def _rows(states: list[list[float]]) -> Rows:
    return tuple(map(tuple, states))


def _newest(fixture: Fixture) -> tuple[Rows, ...]:
    """The last two queries of each head."""
    return tuple(_rows(head[4:6]) for head in fixture[0])


REPEATED = _rows(F1[0][0][1:]), _rows(F1[1][0][1:])
OUTPUT: Rows = ((1.0, 1.0), (0.0, 2.0))
PLAIN = SnapKV(2, pooling="none")
LOW = (1, 1, 2, 3, 2, 1)
RKV_CODE = ReleasedRKV(PastAlone(_newest(F1), "max of logits"), 3, 0.1)

EXAMPLES: dict[str, tuple[str, Policy, int, list[int], list[float]]] = {  # and the scores that are printed
    "scissorhands": ("F1", Protect(Scissorhands(LOW), 0, 1), 3, [0, 1, 5], []),
    "kvzip": ("F1", KVzip(*REPEATED, 5), 3, [0, 1, 2], [math.inf, 0.3067, 0.3335, 0.0823, 0.1963, 0.1155]),
    "kvzip-2": ("F1", KVzip(*REPEATED, 2), 3, [0, 2, 3], [math.inf, 0.0325, 0.5493, 0.2919, 0.1717, 0.0967]),
    "criticalkv": ("F1", CriticalKV(OUTPUT, 4), 4, [1, 2, 4, 5], []),
    "triattention": (
        "F1-bare-keys",
        TriAttention(1 + 0.5j, 2.0, 1.0, (1, 2, 4)),
        3,
        [0, 1, 2],
        [2.2326, 1.5182, 0.8331, 0.6314, 0.6131, 0.3627],
    ),
    "least-error": ("F1", LeastError(_rows(LATER), 3), 3, [0, 1, 3], []),
    "defensivekv": ("F3", DefensiveKV(_newest(F3), 3), 4, [2, 3, 4, 5], [0.2822, 0.2822, 0.3652, 0.3468]),
    "max-of-logits": (
        "F3",
        PastAlone(_newest(F3), "max of logits"),
        4,
        [0, 2, 4, 5],
        [0.5661, 0.4021, 0.6034, 0.4284],
    ),
    "sum-of-logits": (
        "F3",
        PastAlone(_newest(F3), "sum of logits"),
        4,
        [0, 3, 4, 5],
        [0.6647, 0.4321, 0.1516, 0.7516],
    ),
    "mean-of-past": ("F3", PastAlone(_newest(F3), "each"), 4, [0, 1, 4, 5], [1.0618, 1.1601, 0.7644, 1.0136]),
    "morphkv-sum": ("F1", PastAlone(_newest(F1)), 4, [0, 2, 4, 5], [0.648, 0.578, 0.6868, 0.0872]),
    "morphkv-max": (
        "F1",
        PastAlone(_newest(F1), reduce="max"),
        4,
        [1, 2, 4, 5],
        [0.3634, 0.5771, 0.6177, 0.0692],
    ),
    "rkv-code": ("F1", RKV_CODE, 4, [0, 1, 4, 5], [-0.1149, -0.0803, -0.1435, -0.1229]),
    "snapkv-code": ("F1", ReleasedSnapKV(2, 3), 4, [1, 2, 4, 5], [0.3756, 0.5701, 0.4052, 0.2215]),
    "knorm": ("F1", Knorm(), 3, [3, 4, 5], [-2.5, -2.6926, -1.5811, -0.7071, -1.118, -0.5]),
    "keydiff": ("F1", KeyDiff(), 3, [0, 1, 3], [-0.0338, 0.9563, -0.841, -0.1078, -0.9773, -0.7792]),
}
for _name, _fixture, _covariance, _want, _printed in (
    ("F1", "F1-bare-queries", True, [0, 1, 2], [math.inf, 0.6647, 0.9306, 0.2343, 0.3945, 0.3362]),
    ("F1-mean", "F1-bare-queries", False, [0, 1, 2], [math.inf, 0.6488, 0.8904, 0.2372, 0.4121, 0.3524]),
    ("F2", "F2-bare-queries", True, [0, 3, 5], [math.inf, 0.2439, 0.0517, 0.563, 0.2158, 0.4318]),
    ("F2-mean", "F2-bare-queries", False, [0, 1, 3], [math.inf, 0.3614, 0.0766, 0.4738, 0.3136, 0.3068]),
):
    _policy = ExpectedAttention(4, num_sinks=1, covariance=_covariance, epsilon=0)
    EXAMPLES[f"expected-{_name}"] = (
        _fixture,
        _policy,
        3,
        _want,
        _printed,
    )  # of the sink, the greatest plus 1 is printed


@pytest.mark.parametrize(
    ("name", "policy", "room", "want"), [each[:4] for each in EXAMPLES.values()], ids=list(EXAMPLES)
)
def test_keeps_what_the_worked_example_does(name: str, policy: Policy, room: int, want: list[int]) -> None:
    assert _kept(name, policy, room) == [want]


PRINTED = {name: each for name, each in EXAMPLES.items() if each[4]}


@pytest.mark.parametrize(
    ("name", "policy", "room", "printed"),
    [(*each[:3], each[4]) for each in PRINTED.values()],
    ids=list(PRINTED),
)
def test_scores_what_the_worked_example_prints(name: str, policy: Policy, room: int, printed: list[float]) -> None:
    assert _scores(name, policy, room)[: len(printed)] == printed


def _paid(fixture: Fixture, queries: slice = slice(6)) -> Float[Tensor, "q_len kv_len"]:
    """What the first head's queries pay each of the six keys."""
    Q, K = (_tensor(states)[None, :1, :6] for states in fixture[:2])
    return Kernel(SCALE).probabilities(Q, K, torch.ones(6, 6, dtype=torch.bool).tril()[None, None])[0, 0, 0][queries]


def test_scissorhands_counts_queries_that_pay_less_than_an_even_share() -> None:
    even = 1 / torch.arange(1, 7)[:, None]
    low = ((_paid(F1) < even) & torch.ones(6, 6, dtype=torch.bool).tril())[3:].sum(dim=0)
    assert tuple(low.tolist()) == LOW


def test_criticalkv_weighs_attention_by_what_values_become() -> None:
    paid, sizes = (0.2879, 0.2756, 0.2917, 0.0405), (3.0, 6.0, 10.0, 3.0)
    scores = _scores("F1", CriticalKV(OUTPUT, 2), 4)[:4]  # with room for the two that observe, nothing is kept first
    assert scores == pytest.approx([(p + 1e-4) * s for p, s in zip(paid, sizes, strict=True)], abs=6e-4)  # of 4 digits


def test_defensivekv_is_the_greatest_of_pooled_rows_before_its_floor() -> None:
    raw = _scores("F3", DefensiveKV(_newest(F3), 3, floor=0), 4)
    assert raw[:4] == [0.1755, 0.2412, 0.3652, 0.3468]


# heads


def test_a_head_alone_keeps_what_it_attends_to() -> None:
    assert _kept("F3-apart", PLAIN, 4) == [[1, 3, 4, 5], [2, 3, 4, 5]]


def test_a_head_alone_scores_what_it_pays() -> None:
    notes: list[list[Any]] = [[]]
    _kept("F3-apart", Noted(PLAIN, notes), 4)
    found = [[round(head[position], 4) for position in range(4)] for head in notes[0][0]]
    assert found == [[0.2433, 0.4455, 0.1023, 0.3567], [0.1292, 0.1064, 0.5769, 0.3426]]


def test_the_greatest_of_heads_sums_keeps_other_tokens_than_the_greatest_of_each_query() -> None:
    """The example sums a head's probabilities first; `group="max"` takes the greater of each query's, and then sums."""
    assert _kept("F3-apart", GreatestHead(PLAIN), 4) == [[1, 2, 4, 5]] * 2
    assert _scores("F3-apart", GreatestHead(PLAIN), 4)[:4] == [0.2433, 0.4455, 0.5769, 0.3567]
    assert _kept("F3", SnapKV(2, pooling="none", group="max"), 4) == [[2, 3, 4, 5]]


WORTH: Rows = ((0.50, 0.30, 0.10, 0.05, 0.03, 0.02), (0.20, 0.19, 0.18, 0.16, 0.14, 0.13))


def test_adakv_splits_as_the_exact_example_does() -> None:
    assert _kept("F3-apart", AdaKV(Given(WORTH), floor=0.25), 3) == [[0, 1], [0, 1, 2, 3]]  # one of three in any case


def test_adakv_holds_the_token_that_the_released_rounding_loses() -> None:
    counts = [len(head) for head in _kept("F3-apart", AdaKV(Given(WORTH), floor=0.25), 3)]
    assert counts == [2, 4]
    released = [round(count * (1 - 0.2) + int(3 * 0.2)) for count in counts]
    assert released == [2, 3]
    assert sum(released) < sum(counts) == 2 * 3


def test_duo_has_retrieval_heads_keep_all_and_others_the_ends() -> None:
    """With two streaming heads, as a layer holds a multiple of its number of heads, and the example's nine is none."""
    duo = Duo((0.9, 0.1, 0.1), sparsity=2 / 3)
    assert _kept("F3-thrice", duo, 4) == [[0, 1, 2, 3, 4, 5], [0, 4, 5], [0, 4, 5]]


def test_duo_of_two_heads_has_a_place_too_many_until_the_next_token() -> None:
    model, duo = _model("F3-apart"), Duo((0.9, 0.1), sparsity=0.5)
    cache = SinkCache(model, duo, 5)
    _read(model, cache, [0, 1, 2, 3, 4, 5])
    assert _held(cache) == [[0, 1, 2, 3, 4, 5], [0, 3, 4, 5]]
    cache.reset()
    _read(model, cache, [0, 1, 2, 3, 4, 5, 6])
    assert _held(cache) == [[0, 1, 2, 3, 4, 5, 6], [0, 5, 6]]


# oracles


def test_the_mass_oracle_keeps_what_later_queries_attend_to() -> None:
    recording = record(_model("F1"), torch.arange(8)[None], chunk=1)
    assert _kept("F1", Clairvoyant(recording, horizon=2), 3) == [[3, 4, 5]]
    printed = [0.0272, 0.2741, 0.1287, 0.714, 0.3961, 0.4599]
    assert _scores("F1", Clairvoyant(recording, horizon=2), 3) == printed


def test_belady_goes_through_the_known_states() -> None:
    recording = record(_model("F1"), torch.arange(6)[None], chunk=1)
    known = [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 2, 4], [2, 4, 5]]
    assert _trace("F1", Clairvoyant(recording, horizon=6), 3) == known


@pytest.mark.parametrize(
    ("policy", "room", "known"),
    [
        (TOVA(), 3, [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3], [0, 3, 5]]),
        (SnapKV(2, 3), 4, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 2, 4, 5]]),
    ],
    ids=["tova", "snapkv"],
)
def test_a_cache_goes_through_the_known_states(policy: Policy, room: int, known: list[list[int]]) -> None:
    assert _trace("F1", policy, room) == known


def test_what_is_attended_to_most_is_not_what_costs_least() -> None:
    queries, keys, values = _tensor(LATER), _tensor(F1[1][0]), _tensor(F1[2][0])
    assert round(_error(queries, keys, values, [0, 1, 3]), 4) == 0.3367
    assert round(_error(queries, keys, values, [3, 4, 5]), 4) == 0.8844


def test_no_three_tokens_cost_less_than_those_of_least_error() -> None:
    queries, keys, values = _tensor(LATER), _tensor(F1[1][0]), _tensor(F1[2][0])
    first, second = sorted(_error(queries, keys, values, list(kept)) for kept in combinations(range(6), 3))[:2]
    assert round(first, 4) == 0.3367
    assert round(second - first, 4) == 0.1081


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        (LeastError(_rows(LATER), 3), 0.508),
        (Window(), 0.785),
        (StreamingLLM(1), 0.442),
        (TOVA(), 0.276),
        (Knorm(), 0.785),
        (None, 0.785),
    ],
    ids=["least-error", "window", "streaming", "tova", "knorm", "oracle"],
)
def test_recalls_the_known_share_of_what_later_queries_pay(policy: Policy | None, share: float) -> None:
    policy = policy or Clairvoyant(record(_model("F1"), torch.arange(8)[None], chunk=1), horizon=2)
    keys, values = (_tensor(states)[None] for states in F1[1:])
    _, received = attention(_tensor([[LATER]]), keys, values, torch.ones(1, 1, 2, 6, dtype=torch.bool), Kernel(SCALE))
    assert round(float(received[0, 0, _kept("F1", policy, 3)[0]].sum()) / 2, 3) == share


# sums of attention


def test_attention_is_the_known_matrix() -> None:
    printed = [
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.9224, 0.0776, 0.0, 0.0, 0.0, 0.0],
        [0.2533, 0.015, 0.7317, 0.0, 0.0, 0.0],
        [0.145, 0.5966, 0.0853, 0.1731, 0.0, 0.0],
        [0.2714, 0.5504, 0.066, 0.066, 0.0463, 0.0],
        [0.3045, 0.0007, 0.5174, 0.0151, 0.1258, 0.0365],
    ]
    torch.testing.assert_close(_paid(F1), _tensor(printed), rtol=0, atol=5.1e-5)  # of 4 digits


COLUMNS = {0: 2.8966, 1: 1.2403, 2: 1.4004, 3: 0.2541, 4: 0.1721, 5: 0.0365}


@pytest.mark.parametrize("chunk", [6, 3, 2])
def test_h2o_that_has_evicted_none_has_the_sums_of_columns(chunk: int) -> None:
    notes: dict[int, float] = {}
    assert _kept("F1", Overheard(H2O(2), notes), 4, chunk) == [[0, 2, 4, 5]]
    assert notes == COLUMNS


def test_h2o_that_evicts_token_by_token_has_the_known_sums() -> None:
    notes: dict[int, float] = {}
    assert _trace("F1", Overheard(H2O(2), notes), 4)[-1] == [0, 1, 4, 5]
    assert notes == {0: 3.223, 1: 1.2411, 2: 0.883, 3: 0.2703, 4: 0.307, 5: 0.0756}


def test_tokens_receive_together_one_from_each_query() -> None:
    notes: dict[int, float] = {}
    _kept("F1", Overheard(H2O(2), notes), 4)
    assert sum(notes.values()) == pytest.approx(6, abs=3e-4)  # each rounded to 4 digits


def test_knorm_keeps_the_same_whatever_the_chunks() -> None:
    assert _trace("F1", Knorm(), 3)[-1] == [3, 4, 5]
    assert [_kept("F1", Knorm(), 3, chunk) for chunk in (6, 3, 2, 1)] == [[[3, 4, 5]]] * 4


def test_columns_summed_by_tiles_are_those_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the logarithms of the rows' sums in a second pass, as in the example, and by blocks of queries, as here."""
    monkeypatch.setattr(observe_module, "_BLOCK", 2)
    Q, K, V = (_tensor(states)[None] for states in F1)
    whole, logits = _paid(F1).sum(dim=0), (Q @ K.mT * SCALE)[0, 0]
    logits = logits.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    rows = logits.logsumexp(dim=1, keepdim=True)
    tiles = [torch.exp(logits[q : q + 2] - rows[q : q + 2]).split(3, dim=1) for q in (0, 2, 4)]
    second = torch.cat(
        [torch.stack([tile.sum(dim=0) for tile in column]).sum(0) for column in zip(*tiles, strict=True)]
    )
    _, received = attention(Q, K, V, None, Kernel(SCALE))
    for sums in (second, received[0, 0]):
        torch.testing.assert_close(sums, whole, rtol=0, atol=1e-14)  # 4e-16 in the example


def test_sums_of_half_precision_models_are_float32() -> None:
    """Five thousand queries pay all they have to the first token: in float16 the sum stops at 2048."""
    stuck = torch.zeros((), dtype=torch.float16)
    for _ in range(5000):
        stuck += 1
    assert stuck == 2048
    notes: dict[int, float] = {}
    policy = Overheard(H2O(1), notes)
    layer = ScoredLayer(Tallies(Tally(policy, 3, None), Lanes()), None, False, policy, 0, in_cache=False)
    for step in range(10):
        queries = torch.ones(1, 1, 500, 2, dtype=torch.float16)
        keys = torch.full_like(queries, -20)
        if step == 0:
            keys[:, :, 0] = 20
        held, values = layer.update(keys, keys)
        _, received = attention(queries, held, values, None, Kernel(SCALE), layer.weights())
        layer.observe(queries, received, Kernel(SCALE))
    assert notes[0] == 5000


# padding, budgets and positions


def _after_garbage() -> Any:
    """A model that reads F1 after two words whose queries and keys are beyond all others."""
    queries, keys, values = ([[[9.0, 9.0]] * 2 + states[0]] for states in F1)
    return _llama((queries, keys, values))


MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])


def test_padding_that_is_masked_does_not_count() -> None:
    model = _after_garbage()
    masked, ignored = SinkCache(model, H2O(2), 4), SinkCache(model, H2O(2), 4)
    _read(model, masked, list(range(8)), attention_mask=MASK)
    assert _held(masked) == [[0, 2, 4, 5]]  # the row's own tokens: 2, 4, 6 and 7 of its columns
    _read(model, ignored, list(range(8)))
    assert _held(ignored) == [[0, 2, 6, 7]]


def test_padding_that_is_masked_pays_nothing() -> None:
    model, notes = _after_garbage(), dict[int, float]()
    _read(model, SinkCache(model, Overheard(H2O(2), notes), 4), list(range(8)), attention_mask=MASK)
    assert {position: mass for position, mass in notes.items() if position >= 0} == COLUMNS


def _released_pyramid(budget: int, layers: int, window: int) -> list[int]:
    least = (budget - window) // 20
    most = 2 * (budget - window) - least
    return [most - layer * ((most - least) // (layers - 1)) + window for layer in range(layers)]


def test_the_released_pyramid_hands_out_more_than_there_is() -> None:
    assert _released_pyramid(12, 4, 2) == [22, 16, 10, 4]
    assert sum(pyramid(12, 4, window=2)) == 48 < 52
    released = _released_pyramid(128, 32, 8)
    assert released[:3] + released[-2:] == [242, 235, 228, 32, 25]


def test_cake_prefers_the_layer_of_more_and_more_varied_attention() -> None:
    preferences = [round(preference, 4) for preference in _preferences()]
    assert preferences == [0.3065, 0.5096]


def test_cake_shares_eight_tokens_out() -> None:
    preferences = _preferences()
    assert [round(8 * each / sum(preferences), 4) for each in preferences] == [3.0047, 4.9953]
    budgets = scaled([round(1e4 * each) for each in preferences], budget=4)
    assert budgets == [3, 5]
    model = _model("F1-F2")
    cache = SinkCache(model, PLAIN, budgets)
    _read(model, cache, [0, 1, 2, 3, 4, 5])
    assert [len(_held(cache, layer)[0]) for layer in (0, 1)] == [3, 5]


def _preferences() -> list[float]:
    """Of each layer entropy times variance of what the newest two queries pay the past."""
    found = []

    def note(heard: Heard) -> None:
        shown = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
        paid = heard.kernel.probabilities(heard.queries, heard.keys, shown)[0, 0, 0, 4:, :4]
        mean = paid.mean(dim=0)
        found.append(float(-(mean * mean.log()).sum() * paid.var(dim=0).sum()))

    overhear(_model("F1-F2"), torch.arange(6)[None], 6, note)
    return found


@pytest.mark.parametrize(("positions", "at"), [("cache", [0, 1, 2, 3]), ("original", [0, 4, 5, 6])])
def test_streaming_reads_keys_where_the_worked_example_says(positions: Any, at: list[int]) -> None:
    model = _model("F1")
    cache = SinkCache(model, StreamingLLM(1), 4, positions=positions)
    _read(model, cache, [0, 1, 2, 3, 4, 5])
    found = _read(model, cache, [6])[0, -1]
    assert _held(cache) == [[0, 4, 5, 6]]
    given = {"position_ids": torch.tensor([at]), "attention_mask": torch.ones(1, 4)}  # without a mask, gaps part texts
    with torch.no_grad():
        fresh = model(input_ids=torch.tensor([[0, 4, 5, 6]]), use_cache=False, **given).logits
    torch.testing.assert_close(found, fresh[0, -1])
