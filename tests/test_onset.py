import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.onset import Crossing, first_head, halfway, lasting, onsets

STEPS = [0, 16, 64, 256, 512, 1000, 2000, 4000, 8000, 16000, 143000]
PYTHIA = [0.0017, 0.0015, 0.0015, 0.0015, 0.002, 0.005, 0.02, 0.08, 0.13, 0.17, 0.20]  # Pythia-410M, as published
UNIFORM = sum(1 / i for i in range(65, 2049)) / 1984  # 0.174%


def found(shares, hits, segments=10, draws=200, seed=0, uniform=0.01):
    """`onsets` of shares by step and document, and as many heads' hits as there are."""
    documents = len(shares[0])
    steps = [0, *(2**index for index in range(len(shares) - 1))]
    return onsets(
        steps,
        torch.tensor(shares, dtype=torch.float64),
        torch.full((documents,), uniform, dtype=torch.float64),
        torch.tensor(hits),
        torch.full((documents,), segments),
        draws,
        seed,
    )


def test_the_published_curve_has_its_published_onset() -> None:
    share = lasting(STEPS, PYTHIA, 10 * UNIFORM)
    assert share is not None
    assert share.step == pytest.approx(1866, abs=3)
    assert (share.before, share.at) == (1000, 2000)
    half = halfway(STEPS, PYTHIA)
    assert half is not None
    assert half.step == pytest.approx(5278, abs=1)
    assert (half.before, half.at) == (4000, 8000)


@given(
    rise=st.floats(0.2, 3),
    onset=st.floats(2, 900),
    steps=st.lists(st.integers(1, 1000), min_size=2, max_size=12, unique=True),
)
def test_a_power_of_the_step_crosses_where_it_does(rise: float, onset: float, steps: list[int]) -> None:
    steps = sorted(steps)
    crossing = lasting(steps, [0.02 * (step / onset) ** rise for step in steps], 0.02)
    after = [step for step in steps if step >= onset]
    if not after:
        assert crossing is None
    elif len(after) == len(steps):
        assert crossing == Crossing(steps[0], None, steps[0])
    else:
        assert crossing is not None
        assert crossing.step == pytest.approx(onset, rel=1e-6)
        assert (crossing.before, crossing.at) == (steps[-len(after) - 1], after[0])


@given(start=st.floats(0, 0.1), steps=st.lists(st.integers(1, 10**6), min_size=2, max_size=12, unique=True))
def test_a_share_that_grows_with_the_log_of_the_step_is_half_where_it_is(start: float, steps: list[int]) -> None:
    steps = sorted(steps)
    shares = [start + math.log(step) for step in steps]
    goal = shares[-1] / 2
    crossing = halfway(steps, shares)
    assert crossing is not None
    if shares[0] >= goal:
        assert crossing == Crossing(steps[0], None, steps[0])
    else:
        assert crossing.step == pytest.approx(math.exp(goal - start), rel=1e-6)


def test_what_falls_back_is_no_onset() -> None:
    assert lasting([1, 2, 4, 8], [0.01, 0.18, 0.07, 0.095], 0.1) is None
    crossing = lasting([1, 2, 4, 8, 16], [0.01, 0.18, 0.05, 0.2, 0.3], 0.1)
    assert crossing is not None
    assert crossing.step == pytest.approx(4 * 2**0.5)  # from 0.05 to 0.2, 0.1 is half of the way in its log
    assert (crossing.before, crossing.at) == (4, 8)


def test_what_is_just_reached_is_reached() -> None:
    assert lasting([1, 2], [0.05, 0.1], 0.1) == Crossing(2, 1, 2)
    assert first_head([1, 2], [0.4, 0.5]) == Crossing(2, 1, 2)
    assert halfway([1, 2, 4], [0.1, 0.5, 1.0]) == Crossing(2, 1, 2)


def test_half_is_of_the_last_share_not_of_the_greatest() -> None:
    assert halfway([1, 2, 4, 8], [0.1, 0.2, 0.9, 0.4]) == Crossing(2, 1, 2)


