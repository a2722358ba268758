"""The book of slots against the rule, told in Python: which tokens a step attends to, and at which rotation.

A key's rotation is an integer here: that of token p in the cache's convention is `p - shift + (evicted tokens younger
than p)`. The machine below does with integers what a layer does with keys, from the `Step` alone.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from sinkcache.lanes import Lanes
from sinkcache.ledger import Ledger
from sinkcache.policies import StreamingLLM, Window
from sinkcache.policy import Entries, Policy
from sinkcache.positions import Rotation
from sinkcache.slots import Slots, Step
from sinkcache.store import Index


@dataclass(frozen=True)
class Scattered(Policy):
    """Worth without a pattern and with many ties: evicts anywhere, new tokens included."""

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return ((entries.positions * 7919 + 5) % 13 % 6).float()


@dataclass(frozen=True)
class Wrong(Policy):
    """Returns `value` for each token, or a wrong shape where it is None."""

    value: float | None = None

    def score(self, entries: Entries) -> Tensor:
        return torch.zeros(3) if self.value is None else torch.full(entries.positions.shape, self.value)


@dataclass(frozen=True)
class Nosy(Policy):
    """Notes what it is asked about: (tokens seen, positions)."""

    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        self.asked.append((int(entries.seen), entries.positions[0, 0].tolist()))
        return torch.zeros(entries.positions.shape)


def _worth(policy: Policy, position: int) -> float:
    if isinstance(policy, StreamingLLM):
        return 1.0 if position < policy.num_sinks else 0.0
    return float((position * 7919 + 5) % 13 % 6) if isinstance(policy, Scattered) else 0.0


@dataclass
class Told:
    """The rule as it is told: tokens held, all tokens ever evicted, tokens seen, the model's frame."""

    policy: Policy
    capacity: int
    in_cache: bool
    held: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    seen: int = 0
    shift: int = 0

    def trim(self, budget: int, newest: bool = False) -> None:
        """`newest`: the newest token may go as any other; right after its step it may not."""
        while len(self.held) > budget:
            able = [position for position in self.held if newest or position != self.seen - 1]
            least = min(_worth(self.policy, position) for position in able)
            oldest = min(position for position in able if _worth(self.policy, position) == least)
            self.held.remove(oldest)
            self.gone.append(oldest)

    def rotation(self, position: int) -> int:
        younger = sum(1 for other in self.gone if other > position) if self.in_cache else 0
        return position - self.shift + younger

    def attended(self, q_len: int) -> dict[int, int]:
        """Trims, appends, and tells at which rotation each token is attended to."""
        self.trim(self.capacity - 1, newest=True)
        new = list(range(self.seen, self.seen + q_len))
        seen_at = {position: self.rotation(position) for position in self.held} | {p: p - self.shift for p in new}
        self.held += new
        self.seen += q_len
        return seen_at


@dataclass
class Machine:
    """What a layer holds: per slot (position, rotation now), and the rotations set aside."""

    capacity: int
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    aside: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot: (position, rotation as it arrived)

    def run(self, step: Step, shift: int) -> dict[int, int]:
        """Does a step; returns the rotation at which each token is attended to."""
        if step.turns is not None:
            for slot in _list(step.turns.fresh):
                self.aside[slot] = self.slots[slot]
            moved = _list(step.turns.slots)
            assert max(moved) < step.turns.top <= self.capacity
            assert step.dropped not in moved
            moves = step.turns.moves.tolist()
            for at, slot in enumerate(moved):
                position, rotation = self.aside[slot]
                assert position == self.slots[slot][0], "turned from another token's key"
                self.slots[slot] = (position, rotation + (moves[0] if len(moves) == 1 else moves[at]))
        new = [(position, position - shift) for position in range(step.start, step.start + step.q_len)]
        assert sorted(self.slots) == list(range(step.held))
        attended = [token for slot, token in self.slots.items() if slot != step.dropped] + new
        targets, sources = _list(step.targets), _list(step.sources)
        assert len(targets) == len(sources)
        for target, source in zip(targets, sources, strict=True):
            self.slots[target] = new[source]
        assert sorted(self.slots) == list(range(step.length))
        if step.in_place:
            assert sorted(self.slots.values()) == sorted(attended), "attended to and held differ"
        assert len({position for position, _ in attended}) == len(attended)
        return dict(attended)

    def bake(self, baked: Index, by: int) -> None:
        for slot in _list(baked):
            position, rotation = self.slots[slot]
            self.slots[slot] = (position, rotation + by)


