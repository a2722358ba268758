"""Policies that read attention, keys or values against loops over positions, and the worked examples by hand."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import score_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_oracle import Scorer, Scores, Stream

from sinkcache.budgets import pyramid
from sinkcache.policies import (
    H2O,
    RKV,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LagKV,
    Phases,
    Protect,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)
from sinkcache.policies import rkv as rkv_module
from sinkcache.policy import Entries, Policy, Queries, Watch
from sinkcache.positions import Rotation

Fixture = tuple[Any, Any, Any]

# Six tokens, two channels, one key head; F3 has two query heads. Kept sets are those of the papers' formulas, by numpy.
F1: Fixture = (
    [[[-1.5, 3.0], [-1.0, 0.5], [-1.0, 1.0], [0.5, -0.5], [0.0, -1.0], [-2.5, 1.0]]],
    [[[-2.0, -1.5], [1.0, -2.5], [-1.5, 0.5], [0.5, 0.5], [-0.5, 1.0], [0.0, 0.5]]],
    [[[-2.0, 0.5], [-2.0, -1.0], [-4.0, -1.0], [0.0, -1.5], [2.5, 0.0], [-0.5, -2.0]]],
)
F2: Fixture = (
    [[[-1.5, -1.5], [0.5, 1.5], [0.5, -0.5], [-1.5, -1.0], [-0.5, 1.5], [2.0, 1.0]]],
    [[[1.5, -1.0], [0.0, 0.5], [-0.5, -0.5], [-1.5, 2.0], [-1.0, 0.0], [-3.5, 1.0]]],
    [[[1.0, 2.0], [2.0, 1.0], [0.0, -0.5], [0.0, -2.0], [1.5, 1.0], [-1.0, 0.5]]],
)
F3: Fixture = (
    [
        [[0.5, -2.5], [-1.5, -0.5], [-1.0, -2.0], [0.0, -1.0], [0.5, 0.0], [0.5, -1.5]],
        [[0.0, 0.0], [-2.5, 0.5], [0.5, 1.0], [0.0, -2.0], [2.5, 0.5], [-1.5, -1.0]],
    ],
    [[[0.5, 1.0], [0.5, -1.0], [-2.5, 0.0], [-1.0, -1.5], [2.0, -1.0], [1.0, 0.0]]],
    [[[0.5, 1.0], [0.5, -1.0], [-2.5, 0.0], [-1.0, -1.5], [2.0, -1.0], [1.0, 0.0]]],
)


def _stream(fixture: Fixture) -> Stream:
    return oracle.new_stream(*fixture, inv_freq=[1.0])


def _entries(
    streams: list[Stream], watch: Watch, layout: str = "half", spare: int = 0, dtype: torch.dtype = torch.int32
) -> Entries:
    """One row for each stream, each head's tokens in slots of its own choice; NaN in empty slots."""
    first = streams[0]
    kv_len = max(len(held) for stream in streams for held in stream.held) + spare
    shape = (len(streams), len(first.K), kv_len)
    positions = torch.full(shape, -1, dtype=dtype)
    told: dict[str, Any] = {
        name: torch.full(shape + size, torch.nan, dtype=torch.float64)
        for name, size in {"mass": (), "window": (), "keys": first.K.shape[2:], "values": first.V.shape[2:]}.items()
    }
    for row, stream in enumerate(streams):
        for head, held in enumerate(stream.held):
            masses = oracle.mass(stream, head, watch.decay, watch.group)
            windows = oracle.window(stream, head, watch.window, watch.reduce, watch.group)
            for position, slot in zip(held, torch.randperm(kv_len).tolist(), strict=False):
                positions[row, head, slot] = position
                told["mass"][row, head, slot] = masses[position]
                told["window"][row, head, slot] = windows[position]
                told["keys"][row, head, slot] = torch.from_numpy(stream.K[head, position])
                told["values"][row, head, slot] = torch.from_numpy(stream.V[head, position])
    seen = first.seen if len(streams) == 1 else torch.tensor([stream.seen for stream in streams])[:, None, None]
    rotation = Rotation(torch.from_numpy(first.inv_freq), layout)  # type: ignore[arg-type]
    every = [[oracle.moments(stream, head, watch.skip) for head in range(len(stream.Q))] for stream in streams]
    told["queries"] = Queries(
        torch.from_numpy(np.array([[mean for mean, _ in row] for row in every])),
        torch.from_numpy(np.array([[covariance for _, covariance in row] for row in every])),
        seen,
        rotation if len(first.inv_freq) else None,
    )
    asked = {"mass": watch.mass, "window": watch.window, "keys": watch.keys, "values": watch.values}
    asked["queries"] = watch.queries
    return Entries(positions, seen, first.new, 0, {name: told[name] for name, wanted in asked.items() if wanted})


def _read_back(scores: torch.Tensor, positions: torch.Tensor) -> Scores:
    """The scores of one row, by position."""
    heads = zip(positions.tolist(), scores.tolist(), strict=True)
    return [{p: s for p, s in zip(slots, of, strict=True) if p >= 0} for slots, of in heads]


