"""A bounded layer whose policy reads positions alone: asks its ledger what to do and has its store do it."""

from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.bounded import BoundedLayer
from sinkcache.ledger import Ledger
from sinkcache.step import Step
from sinkcache.store import Store, at


class SinkLayer(BoundedLayer):
    """Does the step that its ledger decides once for all layers, rows of a lane and heads."""

    ledger: Ledger

    def kept(self) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions held, ascending, rows that hold fewer filled up with -1 in front; a copy, on the CPU."""
        batch, heads = self.store.keys.shape[:2] if self.store is not None else (1, 1)
        kept, lanes = self.ledger.kept(), self.ledger.lanes.of
        rows = kept.expand(batch, -1) if lanes is None else kept[lanes]
        return rows[:, None].expand(-1, heads, -1).clone()

    def stored_keys(self) -> Float[Tensor, "batch num_kv_heads kept head_dim"]:
        """The keys held (of latent attention: what turns), as they arrived, in the order of `kept`; a copy.

        Some key of the row where a row of a padded batch holds fewer.
        """
        assert self.store is not None
        lanes = self.ledger.lanes.of
        order = self.ledger.order() if lanes is None else self.ledger.order()[lanes]
        keys = self.store.as_arrived(order.shape[1], self.ledger.turned(), self.rotation)
        order = order.to(self.device)[:, None, :, None].expand(*keys.shape[:2], -1, keys.shape[3])
        return keys.gather(2, order)

    def _read(self, store: Store, step: Step, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if step.turns is not None and self.rotation is not None:
            turns = step.turns
            store.turn(turns.slots, turns.fresh, turns.top, self.rotation, turns.phase(self.rotation, keys))
        attended = None
        if not step.in_place or step.order is not None:
            attended = store.joined(step.held, step.dropped, keys, values, step.order)
        store.write(step.targets, at(keys, step.sources), at(values, step.sources))
        return store.read(step.length) if attended is None else attended
