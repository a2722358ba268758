"""What holds a cache: one rule for each engine, written out so that it can be checked, with the version it is of."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from sinkcache.planner.kinds import KINDS, Kind, Model


class Engine(ABC):
    """An engine with its options; bytes of one conversation, and of many. `rules`: whose, of which version."""

    rules: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """What tables call it, its options included."""

    @abstractmethod
    def held(self, model: Model, tokens: int) -> int:
        """Bytes that a conversation of so many tokens holds, prompt and answer together; raises ValueError without a
        rule for some layer of `model`."""

    def peak(self, model: Model, tokens: int) -> int:
        """Bytes that it needs at most on the way."""
        return self.held(model, tokens)

    def together(self, model: Model, users: dict[int, int]) -> int:
        """Bytes of many conversations, `users[length]` of each length, of which one reads its prompt."""
        extra = max((self.peak(model, length) - self.held(model, length) for length in users), default=0)
        return sum(self.held(model, length) * number for length, number in users.items()) + extra


def refuse(rules: str, model: Model, kinds: Iterable[Kind], why: str) -> None:
    """Raises ValueError if `model` has layers of such kinds."""
    found = [kind for kind in KINDS if kind in kinds and any(layer.kind == kind for layer in model.layers)]
    if found:
        raise ValueError(f"{rules} cannot hold {' and '.join(found)} layers: {why}")