def _list(index: Any) -> list[int]:
    if index is None:
        return []
    return list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()


policies = st.sampled_from([Window(), StreamingLLM(1), StreamingLLM(3), Scattered()])
lengths = st.lists(st.integers(1, 9) | st.just(1), min_size=1, max_size=14)


def _capacities(policy: Policy) -> st.SearchStrategy[int]:
    return st.integers(policy.num_sinks + 1 if isinstance(policy, StreamingLLM) else 1, 8)


@settings(deadline=None, max_examples=200)
@given(st.data(), policies, st.booleans(), lengths)
def test_attends_to_what_the_rule_tells_at_the_rotation_it_tells(
    data: st.DataObject, policy: Policy, in_cache: bool, steps: list[int]
) -> None:
    capacity = data.draw(_capacities(policy))
    slots, told, machine = Slots(policy, capacity, in_cache, None), Told(policy, capacity, in_cache), Machine(capacity)
    for q_len in steps:
        if data.draw(st.integers(0, 3)) == 0:
            shift = data.draw(st.integers(-20, told.seen))
            by = told.shift - shift
            young = set(range(told.seen - capacity, told.seen))
            baked = slots.rebase(shift)
            assert {machine.slots[slot][0] for slot in _list(baked)} <= young
            machine.bake(baked, by)
            told.shift = shift
        before = slots.kept_before()
        expected = told.attended(q_len)
        assert before == len(expected) - q_len
        assert machine.run(slots.step(q_len), told.shift) == expected
        told.trim(capacity)
        assert slots.kept().tolist() == sorted(told.held)
        assert (slots.seen, slots.held) == (told.seen, len(told.held))
        by_slot = [machine.slots[slot][0] for slot in range(slots.held)]
        assert slots.positions[: slots.held].tolist() == by_slot


def test_a_token_in_the_slot_of_one_that_had_moved_has_not_moved() -> None:
    slots, told, machine = Slots(Scattered(), 4, True, None), Told(Scattered(), 4, True), Machine(4)
    for _ in range(26):  # twice the pattern of worths
        expected = told.attended(1)
        assert machine.run(slots.step(1), 0) == expected
        told.trim(4)


@settings(deadline=None, max_examples=100)
@given(st.data(), policies, lengths)
def test_knows_which_slots_are_turned(data: st.DataObject, policy: Policy, steps: list[int]) -> None:
    capacity = data.draw(_capacities(policy))
    slots, machine = Slots(policy, capacity, True, None), Machine(capacity)
    for q_len in steps:
        machine.run(slots.step(q_len), 0)
        turned = [slot for slot, (position, rotation) in sorted(machine.slots.items()) if position != rotation]
        assert _list(slots.turned()) == turned


@settings(deadline=None, max_examples=200)
@given(st.data(), policies, st.booleans(), lengths)
def test_turns_only_keys_whose_place_changed(
    data: st.DataObject, policy: Policy, in_cache: bool, steps: list[int]
) -> None:
    capacity = data.draw(_capacities(policy))
    slots, machine = Slots(policy, capacity, in_cache, None), Machine(capacity)
    for q_len in steps:
        before = dict(machine.slots)
        step = slots.step(q_len)
        machine.run(step, 0)
        for slot in [] if step.turns is None else _list(step.turns.slots):
            if slot not in _list(step.targets):
                assert machine.slots[slot] != before[slot]


@settings(deadline=None)
@given(st.data(), policies, lengths)
def test_never_turns_a_key_in_original_positions(data: st.DataObject, policy: Policy, steps: list[int]) -> None:
    slots = Slots(policy, data.draw(_capacities(policy)), False, None)
    assert [slots.step(q_len).turns for q_len in steps] == [None] * len(steps)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 40))
def test_streaming_turns_its_sinks_alone(num_sinks: int, window: int, steps: int) -> None:
    slots = Slots(StreamingLLM(num_sinks), num_sinks + window, True, None)
    for _ in range(steps):
        turns = slots.step(1).turns
        assert turns is None or _list(turns.slots) == list(range(num_sinks))


def test_rebased_keys_are_turned_for_good_once_when_young() -> None:
    slots = Slots(Window(), 4, True, None)
    slots.step(4)
    assert _list(slots.rebase(4)) == [0, 1, 2, 3]


