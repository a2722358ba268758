"""Every policy keeps the contract; `keep` and the kept sets against loops over Python lists."""

import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

import sinkcache.policies
from sinkcache import Entries, Policy, SinkCache, stream
from sinkcache.policies import H2O, RKV, TOVA, AdaKV, KeyDiff, LagKV, Phases, Protect, SnapKV, StreamingLLM, Window
from sinkcache.policy import Queries, keep
from sinkcache.positions import Rotation

NAMES = sinkcache.policies.__all__
MADE_OF_OTHERS = {
    "AdaKV": lambda: AdaKV(SnapKV()),
    "Phases": lambda: Phases(SnapKV(), KeyDiff()),
    "Protect": lambda: Protect(KeyDiff()),
}
POLICIES = [MADE_OF_OTHERS.get(name, getattr(sinkcache.policies, name)) for name in NAMES]
SMALL = {  # defaults protect all of a few tokens
    "H2O-small": H2O(recent=3, num_sinks=2, half_life=4, reduce="mean"),
    "LagKV-small": LagKV(num_sinks=1, lag=2),
    "RKV-small": RKV(observation_window=3, kernel=3, likeness=0.1),
    "SnapKV-small": SnapKV(observation_window=3, kernel=3),
    "SnapKV-max": SnapKV(observation_window=3, pooling="max", recent=1),
    "TOVA-head": TOVA(per="head"),
}
every_policy = pytest.mark.parametrize(
    "policy", [*(make() for make in POLICIES), *SMALL.values()], ids=[*NAMES, *SMALL]
)


def _entries(policy: Policy, kv_len: int = 11) -> Entries:
    """Batch 2, heads 3 for 6 query heads, each in its own order, positions from 0 to 39."""
    positions = torch.stack([torch.randperm(40)[:kv_len] for _ in range(6)]).reshape(2, 3, kv_len)
    drawn = {"mass": (), "window": (), "keys": (8,), "values": (5,)}
    told: dict[str, Any] = {name: torch.rand(2, 3, kv_len, *size) for name, size in drawn.items()}
    rotation = Rotation(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64), "half")
    told["queries"] = Queries(torch.randn(2, 6, 8), torch.eye(8).expand(2, 6, 8, 8), 40, rotation)
    return Entries(positions, seen=40, told={name: told[name] for name in told if getattr(policy.watch(), name)})


def _changed(entries: Entries, change: Callable[[Tensor], Tensor]) -> Entries:
    """The same with another batch, other heads or other slots."""
    told = {name: change(each) if isinstance(each, Tensor) else each for name, each in entries.told.items()}
    return Entries(change(entries.positions), entries.seen, entries.new, entries.layer, told)


def _assert_same(scores: Tensor, others: Tensor) -> None:
    """Same but for the order of sums."""
    torch.testing.assert_close(scores, others)


@every_policy
def test_gives_one_score_for_each_entry(policy: Policy) -> None:
    entries = _entries(policy)
    assert policy.score(entries).shape == entries.positions.shape


@every_policy
@pytest.mark.parametrize("kv_len", [1, 2, 11, 40])
def test_scores_are_finite_or_infinite_and_never_nan(policy: Policy, kv_len: int) -> None:
    assert not policy.score(_entries(policy, kv_len)).isnan().any()


@every_policy
def test_scores_the_first_token_alone(policy: Policy) -> None:
    first = _changed(_entries(policy, 1), lambda each: each * 0 if each.dtype == torch.int64 else each)
    scores = policy.score(Entries(first.positions, 1, 1, 0, first.told))
    assert scores.shape == (2, 3, 1)
    assert not scores.isnan().any()


@every_policy
def test_same_entries_same_scores(policy: Policy) -> None:
    entries = _entries(policy)
    assert torch.equal(policy.score(entries), policy.score(entries))


@every_policy
def test_leaves_its_entries_as_they_were(policy: Policy) -> None:
    entries = _entries(policy)
    before = _changed(entries, torch.clone)
    policy.score(entries)
    assert torch.equal(entries.positions, before.positions)
    for name, each in entries.told.items():
        assert not isinstance(each, Tensor) or torch.equal(each, before.told[name])


@every_policy
def test_scores_follow_their_tokens_to_other_slots(policy: Policy) -> None:
    entries, order = _entries(policy), torch.randperm(11)
    moved = _changed(entries, lambda each: each[:, :, order])
    _assert_same(policy.score(moved), policy.score(entries)[..., order])


