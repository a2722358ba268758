"""A bounded layer whose heads compete: together they hold what the budget gives them, each as many as it wins.

Memory is one pool for all heads of a row, `[batch, 1, num_kv_heads * capacity, dim]`, so that nothing is set aside for
a head that holds little; `fields` say of each slot to which head it belongs. Keys stay there as they arrived. For a
step they are copied, and turned, to a dense tensor as long as the longest head, which lasts until the layer has
attended: one layer's at a time, at most `num_kv_heads` times the layer's own pool, if one head has won nearly all. What
a head lacks is hidden by a mask that this layer makes for itself, as the model knows of no heads of different length.
On a GPU the length of the longest head is waited for, once a step and layer.
"""

import math
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkcache.peers import EMPTY
from sinkcache.policy import ranked
from sinkcache.scored import ScoredLayer
from sinkcache.store import Store, rows_at
from sinkcache.tally import Counts
from sinkcache.watching import Joined


class RaggedLayer(ScoredLayer):
    """Keeps what `policy`, which is one `across_heads`, scores highest of all heads; each keeps its share `floor`."""

    ragged = True

    @property
    def reads_attention(self) -> bool:
        """True: where attention is computed, the layer is asked for its mask."""
        return True

    @property
    def in_use(self) -> int:
        """How many slots of the pool, from the first one on, may be in use."""
        held = (min(book.capacity or 0, book.seen) for book in self.ledger.books)
        return self.num_kv_heads * max(held)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the pool for the budgets that are settled: a share of a row's prompt is once it has tokens."""
        self.num_kv_heads = key_states.shape[1]
        super().lazy_initialization(key_states[:, :1], value_states[:, :1])
        with torch.inference_mode(False):  # or it could not be written outside of it
            self.fields["heads"] = torch.zeros_like(self.fields["positions"], dtype=torch.int16)

    def heads(self, key: Tensor) -> int:
        """How many key heads the layer holds; of latent attention one, however many are attended to."""
        return self.num_kv_heads

    def mask(self) -> Bool[Tensor, "batch num_kv_heads q_len kv_len"] | None:
        """What each query of the step under way may see in each head; None where the model's own mask says it."""
        assert self._under_way is not None
        step, joined = self._under_way
        assert joined is not None
        there = joined.fields["positions"] >= 0
        held = there.shape[-1] - step.q_len
        if held == 0 or (isinstance(step.seen, int) and step.seen == step.kept):  # nothing was ever evicted
            return None
        past = torch.ones(step.q_len, step.q_len, dtype=torch.bool, device=there.device).tril()
        old, new = there[:, :, None, :held], there[:, :, None, held:] & past
        return torch.cat([old.expand(-1, -1, step.q_len, -1), new], dim=-1)

    def kept(self) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions held, ascending, heads that hold fewer filled up with -1 in front; a copy, on the CPU."""
        if self.store is None:
            return torch.zeros(1, 1, 0, dtype=torch.int64)
        return self._dense()["positions"].long().sort(dim=-1).values.cpu()

    def stored_keys(self) -> Float[Tensor, "batch num_kv_heads kept head_dim"]:
        """The keys held, as they arrived, in the order of `kept`; a copy. Some key of the row where a head has none."""
        assert self.store is not None
        fields = self._dense()
        order = fields["positions"].argsort(dim=-1)
        return rows_at(self.store.keys, fields["slots"].gather(-1, order))

    def _clear(self) -> None:
        super()._clear()
        self.num_kv_heads = 1  # until the first token tells

    def _read(self, store: Store, step: Counts, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(step.shift, int) or step.shift != 0:
            self.track_moves()
        fields = self._dense()
        arrived, old_values = (rows_at(buffer, fields["slots"]) for buffer in (store.keys, store.values))
        if step.trims:
            scores = self.scores((self._moved(arrived, fields, step), old_values), fields, step)
            kept = self._winners(scores, fields["positions"], step.on("kept", self.device))
            fields["positions"] = fields["positions"].masked_fill(~kept, -1)
        self._under_way = (step, self._joined(step, (arrived, old_values), fields, keys, values))
        return cast(Any, self._under_way[1]).keys, cast(Any, self._under_way[1]).values

    def _joined(
        self, step: Counts, held: tuple[Tensor, Tensor], fields: dict[str, Tensor], keys: Tensor, values: Tensor
    ) -> Joined:
        """What is held, its keys turned, and the step's own tokens."""
        positions, shift = step.positions(self.device), step.on("shift", self.device)
        told = {"positions": positions, "frames": torch.as_tensor(shift, device=self.device), "slots": torch.tensor(-1)}
        shape, both = (*keys.shape[:2], step.q_len), {}
        for name, field in fields.items():
            new = told.get(name, torch.tensor(0)).to(field).expand(shape)
            both[name] = torch.cat([field, new], dim=-1)
        if fields["positions"].shape[-1] == 0:
            return Joined(keys, values, both)
        moved = self._moved(held[0], fields, step)
        return Joined(torch.cat([moved, keys], dim=2), torch.cat([held[1], values], dim=2), both)

    def _settle(self) -> None:
        """Ends the step under way: reduces what was joined to the budget, and puts what is new of it into the pool."""
        assert self._under_way is not None
        assert self.store is not None
        step, joined = self._under_way
        assert joined is not None
        self._under_way = None
        positions = joined.fields["positions"]
        kept = positions >= 0
        if step.reduces:
            seen = step.on("seen", self.device) + step.on("new", self.device)
            scores = self.scores((joined.keys, joined.values), joined.fields, step, seen=seen)
            scores = scores.masked_fill(positions == seen - 1, torch.inf)  # the newest has had one query, its own
            kept = self._winners(scores, positions, step.on("after", self.device))
        self._put(self.store, joined, kept, step.q_len)
        self.held, self.new = step.longest, step.q_len
        if self.offloaded:
            self.offload()

    def _winners(
        self,
        scores: Float[Tensor, "batch num_kv_heads kv_len"],
        positions: Int[Tensor, "batch num_kv_heads kv_len"],
        count: int | Tensor,
    ) -> Bool[Tensor, "batch num_kv_heads kv_len"]:
        """Which tokens are kept, `count` a head on average: each head's best, then the best of all."""
        floors = self._floors(count)
        rank = ranked(scores, positions).argsort(dim=-1)
        safe = ((rank < floors) & (positions >= 0)).flatten(1)
        order = positions.flatten(1).argsort(dim=-1, descending=True, stable=True)  # of equals, the lower head first
        for worth in (scores.flatten(1), safe.to(torch.int8)):
            order = order.gather(1, worth.gather(1, order).argsort(dim=-1, descending=True, stable=True))
        total = self.num_kv_heads * (count if isinstance(count, int) else count[:, 0])
        best = (torch.arange(order.shape[1], device=order.device) < total).expand(order.shape)
        return torch.zeros_like(safe).scatter(1, order, best).unflatten(1, scores.shape[1:]) & (positions >= 0)

    def _floors(self, count: int | Tensor) -> int | Tensor:
        """How many tokens each head keeps in any case, of `count` on average."""
        floor = cast(Any, self.policy).floor
        tokens = self.ledger.each(lambda book: math.floor(round(floor * (book.capacity or 0), 9)))
        if isinstance(tokens, int) and isinstance(count, int):
            return min(tokens, count)
        tokens = tokens if isinstance(tokens, int) else tokens[:, None, None].to(self.device)
        return torch.minimum(torch.as_tensor(tokens, device=self.device), torch.as_tensor(count, device=self.device))

    def _put(self, store: Store, joined: Joined, kept: Bool[Tensor, "batch num_kv_heads kv_len"], q_len: int) -> None:
        """Frees the slots of tokens that are not kept, and puts each new one that is into the first that is free."""
        slots, pool = joined.fields["slots"], store.keys.shape[2]
        slots = slots.masked_fill((slots < 0) | ~kept, pool)  # `pool`, a slot too many: nowhere
        old, new = slots[..., :-q_len].flatten(1), kept[..., -q_len:].flatten(1)
        taken = new.new_zeros(len(new), pool + 1).scatter(1, old, True)[:, :pool]
        count = min(new.shape[1], pool)
        free = (torch.arange(pool, 0, -1, device=new.device) * ~taken).topk(count, dim=1).indices
        source = new.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
        chosen = new.gather(1, source)
        into = torch.full_like(new, pool, dtype=torch.int64).scatter(1, source, free.where(chosen, pool))
        target = torch.cat([slots[..., :-q_len], into.unflatten(1, (-1, q_len))], dim=-1).flatten(1)
        rows = []
        for buffer, states in ((store.keys, joined.keys), (store.values, joined.values)):
            fresh, held = states[:, :, -q_len:].flatten(1, 2)[:, None], rows_at(buffer, free[:, None])
            rows.append(rows_at(fresh, source[:, None]).where(chosen[:, None, :, None], held))
        first = torch.arange(len(free), device=free.device)[:, None] * pool
        store.put((free + first).flatten(), *rows)
        of_head = torch.arange(slots.shape[1], device=slots.device)[:, None].expand_as(slots)
        told = {**joined.fields, "heads": of_head}
        for name, field in self.fields.items():
            spread = torch.full((len(field), pool + 1), EMPTY[name], dtype=field.dtype, device=field.device)
            spread.scatter_(1, target, told[name].flatten(1).to(field.dtype))
            field.copy_(spread[:, None, :pool])

    def _dense(self) -> dict[str, Tensor]:
        """The fields by head, `[batch, num_kv_heads, longest]`, and with them `slots`, of the pool; -1 is none."""
        positions, count = self.fields["positions"][:, 0], self.num_kv_heads
        heads = self.fields["heads"][:, 0].masked_fill(positions < 0, count)
        order = heads.argsort(dim=-1, stable=True)
        numbers = torch.arange(count, device=heads.device)
        lengths = (heads[:, None] == numbers[:, None]).sum(dim=-1)
        place = torch.arange(int(lengths.max()), device=heads.device)
        first = lengths.cumsum(dim=-1) - lengths
        index = (first[..., None] + place).clamp_max(order.shape[1] - 1)
        slots = order.gather(1, index.flatten(1)).reshape(index.shape).masked_fill(place >= lengths[..., None], -1)
        fields = {"slots": slots}
        for name, field in self.fields.items():
            if name != "heads":
                told = field[:, 0].gather(1, slots.clamp_min(0).flatten(1)).reshape(slots.shape)
                fields[name] = told.masked_fill(slots < 0, EMPTY[name])
        return fields

    def _moved(self, keys: Tensor, fields: dict[str, Tensor], step: Counts) -> Tensor:
        """The keys as the step's queries read them, turned from where they arrived."""
        if self.rotation is None or "frames" not in fields:
            return keys
        positions = fields["positions"].long()
        moves = fields["frames"] - step.on("shift", self.device)
        if self.in_cache:
            younger = positions.shape[-1] - 1 - positions.argsort(dim=-1).argsort(dim=-1)
            moves = moves + step.on("seen", self.device) - 1 - positions - younger
        turned = keys.clone()
        phases = self.rotation.phases(moves.masked_fill(positions < 0, 0), turned)
        self.rotation.put(turned, self.rotation.pick(turned) * phases)
        return turned

    def track_moves(self) -> None:
        """From now on notes for each token in which frame its key arrived."""
        if "frames" not in self.fields:
            with torch.inference_mode(False):
                self.fields["frames"] = torch.zeros_like(self.fields["positions"])

    def _grow(self, capacity: int) -> None:
        super()._grow(self.num_kv_heads * capacity)
