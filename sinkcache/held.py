"""What a cache holds, as it is changed from outside a pass: rows chosen, tokens taken back, positions re-based."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from sinkcache.bounded import BoundedLayer
from sinkcache.lanes import Lanes
from sinkcache.positions import Rotation
from sinkcache.scored import ScoredLayer
from sinkcache.store import At


class Held(Cache):
    """A cache of bounded and native layers, whose rows fall into lanes and whose bounded layers follow ledgers."""

    lanes: Lanes
    ledgers: list[Any]
    rotations: list[Rotation | str | None]
    watched: bool  # made for a model, which announces its passes
    _before: int | None = None  # columns seen when the pass under way began
    _scales: bool  # the model scales its queries by their position

    @property
    def seen(self) -> int:
        """Tokens of the stream read so far; of a padded batch, pads included."""
        return self.lanes.seen

    @property
    def rows(self) -> int:
        """Rows of the batch that is held; 0 before the first token."""
        stores = (layer.store for layer in self.layers if isinstance(layer, BoundedLayer))
        return next((store.keys.shape[0] for store in stores if store is not None), 0)

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Keeps the rows `beam_idx`, in that order."""
        self._rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, numbers or a mask."""
        self._rows(torch.arange(self.rows)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self._rows(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int | Int[Tensor, ""]) -> None:
        """Takes back the newest -`tokens_to_remove` tokens, exactly, as long as none has been evicted.

        Raises ValueError, and changes nothing, if one has, the number is positive or greater than the tokens seen, or a
        native layer has let go of what it would need.
        """
        gone = -int(tokens_to_remove)  # a tensor in transformers 5.17's assisted decoding
        if gone < 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, got {-gone}. Before "
                "transformers 5.14 assisted decoding gives a length to keep: it needs a later one"
            )
        if gone > self.seen:
            raise ValueError(f"cannot take back {gone} tokens: the cache has seen {self.seen}")
        if gone and not all(ledger.whole() for ledger in self.ledgers):
            raise ValueError(
                f"a SinkCache cannot take back {gone} tokens once it has evicted: what they evicted is gone. Keep a "
                "cache.fork() from before the tokens you may want to undo"
            )
        for index, layer in enumerate(self.layers):
            if gone and isinstance(layer, ScoredLayer) and layer.watch.attention:
                raise ValueError(
                    f"a SinkCache whose policy reads attention cannot take back {gone} tokens: what they gave to "
                    "others is counted. Keep a cache.fork() from before the tokens you may want to undo"
                )
            if gone and not isinstance(layer, BoundedLayer) and not _can_crop(layer):
                raise ValueError(
                    f"layer {index} is a {type(layer).__name__} that no longer holds what {gone} tokens hid"
                )
        if gone and any(book.seen - gone < book.shift for book in self.ledgers[0].books):
            self.rebase(0)  # the model's positions would be negative
        if gone:
            real = self.lanes.crop(gone)
            for ledger in self.ledgers:
                ledger.crop(gone, real)
        super().crop(-gone)
        self._before = None  # whatever a pass that failed has left, it is taken back or was nothing

    def rebase(self, shifts: int | Sequence[int]) -> None:
        """From the next step on, the model's positions are the stream's minus the shift; stored keys are moved to fit.

        `shifts`: one for all rows, or one for each lane of a padded batch. `stream` calls it so that positions stay
        small. Raises ValueError if a layer's rotation is unknown, or the model scales its queries by their position.
        """
        each = [shifts] * len(self.lanes) if isinstance(shifts, int) else list(shifts)
        if self.seen > 0:
            self.check_rebase()
        baked = {id(ledger): ledger.rebase(each) for ledger in self.ledgers}
        if self.seen == 0:
            return
        for layer, rotation in zip(self.layers, self.rotations, strict=True):
            if not isinstance(rotation, Rotation) or getattr(layer, "keys", None) is None:
                continue
            if isinstance(layer, ScoredLayer):
                layer.rebase()
                continue
            ledger = layer.ledger if isinstance(layer, BoundedLayer) else self.ledgers[0]
            for rows, slots, move in baked[id(ledger)]:
                if move != 0:
                    _turn(layer, rotation, rows, slots, move)

    def check_rebase(self) -> None:
        """Raises ValueError, with the reason, if positions cannot be re-based."""
        unknown = [each for each in self.rotations if isinstance(each, str)]
        if unknown or not self.watched:
            reason = unknown[0] if unknown else "the cache was made from a config, so its rotations are unknown"
            raise ValueError(f"positions cannot be re-based: {reason}")
        if self._scales:
            raise ValueError("positions cannot be re-based: this model scales its queries by their position")

    def _rows(self, rows: Tensor) -> None:
        if self.rows == 0:
            return
        lanes = self.lanes.select(rows.cpu())
        for ledger in self.ledgers:
            if lanes is not None:
                ledger.regroup(lanes)
        for layer in self.layers:
            layer.rows(rows) if isinstance(layer, BoundedLayer) else cast(Any, layer).reorder_cache(rows)


def _turn(layer: Any, rotation: Rotation, rows: Tensor | None, slots: Any, move: int) -> None:
    """Moves keys of `rows` for good: those in `slots` of a bounded layer, all of a native window, which are young."""
    phase = rotation.phase(torch.tensor([move]), layer.keys)
    if isinstance(layer, BoundedLayer):
        assert layer.store is not None
        if rows is not None:
            slots = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
            slots = At(rows.repeat_interleave(len(slots)), slots.repeat(len(rows)))
        layer.store.bake(slots, rotation, phase)
        return
    turned = layer.keys.clone()  # a copy, since it may be an inference tensor
    chosen = slice(None) if rows is None else rows.to(turned.device)
    part = turned[chosen]
    rotation.put(part, rotation.pick(layer.keys[chosen]) * phase)
    turned[chosen] = part
    layer.keys = turned


def _can_crop(layer: Any) -> bool:
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.get_seq_length() < layer.sliding_window or getattr(layer, "record_past", False)
    return isinstance(layer, CacheLayerMixin) or getattr(layer, "record_past", not hasattr(layer, "conv_states"))
