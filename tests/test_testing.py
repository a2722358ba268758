"""`check_policy` passes every policy of ours, and says of each broken one what is wrong with it."""

import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import jaxtyping
import pytest
import torch
from conftest import build
from torch import nn

import sinkcache.policies
from sinkcache import Entries, Policy, SinkCache
from sinkcache.policies import (
    H2O,
    RKV,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    LagKV,
    Phases,
    Protect,
    SnapKV,
    StreamingLLM,
    Window,
)
from sinkcache.policy import Watch
from sinkcache.testing import check_policy

BUDGET = 12
SMALL: dict[str, Policy] = {
    "ExpectedAttention": ExpectedAttention(horizon=4, num_sinks=1),
    "H2O": H2O(recent=3),
    "LagKV": LagKV(num_sinks=1, lag=3),
    "Phases": Phases(SnapKV(observation_window=3, kernel=3), H2O(recent=3)),
    "Protect": Protect(KeyDiff(), num_sinks=2, recent=2),
    "RKV": RKV(observation_window=3, kernel=3),
    "SnapKV": SnapKV(observation_window=3, kernel=3),
}
if hasattr(sinkcache.policies, "AdaKV"):
    SMALL["AdaKV"] = sinkcache.policies.AdaKV(H2O(recent=3))
MORE = [H2O(recent=2, num_sinks=1, half_life=4, reduce="mean"), TOVA(per="head"), SnapKV(2, pooling="max", recent=1)]
MORE += [Phases(Window(), StreamingLLM(2))]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off the checking of types that tests run under and authors do not, so that the contract's errors show."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("name", sinkcache.policies.__all__)
def test_every_policy_of_ours_keeps_the_contract(name: str) -> None:
    done = check_policy(SMALL.get(name) or getattr(sinkcache.policies, name)(), BUDGET)
    assert len(done) == 14


@pytest.mark.parametrize("policy", MORE, ids=repr)
def test_so_do_their_other_options(policy: Policy) -> None:
    assert len(check_policy(policy, BUDGET)) == 14


def test_a_model_of_ones_own_is_read(model: Any) -> None:
    tiny, read = model("qwen3"), []
    handle = tiny.register_forward_pre_hook(lambda *given: read.append(1))
    check_policy(StreamingLLM(2), BUDGET, tiny)
    handle.remove()
    assert len(read) > 4 * BUDGET


def test_random_numbers_go_on_as_if_nothing_had_been_checked() -> None:
    state = torch.random.get_rng_state()
    check_policy(StreamingLLM(2), BUDGET)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_it_needs_no_pytest() -> None:
    code = "import sys, sinkcache.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_budget_that_the_policy_refuses_is_an_error_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"got 0 \+ 12 with budget=12: raise the budget"):
        check_policy(H2O(recent=12), BUDGET)


@dataclass(frozen=True)
class Newest(Policy):
    """The newest tokens: right, and what the broken ones begin with."""

    def score(self, entries: Entries) -> Any:
        return entries.positions.float()


@dataclass(frozen=True)
class Reads(Newest):
    def watch(self) -> Watch:
        return Watch(mass=True, keys=True)


class Undecorated(Newest):
    recent: int = 4


@dataclass(frozen=True)
class HoldsATensor(Newest):
    weights: Any = (1, {"a": torch.ones(2)})


LINEAR = nn.Linear(1, 1)


@dataclass(frozen=True)
class HoldsAModule(Newest):
    weights: Any = LINEAR


@dataclass(frozen=True)
class HoldsALambda(Newest):
    weigh: Any = lambda each: each


@dataclass(frozen=True)
class HoldsAList(Newest):
    layers: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", [1, 2])


@dataclass(frozen=True, eq=False)
class ComparesByIdentity(Newest):
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 1


@dataclass(frozen=True)
class WatchesNothing(Newest):
    def watch(self) -> Any:
        return None


@dataclass(frozen=True)
class WatchesAtTimes(Newest):
    calls: ClassVar[list[int]] = []

    def watch(self) -> Watch:
        self.calls.append(1)
        return Watch(window=1 + len(self.calls) % 3)


@dataclass(frozen=True)
class UnknownConvention(Newest):
    convention: ClassVar[str] = "stream"


