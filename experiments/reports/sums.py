"""A policy's sums over the tokens of a table, unit by unit, and the figures that are made of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float

from experiments.reports.bootstrap import Estimate, Mean, Units, estimate, mean
from experiments.reports.groups import Line

_UNTOLD = 0.025  # of the draws, in which the anchor is no worse than the full cache


@dataclass(frozen=True)
class Tokens:
    """Of each document, the tokens that are counted, and those of them after the first eviction."""

    counted: dict[str, Bool[np.ndarray, " tokens"]]
    after: dict[str, Bool[np.ndarray, " tokens"]]

    @property
    def count(self) -> int:
        """Of all that are counted."""
        return sum(int(each.sum()) for each in self.counted.values())


class Sums:
    """A line's sums by unit, of which its figures are made."""

    def __init__(self, line: Line, tokens: Tokens, units: Units, names: Sequence[str]) -> None:
        self.line, self.tokens, self.units, self.names = line, tokens, units, names

    @cached_property
    def all(self) -> Mean:
        """Negative log-likelihood over all tokens that are counted."""
        return mean(self.units, self._sum("nll", self.tokens.counted), self._count(self.tokens.counted))

    @cached_property
    def after(self) -> Mean:
        """The same over those after the first eviction."""
        return mean(self.units, self._sum("nll", self.tokens.after), self._count(self.tokens.after))

    def perplexity(self) -> Estimate:
        """Over all tokens that are counted."""
        return _exponential(self.all, self.units)

    def perplexity_after(self) -> Estimate:
        """Over those after the first eviction."""
        return _exponential(self.after, self.units)

    def ratio(self, other: "Sums") -> Estimate | None:
        """Of perplexities after the first eviction, on the documents of this line; None if the other lacks one."""
        if not self.line.cells or not set(self.line.cells) <= set(other.line.cells):
            return None
        top = self._sum("nll", self.tokens.after) - other._sum("nll", self.tokens.after, self.line)
        return _exponential(mean(self.units, top, self._count(self.tokens.after)), self.units)

    def gap(self, anchor: "Sums", full: "Sums") -> Estimate | None:
        """The share of the way from the anchor's perplexity to the full cache's; None if nobody can tell them apart."""
        if any(set(each.line.cells) != set(self.line.cells) for each in (anchor, full)):
            return None
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            value, low, high = (np.exp(np.float64(each.after.value)) for each in (self, anchor, full))
            drawn, lows, highs = (np.exp(each.after.drawn) for each in (self, anchor, full))
            if not low > high or (lows <= highs).mean() > _UNTOLD:
                return None
            return estimate(float((low - value) / (low - high)), (lows - drawn) / (lows - highs), self.units)

    def plain(self, what: str) -> Estimate | None:
        """The mean over tokens after the first eviction, of those for which there is one."""
        cells = self.line.cells.items()
        known = {name: self.tokens.after[name] & ~np.isnan(getattr(cell, what)) for name, cell in cells}
        if not any(mask.any() for mask in known.values()):
            return None
        found = mean(self.units, self._sum(what, known), self._count(known))
        return estimate(found.value, found.drawn, self.units)

    def recall(self) -> Estimate | None:
        """Mean over documents, each by its tokens; with an interval only where documents alone are drawn."""
        found = {name: cell.row["figures"].get("recall") for name, cell in self.line.cells.items()}
        if not found or any(value is None for value in found.values()):
            return None
        parts = [self.tokens.after[name] * found[name] if name in found else None for name in self.names]
        got = mean(self.units, self.units.sums(parts), self._count(self.tokens.after))
        return Estimate(got.value) if self.units.by_stretch else estimate(got.value, got.drawn, self.units)

    def bits_per_byte(self) -> Estimate | None:
        """Over all tokens, by UTF-8 bytes of the text, those of a first token that is not scored among them.

        None where some tokens were not scored, or the bytes are not known.
        """
        cells = self.line.cells
        told = [cell.asked.get("bytes_of_text") for cell in cells.values()]
        known = [each for each in told if each is not None]
        scored = [cell.row["figures"]["scored"] for cell in cells.values()]
        counted = [int(self.tokens.counted[name].sum()) for name in cells]
        if len(known) < len(cells) or scored != counted or not sum(known):
            return None
        factor = sum(counted) / sum(known) / math.log(2)
        return estimate(self.all.value * factor, self.all.drawn * factor, self.units)

    def _sum(
        self, what: str, masks: dict[str, Bool[np.ndarray, " tokens"]], of: Line | None = None
    ) -> Float[np.ndarray, " units"]:
        shown = (of or self.line).cells
        parts = [
            np.where(masks[name], getattr(self.line.cells[name], what), 0.0) if name in shown else None
            for name in self.names
        ]
        return self.units.sums(parts)

    def _count(self, masks: dict[str, Bool[np.ndarray, " tokens"]]) -> Float[np.ndarray, " units"]:
        cells = self.line.cells
        return self.units.sums([masks[name] if name in cells else None for name in self.names])


def _exponential(found: Mean, units: Units) -> Estimate:
    with np.errstate(over="ignore"):
        return estimate(float(np.exp(np.float64(found.value))), np.exp(found.drawn), units)
