"""A cell of a grid: what is to be measured, by which function, and what was found."""

import hashlib
import importlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.results import Row


@dataclass(frozen=True)
class Cell:
    """`function`, "module:name", is called with the cell and returns what it `Found`.

    `asked` is JSON and holds all that the figures depend on; `payload` what the function needs beside it, and of which
    `asked` has a hash. A cell can be measured by any process that can import the function.
    """

    function: str
    asked: Row
    payload: Any = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> str:
        """16 hexadecimal digits for the function and what is asked."""
        whole = json.dumps([self.function, self.asked], sort_keys=True, allow_nan=False)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """A few words for people: what is asked, as far as it is a number or a word."""
        words = ("name", "budget", "positions", "chunk", "task", "language", "length", "depth", "text")
        return ", ".join(str(self.asked[each]) for each in words if self.asked.get(each) is not None)


@dataclass(frozen=True)
class Found:
    """What a cell gave: `figures` are the same on every run, `cost` is not; `scores` are arrays by name."""

    figures: Row
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    cost: Row = field(default_factory=dict)


def measured(cell: Cell) -> Found:
    """Calls the cell's function."""
    module, _, name = cell.function.partition(":")
    return getattr(importlib.import_module(module), name)(cell)