def test_rebasing_to_where_it_is_changes_nothing() -> None:
    slots = Slots(Window(), 4, True, None)
    slots.step(4)
    slots.rebase(4)
    assert _list(slots.rebase(4)) == []


def test_rebasing_turns_no_key_for_good_that_is_to_turn_on_read() -> None:
    slots = Slots(StreamingLLM(2), 6, True, None)
    slots.step(7)  # evicts 2, so that 0 and 1 move
    assert sorted(slots.positions[_list(slots.rebase(7))].tolist()) == [3, 4, 5, 6]


def test_rebasing_turns_no_old_key_for_good() -> None:
    slots = Slots(StreamingLLM(2), 4, False, None)
    for _ in range(9):
        slots.step(1)
    assert sorted(slots.positions[_list(slots.rebase(9))].tolist()) == [7, 8]


@settings(deadline=None, max_examples=100)
@given(st.data(), policies, lengths)
def test_single_tokens_go_in_place(data: st.DataObject, policy: Policy, steps: list[int]) -> None:
    capacity = data.draw(_capacities(policy))
    slots = Slots(policy, capacity, True, None)
    for q_len in steps:
        step = slots.step(q_len)
        fits = step.held - (step.dropped is not None) + q_len <= capacity
        assert step.in_place == fits
        assert fits or q_len > 1


def _token_by_token(
    data: st.DataObject, policy: Policy, in_cache: bool, steps: list[int], q_len: int
) -> tuple[Slots, list[int], list[set[int]] | None]:
    """A book after `steps`, the columns of its next step, and what each of its queries sees if read token by token.

    None for the last if no mask can show that: a key is read at another rotation, or others are kept.
    """
    capacity = data.draw(_capacities(policy))
    slots, told, machine = Slots(policy, capacity, in_cache, None), Told(policy, capacity, in_cache), Machine(capacity)
    for earlier in steps:
        machine.run(slots.step(earlier), 0)
        told.attended(earlier)
        told.trim(capacity)
    columns = [position for _, (position, _) in sorted(machine.slots.items())]
    whole = Told(policy, capacity, in_cache, list(told.held), list(told.gone), told.seen)
    at_once = whole.attended(q_len)
    whole.trim(capacity)
    rows = [told.attended(1) for _ in range(q_len)]
    possible = sorted(told.held) == sorted(whole.held) and all(
        at_once.get(p) == r for row in rows for p, r in row.items()
    )
    return slots, _columns(at_once, columns), [set(row) for row in rows] if possible else None


def _columns(attended: dict[int, int], by_slot: list[int]) -> list[int]:
    """The attended positions, those held in the order of their slots, then the new ones."""
    return [position for position in by_slot if position in attended] + sorted(set(attended) - set(by_slot))


@settings(deadline=None, max_examples=200)
@given(st.data(), policies, st.booleans(), lengths, st.integers(1, 9))
def test_visible_is_what_reading_token_by_token_would_see(
    data: st.DataObject, policy: Policy, in_cache: bool, steps: list[int], q_len: int
) -> None:
    slots, columns, rows = _token_by_token(data, policy, in_cache, steps, q_len)
    if rows is None:
        with pytest.raises(ValueError, match="token by token"):
            slots.visible(q_len)
        return
    try:
        mask = slots.visible(q_len)
    except ValueError:
        assert in_cache  # it may refuse more than it must where keys move
        assert policy != Window()
        return
    assert [{p for p, seen in zip(columns, row, strict=True) if seen} for row in mask.tolist()] == rows


def test_asking_what_is_visible_changes_nothing() -> None:
    slots = Slots(Window(), 4, True, None)
    slots.step(3)
    slots.visible(5)
    assert (slots.seen, slots.kept().tolist()) == (3, [0, 1, 2])


def test_a_policy_is_told_the_tokens_seen_when_it_is_asked() -> None:
    policy = Nosy()
    slots = Slots(policy, 2, True, None)
    for q_len in (3, 1):
        slots.step(q_len)
    assert policy.asked == [(3, [0, 1, 2]), (3, [1, 2])]


def test_layers_of_one_ledger_get_the_same_step() -> None:
    ledger = Ledger(Slots(StreamingLLM(1), 4, True, None), Lanes())
    first = ledger.step(0, 3)
    assert ledger.step(0, 3) is first
    assert ledger.seen == ledger.books[0].seen == 3