@every_policy
def test_scores_follow_their_heads(policy: Policy) -> None:
    entries, order = _entries(policy), torch.tensor([2, 0, 1])
    moved = _changed(entries, lambda each: each[:, order])
    if policy.watch().queries:
        queries, of_heads = entries.queries, torch.tensor([4, 5, 0, 1, 2, 3])
        mean, covariance = queries.mean[:, of_heads], queries.covariance[:, of_heads]
        moved.told["queries"] = Queries(mean, covariance, queries.position, queries.rotation)
    _assert_same(policy.score(moved), policy.score(entries)[:, order])


@every_policy
def test_rows_do_not_meet(policy: Policy) -> None:
    entries = _entries(policy)
    alone = _changed(entries, lambda each: each[1:])
    if policy.watch().queries:
        queries = entries.queries
        mean, covariance = queries.mean[1:], queries.covariance[1:]
        alone.told["queries"] = Queries(mean, covariance, queries.position, queries.rotation)
    _assert_same(policy.score(alone), policy.score(entries)[1:])


@every_policy
def test_takes_tokens_seen_row_by_row(policy: Policy) -> None:
    entries = _entries(policy)
    by_row = Entries(entries.positions, torch.full((2, 1, 1), 40), entries.new, entries.layer, entries.told)
    _assert_same(policy.score(by_row), policy.score(entries))


@every_policy
def test_reads_nothing_of_empty_slots(policy: Policy) -> None:
    entries, order = _entries(policy), torch.randperm(13)

    def padded(each: Tensor) -> Tensor:
        nothing = torch.full_like(each[:, :, :2], -1 if each.dtype == torch.int64 else torch.nan)
        return torch.cat([each, nothing], dim=2)[:, :, order]

    scores = policy.score(_changed(entries, padded))
    assert not scores.isnan().any()
    _assert_same(scores[..., order.argsort()][..., :11], policy.score(entries))


@every_policy
def test_pickles(policy: Policy) -> None:
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize("make", POLICIES, ids=NAMES)
def test_two_of_the_same_are_equal_and_hash_alike(make: Callable[[], Policy]) -> None:
    assert make() == make()
    assert hash(make()) == hash(make())


@every_policy
def test_is_frozen(policy: Policy) -> None:
    with pytest.raises(FrozenInstanceError):
        policy.num_sinks = 3  # type: ignore[attr-defined]


@every_policy
def test_owns_no_tensor(policy: Policy) -> None:
    assert not any(isinstance(getattr(policy, each.name), Tensor) for each in fields(policy))


@every_policy
def test_names_its_convention(policy: Policy) -> None:
    assert policy.convention in ("cache", "original")


@every_policy
def test_can_live_with_the_default_budget(policy: Policy) -> None:
    policy.check(1024)


def test_policies_of_other_parameters_are_not_equal() -> None:
    assert StreamingLLM(num_sinks=1) != StreamingLLM(num_sinks=2)


def test_policy_without_a_score_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        Policy()  # type: ignore[abstract]


def _kept(scores: list[float], positions: list[int], budget: int) -> list[int]:
    """Evicts the least, of equals the oldest, one at a time."""
    left = list(range(len(scores)))
    while len(left) > budget:
        worst = left[0]
        for index in left:
            if scores[index] < scores[worst] or (
                scores[index] == scores[worst] and positions[index] < positions[worst]
            ):
                worst = index
        left.remove(worst)
    return left


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], int]:
    """Six rows of scores with many ties, positions in any order, a budget that may exceed the length."""
    kv_len = draw(st.integers(1, 9))
    worth = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf])
    scores = [draw(st.lists(worth, min_size=kv_len, max_size=kv_len)) for _ in range(6)]
    positions = [draw(st.permutations(range(3, 3 + 2 * kv_len)))[:kv_len] for _ in range(6)]
    return scores, positions, draw(st.integers(1, 11))


@settings(deadline=None)
@given(scored())
def test_keep_equals_evicting_the_least_one_by_one(case: tuple[list[list[float]], list[list[int]], int]) -> None:
    scores, positions, budget = case
    got = keep(torch.tensor(scores).reshape(2, 3, -1), torch.tensor(positions).reshape(2, 3, -1), budget)
    assert got.reshape(6, -1).tolist() == [_kept(*row, budget) for row in zip(scores, positions, strict=True)]


