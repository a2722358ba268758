"""How many tokens each lane holds, where every layer, row and head decides for itself which.

The rule is that of `sinkcache.slots`: what is held is trimmed to `capacity - 1`, or where tokens go `every` at a time
to `capacity - every`, the step's tokens are appended and attend, then the layer is reduced to `capacity`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkcache.accounts import Accounts
from sinkcache.book import Book
from sinkcache.store import Index

Count = int | Tensor  # of each row: one number where all rows are alike, else int64 [batch], on the CPU


@dataclass(frozen=True)
class Counts:
    """A step of `q_len` columns in numbers of tokens: of each row `seen` before the step, `held` before it, `kept` of
    those for its queries, held `after` it, and `new` in it.

    `real`: which columns are no pads, `[batch, q_len]` on the CPU; None: all. `shift`: by how much the model's
    positions lag behind the stream. `most`, `longest`: the greatest of `kept` and `after`.
    """

    q_len: int
    seen: Count
    held: Count
    kept: Count
    after: Count
    new: Count
    shift: Count
    real: Bool[Tensor, "batch q_len"] | None
    most: int
    longest: int
    trims: bool  # some row gives up a token before the step
    reduces: bool  # some row gives up a token after it
    _on: dict = field(default_factory=dict, repr=False, compare=False)

    def on(self, name: str, device: torch.device) -> int | Tensor:
        """The count `name`, of each row int64 `[batch, 1, 1]` on `device`; moved once for all layers."""
        value = getattr(self, name)
        if isinstance(value, int):
            return value
        if (name, device) not in self._on:
            self._on[name, device] = value[:, None, None].to(device)
        return self._on[name, device]

    def positions(self, device: torch.device) -> Int[Tensor, "rows 1 q_len"]:
        """Of the step's tokens in the stream, one row where rows are alike; -1 for pads."""
        if self.real is None:
            return (self.on("seen", device) + torch.arange(self.q_len, device=device)).reshape(-1, 1, self.q_len)
        real = self.real.to(device)[:, None]
        return (self.on("seen", device) + real.cumsum(dim=-1) - 1).masked_fill(~real, -1)


class Tally(Book):
    """A book that counts."""

    def step(self, q_len: int) -> tuple[int, int, int]:
        """Books `q_len` tokens; the numbers held before, kept for the step's queries, and held after it."""
        self._open(q_len)
        assert self.capacity is not None
        held, kept = self.held, self.kept_before()
        self.held = min(kept + q_len, self.capacity)
        self.seen += q_len
        return held, kept, self.held

    def idle(self) -> tuple[int, int, int]:
        """Sits a step out, but is trimmed as the others are; the same numbers."""
        held, self.held = self.held, self.kept_before()
        return held, self.held, self.held

    def rebase(self, shift: int) -> Index:
        """Moves the frame: the model's position is now the stream's minus `shift`. No key is to be turned for good."""
        self.shift = shift
        return slice(0, 0)

    def rehearsal(self) -> "Tally":
        """A copy that goes its own way, to try steps on or for a lane that splits off."""
        return copy.copy(self)


class Tallies(Accounts):
    """One tally for each lane; layers that share a budget share them."""

    books: list[Tally]

    def kept_before(self, q_len: int) -> int:
        """How many slots the next step's queries are shown beside their own `q_len` columns."""
        return max(book.kept_before() for book in self.books)

    def shown(self, q_len: int) -> Bool[Tensor, "lanes kv_len"]:
        """Which of the slots and new columns of the next step hold a token that the lane's queries may see."""
        kept = self.kept_before(q_len)
        slots = torch.arange(kept + q_len)
        if self.lanes.real is None and q_len == 1:  # the new token takes the first free slot, or that of an evicted one
            return torch.stack([slots <= book.kept_before() for book in self.books])
        shown = []
        for lane, book in enumerate(self.books):
            new = torch.zeros(q_len, dtype=torch.bool)
            new[self.lanes.columns(lane, q_len)] = True
            shown.append(torch.cat([slots[:kept] < book.kept_before(), new]))
        return torch.stack(shown)

    def each(self, what: Callable[[Tally], int]) -> Count:
        """A number of each row."""
        if not self.lanes.padded:
            return what(self.books[0])
        assert self.lanes.of is not None
        return torch.tensor([what(book) for book in self.books])[self.lanes.of]

    def _advance(self, q_len: int) -> Counts:
        self._check_torn()
        before = self.each(lambda book: book.seen), self.each(lambda book: book.shift)
        most = self.kept_before(q_len)
        if not self.lanes.padded:
            held, kept, after = self.books[0].step(q_len)
            trims, reduces = held > kept, kept + q_len > after
            return Counts(q_len, before[0], held, kept, after, q_len, before[1], None, most, after, trims, reduces)
        self._torn = True
        told = []
        for lane, book in enumerate(self.books):
            new = len(self.lanes.columns(lane, q_len))
            told.append((*(book.step(new) if new else book.idle()), new))
        self._torn = False
        assert self.lanes.of is not None
        held, kept, after, new = torch.tensor(told)[self.lanes.of].unbind(1)
        trims, reduces = bool((held > kept).any()), bool((kept + new > after).any())
        real, longest = self.lanes.real, int(after.max())
        return Counts(q_len, before[0], held, kept, after, new, before[1], real, most, longest, trims, reduces)