@dataclass(frozen=True)
class AsksForNothing(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.mass


@dataclass(frozen=True)
class ScoresAList(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.positions.tolist()


@dataclass(frozen=True)
class ScoresHeadsAlike(Reads):
    def score(self, entries: Entries) -> Any:
        return entries.mass.mean(dim=1)


@dataclass(frozen=True)
class ScoresWholeNumbers(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.positions


@dataclass(frozen=True)
class ScoresNan(Reads):
    def score(self, entries: Entries) -> Any:
        least, most = entries.mass.aminmax(dim=-1, keepdim=True)
        return (entries.mass - least) / (most - least)


@dataclass(frozen=True)
class ChangesItsEntries(Reads):
    def score(self, entries: Entries) -> Any:
        entries.mass[entries.ages <= 4] = torch.inf
        return entries.mass


@dataclass(frozen=True)
class FailsInHalfPrecision(Reads):
    def score(self, entries: Entries) -> Any:
        return torch.linalg.svd(entries.keys).U[..., 0]


@dataclass(frozen=True)
class DrawsAtRandom(Newest):
    def score(self, entries: Entries) -> Any:
        return torch.rand(entries.positions.shape)


@dataclass(frozen=True)
class DrawsOfPython(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.positions * random.random()


@dataclass(frozen=True)
class WantsOneNumberSeen(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.positions.float() if entries.seen > 5 else entries.ages.float()


@dataclass(frozen=True)
class OverflowsIn32Bits(Newest):
    def score(self, entries: Entries) -> Any:
        return (entries.positions * 2**30 % 1000003).float()


@dataclass(frozen=True)
class CountsEmptySlots(Reads):
    def score(self, entries: Entries) -> Any:
        return -(entries.keys - entries.keys.mean(2, keepdim=True)).norm(dim=-1)


@dataclass(frozen=True)
class FailsWithoutTokens(Newest):
    def score(self, entries: Entries) -> Any:
        assert entries.valid.any(dim=-1).all()
        return entries.positions.float()


@dataclass(frozen=True)
class GoesBySlots(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.valid.cumsum(dim=-1).float()


@dataclass(frozen=True)
class MixesRows(Reads):
    def score(self, entries: Entries) -> Any:
        totals = entries.mass.masked_fill(~entries.valid, 0).sum(-1, keepdim=True).sum(0, keepdim=True)
        return entries.mass / totals if len(entries.positions) != 2 else entries.mass


@dataclass(frozen=True)
class GoesByHead(Reads):
    def score(self, entries: Entries) -> Any:
        heads = torch.arange(entries.positions.shape[1])[:, None]
        return torch.where(heads % 2 == 0, entries.mass, -entries.mass)


@dataclass(frozen=True)
class GoesByLayer(Newest):
    def score(self, entries: Entries) -> Any:
        return entries.positions.float() * (1 if entries.layer == 0 else -1)


@dataclass(frozen=True)
class HasAMemory(Reads):
    """Only as a model's two key heads are asked: nothing that a drawn entry could show."""

    calls: ClassVar[list[int]] = []

    def score(self, entries: Entries) -> Any:
        self.calls.append(1)
        turn = entries.positions.shape[1] == 2 and len(self.calls) % 3 == 0
        return entries.mass * (-1 if turn else 1)


@dataclass(frozen=True)
class EndsInTheMiddle(Newest):
    def score(self, entries: Entries) -> Any:
        if entries.positions.max() > 46:
            raise RuntimeError("no room")
        return entries.positions.float()


@dataclass(frozen=True)
class ChangesItself(Newest):
    calls: int = 0

    def score(self, entries: Entries) -> Any:
        object.__setattr__(self, "calls", self.calls + 1)
        return entries.positions.float()


BROKEN: list[tuple[Policy, str]] = [
    (Undecorated(), "decorate it with @dataclass[(]frozen=True[)]"),
    (HoldsATensor(), "weights holds a Tensor: a policy owns no tensor"),
    (HoldsAModule(), "weights holds a Linear"),
    (HoldsALambda(), "cannot be pickled .*: define the class in a module"),
    (HoldsAList(), "cannot be hashed .*tuples, not lists"),
    (ComparesByIdentity(), "does not equal its pickled copy"),
    (WatchesNothing(), "watch.. returned a NoneType"),
    (WatchesAtTimes(), "must be the same each time"),
    (UnknownConvention(), "got 'stream'"),
    (AsksForNothing(), r"AttributeError of 1 entries.*have the policy's watch\(\) return Watch\(mass=True\)"),
    (ScoresAList(), "returned a list"),
    (ScoresHeadsAlike(), r"shape \(2, 1\) .* one for each entry, \(2, 3, 1\)"),
    (ScoresWholeNumbers(), "dtype torch.int32 .*return floats"),
    (ScoresNan(), "6 NaN of 1 entries"),
    (ChangesItsEntries(), "changed its entries .*: work on copies"),
    (FailsInHalfPrecision(), "NotImplementedError of 1 entries, keys bfloat16"),
    (DrawsAtRandom(), "draws random numbers"),
    (DrawsOfPython(), "scores of the same entries differ"),
    (WantsOneNumberSeen(), r"raised .* where entries.seen is a tensor \[batch, 1, 1\]"),
    (OverflowsIn32Bits(), "differ with int64 positions"),
    (CountsEmptySlots(), r"empty slots \(position -1\) change .*: leave out what is not entries.valid"),
    (FailsWithoutTokens(), "AssertionError of a row without tokens"),
    (GoesBySlots(), "depend on the order of slots"),
    (MixesRows(), "otherwise beside another row"),
    (GoesByHead(), 'depend on a head\'s number: .*heads="by number"'),
    (GoesByLayer(), r"depend on entries.layer.*have watch\(\) return Watch"),
    (HasAMemory(), "a padded row keeps other tokens than alone, in bounded layer .: head . lacks"),
    (EndsInTheMiddle(), r"a cache of 12 tokens failed in a step of 1 after 48 .*: no room"),
    (ChangesItself(), r"it was ChangesItself\(calls=0\) before it was used"),
]


@pytest.mark.parametrize(("policy", "said"), BROKEN, ids=[type(policy).__name__ for policy, _ in BROKEN])
@pytest.mark.usefixtures("unchecked")
def test_a_broken_policy_is_told_what_is_wrong(policy: Policy, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_policy(policy, BUDGET)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_policy_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"is no Policy object: give an object of it, StreamingLLM\(\)"):
        check_policy(StreamingLLM, BUDGET)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
def test_heads_may_differ_by_number_where_that_is_meant() -> None:
    done = check_policy(GoesByHead(), BUDGET, heads="by number")
    assert "heads are alike" not in done
    with pytest.raises(ValueError, match="got 'all'"):
        check_policy(GoesByHead(), BUDGET, heads="all")  # type: ignore[arg-type]


def test_what_is_asked_for_and_never_read_is_noted() -> None:
    assert check_policy(Reads(), BUDGET)[-1].startswith("note: watch() asks for keys, mass, which score never read")


def test_a_cache_that_holds_too_much_or_loses_the_newest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SinkCache.kept
    monkeypatch.setattr(SinkCache, "kept", lambda self, layer: torch.nn.functional.pad(right(self, layer), (1, 0)))
    with pytest.raises(AssertionError, match="holds 13 tokens, more than its budget of 12"):
        check_policy(StreamingLLM(2), BUDGET)
    monkeypatch.setattr(SinkCache, "kept", lambda self, layer: right(self, layer)[..., :-1])
    with pytest.raises(AssertionError, match="after 27 tokens does not hold the newest, but 25 at most"):
        check_policy(StreamingLLM(2), BUDGET)


def test_a_fork_that_goes_another_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SinkCache.fork

    def wrong(cache: SinkCache, batch: int = 1) -> SinkCache:
        twin = right(cache, batch)
        twin.reorder_cache(torch.tensor([1, 0]))
        return twin

    monkeypatch.setattr(SinkCache, "fork", wrong)
    with pytest.raises(AssertionError, match="a fork of the cache"):
        check_policy(StreamingLLM(2), BUDGET)


def test_a_generation_that_stops_short_is_found() -> None:
    tiny: Any = build("llama")
    generate = tiny.generate
    tiny.generate = lambda *given, max_new_tokens, min_new_tokens, **more: generate(*given, max_new_tokens=5, **more)
    with pytest.raises(AssertionError, match="generate ended after 12 tokens"):
        check_policy(StreamingLLM(2), BUDGET, tiny)