def _driven(policy: Policy, spare: int = 0) -> Scorer:
    def scorer(stream: Stream) -> Scores:
        entries = _entries([stream], policy.watch(), spare=spare)
        return _read_back(policy.score(entries)[0], entries.positions[0])

    return scorer


# worked examples

SNAP: dict[str, Any] = {"observation_window": 2, "kernel": 3}
EXAMPLES: list[tuple[str, Fixture, Policy, Scorer, int, int, list[int]]] = [
    ("window", F1, Window(), oracle.recency(), 6, 3, [3, 4, 5]),
    ("streaming", F1, StreamingLLM(1), oracle.recency(1), 6, 3, [0, 4, 5]),
    ("h2o-6", F1, H2O(2), oracle.h2o(2), 6, 4, [0, 2, 4, 5]),
    ("h2o-3", F1, H2O(2), oracle.h2o(2), 3, 4, [0, 2, 4, 5]),
    ("h2o-2", F1, H2O(2), oracle.h2o(2), 2, 4, [0, 2, 4, 5]),
    ("h2o-1", F1, H2O(2), oracle.h2o(2), 1, 4, [0, 1, 4, 5]),
    ("h2o-sum", F2, H2O(2), oracle.h2o(2), 6, 4, [0, 1, 4, 5]),
    ("h2o-mean", F2, H2O(2, reduce="mean"), oracle.h2o(2, mean=True), 6, 4, [0, 3, 4, 5]),
    ("h2o-decay", F2, H2O(2, half_life=1), oracle.h2o(2, decay=0.5), 6, 4, [0, 3, 4, 5]),
    ("tova-6", F1, TOVA(), oracle.tova(), 6, 3, [0, 2, 4]),
    ("tova-3", F1, TOVA(), oracle.tova(), 3, 3, [0, 2, 4]),
    ("tova-2", F1, TOVA(), oracle.tova(), 2, 3, [0, 4, 5]),
    ("tova-1", F1, TOVA(), oracle.tova(), 1, 3, [0, 3, 5]),
    ("snapkv-none", F1, SnapKV(**SNAP, pooling="none"), oracle.snapkv(2, 3, "none"), 6, 4, [0, 2, 4, 5]),
    ("snapkv-avg", F1, SnapKV(**SNAP), oracle.snapkv(2, 3), 6, 4, [0, 1, 4, 5]),
    ("snapkv-max", F1, SnapKV(**SNAP, pooling="max"), oracle.snapkv(2, 3, "max"), 6, 4, [2, 3, 4, 5]),
    ("snapkv-2", F1, SnapKV(**SNAP), oracle.snapkv(2, 3), 2, 4, [0, 1, 4, 5]),
    ("snapkv-1", F1, SnapKV(**SNAP), oracle.snapkv(2, 3), 1, 4, [0, 2, 4, 5]),
    ("morphkv-sum", F1, SnapKV(2, pooling="none"), oracle.snapkv(2, 1), 6, 4, [0, 2, 4, 5]),
    ("morphkv-max", F1, SnapKV(2, pooling="none", reduce="max"), oracle.snapkv(2, 1, reduce="max"), 6, 4, [1, 2, 4, 5]),
    ("group-mean", F3, SnapKV(2, pooling="none"), oracle.snapkv(2, 1), 6, 4, [2, 3, 4, 5]),
    ("knorm", F1, Knorm(), oracle.knorm(), 6, 3, [3, 4, 5]),
    ("keydiff-6", F1, KeyDiff(), oracle.keydiff(), 6, 3, [0, 1, 3]),
    ("keydiff-1", F1, KeyDiff(), oracle.keydiff(), 1, 3, [1, 2, 3]),
    ("lagkv", F1, LagKV(1, 2), oracle.lagkv(1, 2), 6, 5, [0, 1, 3, 4, 5]),
]
for _name, _fixture, _covariance, _want in (
    ("F1", F1, True, [0, 1, 2]),
    ("F1-mean", F1, False, [0, 1, 2]),
    ("F2", F2, True, [0, 3, 5]),
    ("F2-mean", F2, False, [0, 1, 3]),
):
    _policy = ExpectedAttention(4, num_sinks=1, covariance=_covariance, epsilon=0)
    _scorer = oracle.expected_attention(4, 1, covariance=_covariance)
    EXAMPLES.append((f"expected-{_name}", _fixture, _policy, _scorer, 6, 3, _want))


@pytest.mark.parametrize(
    ("fixture", "policy", "scorer", "chunk", "budget", "want"),
    [case[1:] for case in EXAMPLES],
    ids=[case[0] for case in EXAMPLES],
)
def test_worked_example(
    fixture: Fixture, policy: Policy, scorer: Scorer, chunk: int, budget: int, want: list[int]
) -> None:
    chunks = [chunk] * (6 // chunk)
    for who in (scorer, _driven(policy), _driven(policy, spare=2)):
        assert oracle.paper(_stream(fixture), chunks, budget, who)[-1] == [want]


def test_worked_example_tova_goes_through_the_known_states() -> None:
    kept = oracle.paper(_stream(F1), [1] * 6, 3, _driven(TOVA()))
    assert [held[0] for held in kept] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3], [0, 3, 5]]