@pytest.mark.parametrize(("start", "q_len"), [(0, 2), (1, 3), (7, 3)])
def test_layers_that_disagree_are_an_error(start: int, q_len: int) -> None:
    ledger = Ledger(Slots(StreamingLLM(1), 4, True, None), Lanes())
    ledger.step(0, 3)
    with pytest.raises(RuntimeError, match="layers disagree"):
        ledger.step(start, q_len)


def test_a_step_needs_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Slots(Window(), 4, True, None).step(0)


@pytest.mark.parametrize(("share", "prompt", "expected"), [(0.25, 10, 3), (1.0, 7, 7), (0.5, 8, 4), (0.01, 3, 1)])
def test_a_share_of_the_prompt_is_rounded_up(share: float, prompt: int, expected: int) -> None:
    slots = Slots(Window(), share, True, None)
    slots.resolve(prompt)
    assert slots.capacity == expected


def test_a_settled_share_stays() -> None:
    slots = Slots(Window(), 0.5, True, None)
    slots.resolve(10)
    slots.resolve(100)
    assert slots.capacity == 5


def test_a_first_step_settles_a_share() -> None:
    slots = Slots(Window(), 0.5, True, None)
    slots.step(6)
    assert slots.kept().tolist() == [3, 4, 5]


def test_a_share_too_small_for_the_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="num_sinks"):
        Slots(StreamingLLM(4), 0.5, True, None).resolve(8)


def test_reset_forgets_the_stream_and_the_share() -> None:
    slots = Slots(Window(), 0.5, True, None)
    slots.step(6)
    slots.rebase(6)
    slots.reset()
    assert (slots.seen, slots.held, slots.shift, slots.capacity, slots.kept().tolist()) == (0, 0, 0, None, [])


def test_a_reset_book_reads_as_a_new_one() -> None:
    used, new = Slots(StreamingLLM(1), 3, True, None), Slots(StreamingLLM(1), 3, True, None)
    for _ in range(5):
        used.step(2)
    used.reset()
    for _ in range(6):
        assert used.step(1) == new.step(1)


def test_positions_at_the_limit_are_refused() -> None:
    slots = Slots(Window(), 4, True, 6)
    slots.step(5)
    with pytest.raises(ValueError, match=r"beyond 6.*sinkcache.stream"):
        slots.step(1)


def test_rebasing_makes_room_below_the_limit() -> None:
    slots = Slots(Window(), 4, True, 6)
    slots.step(5)
    slots.rebase(5)
    assert slots.step(5).length == 4


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_score_that_is_nan_is_refused(q_len: int) -> None:
    slots = Slots(Wrong(float("nan")), 2, True, None)
    slots.step(2)
    with pytest.raises(ValueError, match="NaN"):
        slots.step(q_len)


@pytest.mark.parametrize("q_len", [1, 3])
def test_scores_of_another_shape_are_refused(q_len: int) -> None:
    slots = Slots(Wrong(), 2, True, None)
    slots.step(2)
    with pytest.raises(ValueError, match="one score for each entry"):
        slots.step(q_len)


@pytest.mark.parametrize("worth", [torch.inf, -torch.inf])
def test_of_tokens_all_infinite_the_oldest_goes(worth: float) -> None:
    slots = Slots(Wrong(worth), 2, True, None)
    for q_len in (1, 1, 1, 3, 1):
        slots.step(q_len)
    assert slots.kept().tolist() == [5, 6]


def test_a_phase_is_computed_once_for_all_layers() -> None:
    slots = Slots(StreamingLLM(1), 2, True, None)
    for _ in range(3):
        slots.step(1)
    turns = slots.step(1).turns
    assert turns is not None
    rotation = Rotation(torch.tensor([1.0, 0.5], dtype=torch.float64), "half")
    assert turns.phase(rotation, torch.zeros(1)) is turns.phase(rotation, torch.zeros(1))


def test_rotations_that_differ_have_their_own_phases() -> None:
    slots = Slots(StreamingLLM(1), 2, True, None)
    for _ in range(3):
        slots.step(1)
    turns = slots.step(1).turns
    assert turns is not None
    slow, fast = (Rotation(torch.tensor([f], dtype=torch.float64), "half") for f in (0.5, 1.0))
    like = torch.zeros(1, dtype=torch.float64)
    assert torch.equal(turns.phase(slow, like), slow.phase(turns.moves, like))
    assert torch.equal(turns.phase(fast, like), fast.phase(turns.moves, like))
