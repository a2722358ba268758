"""The books of all lanes of a batch for one budget, and the step that they make together."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkcache.accounts import Accounts
from sinkcache.slots import Slots
from sinkcache.step import Step, Turns
from sinkcache.store import At, Index


class Ledger(Accounts):
    """One book of slots for each lane; layers that share a budget share a ledger, and do the step it decides once."""

    books: list[Slots]

    def kept_before(self, q_len: int) -> int:
        """How many slots the next step's queries are shown beside their own `q_len` columns."""
        if self._in_place(q_len):
            return max(book.kept_before() for book in self.books)
        return max(book.held for book in self.books)

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

    def _in_place(self, q_len: int) -> bool:
        """Whether each row's slots are all that its queries attend to."""
        return self.lanes.real is None and (q_len == 1 or len(self.books) == 1)

    def _advance(self, q_len: int) -> Step:
        if self.lanes.real is None and len(self.books) == 1:
            return self.books[0].step(q_len)
        self._check_torn()
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