def test_worked_example_snapkv_goes_through_the_known_states() -> None:
    kept = oracle.paper(_stream(F1), [1] * 6, 4, _driven(SnapKV(**SNAP)))
    assert [held[0] for held in kept][3:] == [[0, 1, 2, 3], [0, 2, 3, 4], [0, 2, 4, 5]]


def _scores(fixture: Fixture, policy: Policy) -> list[float]:
    """Scores of the past four of six tokens, rounded."""
    stream = _stream(fixture)
    oracle.read(stream, 6)
    (scores,) = _driven(policy)(stream)
    return [round(scores[position], 4) for position in range(4)]


def test_worked_examples_give_the_known_scores() -> None:
    assert _scores(F1, H2O(2)) == [2.8966, 1.2403, 1.4004, 0.2541]
    assert _scores(F1, SnapKV(**SNAP, pooling="none")) == [0.5758, 0.5511, 0.5834, 0.0811]
    assert _scores(F1, SnapKV(**SNAP)) == [0.5635, 0.5701, 0.4052, 0.3322]
    assert _scores(F1, SnapKV(**SNAP, pooling="max")) == [0.5758, 0.5834, 0.5834, 0.5834]
    assert _scores(F3, SnapKV(2, pooling="none")) == [0.1863, 0.276, 0.3396, 0.3497]
    assert _scores(F1, Knorm()) == [-2.5, -2.6926, -1.5811, -0.7071]
    assert _scores(F1, KeyDiff()) == [-0.0338, 0.9563, -0.841, -0.1078]
    assert _scores(F1, LagKV(1, 2)) == [math.inf, 1.3522, 0.6478, math.inf]
    assert _scores(F1, ExpectedAttention(4, 1, epsilon=0))[1:] == [0.6647, 0.9306, 0.2343]
    assert _scores(F2, ExpectedAttention(4, 1, covariance=False, epsilon=0))[1:] == [0.3614, 0.0766, 0.4738]


# faults of reference codes, and what is not them


def test_padding_counted_in_an_average_would_cost_the_first_token_its_place() -> None:
    padded = oracle.paper(_stream(F1), [6], 4, oracle.snapkv(2, 3, "padded"))
    assert padded == [[[1, 2, 4, 5]]]
    assert oracle.paper(_stream(F1), [6], 4, _driven(SnapKV(**SNAP))) == [[[0, 1, 4, 5]]]


def test_probabilities_of_a_group_are_no_maximum_and_no_sum_of_logits() -> None:
    Q, K = np.array(F3[0]), np.array(F3[1])[0]
    logits = Q[:, 4:] @ K[:4].T * 2**-0.5

    def past(rows: np.ndarray[Any, Any]) -> list[int]:
        return oracle.best(dict(enumerate(np.sum([oracle.softmax(row) for row in rows], axis=0).tolist())), 2)

    assert past(logits.max(axis=0)) == [0, 2]  # R-KV's code
    assert past(logits.sum(axis=0)) == [0, 3]  # MorphKV's
    assert oracle.paper(_stream(F3), [6], 4, _driven(SnapKV(2, pooling="none"))) == [[[2, 3, 4, 5]]]


def test_greatest_of_a_group_is_that_of_each_query() -> None:
    stream = _stream(F3)
    oracle.read(stream, 6)
    rows = [stream.attention(0, query) for query in (4, 5)]
    (scores,) = _driven(SnapKV(2, pooling="none", group="max"))(stream)
    assert [scores[p] for p in range(4)] == pytest.approx([sum(max(row[p]) for row in rows) for p in range(4)])
    heads = [
        np.sum([row[p] for row in rows], axis=0).max() for p in range(4)
    ]  # were it that of each head's sum, 1 and 2 would stay
    assert oracle.best(dict(enumerate(heads)), 2) == [1, 2]
    assert oracle.paper(_stream(F3), [6], 4, _driven(SnapKV(2, pooling="none", group="max"))) == [[[2, 3, 4, 5]]]


def test_a_sum_of_attention_favours_old_tokens_and_a_mean_does_not() -> None:
    even = ([[[0.0, 0.0]] * 12], [[[1.0, 0.0]] * 12], [[[1.0, 0.0]] * 12])  # all tokens are alike
    scorers = [_driven(policy) for policy in (H2O(1), H2O(1, reduce="mean"))]
    by_sum, by_mean = (oracle.paper(_stream(even), [12], 6, scorer)[-1][0] for scorer in scorers)
    assert by_sum == [0, 1, 2, 3, 4, 11]
    stream = _stream(even)
    oracle.read(stream, 12)
    (scores,) = scorers[1](stream)
    assert scores[1] / scores[10] < 2.5 < 12 < sum(1 / n for n in range(2, 13)) / (1 / 12)
    assert by_mean[:1] == [0]


