"""The store against a Python list of slots, each a vector of floats and how far it is turned."""

import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinkcache.positions import Rotation
from sinkcache.store import Index, Store

CAPACITY, HEAD_DIM, VALUE_DIM = 5, 6, 3
INV_FREQ = [1.0, 0.31]  # 4 of 6 channels turn, in halves
ROTATION = Rotation(torch.tensor(INV_FREQ, dtype=torch.float64), "half")

Slot = tuple[list[float], int, list[float]]  # a key as it arrived, its move, its value


def _tokens(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, count, HEAD_DIM).to(dtype), torch.randn(2, 3, count, VALUE_DIM).to(dtype)


def _filled(dtype: torch.dtype = torch.float64) -> tuple[Store, Tensor, Tensor]:
    keys, values = _tokens(CAPACITY, dtype)
    store = Store(CAPACITY, keys, values)
    store.write(slice(0, CAPACITY), keys, values)
    return store, keys, values


def _phase(moves: list[int], like: Tensor) -> Tensor:
    return ROTATION.phase(torch.tensor(moves), like)


def _turned(key: list[float], move: int) -> list[float]:
    turned = list(key)
    for f, frequency in enumerate(INV_FREQ):
        c, s = math.cos(move * frequency), math.sin(move * frequency)
        turned[f], turned[f + 2] = key[f] * c - key[f + 2] * s, key[f] * s + key[f + 2] * c
    return turned


def _index(slots: list[int], as_slice: bool) -> Index:
    run = slots == list(range(slots[0], slots[-1] + 1))
    return slice(slots[0], slots[-1] + 1) if run and as_slice else torch.tensor(slots)


def _check(store: Store, model: list[Slot], row: int, head: int) -> None:
    keys, values = store.read(CAPACITY)
    expected = torch.tensor([_turned(key, move) for key, move, _ in model], dtype=torch.float64)
    torch.testing.assert_close(keys[row, head], expected)
    assert values[row, head].tolist() == [value for _, _, value in model]


@settings(deadline=None)
@given(st.data())
def test_does_what_a_list_of_slots_does(data: st.DataObject) -> None:
    store, keys, values = _filled()
    row, head = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    model: list[Slot] = [(keys[row, head, i].tolist(), 0, values[row, head, i].tolist()) for i in range(CAPACITY)]
    some = st.lists(st.integers(0, CAPACITY - 1), min_size=1, unique=True).map(sorted)
    for _ in range(data.draw(st.integers(1, 6))):
        slots, as_slice = data.draw(some), data.draw(st.booleans())
        kind = data.draw(st.sampled_from(["write", "turn", "bake", "joined"]))
        if kind == "write":
            new_keys, new_values = _tokens(len(slots))
            store.write(_index(slots, as_slice), new_keys, new_values)
            for at, slot in enumerate(slots):
                model[slot] = (new_keys[row, head, at].tolist(), 0, new_values[row, head, at].tolist())
        elif kind == "turn":
            moves = [data.draw(st.integers(-50, 50)) for _ in slots]
            fresh = [slot for slot in slots if model[slot][1] == 0]
            index = _index(fresh, as_slice) if fresh else None
            store.turn(_index(slots, as_slice), index, slots[-1] + 1, ROTATION, _phase(moves, keys))
            for slot, move in zip(slots, moves, strict=True):
                model[slot] = (model[slot][0], move, model[slot][2])
        elif kind == "bake":
            slots = [slot for slot in slots if model[slot][1] == 0]
            move = data.draw(st.integers(-50, 50))
            if slots:
                store.bake(_index(slots, as_slice), ROTATION, _phase([move], keys))
            for slot in slots:
                model[slot] = (_turned(model[slot][0], move), 0, model[slot][2])
        else:
            dropped = data.draw(st.none() | st.integers(0, CAPACITY - 1))
            new_keys, new_values = _tokens(2)
            got_keys, got_values = store.joined(CAPACITY, dropped, new_keys, new_values)
            left = [slot for index, slot in enumerate(model) if index != dropped]
            old = torch.tensor([_turned(key, move) for key, move, _ in left], dtype=torch.float64)
            torch.testing.assert_close(got_keys[row, head], torch.cat([old, new_keys[row, head]]))
            assert got_values[row, head].tolist() == [value for _, _, value in left] + new_values[row, head].tolist()
        _check(store, model, row, head)
    moved = [slot for slot in range(CAPACITY) if model[slot][1] != 0]
    arrived = store.as_arrived(CAPACITY, torch.tensor(moved, dtype=torch.int64), ROTATION)
    torch.testing.assert_close(arrived[row, head], torch.tensor([key for key, _, _ in model], dtype=torch.float64))


