"""Since which training step there is a sink, by three definitions, and how far that depends on the documents.

A curve is known at checkpoints only: a step between two of them is interpolated, and both are told. From step 0 on
nothing is interpolated on a scale that has no zero: the later checkpoint stands for the crossing.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

TIMES_UNIFORM, PART_OF_SEGMENTS, PART_OF_FINAL = 10, 0.5, 0.5
DEFINITIONS = {
    "lasting": "mean share of the first token at least 10 x uniform, from there to the last checkpoint",
    "head": "a head in which the first token's importance is above 0.3 in at least half of the segments, which have a "
    "BOS in front if the documents have",
    "half": "half of the mean share at the last checkpoint, if that is 10 x uniform at least",
}


@dataclass(frozen=True)
class Crossing:
    """At `step`, between the checkpoints `before` and `at`; `before` is None if the first checkpoint is there."""

    step: float
    before: int | None
    at: int


@dataclass(frozen=True)
class Onset:
    """A crossing, None if it is not reached, and the middle 95% over resamples; None there is "not reached" too.

    `reached`: the part of the resamples in which it is; None, as `low` and `high`, with fewer than two documents.
    """

    crossing: Crossing | None
    low: float | None
    high: float | None
    reached: float | None


def lasting(steps: Sequence[int], shares: Sequence[float], threshold: float) -> Crossing | None:
    """Where the share comes to `threshold` for good; between checkpoints along a line in log share and log step."""
    below = [index for index, share in enumerate(shares) if not share >= threshold]
    return _at(steps, shares, below[-1] + 1 if below else 0, threshold, math.log)


def halfway(steps: Sequence[int], shares: Sequence[float], part: float = PART_OF_FINAL) -> Crossing | None:
    """Where the share first comes to a part of the last one; between checkpoints along a line in share and log step."""
    if not shares:
        return None
    goal = part * shares[-1]
    first = next(index for index, share in enumerate(shares) if share >= goal)
    return _at(steps, shares, first, goal, float)


def first_head(steps: Sequence[int], parts: Sequence[float], part: float = PART_OF_SEGMENTS) -> Crossing | None:
    """The first checkpoint at which some head has a sink in at least this part; `parts` are those of the best head."""
    first = next((index for index, each in enumerate(parts) if each >= part), None)
    return None if first is None else Crossing(steps[first], steps[first - 1] if first else None, steps[first])


def _at(
    steps: Sequence[int], shares: Sequence[float], index: int, goal: float, scale: Callable[[float], float]
) -> Crossing | None:
    if index >= len(steps):
        return None
    if index == 0:
        return Crossing(steps[0], None, steps[0])
    (before, at), (low, high) = steps[index - 1 : index + 1], shares[index - 1 : index + 1]
    if before <= 0 or not low < goal <= high or (scale is math.log and low <= 0):
        return Crossing(at, before, at)
    part = (scale(goal) - scale(low)) / (scale(high) - scale(low))
    return Crossing(math.exp(math.log(before) + part * math.log(at / before)), before, at)


def onsets(
    steps: Sequence[int],
    shares: Float[Tensor, "steps documents"],
    uniform: Float[Tensor, " documents"],
    hits: Int[Tensor, "steps documents heads"],
    segments: Int[Tensor, " documents"],
    draws: int,
    seed: int,
) -> dict[str, Onset]:
    """By definition, the onset on all documents, and its interval over documents drawn anew, with replacement.

    `hits`: in how many of a document's `segments` a head has a sink.
    """
    counts = hits.double()

    def by_definition(weights: Tensor) -> dict[str, Crossing | None]:
        curve = ((shares.double() @ weights) / weights.sum()).tolist()
        level = float((uniform.double() @ weights) / weights.sum())
        parts = torch.einsum("sdh,d->sh", counts, weights) / (segments.double() @ weights)
        return {
            "lasting": lasting(steps, curve, TIMES_UNIFORM * level),
            "head": first_head(steps, parts.amax(dim=1).tolist()),
            "half": halfway(steps, curve) if curve[-1] >= TIMES_UNIFORM * level else None,
        }

    documents = shares.shape[1]
    whole = by_definition(torch.ones(documents, dtype=torch.float64))
    if documents < 2:
        return {name: Onset(each, None, None, None) for name, each in whole.items()}
    generator = random.Random(seed)
    drawn = [torch.tensor(generator.choices(range(documents), k=documents)) for _ in range(draws)]
    found = [by_definition(torch.bincount(each, minlength=documents).double()) for each in drawn]
    return {name: _interval(whole[name], [each[name] for each in found]) for name in whole}


def _interval(whole: Crossing | None, found: Sequence[Crossing | None]) -> Onset:
    if not found:
        return Onset(whole, None, None, None)
    steps = sorted(math.inf if each is None else each.step for each in found)
    low, high = (steps[round(part * (len(steps) - 1))] for part in (0.025, 0.975))
    reached = sum(each is not None for each in found) / len(found)
    return Onset(whole, None if math.isinf(low) else low, None if math.isinf(high) else high, reached)