def test_rkv_gives_the_worked_example_without_the_accident_that_protects_the_first_token() -> None:
    assert oracle.paper(_stream(F1), [6], 4, _driven(RKV(2, 3))) == [[[0, 1, 4, 5]]]
    released = [-0.1149, -0.0803, -0.1435, -0.1229]  # where nothing is alike, column 0 is struck out
    ours = _scores(F1, RKV(2, 3))
    assert ours[0] < released[0]
    assert ours == [-0.1239, -0.0846, -0.1474, -0.127]


# against loops over positions

DIM, VALUE_DIM, INV_FREQ = 8, 5, [1.0, 0.3, 0.05]  # six of eight channels turn


def _random_stream(seed: int, tokens: int = 40, layout: str = "half") -> Stream:
    """Four query heads on two key heads."""
    rng = np.random.default_rng(seed)
    bare, K, V = (rng.normal(size=(heads, tokens, dim)) for heads, dim in ((4, DIM), (2, DIM), (2, VALUE_DIM)))
    stream = oracle.new_stream(bare + 0.5, K * 1.5 + 0.3, V, bare=bare + 0.5, inv_freq=INV_FREQ)
    if layout == "interleaved":
        stream.pairs = [(2 * pair, 2 * pair + 1) for pair in range(len(INV_FREQ))]
    turned = [[oracle.turn(stream, t) @ query for t, query in enumerate(head)] for head in stream.bare]
    stream.Q = np.array(turned) * 1.5
    return stream


CASES: dict[str, tuple[Policy, Scorer]] = {
    "h2o": (H2O(3), oracle.h2o(3)),
    "h2o-mean": (H2O(2, 1, reduce="mean"), oracle.h2o(2, 1, mean=True)),
    "h2o-decay": (H2O(0, half_life=3.5), oracle.h2o(0, decay=0.5 ** (1 / 3.5))),
    "h2o-both": (H2O(1, 2, 5, "mean", "max"), oracle.h2o(1, 2, 0.5**0.2, True, "max")),
    "snapkv": (SnapKV(4, 3), oracle.snapkv(4, 3)),
    "snapkv-5": (SnapKV(4, 5, num_sinks=1, recent=2), oracle.snapkv(4, 5, num_sinks=1, recent=2)),
    "snapkv-max": (SnapKV(3, 5, "max", recent=0), oracle.snapkv(3, 5, "max", recent=0)),
    "snapkv-none": (SnapKV(4, pooling="none", reduce="max"), oracle.snapkv(4, 1, "none", "max")),
    "snapkv-group": (SnapKV(4, 3, group="max"), oracle.snapkv(4, 3, group="max")),
    "tova": (TOVA(), oracle.tova()),
    "tova-head": (TOVA("head", 1, 2), oracle.tova("head", 1, 2)),
    "expected": (ExpectedAttention(7, 2, epsilon=0.02), oracle.expected_attention(7, 2, epsilon=0.02)),
    "expected-mean": (ExpectedAttention(3, 1, 2, False, 0.02), oracle.expected_attention(3, 1, 2, False, 0.02)),
    "expected-no-sinks": (ExpectedAttention(1, 0, epsilon=0.1), oracle.expected_attention(1, 0, epsilon=0.1)),
    "keydiff": (KeyDiff(), oracle.keydiff()),
    "keydiff-safe": (KeyDiff(1, 3), oracle.keydiff(1, 3)),
    "knorm": (Knorm(), oracle.knorm()),
    "knorm-safe": (Knorm(2, 2), oracle.knorm(2, 2)),
    "lagkv": (LagKV(1, 3), oracle.lagkv(1, 3)),
    "lagkv-keys": (LagKV(0, 2, 0.0), oracle.lagkv(0, 2, 0.0)),
    "lagkv-values": (LagKV(2, 4, 2.5), oracle.lagkv(2, 4, 2.5)),
    "rkv": (RKV(3, 3, 0.3), oracle.rkv(3, 3, 0.3)),
    "rkv-alike": (RKV(2, 5, 0.05, 0.1, 1), oracle.rkv(2, 5, 0.05, 0.1, 1)),
    "random": (Random(), oracle.by_chance(0)),
    "random-7": (Random(7), oracle.by_chance(7)),
    "protect": (Protect(KeyDiff(), 2, 3), oracle.protect(oracle.keydiff(), 2, 3)),
    "phases": (Phases(SnapKV(3, 3), KeyDiff(1)), oracle.phases(oracle.snapkv(3, 3), oracle.keydiff(1))),
}
every_case = pytest.mark.parametrize(("policy", "scorer"), CASES.values(), ids=CASES)


