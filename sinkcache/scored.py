"""A bounded layer whose policy reads more than positions: each row and key head decides for itself what it keeps.

What a token has received lives in `fields`, tensors `[batch, num_kv_heads, slots]` beside the keys, and moves with it.
In decoding a new token takes the slot of the one it evicts, in place; a longer step is joined to what is held, attends,
and is reduced afterwards. Nothing waits for the device. Slots of a row are in use from the first one on.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.observe import Kernel
from sinkcache.peers import EMPTY, Peers
from sinkcache.policy import ranked
from sinkcache.store import Store, rows_at
from sinkcache.tally import Counts
from sinkcache.watching import Joined, WatchingLayer


class ScoredLayer(WatchingLayer):
    """Keeps what `policy` scores highest."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.peers = Peers([self])  # who decides with it; the cache puts layers together that can
        self._clear()

    @property
    def awaiting(self) -> int | None:
        """How many keys the step under way attends to, while its attention has not been seen; else None."""
        if self._under_way is None:
            return None
        step, joined = self._under_way
        return step.most + 1 if joined is None else joined.keys.shape[2]

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back: as long as none was evicted and none has been scored."""
        return not self.watch.attention and self.ledger.whole()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers for the budgets that are settled: a share of a row's prompt is once it has tokens."""
        super().lazy_initialization(key_states, value_states)
        assert self.store is not None
        shape, wide = self.store.keys.shape[:3], torch.promote_types(key_states.dtype, torch.float32)
        with torch.inference_mode(False):  # or they could not be written outside of it
            self.fields = {"positions": torch.full(shape, -1, dtype=torch.int32, device=self.device)}
            if self.watch.mass:
                self.fields["mass"] = torch.zeros(shape, dtype=wide, device=self.device)
        if self.in_cache:
            self.track_moves()

    def observe(
        self,
        queries: Float[Tensor, "batch num_heads q_len head_dim"],
        received: Float[Tensor, "batch num_kv_heads kv_len"] | None,
        kernel: Kernel,
    ) -> None:
        """Ends the step under way: notes its queries and what each key `received` of them, and evicts."""
        assert self._under_way is not None
        step, joined = self._under_way
        fields = self._slots(step.most + 1) if joined is None else joined.fields
        if received is not None and self.watch.mass:
            if self.watch.decay != 1:
                fields["mass"] *= self._decayed(step)
            fields["mass"] += received
        self._note(step, queries, kernel)
        self._settle()

    def kept(self) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions held, ascending, rows that hold fewer filled up with -1 in front; a copy, on the CPU."""
        if self.store is None:
            return torch.zeros(1, 1, 0, dtype=torch.int64)
        return self._slots(self.held)["positions"].long().sort(dim=-1).values.cpu()

    def stored_keys(self) -> Float[Tensor, "batch num_kv_heads kept head_dim"]:
        """The keys held, as they arrived, in the order of `kept`; a copy.

        Some key of the row where a row of a padded batch holds fewer.
        """
        assert self.store is not None
        fields, keys = self._slots(self.held), self.store.keys[:, :, : self.held].clone()
        if self.rotation is not None and self.store.arrived is not None:
            turned_ones = (fields["applied"] != 0)[..., None]
            arrived = self.store.arrived[:, :, : self.held]
            self.rotation.put(keys, torch.where(turned_ones, arrived, self.rotation.pick(keys)))
        return rows_at(keys, fields["positions"].argsort(dim=-1))

    def rebase(self) -> None:
        """Has keys and queries turned, before the next read, to where the ledger's frame now is."""
        if self.store is not None:
            self.track_moves()
            self.restless = True

    def track_moves(self) -> None:
        """From now on notes for each token by how much its key is, and is to be, turned."""
        if self.fields and "moves" not in self.fields:
            with torch.inference_mode(False):
                for name in ("moves", "frames", "applied"):
                    self.fields[name] = torch.zeros_like(self.fields["positions"], dtype=torch.int64)

    def reset(self) -> None:
        """Frees the buffers and forgets the stream."""
        super().reset()
        self.peers.forget()
        self._clear()

    def rows(self, chosen: Int[Tensor, " batch"]) -> None:
        """Keeps the rows `chosen`, in that order."""
        super().rows(chosen)
        self._each(lambda tensor: tensor.index_select(0, chosen.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest columns, -`tokens_to_remove` of them, once the ledger has."""
        super().crop(tokens_to_remove)
        if self.store is not None:
            seen = self.ledger.each(lambda book: book.seen)
            seen = seen if isinstance(seen, int) else seen[:, None, None].to(self.device)
            self.fields["positions"].masked_fill_(self.fields["positions"] >= seen, -1)
            self.held = max(book.held for book in self.ledger.books)

    def tensors(self) -> list[Tensor]:
        """Every tensor that this layer keeps alive."""
        parts = [part for part in (self.recent, self.moments) if part is not None]
        noted = [value for part in parts for value in vars(part).values()]
        return [*super().tensors(), *self.fields.values(), *noted]

    def _clear(self) -> None:
        self._forget()
        self.fields: dict[str, Tensor] = {}
        self.held, self.new = 0, 1  # slots in use in the longest row, columns of the last step
        self.restless = False  # some key may have to be turned before the next read
        self._under_way: tuple[Counts, Joined | None] | None = None

    def _read(self, store: Store, step: Counts, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        joined = None
        if not isinstance(step.shift, int) or step.shift != 0:
            for layer in self.peers.layers:
                layer.track_moves()
        if self.restless and self.held:
            self._turn(store, self.held, step)  # before anything is scored
        if step.q_len == 1 and step.real is None:
            self._take_in(store, step, keys, values)
            attended = store.read(step.most + 1)
        else:
            joined = self._join(store, step, keys, values)
            attended = joined.keys, joined.values
        self._under_way = (step, joined)
        if not self.watch.attention:
            self._settle()
        return attended

    def _take_in(self, store: Store, step: Counts, keys: Tensor, values: Tensor) -> None:
        """Puts each row's one new token into a free slot, or into that of the token it evicts."""
        if step.trims and self.ledger.books[0].every > 1:
            self._compact(store, step)
        slots, places = self.peers.room(self, step)
        if isinstance(slots, int):
            store.write(slice(slots, slots + 1), keys, values)
        else:
            assert places is not None
            store.put(places, keys, values)
        if self.restless:
            self._turn(store, step.most + 1, step)

    def _join(self, store: Store, step: Counts, keys: Tensor, values: Tensor) -> Joined:
        if step.trims:
            self._compact(store, step)
        if self.restless and step.most:
            self._turn(store, step.most, step)
        old = self._slots(step.most)
        positions = step.positions(self.device).expand(*keys.shape[:2], -1)
        shift = step.on("shift", self.device)
        told = {"positions": positions, "frames": torch.as_tensor(shift, device=self.device).expand_as(positions)}
        fields = {}
        for name, field in old.items():
            new = told[name].to(field.dtype) if name in told else field.new_zeros(positions.shape)
            fields[name] = torch.cat([field, new], dim=-1)
        if step.most:
            held = store.read(step.most)
            keys, values = torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
        return Joined(keys, values, fields)

    def _settle(self) -> None:
        """Ends the step under way: reduces what was joined to the budget."""
        assert self._under_way is not None
        (step, joined), store = self._under_way, self.store
        assert store is not None
        self._under_way = None
        if joined is not None and step.real is None and isinstance(step.after, int) and not step.reduces:
            new = slice(step.most, step.longest)
            store.write(new, joined.keys[:, :, new], joined.values[:, :, new])
            for name, field in self.fields.items():
                field[..., : step.longest] = joined.fields[name]
        elif joined is not None:
            seen = step.on("seen", self.device) + step.on("new", self.device)
            positions = joined.fields["positions"]
            if step.reduces:
                scores = self.scores((joined.keys, joined.values), joined.fields, step, seen=seen)
                scores = scores.masked_fill(positions == seen - 1, torch.inf)  # the newest has had one query, its own
            else:
                scores = positions.float()
            best = self._best(scores, positions, step.longest, step.on("after", self.device))
            self._replace(store, joined.keys, joined.values, joined.fields, best, seen, most=step.most)
        self.held, self.new = step.longest, step.q_len
        if self.offloaded:
            self.offload()

    def _compact(self, store: Store, step: Counts) -> None:
        """Trims what is held, each row to what the step's queries see."""
        fields = self._slots(self.held)
        held = store.read(self.held)
        best = self._best(self.scores(held, fields, step), fields["positions"], step.most, step.on("kept", self.device))
        self._replace(store, *held, fields, best, step.on("seen", self.device), most=self.held)

    def _best(self, scores: Tensor, positions: Tensor, longest: int, counts: int | Tensor) -> Tensor:
        """The best of each row, as many as it may keep, by age; -1 fills up rows that keep fewer."""
        best = ranked(scores, positions)[..., :longest]
        gone = positions.gather(-1, best) < 0
        if not isinstance(counts, int):
            gone = gone | (torch.arange(best.shape[-1], device=best.device) >= counts)
        age = positions.gather(-1, best).masked_fill(gone, torch.iinfo(positions.dtype).max)
        return best.masked_fill(gone, -1).gather(-1, age.argsort(dim=-1))

    def _replace(
        self,
        store: Store,
        keys: Tensor,
        values: Tensor,
        fields: dict[str, Tensor],
        best: Int[Tensor, "batch num_kv_heads kept"],
        seen: int | Tensor,
        most: int,
    ) -> None:
        """Fills the slots with `best` of the entries, the first `most` of which are slots now."""
        none, index, kept = best < 0, best.clamp_min(0), best.shape[-1]
        if store.arrived is not None:
            arrived = store.arrived[:, :, :most]
            if keys.shape[2] > most:
                arrived = torch.nn.functional.pad(arrived, (0, 0, 0, keys.shape[2] - most))
            store.arrived[:, :, :kept] = rows_at(arrived, index)
        keys, values = rows_at(keys, index), rows_at(values, index)
        store.write(slice(0, kept), keys, values)
        for name, field in self.fields.items():
            field[..., :kept] = fields[name].gather(-1, index).masked_fill(none, EMPTY[name])
            field[..., kept:] = EMPTY[name]
        if self.in_cache:
            positions = self._slots(kept)["positions"]
            younger = kept - 1 - positions.argsort(dim=-1).argsort(dim=-1)
            self._slots(kept)["moves"].copy_((seen - 1 - positions - younger).masked_fill(none, 0))
            self.restless = True

    def _turn(self, store: Store, length: int, step: Counts) -> None:
        """Has every key read where it belongs: as far from where it arrived as tokens younger than it are gone."""
        self.restless = False
        if self.rotation is None:
            return
        fields = self._slots(length)
        wanted = fields["moves"] + fields["frames"] - step.on("shift", self.device)
        fresh = (fields["applied"] == 0) & (wanted != 0)
        turning = (fields["applied"] != 0) | (wanted != 0)
        store.turn_each(fresh, turning, self.rotation, self.rotation.phases(wanted, store.keys))
        fields["applied"].copy_(wanted)

    def _slots(self, length: int) -> dict[str, Tensor]:
        return {name: field[..., :length] for name, field in self.fields.items()}

    def _grow(self, capacity: int) -> None:
        super()._grow(capacity)
        more = capacity - next(iter(self.fields.values())).shape[-1]
        if more > 0:
            with torch.inference_mode(False):
                for name, field in self.fields.items():
                    self.fields[name] = torch.nn.functional.pad(field, (0, more), value=EMPTY[name])

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Any) -> None:
        """Puts `change` of each tensor that is beside the store in its place."""
        self.peers.forget()
        with torch.inference_mode(False):
            self.fields = {name: change(field) for name, field in self.fields.items()}
            for part in (self.recent, self.moments):
                for name, tensor in vars(part).items() if part is not None else ():
                    setattr(part, name, change(tensor))