def test_holds_exactly_its_capacity() -> None:
    store = Store(CAPACITY, *_tokens(40))
    assert [tensor.untyped_storage().nbytes() for tensor in store.tensors()] == [2 * 3 * 5 * 6 * 8, 2 * 3 * 5 * 3 * 8]


def test_reading_copies_nothing() -> None:
    store, _, _ = _filled()
    keys, values = store.read(3)
    assert (keys.data_ptr(), values.data_ptr()) == (store.keys.data_ptr(), store.values.data_ptr())


def test_reads_the_first_slots_only() -> None:
    store, keys, values = _filled()
    got_keys, got_values = store.read(3)
    assert torch.equal(got_keys, keys[:, :, :3])
    assert torch.equal(got_values, values[:, :, :3])


def test_joined_keys_share_no_memory_with_the_store() -> None:
    store, keys, values = _filled()
    got_keys, got_values = store.joined(2, None, keys[:, :, :1], values[:, :, :1])
    store.keys.zero_()
    store.values.zero_()
    assert torch.equal(got_keys[:, :, :2], keys[:, :, :2])
    assert torch.equal(got_values[:, :, :2], values[:, :, :2])


def test_joins_a_step_to_nothing_without_a_copy() -> None:
    keys, values = _tokens(4)
    got_keys, got_values = Store(CAPACITY, keys, values).joined(0, None, keys, values)
    assert got_keys is keys
    assert got_values is values


def test_written_tokens_are_copies() -> None:
    store, keys, _ = _filled()
    before = store.keys.clone()
    keys.zero_()
    assert torch.equal(store.keys, before)


def test_nothing_is_set_aside_before_a_key_turns() -> None:
    store, _, _ = _filled()
    assert store.arrived is None


def test_sets_aside_no_more_slots_than_are_below_top() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([3], keys))
    assert store.arrived is not None
    assert store.arrived.shape == (2, 3, 2, 2)


def test_growing_what_is_set_aside_keeps_what_was_there() -> None:
    store, keys, _ = _filled(torch.bfloat16)
    store.turn(slice(0, 1), slice(0, 1), 1, ROTATION, _phase([3], keys))
    store.turn(slice(0, 4), slice(1, 4), 4, ROTATION, _phase([9], keys))
    assert torch.equal(store.as_arrived(CAPACITY, slice(0, 4), ROTATION), keys)


def _turned_at_once(keys: Tensor, move: int) -> Tensor:
    turned = keys.clone()
    ROTATION.put(turned, ROTATION.pick(keys) * _phase([move], keys))
    return turned


def test_a_copy_turns_on_its_own() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([3], keys))
    other = copy.deepcopy(store)
    other.turn(slice(0, 2), None, 2, ROTATION, _phase([8], keys))
    torch.testing.assert_close(other.keys[:, :, :2], _turned_at_once(keys, 8)[:, :, :2])
    torch.testing.assert_close(store.keys[:, :, :2], _turned_at_once(keys, 3)[:, :, :2])


def test_rows_turn_after_they_were_chosen() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([3], keys))
    store.rows(torch.tensor([1, 1, 0]))
    store.turn(slice(0, 2), None, 2, ROTATION, _phase([8], keys))
    torch.testing.assert_close(store.keys[:, :, :2], _turned_at_once(keys, 8)[[1, 1, 0], :, :2])