def _differing_rows(layout: str = "half", new: int = 1) -> list[Stream]:
    """Three rows of 31, 18 and 6 tokens, which hold 14, 14 and 5 of them, other ones in each head."""
    streams = []
    for row, (seen, held) in enumerate(((31, 14), (18, 14), (6, 5))):
        stream = _random_stream(row, layout=layout)
        oracle.read(stream, seen)
        rng = np.random.default_rng(row)
        stream.held = [sorted(rng.permutation(seen)[:held].tolist()) for _ in stream.held]
        stream.new = new
        streams.append(stream)
    return streams


def _check(policy: Policy, scorer: Scorer, streams: list[Stream], layout: str, spare: int) -> None:
    entries = _entries(streams, policy.watch(), layout, spare)
    scores = policy.score(entries)
    assert (scores[~entries.valid] == -torch.inf).all()
    assert not scores.isnan().any()
    for stream, row, positions in zip(streams, scores, entries.positions, strict=True):
        for got, want in zip(_read_back(row, positions), scorer(stream), strict=True):
            order = sorted(want)
            np.testing.assert_allclose([got[p] for p in order], [want[p] for p in order], rtol=0, atol=1e-6)


@every_case
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_equal_loops_over_positions(policy: Policy, scorer: Scorer, layout: str) -> None:
    for spare in (0, 3):
        _check(policy, scorer, _differing_rows(layout), layout, spare)


@every_case
def test_scores_of_one_row_equal_loops_over_positions(policy: Policy, scorer: Scorer) -> None:
    for stream in _differing_rows(new=4):
        _check(policy, scorer, [stream], "half", 1)


@every_case
@pytest.mark.parametrize("seen", [1, 2, 3])
def test_scores_a_few_tokens(policy: Policy, scorer: Scorer, seen: int) -> None:
    stream = _random_stream(9)
    oracle.read(stream, seen)
    for new in (1, seen):
        stream.new = new
        _check(policy, scorer, [stream], "half", 2)


@every_case
def test_a_row_without_tokens_does_not_disturb(policy: Policy, scorer: Scorer) -> None:
    empty, full = _random_stream(1), _differing_rows()[0]
    entries = _entries([full, empty], policy.watch())
    scores = policy.score(entries)
    assert not scores.isnan().any()
    (want, _) = scorer(full)
    got = _read_back(scores[0], entries.positions[0])[0]
    np.testing.assert_allclose([got[p] for p in want], list(want.values()), rtol=0, atol=1e-6)


@every_case
def test_positions_may_be_of_any_width(policy: Policy, scorer: Scorer) -> None:
    scores = []
    for dtype in (torch.int32, torch.int64):
        torch.manual_seed(0)
        scores.append(policy.score(_entries(_differing_rows(), policy.watch(), dtype=dtype)))
    torch.testing.assert_close(*scores)


@every_case
def test_leaves_what_it_is_told_as_it_was(policy: Policy, scorer: Scorer) -> None:
    entries = _entries(_differing_rows(), policy.watch(), spare=2)
    kept = {name: value.clone() for name, value in entries.told.items() if isinstance(value, torch.Tensor)}
    moments = [entries.told["queries"].mean, entries.told["queries"].covariance] if policy.watch().queries else []
    copies = [each.clone() for each in moments]
    policy.score(entries)
    for name, value in kept.items():
        torch.testing.assert_close(entries.told[name], value, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(*pair) for pair in zip(moments, copies, strict=True))


@every_case
@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("chunks", [[1] * 30, [17, 1, 1, 4, 2, 1, 1, 3], [5] * 6], ids=["tokens", "mixed", "fives"])
def test_a_bounded_stream_keeps_what_loops_keep(
    policy: Policy, scorer: Scorer, chunks: list[int], evict_every: int
) -> None:
    runs = [oracle.library(_random_stream(4), chunks, 14, who, evict_every) for who in (scorer, _driven(policy, 1))]
    assert runs[0][0] == runs[1][0]
    assert max(len(held) for kept in runs[0][0] for held in kept) == 14


@every_case
def test_the_librarys_rule_is_the_papers_at_one_token_more(policy: Policy, scorer: Scorer) -> None:
    stream, other = _random_stream(5), _random_stream(5)
    oracle.library(stream, [1] * 25, 14, scorer)
    stream.held = [oracle.best(scores, 13) for scores in scorer(stream)]
    assert oracle.paper(other, [1] * 25, 13, scorer)[-1] == stream.held


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 38), st.integers(1, 13), st.sampled_from([1, 3, 5, 9]))
def test_pooling_equals_loops_over_positions(seed: int, seen: int, held: int, kernel: int) -> None:
    stream = _random_stream(seed)
    oracle.read(stream, seen)
    rng = np.random.default_rng(seed)
    stream.held = [sorted(rng.permutation(seen)[:held].tolist()) for _ in stream.held]
    for pooling in ("avg", "max"):
        _check(SnapKV(4, kernel, pooling), oracle.snapkv(4, kernel, pooling), [stream], "half", 2)  # type: ignore[arg-type]


