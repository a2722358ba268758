"""Whoever is shown attention without being a layer that evicts."""

from typing import Any

from torch import Tensor, nn

from sinkcache.policy import Watch


class Onlooker:
    """Stands for the layers of a cache when a model is tried: wants sums, and does nothing with them."""

    watch, awaiting = Watch(mass=True), None

    def mask(self) -> None:
        return None

    def weights(self) -> None:
        return None

    def last_alone(self) -> bool:
        return False

    def heads(self, key: Tensor) -> int:
        return key.shape[1]

    def look(self, module: nn.Module, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        return None

    def observe(self, *shown: Any) -> None:
        return None


class Trial(Onlooker):
    """Counts the layers whose attention is shown, all of it computed by blocks."""

    layers = 0

    def observe(self, *shown: Any) -> None:
        self.layers += 1
