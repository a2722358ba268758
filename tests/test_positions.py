"""Rotations against sines and cosines in Python floats, and angles against exact fractions."""

import cmath
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinkcache.positions import Layout, Rotation, same

TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510")
INV_FREQ = [1.0, 0.31, 0.0625, 0.0007]

layouts = st.sampled_from(["half", "interleaved"])
both_layouts = pytest.mark.parametrize("layout", ["half", "interleaved"])


def _rotation(layout: Layout, pairs: int = 4) -> Rotation:
    return Rotation(torch.tensor(INV_FREQ[:pairs], dtype=torch.float64), layout)


def _turn(rotation: Rotation, keys: Tensor, moves: list[int]) -> Tensor:
    turned = keys.clone()
    rotation.put(turned, rotation.pick(keys) * rotation.phase(torch.tensor(moves), keys))
    return turned


def _oracle(key: list[float], move: int, layout: str, pairs: int) -> list[float]:
    """One key, turned pair by pair with the rotation matrix, as the RoFormer paper writes it (equation 15)."""
    turned = list(key)
    for f in range(pairs):
        first, second = (f, f + pairs) if layout == "half" else (2 * f, 2 * f + 1)
        c, s = math.cos(move * INV_FREQ[f]), math.sin(move * INV_FREQ[f])
        turned[first] = key[first] * c - key[second] * s
        turned[second] = key[first] * s + key[second] * c
    return turned


@settings(deadline=None)
@given(layouts, st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(-5000, 5000), min_size=5, max_size=5))
def test_turns_each_pair_as_the_paper_does(layout: Layout, pairs: int, still: int, moves: list[int]) -> None:
    keys = torch.randn(2, 3, 5, 2 * pairs + still, dtype=torch.float64)
    expected = [
        [[_oracle(key.tolist(), move, layout, pairs) for key, move in zip(head, moves, strict=True)] for head in row]
        for row in keys
    ]
    got = _turn(_rotation(layout, pairs), keys, moves)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@both_layouts
def test_leaves_the_other_channels_of_a_partial_rotary_alone(layout: Layout) -> None:
    keys = torch.randn(2, 3, 5, 11)
    assert torch.equal(_turn(_rotation(layout), keys, [1, 2, 3, 4, 5])[..., 8:], keys[..., 8:])


@both_layouts
def test_counts_the_channels_that_turn(layout: Layout) -> None:
    assert _rotation(layout, pairs=3).channels == 6


@settings(deadline=None)
@given(layouts, st.integers(-4000, 4000), st.integers(-4000, 4000))
def test_shifts_add(layout: Layout, first: int, second: int) -> None:
    keys, rotation = torch.randn(2, 3, 1, 9, dtype=torch.float64), _rotation(layout)
    torch.testing.assert_close(
        _turn(rotation, _turn(rotation, keys, [first]), [second]), _turn(rotation, keys, [first + second])
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@both_layouts
def test_shift_by_zero_is_the_identity(layout: Layout, dtype: torch.dtype) -> None:
    keys = torch.randn(2, 3, 5, 9).to(dtype)
    assert torch.equal(_turn(_rotation(layout), keys, [0] * 5), keys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@both_layouts
def test_picking_and_putting_changes_nothing(layout: Layout, dtype: torch.dtype) -> None:
    keys, rotation = torch.randn(2, 3, 5, 9).to(dtype), _rotation(layout)
    again = keys.clone()
    rotation.put(again, rotation.pick(keys))
    assert torch.equal(again, keys)


@both_layouts
def test_picked_channels_are_a_copy(layout: Layout) -> None:
    keys, rotation = torch.ones(2, 3, 5, 8), _rotation(layout)
    picked = rotation.pick(keys)
    keys.zero_()
    assert torch.equal(picked, torch.full_like(picked, 1 + 1j))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.complex128), (torch.float32, torch.complex64), (torch.bfloat16, torch.complex64)],
)
def test_computes_in_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    keys, rotation = torch.randn(2, 3, 5, 8).to(dtype), _rotation("half")
    assert rotation.pick(keys).dtype == rotation.phase(torch.tensor([3]), keys).dtype == expected


def _exact_phase(move: int, frequency: float) -> complex:
    angle = (move * Fraction(frequency)) % TWO_PI
    return cmath.exp(1j * float(angle))


FAR = [4_000_000, -4_000_000, 3_999_999, 16_777_217]


@pytest.mark.parametrize("move", FAR)
def test_angles_four_million_tokens_away_are_exact(move: int) -> None:
    got = _rotation("half").phase(torch.tensor([move]), torch.zeros(1, dtype=torch.float64))[0]
    expected = torch.tensor([_exact_phase(move, frequency) for frequency in INV_FREQ], dtype=torch.complex128)
    torch.testing.assert_close(got, expected, rtol=0, atol=4e-9)  # half an ulp of 16.8 million is 1.9e-9


@pytest.mark.parametrize("move", FAR)
def test_float32_keys_turn_by_exact_angles(move: int) -> None:
    got = _rotation("half").phase(torch.tensor([move]), torch.zeros(1))[0]
    expected = torch.tensor([_exact_phase(move, frequency) for frequency in INV_FREQ], dtype=torch.complex64)
    torch.testing.assert_close(got, expected, rtol=0, atol=1.2e-7)  # one ulp of a float32 below 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(deadline=None)
@given(layouts, st.integers(-4_000_000, 4_000_000))
def test_half_precision_keys_are_rounded_once(dtype: torch.dtype, layout: Layout, move: int) -> None:
    keys = torch.randn(2, 3, 1, 8).to(dtype)
    exact = _turn(_rotation(layout), keys.double(), [move])
    error = (_turn(_rotation(layout), keys, [move]).double() - exact).abs()
    unit = torch.finfo(dtype).eps / 2
    assert bool((error <= unit * exact.abs() + 2e-6).all())  # 2e-6: float32 arithmetic, and float16's subnormals


def test_one_phase_serves_every_key() -> None:
    keys, rotation = torch.randn(2, 3, 5, 8, dtype=torch.float64), _rotation("half")
    assert torch.equal(_turn(rotation, keys, [7]), _turn(rotation, keys, [7] * 5))


def test_rotations_are_the_same_where_frequencies_layout_and_what_turns_are() -> None:
    one = _rotation("half")
    assert same(one, _rotation("half"))
    for other in (_rotation("interleaved"), _rotation("half", pairs=3), Rotation(one.inv_freq, "half", values=True)):
        assert not same(one, other)
    assert not same(one, None)
    assert same("unknown", "unknown")