@every_case
def test_half_precision_is_scored_in_float32(policy: Policy, scorer: Scorer) -> None:
    entries = _entries(_differing_rows(), policy.watch())
    told = dict[str, Any]({name: entries.told[name].bfloat16() for name in ("keys", "values") if name in entries.told})
    told |= {name: each.float() for name, each in entries.told.items() if name in ("mass", "window")}
    if policy.watch().queries:
        moments = entries.queries
        told["queries"] = Queries(moments.mean.float(), moments.covariance.float(), moments.position, moments.rotation)
    scores = policy.score(Entries(entries.positions, entries.seen, entries.new, 0, told))
    assert scores.dtype == torch.float32
    exact = policy.score(Entries(entries.positions, entries.seen, entries.new, 0, _widened(told)))
    torch.testing.assert_close(scores.double(), exact.double(), rtol=1e-4, atol=1e-5)  # of sums over 14 tokens


def _widened(told: dict[str, Any]) -> dict[str, Any]:
    wide = dict[str, Any]({name: each.double() for name, each in told.items() if isinstance(each, torch.Tensor)})
    if "queries" in told:
        moments = told["queries"]
        wide["queries"] = Queries(
            moments.mean.double(), moments.covariance.double(), moments.position, moments.rotation
        )
    return wide


# what single policies promise


def test_tova_keeps_the_same_tokens_in_every_head() -> None:
    kept, _ = oracle.library(_random_stream(2), [1] * 30, 9, _driven(TOVA(), 2))
    assert all(held == heads[0] for heads in kept for held in heads)
    kept, _ = oracle.library(_random_stream(2), [1] * 30, 9, _driven(TOVA("head"), 2))
    assert any(heads[0] != heads[1] for heads in kept)


def test_expected_attention_without_a_rotation_takes_queries_as_they_are() -> None:
    streams = _differing_rows()
    for stream in streams:
        stream.inv_freq, stream.pairs = np.zeros(0), []
    _check(ExpectedAttention(7, 2), oracle.expected_attention(7, 2), streams, "half", 1)


def test_expected_attention_refuses_latent_keys() -> None:
    policy = ExpectedAttention(7)
    entries = _entries(_differing_rows(), policy.watch())
    queries = entries.queries
    rotation = Rotation(torch.tensor(INV_FREQ, dtype=torch.float64), "half", values=True)
    told = {**entries.told, "queries": Queries(queries.mean, queries.covariance, queries.position, rotation)}
    with pytest.raises(ValueError, match="latent keys"):
        policy.score(Entries(entries.positions, entries.seen, 1, 0, told))


def test_expected_attention_of_late_positions_is_exact() -> None:
    stream = _random_stream(3)
    oracle.read(stream, 20)
    policy = ExpectedAttention(4, 0, epsilon=0)
    entries, at_million = _entries([stream], policy.watch()), 1_000_000
    queries = entries.queries
    told = {**entries.told, "queries": Queries(queries.mean, queries.covariance, at_million, queries.rotation)}
    got = policy.score(Entries(entries.positions, entries.seen, 1, 0, told))
    turn, stream.bare = oracle.turn, stream.bare.copy()
    ahead = np.mean([turn(stream, at_million + j) for j in range(4)], axis=0)
    mean, spread = oracle.moments(stream, 0, 0)
    keys = stream.K[0, :20]
    logits = keys @ ahead @ mean / 8**0.5 + np.array([k @ ahead @ spread @ ahead.T @ k for k in keys]) / 16
    mean, spread = oracle.moments(stream, 1, 0)
    other = keys @ ahead @ mean / 8**0.5 + np.array([k @ ahead @ spread @ ahead.T @ k for k in keys]) / 16
    want = (oracle.softmax(logits) + oracle.softmax(other)) / 2 * np.linalg.norm(stream.V[0, :20], axis=1)
    scores = _read_back(got[0], entries.positions[0])[0]
    np.testing.assert_allclose([scores[p] for p in range(20)], want, rtol=0, atol=1e-6)


def test_rkv_compares_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RKV(3, 3, 0.3, likeness=0.2)
    entries = _entries(_differing_rows(), policy.watch(), spare=2)
    at_once = policy.score(entries)
    monkeypatch.setattr(rkv_module, "BLOCK", 3)
    torch.testing.assert_close(policy.score(entries), at_once)


def test_rkv_lets_the_newest_of_equal_keys_stay() -> None:
    K = np.random.default_rng(0).normal(size=(1, 8, 16))
    K[0, 1] = K[0, 2] = K[0, 4]
    stream = oracle.new_stream(np.zeros((1, 8, 16)), K, K)
    oracle.read(stream, 8)
    (scores,) = _driven(RKV(1, 1, weight=0.0))(stream)
    assert min(scores[1], scores[2]) < scores[4]


def test_lagkv_survives_a_channel_that_is_constant() -> None:
    stream = _random_stream(6)
    stream.K[:, :, 3] = 1.0
    oracle.read(stream, 13)
    _check(LagKV(1, 3), oracle.lagkv(1, 3), [stream], "half", 2)


