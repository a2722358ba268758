"""The books of all lanes of a batch for one budget, and the step that they make together."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkcache.lanes import Lanes
from sinkcache.slots import Slots
from sinkcache.step import Step, Turns
from sinkcache.store import At, Index


class Ledger:
    """One book of slots for each lane; layers that share a budget share a ledger, and do the step it decides once."""

    def __init__(self, book: Slots, lanes: Lanes) -> None:
        self.lanes, self.books = lanes, [book]
        self.seen = 0  # columns
        self._torn = False  # some lanes have booked a step, and others have not
        self.last: tuple[int, int, Step] | None = None

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

    def step(self, start: int, q_len: int) -> Step:
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

    def kept_before(self, q_len: int) -> int:
        """How many slots the next step's queries are shown beside their own `q_len` columns."""
        if self._in_place(q_len):
            return max(book.kept_before() for book in self.books)
        return max(book.held for book in self.books)

    def whole(self, q_len: int = 0) -> bool:
        """Whether no token has been evicted, nor would be by a step of `q_len` columns."""
        new = [len(self.lanes.columns(lane, q_len)) if self.lanes.padded else q_len for lane in range(len(self.books))]
        return all(
            book.held == book.seen and (book.capacity is None or book.held + more <= book.capacity)
            for book, more in zip(self.books, new, strict=True)
        )

    def shown(self, q_len: int) -> Bool[Tensor, "lanes kv_len"]:
        """Which of the slots and new columns of the next step hold a token that the lane's queries may see."""
        kept = self.kept_before(q_len)
        slots = torch.arange(kept + q_len)
        if self._in_place(q_len):
            return torch.stack([slots < book.kept_before() + q_len for book in self.books])
        lanes = []
        for lane, book in enumerate(self.books):
            new = torch.zeros(q_len, dtype=torch.bool)
            new[self.lanes.columns(lane, q_len)] = True
            old = slots[:kept] < book.held
            if bool(new.any()) and (dropped := book.to_drop()) is not None:
                old[dropped] = False
            lanes.append(torch.cat([old, new]))
        return torch.stack(lanes)

    def kept(self) -> Int[Tensor, "lanes kept"]:
        """Each lane's own tokens that it holds, ascending; lanes that hold fewer are filled up with -1 in front."""
        kept = [book.kept() for book in self.books]
        longest = max(len(each) for each in kept)
        return torch.stack([torch.nn.functional.pad(each, (longest - len(each), 0), value=-1) for each in kept])

    def turned(self) -> Index | At:
        """The slots whose keys the buffers hold turned."""
        if not self.lanes.padded:
            return self.books[0].turned()
        parts = [_spread(self.lanes.rows(lane), book.turned()) for lane, book in enumerate(self.books)]
        return _at(parts)

    def order(self) -> Int[Tensor, "lanes kept"]:
        """The slots in the order of `kept`; slot 0 where a lane is filled up."""
        kept = max(book.held for book in self.books)
        none = torch.zeros(0, dtype=torch.int64)
        order = [book.positions[: book.held].argsort() if book.held else none for book in self.books]
        return torch.stack([torch.nn.functional.pad(each, (kept - len(each), 0)) for each in order])

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

    def _in_place(self, q_len: int) -> bool:
        """Whether each row's slots are all that its queries attend to."""
        return self.lanes.real is None and (q_len == 1 or len(self.books) == 1)

    def _advance(self, q_len: int) -> Step:
        if self.lanes.real is None and len(self.books) == 1:
            return self.books[0].step(q_len)
        if self._torn:
            raise RuntimeError(
                "a step failed or was interrupted half-way: call cache.reset() and read the prompt again"
            )
        kept, in_place, start = self.kept_before(q_len), self._in_place(q_len), self.seen
        self._torn = True
        turns: list[tuple[Tensor, Tensor]] = []
        fresh: list[tuple[Tensor, Tensor]] = []
        targets: list[tuple[Tensor, Tensor]] = []
        sources: list[tuple[Tensor, Tensor]] = []
        moves, top = [], 0
        for lane, book in enumerate(self.books):
            rows, columns = self.lanes.rows(lane), self.lanes.columns(lane, q_len)
            if len(columns) == 0:
                continue
            step = book.step(len(columns))
            targets.append(_spread(rows, step.targets))
            assert not isinstance(step.sources, At)
            sources.append(_spread(rows, columns[step.sources]))
            if step.turns is not None:
                turns.append(_spread(rows, step.turns.slots))
                moves.append(step.turns.moves.expand(len(turns[-1][0]) // len(rows)).repeat(len(rows)))
                top = max(top, step.turns.top)
                if step.turns.fresh is not None:
                    fresh.append(_spread(rows, step.turns.fresh))
        turning = Turns(_at(turns), _at(fresh) if fresh else None, top, torch.cat(moves)) if turns else None
        length = max(book.held for book in self.books)
        self._torn = False
        return Step(start, q_len, kept, None, turning, _at(targets), _at(sources), length, in_place)


def _spread(rows: Tensor, slots: Index | At) -> tuple[Tensor, Tensor]:
    """`slots` in each of `rows`."""
    assert not isinstance(slots, At)
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop)
    return rows.repeat_interleave(len(slots)), slots.repeat(len(rows))


def _at(parts: list[tuple[Tensor, Tensor]]) -> At:
    none = torch.zeros(0, dtype=torch.int64)
    return At(torch.cat([rows for rows, _ in parts] or [none]), torch.cat([slots for _, slots in parts] or [none]))