def test_keep_gives_ties_to_the_newer_token() -> None:
    got = keep(torch.zeros(1, 1, 5), torch.tensor([[[8, 2, 9, 4, 6]]]), 2)
    assert got.tolist() == [[[0, 2]]]


def test_keep_returns_indices_in_ascending_order() -> None:
    got = keep(torch.tensor([[[1.0, 5.0, 0.0, 4.0, 9.0]]]), torch.tensor([[[4, 3, 2, 1, 0]]]), 3)
    assert got.tolist() == [[[1, 3, 4]]]


def test_keep_keeps_all_when_the_budget_is_larger() -> None:
    got = keep(torch.zeros(2, 3, 4), torch.arange(4).expand(2, 3, 4), 9)
    assert torch.equal(got, torch.arange(4).expand(2, 3, 4))


def test_keep_refuses_nan() -> None:
    with pytest.raises(ValueError, match="NaN"):
        keep(torch.tensor([[[0.0, torch.nan, 1.0]]]), torch.arange(3)[None, None], 2)


def _select(policy: Policy, positions: list[int], seen: int, budget: int) -> list[int]:
    entries = Entries(torch.tensor([[positions]]), seen)
    chosen = keep(policy.score(entries), entries.positions, budget)[0, 0]
    return sorted(positions[index] for index in chosen.tolist())


@settings(deadline=None)
@given(st.permutations(range(14)), st.integers(1, 16))
def test_window_keeps_the_newest(positions: list[int], budget: int) -> None:
    assert _select(Window(), positions, 14, budget) == list(range(14))[-budget:]


@settings(deadline=None)
@given(st.permutations(range(14)), st.integers(0, 6), st.integers(1, 9))
def test_streaming_keeps_the_first_and_the_newest(positions: list[int], num_sinks: int, window: int) -> None:
    budget = num_sinks + window
    expected = list(range(14)) if budget >= 14 else [*range(num_sinks), *range(14 - window, 14)]
    assert _select(StreamingLLM(num_sinks), positions, 14, budget) == expected


def test_streaming_sinks_are_the_first_of_the_stream_and_not_of_what_is_held() -> None:
    assert _select(StreamingLLM(num_sinks=2), [1, 5, 6, 7], 8, 2) == [1, 7]
    assert _select(StreamingLLM(num_sinks=2), [3, 5, 6, 7], 8, 2) == [6, 7]


@settings(deadline=None)
@given(st.permutations(range(9)), st.integers(1, 9))
def test_streaming_without_sinks_is_window(positions: list[int], budget: int) -> None:
    assert _select(StreamingLLM(num_sinks=0), positions, 9, budget) == _select(Window(), positions, 9, budget)


@pytest.mark.parametrize("num_sinks", [-1, 1.5, "4", True, None])
def test_streaming_refuses_sinks_that_are_no_count(num_sinks: object) -> None:
    unchecked = object.__new__(StreamingLLM)  # past the type checks that only tests have
    object.__setattr__(unchecked, "num_sinks", num_sinks)
    with pytest.raises(ValueError, match="num_sinks must be a whole number"):
        unchecked.__post_init__()


def test_streaming_checks_its_sinks_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="got -1"):
        StreamingLLM(num_sinks=-1)


@pytest.mark.parametrize("budget", [1, 3, 4])
def test_streaming_refuses_a_budget_which_its_sinks_fill(budget: int) -> None:
    with pytest.raises(ValueError, match=f"num_sinks=4 with budget={budget}"):
        StreamingLLM(num_sinks=4).check(budget)


def test_streaming_accepts_one_token_beside_its_sinks() -> None:
    StreamingLLM(num_sinks=4).check(5)


@dataclass(frozen=True)
class EveryNth(Policy):
    """Keeps the multiples of `n` longest; a user's own policy."""

    n: int = 5

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return (entries.positions % self.n == 0).float()


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_a_users_own_policy_works(model, positions: str) -> None:
    cache = SinkCache(model("llama"), EveryNth(), budget=6, positions=positions)  # type: ignore[arg-type]
    for _ in stream(model("llama"), cache, range(23)):
        pass
    assert cache.kept(1)[0, 1].tolist() == [0, 5, 10, 15, 20, 22]