def test_lagkv_compares_two_chunks_that_are_all_there_is() -> None:
    stream = _random_stream(6)
    oracle.read(stream, 6)
    assert sum(score < math.inf for score in oracle.lagkv(0, 3)(stream)[0].values()) == 3
    _check(LagKV(0, 3), oracle.lagkv(0, 3), [stream], "half", 0)


def test_random_is_uniform_and_not_the_order_of_reading() -> None:
    positions = torch.arange(100_000)[None, None]
    for seed in (0, 1, 2**40):
        scores = Random(seed).score(Entries(positions, seen=100_000))[0, 0]
        assert ((scores >= 0) & (scores < 1)).all()
        shares = torch.histc(scores, 10, 0, 1) / 100_000
        torch.testing.assert_close(shares, torch.full((10,), 0.1), rtol=0, atol=0.005)  # five standard deviations
        pairs = torch.stack([scores, positions[0, 0].float()])
        assert torch.corrcoef(pairs)[0, 1].abs() < 0.02
        assert torch.corrcoef(torch.stack([scores[1:], scores[:-1]]))[0, 1].abs() < 0.02


def test_random_of_other_seeds_draws_others() -> None:
    entries = Entries(torch.arange(100)[None, None], seen=100)
    assert not torch.equal(Random(0).score(entries), Random(1).score(entries))


def test_protect_is_its_policy_with_more_spared() -> None:
    assert Protect(StreamingLLM(2)).convention == "cache"
    assert Protect(KeyDiff()).convention == "original"
    assert Protect(SnapKV(8)).watch() == SnapKV(8).watch()
    assert Protect(Protect(Knorm(), 1, 0), 0, 2) != Protect(Knorm(), 1, 2)


def test_phases_scores_a_step_of_many_by_the_first_and_of_one_by_the_second() -> None:
    policy = Phases(Knorm(), KeyDiff())
    for new, inner in ((1, KeyDiff()), (2, Knorm()), (9, Knorm())):
        entries = _entries(_differing_rows(new=new), policy.watch())
        assert torch.equal(policy.score(entries), inner.score(entries))


def test_phases_watches_what_either_reads() -> None:
    assert Phases(SnapKV(8), KeyDiff()).watch() == Watch(window=8, keys=True)
    assert Phases(H2O(half_life=1), SnapKV(8, reduce="max")).watch() == Watch(
        mass=True, decay=0.5, window=8, reduce="max"
    )
    assert Phases(ExpectedAttention(num_sinks=2), SnapKV(8, group="max")).watch() == Watch(
        window=8, group="max", queries=True, keys=True, values=True, skip=2
    )
    assert Phases(SnapKV(8), SnapKV(8)).watch() == SnapKV(8).watch()
    assert Phases(Window(), Window()).watch() == Watch()


@pytest.mark.parametrize(
    ("one", "other", "option"),
    [
        (SnapKV(8), SnapKV(9), "window"),
        (SnapKV(8), SnapKV(8, reduce="max"), "reduce"),
        (SnapKV(8), H2O(group="max"), "group"),
        (H2O(), H2O(half_life=3), "decay"),
        (ExpectedAttention(num_sinks=1), ExpectedAttention(num_sinks=2), "skip"),
    ],
    ids=["window", "reduce", "group", "decay", "skip"],
)
def test_phases_refuses_two_ways_of_reading_one_thing(one: Policy, other: Policy, option: str) -> None:
    for pair in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=f"the same {option}"):
            Phases(*pair)


def test_phases_names_the_convention_that_both_can_live_with() -> None:
    assert Phases(StreamingLLM(), Window()).convention == "cache"
    assert Phases(StreamingLLM(), SnapKV()).convention == "original"
    assert Phases(SnapKV(), StreamingLLM()).convention == "original"
    assert Phases(SnapKV(), KeyDiff()).convention == "original"


@pytest.mark.parametrize(
    ("policy", "least"),
    [
        (H2O(5, 2), 8),
        (SnapKV(6), 7),
        (SnapKV(6, num_sinks=2, recent=3), 6),
        (TOVA(num_sinks=1, recent=2), 4),
        (ExpectedAttention(num_sinks=4, recent=1), 6),
        (KeyDiff(1, 1), 3),
        (Knorm(2, 1), 4),
        (LagKV(3, 4), 11),
        (RKV(5, num_sinks=1), 7),
        (Protect(Random(), 3, 4), 8),
        (Protect(SnapKV(20), 3, 4), 21),
        (Phases(SnapKV(20), KeyDiff()), 21),
        (Phases(KeyDiff(), SnapKV(20)), 21),
    ],
    ids=repr,
)
def test_refuses_a_budget_which_its_protected_tokens_fill(policy: Policy, least: int) -> None:
    policy.check(least)
    with pytest.raises(ValueError, match=f"budget={least - 1}: raise the budget"):
        policy.check(least - 1)