def test_another_run_of_slots_turns_alone() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 4), slice(0, 4), 4, ROTATION, _phase([3], keys))
    store.turn(slice(2, 4), None, 4, ROTATION, _phase([8], keys))
    torch.testing.assert_close(store.keys[:, :, :2], _turned_at_once(keys, 3)[:, :, :2])
    torch.testing.assert_close(store.keys[:, :, 2:4], _turned_at_once(keys, 8)[:, :, 2:4])


def test_a_new_token_in_a_turned_slot_turns_from_how_it_arrived() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([3], keys))
    new_keys, new_values = _tokens(1)
    store.write(slice(1, 2), new_keys, new_values)
    store.turn(slice(0, 2), slice(1, 2), 2, ROTATION, _phase([8], keys))
    torch.testing.assert_close(store.keys[:, :, 1:2], _turned_at_once(new_keys, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_key_turned_a_thousand_times_is_rounded_once(dtype: torch.dtype) -> None:
    store, keys, _ = _filled(dtype)
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([1], keys))
    for move in range(2, 1001):
        store.turn(slice(0, 2), None, 2, ROTATION, _phase([move], keys))
    at_once = keys.clone()
    ROTATION.put(at_once, ROTATION.pick(keys) * _phase([1000], keys))
    assert torch.equal(store.keys[:, :, :2], at_once[:, :, :2])


def test_a_key_comes_back_as_it_arrived_bit_for_bit() -> None:
    store, keys, _ = _filled(torch.bfloat16)
    store.turn(torch.tensor([1, 4]), torch.tensor([1, 4]), 5, ROTATION, _phase([17, -3], keys))
    assert torch.equal(store.as_arrived(CAPACITY, torch.tensor([1, 4]), ROTATION), keys)


def test_as_arrived_is_a_copy() -> None:
    store, keys, _ = _filled()
    store.as_arrived(CAPACITY, slice(0, 0), ROTATION).zero_()
    assert torch.equal(store.keys, keys)


def test_keys_without_a_rotation_are_as_they_arrived() -> None:
    store, keys, _ = _filled()
    assert torch.equal(store.as_arrived(3, slice(0, 0), None), keys[:, :, :3])


def test_values_never_turn() -> None:
    store, keys, values = _filled()
    store.turn(slice(0, 5), slice(0, 5), 5, ROTATION, _phase([3], keys))
    store.bake(slice(0, 5), ROTATION, _phase([3], keys))
    assert torch.equal(store.values, values)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_keeps_the_chosen_rows_in_order(chosen: list[int]) -> None:
    store, keys, values = _filled()
    store.turn(slice(1, 3), slice(1, 3), 3, ROTATION, _phase([4], keys))
    turned = store.keys.clone()
    store.rows(torch.tensor(chosen))
    assert torch.equal(store.keys, turned[chosen])
    assert torch.equal(store.values, values[chosen])
    assert torch.equal(store.as_arrived(CAPACITY, slice(1, 3), ROTATION), keys[chosen])


def test_frees_the_rows_it_drops() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([4], keys))
    before = sum(tensor.untyped_storage().nbytes() for tensor in store.tensors())
    store.rows(torch.tensor([1]))
    assert sum(tensor.untyped_storage().nbytes() for tensor in store.tensors()) == before // 2


def test_no_view_keeps_dropped_rows_alive() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([4], keys))
    store.turn(slice(0, 2), None, 2, ROTATION, _phase([5], keys))
    old = weakref.ref(store.keys)
    store.rows(torch.tensor([1]))
    gc.collect()
    assert old() is None


def test_names_every_tensor_it_holds() -> None:
    store, keys, _ = _filled()
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([4], keys))
    held = {id(value) for value in vars(store).values() if isinstance(value, Tensor)}
    assert {id(tensor) for tensor in store.tensors()} == held


def test_a_store_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        store, keys, _ = _filled()
        store.turn(slice(0, 1), slice(0, 1), 1, ROTATION, _phase([4], keys))
    store.write(slice(0, 2), *_tokens(2))
    store.turn(slice(0, 2), slice(0, 2), 2, ROTATION, _phase([4], store.keys))
    assert not store.keys.is_inference()