def test_nothing_is_interpolated_from_step_0_or_a_share_of_0() -> None:
    assert lasting([0, 16, 64], [0.01, 0.5, 0.6], 0.1) == Crossing(16, 0, 16)
    assert halfway([0, 16, 64], [0.01, 0.5, 0.6]) == Crossing(16, 0, 16)
    assert lasting([8, 16], [0.0, 0.5], 0.1) == Crossing(16, 8, 16)


def test_nothing_is_found_without_checkpoints() -> None:
    assert lasting([], [], 0.1) is None
    assert halfway([], []) is None
    assert first_head([], []) is None


def test_a_share_that_is_not_a_number_is_no_sink() -> None:
    assert lasting([1, 2], [0.2, math.nan], 0.1) is None


def test_the_first_head_is_the_best_of_each_checkpoint_and_need_not_last() -> None:
    assert first_head([1, 2, 4, 8], [0.1, 0.6, 0.2, 0.9]) == Crossing(2, 1, 2)
    assert first_head([1, 2], [0.7, 0.9]) == Crossing(1, None, 1)
    assert first_head([1, 2], [0.1, 0.49]) is None


def test_a_head_counts_by_its_own_segments_over_all_documents() -> None:
    shares = [[0.01, 0.01]] * 3
    spread = found(shares, [[[0, 0], [0, 0]], [[9, 0], [0, 9]], [[9, 0], [1, 9]]])["head"]
    assert spread.crossing == Crossing(2, 1, 2)  # 9 of 20 in either head, then 10 of 20 in the first
    assert found(shares, [[[0], [0]], [[4], [5]], [[4], [5]]])["head"].crossing is None


def test_a_curve_is_the_mean_of_its_documents() -> None:
    one = found([[0.01, 0.01], [0.02, 0.02], [0.02, 0.38], [0.3, 0.9]], [[[0], [0]]] * 4)
    assert one["lasting"].crossing == lasting([0, 1, 2, 4], [0.01, 0.02, 0.2, 0.6], 0.1)
    assert one["half"].crossing == halfway([0, 1, 2, 4], [0.01, 0.02, 0.2, 0.6])


def test_half_of_no_sink_is_not_reached() -> None:
    never = found([[0.01, 0.01], [0.011, 0.01], [0.09, 0.09]], [[[0], [0]]] * 3)
    assert all(each.crossing is None and each.reached == 0 for each in never.values())
    assert all(each.low is None and each.high is None for each in never.values())


def test_intervals_come_from_the_documents_alone() -> None:
    alike = [[share] * 5 for share in (0.01, 0.02, 0.05, 0.3, 0.5)]
    hits = [[[0]] * 5, [[0]] * 5, [[5]] * 5, [[9]] * 5, [[9]] * 5]
    for each in found(alike, hits).values():
        assert each.crossing is not None
        assert each.low == pytest.approx(each.crossing.step)
        assert each.high == pytest.approx(each.crossing.step)
        assert each.reached == 1
    unlike = [[0.01] * 5, [0.02] * 5, [0.03, 0.2, 0.05, 0.3, 0.09], [0.3] * 5, [0.5] * 5]
    apart = found(unlike, hits)["lasting"]
    assert apart.crossing is not None
    assert apart.low is not None
    assert apart.high is not None
    assert apart.low < apart.crossing.step < apart.high
    assert apart.low >= 1
    assert apart.high <= 4
    assert found(unlike, hits) == found(unlike, hits)
    assert found(unlike, hits)["lasting"] != found(unlike, hits, seed=1, draws=50)["lasting"]


def test_an_interval_may_end_in_not_reached() -> None:
    shares = [[0.01, 0.01], [0.02, 0.02], [0.02, 0.5]]  # with the first document alone there is no sink
    onset = found(shares, [[[0], [0]]] * 3)["lasting"]
    assert onset.crossing is not None
    assert onset.low is not None
    assert onset.high is None
    assert 0.6 < (onset.reached or 0) < 0.9  # three of the four ways to draw two


def test_one_document_has_no_interval() -> None:
    onset = found([[0.01], [0.02], [0.5]], [[[0]]] * 3)["lasting"]
    assert onset.crossing is not None
    assert (onset.low, onset.high, onset.reached) == (None, None, None)
