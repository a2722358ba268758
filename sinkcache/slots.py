"""Which stream position each slot of a layer holds, and what the next step changes.

A policy that reads positions alone decides the same for every row, head and layer, so all layers that share a budget
share one `Slots`: it lives on the CPU, decides once per step without asking a device, and hands each layer the same
`Step`. No layer repeats the work.

The rule, for a step of q tokens: what is held is trimmed to `capacity - 1`, the q are appended and attend, then the
layer is reduced to `capacity`, the newest token being one of those that stay. A token read on its own thus sees exactly
`capacity` tokens, itself included.
"""

import copy

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkcache.book import Book
from sinkcache.policy import Entries, Policy, check_scores, keep, score, weakest
from sinkcache.step import Step, Turns
from sinkcache.store import Index


class Slots(Book):
    """The book of the slots: per slot its position and how far it moved.

    `in_cache`: positions are those inside the cache (StreamingLLM) and not those of the stream. `ordered`: steps say in
    which order slots are attended to.
    """

    def __init__(
        self, policy: Policy, asked: int | float, in_cache: bool, limit: int | None, ordered: bool = False
    ) -> None:
        self.in_cache, self.ordered = in_cache, ordered
        super().__init__(policy, asked, limit)

    def reset(self) -> None:
        """Back to an empty stream."""
        self._restless = False  # some key may have to be turned before the next read
        self._new = 1  # tokens of the last step
        super().reset()

    def kept(self) -> Int[Tensor, " kept"]:
        """Stream positions held, ascending; a copy."""
        return self.positions[: self.held].sort().values if self.held else torch.zeros(0, dtype=torch.int64)

    def to_drop(self) -> int | None:
        """The slot that the next step of any length will empty before its queries attend."""
        return self._weakest() if self.held == self.capacity else None

    def turned(self) -> Index:
        """The slots whose keys the buffers hold turned."""
        return _run(self._applied[: self.held].nonzero()[:, 0] if self.held else torch.zeros(0, dtype=torch.int64))

    def step(self, q_len: int) -> Step:
        """Books `q_len` tokens as read and says what a layer does with them; raises RuntimeError if torn."""
        self._open(q_len)
        assert self.capacity is not None
        dropped = self.to_drop()
        self._torn = True
        if dropped is not None:
            self._count(self.positions[dropped : dropped + 1])
        turns = self._turns(dropped)
        start, held, order = self.seen, self.held, self._order(dropped) if self.ordered else None
        kept = held - (dropped is not None)
        if kept + q_len <= self.capacity:
            first = held if dropped is None else dropped
            targets, sources, in_place = slice(first, first + q_len), slice(0, q_len), True
            self.positions[targets] = torch.arange(start, start + q_len)
            self._moves[targets] = 0
        else:
            targets, sources = self._reduce(dropped, q_len)
            in_place = False
        self._applied[targets] = 0
        self._frame[targets] = self.shift
        self.seen, self.held, self._new = start + q_len, min(kept + q_len, self.capacity), q_len
        self._torn = False
        return Step(start, q_len, held, dropped, turns, targets, sources, self.held, in_place, order)

    def rebase(self, shift: int) -> Index:
        """Moves the frame: from now on the model's position is the stream's minus `shift`.

        Returns the slots whose keys the owner must turn for good, by the old shift minus the new: the newest `capacity`
        tokens, which will not live to be turned many times. Older ones are turned on read, from how they arrived.
        """
        move, self.shift = self.shift - shift, shift
        if self.held == 0 or move == 0:
            return slice(0, 0)
        used = slice(0, self.held)
        young = self.positions[used] >= self.seen - len(self.positions)
        chosen = (young & (self._moves[used] == 0)).nonzero()[:, 0]  # none of these was ever turned on read
        self._frame[chosen] = shift
        self._restless = True
        return _run(chosen)

    def visible(self, q_len: int) -> Bool[Tensor, "q_len kv_len"]:
        """Which of the held and new tokens each query of a step would see if the step were read token by token.

        Columns are in the order in which a step of `q_len` tokens attends to them. Raises ValueError if reading token
        by token would move keys or keep other tokens than the step does, so that no mask can make up for it.
        """
        single, whole = self.rehearsal(), self.rehearsal()
        dropped = whole.step(q_len).dropped
        held = [slot for slot in range(self.held) if slot != dropped]
        columns = torch.cat([self.positions[held], torch.arange(self.seen, self.seen + q_len)])
        rows = []
        for _ in range(q_len):
            single.step(1)
            rows.append(torch.isin(columns, single.positions[: single.held]))
        if bool(single._moves[: single.held].any()) or not torch.equal(single.kept(), whole.kept()):
            raise ValueError(
                f"{self.policy!r} in chunks of {q_len} cannot be read as if token by token: keys would move, or others "
                'be kept. Use chunk=1, or positions="original" with a policy of positions alone'
            )
        return torch.stack(rows)

    def rehearsal(self) -> "Slots":
        """A copy that goes its own way, to try steps on or for a lane that splits off."""
        book = copy.copy(self)
        if self.capacity is not None:
            with torch.inference_mode(False):  # or they could not be written outside of it
                book.positions, book._moves = self.positions.clone(), self._moves.clone()
                book._applied, book._frame = self._applied.clone(), self._frame.clone()
        return book

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):  # or they could not be written outside of it
            self.positions = torch.zeros(capacity, dtype=torch.int64)
            self._moves = torch.zeros_like(self.positions)  # evicted tokens younger than the slot's: its move
            self._applied = torch.zeros_like(self.positions)  # by how much the buffer's key is turned now
            self._frame = torch.zeros_like(self.positions)  # the shift under which the key arrived

    def _order(self, dropped: int | None) -> Int[Tensor, " held"]:
        order = self.positions[: self.held].argsort()
        return order if dropped is None else order[order != dropped]

    def _score(self, positions: Int[Tensor, " kv_len"], seen: int, new: int) -> Tensor:
        return score(self.policy, Entries(positions[None, None].clone(), seen, new))

    def _weakest(self) -> int:
        held = self.positions[: self.held]
        scores = self._score(held, self.seen, self._new)
        check_scores(scores)
        return int(weakest(scores[0, 0], held))

    def _reduce(self, dropped: int | None, q_len: int) -> tuple[Index, Index]:
        assert self.capacity is not None
        stays = torch.ones(self.held, dtype=torch.bool)
        if dropped is not None:
            stays[dropped] = False
        old = stays.nonzero()[:, 0]
        everyone = torch.cat([self.positions[old], torch.arange(self.seen, self.seen + q_len)])
        scores = self._score(everyone, self.seen + q_len, q_len)
        best = keep(scores[..., :-1], everyone[None, None, :-1], self.capacity - 1)[0, 0]
        survives = torch.zeros(len(everyone), dtype=torch.bool)
        survives[best] = survives[-1] = True  # the newest stays, of use to nobody yet
        gone = everyone[~survives]
        unused = torch.arange(self.held, self.capacity)
        free = torch.cat([(~stays).nonzero()[:, 0], old[~survives[: len(old)]], unused])
        targets = free.sort().values
        sources = survives[len(old) :].nonzero()[:, 0]
        self._count(gone)
        self.positions[targets] = self.seen + sources
        self._moves[targets] = _younger(gone, self.seen + sources) if self.in_cache else 0
        return _run(targets), _run(sources)

    def _count(self, gone: Int[Tensor, " gone"]) -> None:
        """Books the evicted positions `gone`: each older token moves up by one for each."""
        if self.in_cache:
            used = slice(0, self.held)
            self._moves[used] += _younger(gone, self.positions[used])
            self._restless = True

    def _turns(self, dropped: int | None) -> Turns | None:
        if not self._restless:
            return None
        self._restless = False
        used = slice(0, self.held)
        wanted = self._moves[used] + self._frame[used] - self.shift
        changed = wanted != self._applied[used]
        if dropped is not None:
            changed[dropped] = False
        slots = changed.nonzero()[:, 0]
        if len(slots) == 0:
            return None
        fresh = slots[self._applied[slots] == 0]
        moves = wanted[slots]
        self._applied[slots] = moves
        alike = moves[:1] if bool((moves == moves[0]).all()) else moves
        return Turns(_run(slots), _run(fresh) if len(fresh) else None, int(slots[-1]) + 1, alike)


def _younger(gone: Int[Tensor, " gone"], positions: Int[Tensor, " kv_len"]) -> Int[Tensor, " kv_len"]:
    """For each position, how many of `gone` are younger (greater)."""
    if len(gone) == 1:
        return (positions < gone).long()
    return len(gone) - torch.searchsorted(gone.sort().values, positions, right=True)


def _run(slots: Int[Tensor, " slots"]) -> Index:
    """`slots`, ascending, as a slice where they follow one another."""
    if len(slots) == 0:
        return slice(0, 0)
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == len(slots) else slots
