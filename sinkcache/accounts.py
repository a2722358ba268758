"""What layers that share a budget share: a book for each lane of the batch, and the step they make together."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkcache.book import Book
from sinkcache.lanes import Lanes
from sinkcache.store import Index


class Accounts(ABC):
    """One book for each lane; `seen` columns. The first layer to ask for a step has it decided, for all of them."""

    books: list[Any]

    def __init__(self, book: Book, lanes: Lanes) -> None:
        self.lanes, self.books = lanes, [book]
        self.seen = 0  # columns
        self._torn = False  # some lanes have booked a step, and others have not
        self.last: tuple[int, int, Any] | None = None

    def reset(self) -> None:
        """Back to an empty stream."""
        self.books = self.books[:1]
        self.books[0].reset()
        self.seen, self.last, self._torn = 0, None, False

    @property
    def capacity(self) -> int | None:
        """The most slots a row needs; None while a share of the prompt is not settled."""
        known = [book.capacity for book in self.books if book.capacity is not None]
        return max(known) if known else None

    def regroup(self, parents: list[int]) -> None:
        """Lane i is now a part of what was lane `parents[i]`."""
        taken: set[int] = set()
        books = []
        for parent in parents:
            books.append(self.books[parent].rehearsal() if parent in taken else self.books[parent])
            taken.add(parent)
        self.books = books

    def step(self, start: int, q_len: int) -> Any:
        """The step of `q_len` columns for a layer that has seen `start`; the first layer to ask makes the decision."""
        if start == self.seen:
            step = self._advance(q_len)
            if self.lanes.seen == start:  # layers of another budget may have come first
                self.lanes.advance(q_len)
            self.last = (start, q_len, step)
            self.seen += q_len
        elif self.last is None or self.last[:2] != (start, q_len):
            raise RuntimeError(
                f"layers disagree on the tokens seen ({start} and {self.seen}): a forward pass was interrupted or "
                "skipped a layer. Call cache.reset() and read the prompt again"
            )
        assert self.last is not None
        return self.last[2]

    @abstractmethod
    def kept_before(self, q_len: int) -> int:
        """How many slots the next step's queries are shown beside their own `q_len` columns."""

    @abstractmethod
    def shown(self, q_len: int) -> Bool[Tensor, "lanes kv_len"]:
        """Which of the slots and new columns of the next step hold a token that the lane's queries may see."""

    def whole(self, q_len: int = 0) -> bool:
        """Whether no token has been evicted, nor would be by a step of `q_len` columns."""
        new = [len(self.lanes.columns(lane, q_len)) if self.lanes.padded else q_len for lane in range(len(self.books))]
        return all(
            book.held == book.seen and (book.capacity is None or book.held + more <= book.capacity)
            for book, more in zip(self.books, new, strict=True)
        )

    def rebase(self, shifts: list[int]) -> list[tuple[Tensor | None, Index, int]]:
        """Moves each lane's frame; returns rows (None: all), slots and moves of the keys to turn for good."""
        moves = [book.shift - shift for book, shift in zip(self.books, shifts, strict=True)]
        baked = [book.rebase(shift) for book, shift in zip(self.books, shifts, strict=True)]
        if not self.lanes.padded:
            return [(None, baked[0], moves[0])]
        return [(self.lanes.rows(lane), baked[lane], moves[lane]) for lane in range(len(self.books))]

    def shifts_of(self, given: Int[Tensor, "batch q_len"]) -> list[int]:
        """By how much the positions `given` to the next step lag behind the tokens, lane by lane.

        Raises ValueError unless they go on from what was read, one by one.
        """
        lanes, moved = self.lanes, []
        for lane, book in enumerate(self.books):
            rows = lanes.rows(lane) if lanes.padded else slice(None)
            columns = lanes.columns(lane, given.shape[1]) if lanes.padded else slice(None)
            positions = given[rows][:, columns]
            if positions.shape[1] == 0:
                moved.append(book.shift)
                continue
            first = int(positions[0, 0])
            if not bool((positions == torch.arange(first, first + positions.shape[1])).all()):
                raise ValueError(
                    f"position_ids are not {positions.shape[1]} positions in a row from {first}, the same in rows that "
                    "were padded alike: packed sequences are not supported. Leave position_ids out, or count each "
                    "row's own tokens"
                )
            if book.seen > 0 and first not in (book.seen, book.seen - book.shift):
                raise ValueError(
                    f"position_ids begin at {first}, but the cache has seen {book.seen} tokens: pass positions that go "
                    "on from there, or none, and leave use_cache on. generate makes them of the attention_mask, which "
                    "must cover all that was seen, pads hidden, and one new token at least"
                )
            moved.append(book.seen - first)
        return moved

    def crop(self, columns: int, real: list[int]) -> None:
        """Takes the last `columns` back, `real` tokens of each lane; nothing may have been evicted."""
        for book, tokens in zip(self.books, real, strict=True):
            book.crop(tokens)
        self.seen -= columns
        self.last = None

    @abstractmethod
    def _advance(self, q_len: int) -> Any:
        """Books the announced columns in every lane; the step they make together."""

    def _check_torn(self) -> None:
        if self._torn:
            raise RuntimeError(
                "a step failed or was interrupted half-way: call cache.reset() and read the prompt again"
            )
