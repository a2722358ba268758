"""How fast a run goes: seconds per token by block, of a run of any length."""

import statistics
from dataclasses import dataclass, field

_HELD = 2048  # values, from which every other is forgotten


@dataclass
class Pace:
    """Every `stride`-th of the values added, the first of them the oldest: their median is that of all, or near it."""

    values: list[float] = field(default_factory=list)
    stride: int = 1
    count: int = 0

    @property
    def median(self) -> float:
        """Seconds per token."""
        return statistics.median(self.values)

    def add(self, value: float) -> None:
        """Counts a value in."""
        if self.count % self.stride == 0:
            self.values.append(value)
        self.count += 1
        if len(self.values) >= _HELD:
            self.values = self.values[::2]
            self.stride *= 2
