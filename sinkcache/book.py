"""How many tokens of a lane's stream are held: the count that all layers with one budget share."""

import math
from abc import ABC, abstractmethod
from typing import Any

from sinkcache.policy import Policy


class Book(ABC):
    """`seen` tokens read, `held` slots in use of `capacity`, the budget once it is settled.

    `asked` is the budget: tokens, or a share in (0, 1] of the prompt, which the first step or `resolve` settles.
    `limit`: the model must not be given this position or a later one. `shift` is how far behind the stream the model's
    own positions run. `every`: how many tokens go when a full layer makes room.
    """

    def __init__(self, policy: Policy, asked: int | float, limit: int | None, every: int = 1) -> None:
        self.policy, self.asked, self.limit, self.every = policy, asked, limit, every
        self.reset()

    def reset(self) -> None:
        """Back to an empty stream."""
        self.seen = self.held = self.shift = 0
        self.capacity: int | None = None
        self._torn = False  # a step was booked in part
        if isinstance(self.asked, int):
            self._allocate(self.asked)

    def resolve(self, prompt: int) -> None:
        """Settles a budget that is a share of the prompt, `prompt` tokens long; a settled budget stays as it is."""
        if self.capacity is None:
            budget = math.ceil(round(self.asked * prompt, 9))  # 0.07 of 100 is 7, whatever floats make of it
            check_budget(self.policy, budget, self.every)
            self._allocate(budget)

    def kept_before(self) -> int:
        """How many held tokens the next step's queries will see."""
        if self.capacity is None or self.held < self.capacity:
            return self.held
        return self.capacity - self.every

    def crop(self, tokens: int) -> None:
        """Takes the newest `tokens` back; none may have been evicted, so that they are in the last slots in use."""
        assert self.held == self.seen
        self.held -= tokens
        self.seen -= tokens

    @abstractmethod
    def step(self, q_len: int) -> Any:
        """Books `q_len` tokens as read and says what that changes."""

    @abstractmethod
    def rehearsal(self) -> "Book":
        """A copy that goes its own way, to try steps on or for a lane that splits off."""

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity

    def _open(self, q_len: int) -> None:
        """Raises RuntimeError if a step was booked in part, ValueError for no tokens or positions beyond the limit."""
        if self._torn:
            raise RuntimeError(
                "a step failed or was interrupted half-way: call cache.reset() and read the prompt again"
            )
        if q_len < 1:
            raise ValueError(f"a step needs at least one token, got {q_len}")
        if self.limit is not None and self.seen - self.shift + q_len >= self.limit:
            raise ValueError(
                f"position {self.seen - self.shift + q_len} is beyond {self.limit}, from where this model changes its "
                "rotary frequencies: use sinkcache.stream, which keeps positions small"
            )
        self.resolve(q_len)


def check_budget(policy: Policy, budget: int, every: int) -> None:
    """Raises ValueError if `policy` cannot do its work within `budget` tokens, of which `every` go at a time."""
    policy.check(budget)
    if every > 1:
        if every >= budget:
            raise ValueError(f"evict_every must be less than the budget, got {every} with budget={budget}")
        try:
            policy.check(budget - every + 1)
        except ValueError as error:
            raise ValueError(f"evict_every={every} leaves {budget - every} of {budget} tokens: {error}") from error


def least_budget(policy: Policy, budget: int) -> int:
    """The least that `policy` can do its work within, `budget` at most, which must be enough."""
    for each in range(1, budget):
        try:
            policy.check(each)
        except ValueError:
            continue
        return each
    return budget
