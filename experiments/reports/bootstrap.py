"""Intervals by drawing anew: documents, or where these are few, documents and stretches of each.

Every figure is a quotient of two sums over tokens, or made of such: a draw takes each unit so many times, and one draw
serves all policies alike, so that what a hard document does to all of them does not blur how they differ. A stretch is
128 consecutive tokens, or longer where the document has more than 512 of them: neighbours depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

DRAWS, SEED = 2000, 0
FEW = 5  # documents, below which stretches are drawn as well
STRETCH, MOST = 128, 512  # tokens a stretch; stretches a document
LOW, HIGH = 2.5, 97.5  # percent


@dataclass(frozen=True)
class Estimate:
    """A figure, and between what it lies in 95% of the draws; None where nothing could be drawn."""

    value: float
    low: float | None = None
    high: float | None = None

    def contains(self, value: float) -> bool:
        """Whether the interval, ends included, holds `value`; False without one."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


@dataclass(frozen=True)
class Units:
    """What is drawn, of documents of so many tokens."""

    lengths: tuple[int, ...]

    @property
    def by_stretch(self) -> bool:
        """Whether stretches are drawn beside the documents."""
        return len(self.lengths) < FEW

    @cached_property
    def starts(self) -> list[Int[np.ndarray, " units"]]:
        """By document, the first token of each unit."""
        if not self.by_stretch:
            return [np.zeros(1, dtype=np.int64) for _ in self.lengths]
        return [np.arange(0, length, max(STRETCH, -(-length // MOST))) for length in self.lengths]

    @property
    def count(self) -> int:
        """Of all units."""
        return sum(map(len, self.starts))

    def sums(self, values: Sequence[Float[np.ndarray, " tokens"] | None]) -> Float[np.ndarray, " units"]:
        """By unit, the sum over its tokens; of a document that is None, 0."""
        parts = [
            np.zeros(len(starts)) if each is None else np.add.reduceat(each.astype(np.float64), starts)
            for starts, each in zip(self.starts, values, strict=True)
        ]
        return np.concatenate(parts)

    @cached_property
    def weights(self) -> Float[np.ndarray, "draws units"]:
        """How many times each draw takes each unit; the same whenever it is made.

        Documents are drawn with replacement. Each time that one is drawn, as many stretches as it has are drawn of it.
        """
        generator = np.random.default_rng(SEED)
        documents = len(self.lengths)
        taken = generator.multinomial(documents, np.full(documents, 1 / documents), size=DRAWS)
        if not self.by_stretch:
            return taken.astype(np.float64)
        columns = []
        for document, starts in enumerate(self.starts):
            even = np.full(len(starts), 1 / len(starts))
            columns.append(generator.multinomial(taken[:, document] * len(starts), even))
        return np.concatenate(columns, axis=1).astype(np.float64)


@dataclass(frozen=True)
class Mean:
    """A quotient of two sums: over everything, and by draw."""

    value: float
    drawn: Float[np.ndarray, " draws"]

    def estimate(self, units: Units) -> Estimate:
        """With its interval."""
        return estimate(self.value, self.drawn, units)


def mean(units: Units, top: Float[np.ndarray, " units"], bottom: Float[np.ndarray, " units"]) -> Mean:
    """The sum of `top` over that of `bottom`; NaN where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (units.weights @ top) / (units.weights @ bottom)
        return Mean(float(np.float64(top.sum()) / bottom.sum()), drawn)


def estimate(value: float, drawn: Float[np.ndarray, " draws"], units: Units) -> Estimate:
    """`value` with the middle 95% of the draws that gave a number; without, where there is one unit only."""
    known = drawn[~np.isnan(drawn)]
    if units.count < 2 or not known.size or not np.isfinite(known).all():
        return Estimate(value)
    low, high = np.percentile(known, [LOW, HIGH])
    return Estimate(value, float(low), float(high))