def _made(policy: Policy, /, **fields: object) -> None:
    """Makes `policy` with other fields, past the type checks that only tests have."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)
    policy.__post_init__()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "field", "value", "rule"),
    [
        *[(make, "num_sinks", -1, "0 or more") for make in (H2O, SnapKV, TOVA, ExpectedAttention, KeyDiff, Knorm)],
        *[(make, "num_sinks", 1.5, "whole number") for make in (LagKV, RKV)],
        *[(make, "recent", -2, "0 or more") for make in (H2O, SnapKV, TOVA, ExpectedAttention, KeyDiff, Knorm)],
        (H2O, "half_life", 0.0, "more than 0"),
        (H2O, "half_life", math.inf, "None is no decay"),
        (H2O, "half_life", math.nan, "more than 0"),
        (H2O, "reduce", "max", '"sum" or "mean"'),
        (SnapKV, "observation_window", 0, "1 or more"),
        (SnapKV, "kernel", 4, "must be odd"),
        (SnapKV, "kernel", 0, "1 or more"),
        (SnapKV, "pooling", "mean", '"avg", "max" or "none"'),
        (TOVA, "per", "token", '"layer" or "head"'),
        (ExpectedAttention, "horizon", 0, "1 or more"),
        (ExpectedAttention, "epsilon", -0.1, "0 or more"),
        (ExpectedAttention, "epsilon", math.nan, "0 or more"),
        (LagKV, "lag", 1, "2 or more"),
        (LagKV, "value_weight", -1.0, "0 or more"),
        (RKV, "observation_window", 0, "1 or more"),
        (RKV, "kernel", 2, "must be odd"),
        (RKV, "weight", 1.1, r"\[0, 1\]"),
        (RKV, "likeness", -0.1, r"\[0, 1\]"),
        (Random, "seed", -1, "0 or more"),
        (Random, "seed", True, "whole number"),
        (lambda: Protect(Knorm()), "num_sinks", -1, "0 or more"),
        (lambda: Protect(Knorm()), "recent", -1, "0 or more"),
        (lambda: Protect(Knorm()), "policy", Knorm, "policy object"),
        (lambda: Phases(Knorm(), Knorm()), "prefill", Knorm, "policy object"),
        (lambda: Phases(Knorm(), Knorm()), "decode", "knorm", "policy object"),
    ],
)
def test_refuses_what_it_cannot_be_made_with(make: Callable[[], Policy], field: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as raised:
        _made(make(), **{field: value})
    assert field in str(raised.value)
    assert repr(value) in str(raised.value)


def test_refuses_a_reading_of_attention_that_is_none() -> None:
    for make, field in ((H2O, "group"), (SnapKV, "group"), (SnapKV, "reduce")):
        with pytest.raises((ValueError, TypeError), match="mean"):  # TypeError: of the type checks that only tests have
            _made(make(), **{field: "median"})
    with pytest.raises(ValueError, match="decay must be in"):
        Watch(mass=True, decay=1.5)


# budgets that fall from layer to layer


def test_pyramid_gives_the_worked_example() -> None:
    assert pyramid(12, 4, window=2) == [22, 15, 9, 2]


@pytest.mark.parametrize(("budget", "window", "released"), [(128, 8, 4272), (2048, 32, 65840)])
def test_pyramid_hands_out_no_more_than_was_asked_for(budget: int, window: int, released: int) -> None:
    least = (budget - window) // 20
    step = (2 * (budget - window) - 2 * least) // 31
    assert sum(2 * (budget - window) - least - layer * step + window for layer in range(32)) == released
    budgets = pyramid(budget, 32, window=window)
    assert sum(budgets) == 32 * budget < released
    assert budgets[-1] - window in (least, least + 1)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from([1, 1.5, 8, 20, 1000]), st.integers(0, 20))
def test_pyramid_falls_sums_exactly_and_leaves_none_empty(budget: int, layers: int, beta: float, window: int) -> None:
    budgets = pyramid(budget, layers, beta, min(window, budget))
    assert sum(budgets) == layers * budget
    assert len(budgets) == layers
    assert min(budgets) >= max(1, min(window, budget))
    assert all(later <= earlier + 1 for earlier, later in pairwise(budgets))
    if beta == 1:
        assert budgets == [budget] * layers


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"budget": 0, "layers": 4}, "budget must be a whole number, 1 or more, got 0"),
        ({"budget": 8, "layers": 0}, "layers must be a whole number, 1 or more, got 0"),
        ({"budget": 8, "layers": 4, "window": -1}, "window must be a whole number, 0 or more, got -1"),
        ({"budget": 8, "layers": 4, "window": 9}, "window=9 with budget=8"),
        ({"budget": 8, "layers": 4, "beta": 0.5}, "beta must be 1 .* got 0.5"),
        ({"budget": 8, "layers": 4, "beta": math.nan}, "beta must be 1"),
    ],
)
def test_pyramid_refuses_what_is_no_ramp(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        pyramid(**options)
