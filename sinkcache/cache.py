"""`SinkCache`: a transformers cache that holds at most `budget` tokens a layer, chosen by an eviction policy."""

import copy
import os
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from sinkcache.attention import fit
from sinkcache.budgets import asked_budgets
from sinkcache.files import Origin, read, write
from sinkcache.guard import guard
from sinkcache.lanes import Lanes
from sinkcache.layer import SinkLayer
from sinkcache.ledger import Ledger
from sinkcache.memory import held_bytes, storage, tensors_of
from sinkcache.passes import Announced
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policy import Policy
from sinkcache.positions import Rotation
from sinkcache.probe import Found
from sinkcache.slots import Slots
from sinkcache.store import At
from sinkcache.support import (
    Positions,
    check_sliding,
    decoder_config,
    found_in,
    frequency_limit,
    scales_by_position,
)

_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer)  # of the growing kinds


class SinkCache(Announced):
    """Holds at most `budget` tokens in each full-attention layer of `model`; pass it to `model.generate(cache=...)`.

    It bounds memory and keeps generation fluent past the trained length; it does not extend what the model remembers:
    an evicted token is gone. Sliding-window and linear-attention layers keep their native cache.

    `model`: a causal LM, which is probed (three short passes) and announces its passes to the cache from then on; or
    its config, where `positions` is "original": it is trusted, nothing is probed and no pass is checked.
    `budget`: tokens a layer holds, sinks and the newest token included; or a share in (0, 1] of the prompt, settled by
    the first step or by `prefill` (which knows the whole prompt; `generate(prefill_chunk_size=...)` shows the cache the
    first chunk alone); or a list of one for each bounded layer. Layers that hold different numbers need a mask each:
    the model's attention is then set to one that cuts the mask to each layer's keys (sdpa and eager attention).
    `positions`: "cache" (positions inside the cache, as in StreamingLLM), "original" (those of the stream), or None for
    the policy's own.
    `sliding`: "native", or "bound": layers with a sliding window are bounded too; the budget must fit into the window.

    `offload`: "cpu" keeps every layer's storage on the CPU but while that layer computes.

    Rows of a batch padded on the left, or with holes, are each as they would be alone: pads are never held.

    Raises TypeError for arguments of another kind, ValueError for values out of range and for models that cannot be
    bounded exactly, each with its reason.
    """

    def __init__(
        self,
        model: nn.Module | PreTrainedConfig,
        policy: Policy = StreamingLLM(),  # noqa: B008 - frozen and without state
        budget: int | float | list[int] | list[float] = 1024,
        positions: Positions | None = None,
        sliding: Literal["native", "bound"] = "native",
        offload: Literal["cpu"] | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            given = f"a {type(policy).__name__}" if isinstance(policy, nn.Module) else repr(policy)
            raise TypeError(f"policy must be a Policy object such as StreamingLLM(num_sinks=4), got {given}")
        chosen = cast(Positions, policy.convention if positions is None else positions)
        if chosen not in ("cache", "original"):
            raise ValueError(f'positions must be "cache" or "original", got {chosen!r}')
        if sliding not in ("native", "bound"):
            raise ValueError(f'sliding must be "native" or "bound", got {sliding!r}')
        if offload not in ("cpu", None):
            raise ValueError(f'offload must be "cpu" or None, got {offload!r}')
        config = decoder_config(model, chosen)
        limit = frequency_limit(config, chosen)
        layers: list[Any] = DynamicCache(config=config).layers
        bounded = _bounded(config, layers, sliding)
        asked = asked_budgets(budget, len(bounded))
        for each in asked:
            if isinstance(each, int):
                policy.check(each)
        self.window = check_sliding(config, [layers[index] for index in bounded], asked)
        self.watched, self.offloaded = isinstance(model, nn.Module), offload == "cpu"
        if len(set(asked)) > 1:
            fit(model)
        found = found_in(model) if isinstance(model, nn.Module) else Found([None] * len(layers), ordered=False)
        self.rotations, self.ordered = list(found.rotations), found.ordered
        if self.ordered and chosen == "original":
            raise ValueError(
                'positions="original" cannot be had: this model goes by the order of its cache (ALiBi), so distance is '
                'counted inside the cache. Use positions="cache"'
            )
        self.policy, self.positions, self.sliding = policy, chosen, sliding
        self.lanes = Lanes()
        books = {each: Slots(policy, each, chosen == "cache", limit, self.ordered) for each in asked}
        ledgers = {each: Ledger(book, self.lanes) for each, book in books.items()}
        self.ledgers = list(ledgers.values())
        self._scales = scales_by_position(config)
        for index, each in zip(bounded, asked, strict=True):
            rotation = self.rotations[index]
            if isinstance(rotation, str) and chosen == "cache":
                raise ValueError(f'positions="cache" cannot be had: {rotation}. Use positions="original"')
            known = rotation if isinstance(rotation, Rotation) else None
            layers[index] = SinkLayer(ledgers[each], known, layers[index].is_sliding)
        super().__init__(layers=layers)
        self.origin = Origin(model)
        if isinstance(model, nn.Module):
            guard(model)

    @property
    def seen(self) -> int:
        """Tokens of the stream read so far; of a padded batch, pads included."""
        return self.lanes.seen

    @property
    def nbytes(self) -> int:
        """Bytes of storage held by all layers, native ones and turned keys' originals included."""
        return held_bytes(self)

    @property
    def slots(self) -> Slots:
        """The one book that all layers and rows follow; raises ValueError where budgets or rows differ."""
        if len(self.ledgers) > 1 or len(self.lanes) > 1:
            raise ValueError("layers or rows of this cache hold different numbers of tokens: no one book tells of all")
        return self.ledgers[0].books[0]

    def kept(self, layer: int) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions that layer number `layer` holds, ascending; a copy.

        In a padded batch they count a row's own tokens, and rows that hold fewer are filled up with -1 in front. Raises
        ValueError if that layer keeps its native cache.
        """
        bounded = self.layers[layer]
        if not isinstance(bounded, SinkLayer):
            raise ValueError(f"layer {layer} is not bounded: it keeps its native {type(bounded).__name__}")
        batch, heads = bounded.store.keys.shape[:2] if bounded.store is not None else (1, 1)
        kept = bounded.ledger.kept()
        rows = kept.expand(batch, -1) if self.lanes.of is None else kept[self.lanes.of]
        return rows[:, None].expand(-1, heads, -1).clone()

    def reset(self) -> None:
        """Frees the storage and forgets the stream; the cache can be used again."""
        super().reset()
        for layer in self.layers:
            if type(layer) is DynamicSlidingWindowLayer:  # before transformers 5.18 its keys stayed, as zeros
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.lanes.reset()
        self._before = self._apart_from = None
        for ledger in self.ledgers:
            ledger.reset()

    def resolve(self, q_len: int) -> None:
        """Settles budgets that are a share of the prompt, of which `q_len` columns (those announced, if any) come."""
        for ledger in self.ledgers:
            for lane, book in enumerate(ledger.books):
                book.resolve(len(self.lanes.columns(lane, q_len)) if self.lanes.padded else q_len)

    def check_rebase(self) -> None:
        """Raises ValueError if some layer's rotation is unknown, so that positions cannot be re-based."""
        unknown = [each for each in self.rotations if isinstance(each, str)]
        if unknown or not self.watched:
            reason = unknown[0] if unknown else "the cache was made from a config, so its rotations are unknown"
            raise ValueError(f"positions cannot be re-based: {reason}")
        if self._scales:
            raise ValueError("positions cannot be re-based: this model scales its queries by their position")

    def rebase(self, shifts: int | Sequence[int]) -> None:
        """From the next step on, the model's positions are the stream's minus the shift; stored keys are moved to fit.

        `shifts`: one for all rows, or one for each lane of a padded batch. `stream` calls it so that positions stay
        small. Raises ValueError if some layer's rotation is unknown.
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
            ledger = layer.ledger if isinstance(layer, SinkLayer) else self.ledgers[0]
            for rows, slots, move in baked[id(ledger)]:
                if move != 0:
                    _turn(layer, rotation, rows, slots, move)

    def describe(self) -> str:
        """A table: layer, kind, policy, budget, kept, evicted, bytes; of a padded batch, of the row with the most."""
        rows: list[tuple[str, ...]] = [("layer", "kind", "policy", "budget", "kept", "evicted", "bytes")]
        for index, layer in enumerate(self.layers):
            held = str(storage(tensors_of(layer)))
            if isinstance(layer, SinkLayer):
                book = max(layer.ledger.books, key=lambda each: each.seen)
                kept = book.held if layer.store is not None else 0
                budget = book.capacity if book.capacity is not None else book.asked
                kind = "sliding" if layer.is_sliding else "full"
                row = (kind, repr(self.policy), str(budget), str(kept), str(book.seen - kept))
            else:
                row = (type(layer).__name__, "native", "-", "-", "-")
            rows.append((str(index), *row, held))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def fork(self, batch: int = 1) -> "SinkCache":
        """A cache that goes its own way from here, each row repeated `batch` times; this one stays as it is.

        It may evict, even if assisted decoding has left this one waiting for tokens to be taken back.
        """
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"batch must be 1 or more rows for each, got {batch!r}")
        twin = copy.deepcopy(self)
        for layer in cast(list[Any], twin.layers):
            if hasattr(layer, "record_past"):
                layer.record_past = False
        if batch > 1:
            twin.batch_repeat_interleave(batch)
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to one safetensors file, all of it or nothing; what is at `path` is replaced.

        Raises RuntimeError in the middle of a forward pass or after one that failed, ValueError if the model is gone or
        a file cannot hold what a policy or a native layer is made of, OSError as writing does.
        """
        write(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module | PreTrainedConfig,
        policy: Policy | None = None,
        positions: Positions | None = None,
    ) -> "SinkCache":
        """The cache that was saved at `path`, which goes on as that one would have; `model` is the one it was made for.

        `policy` must be given if it is none of `sinkcache.policies`; it and `positions` must be those of the file.
        Raises FileNotFoundError if there is no file, ValueError if it is damaged, or another's.
        """
        saved = read(path, model, policy, positions)
        cache = cls(model, saved.policy, saved.budgets, saved.positions, saved.sliding)
        saved.restore(cache, model)
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest -`tokens_to_remove` tokens, exactly, as long as none has been evicted.

        Raises ValueError, and changes nothing, if one has, the number is positive or greater than the tokens seen, or a
        native layer has let go of what it would need.
        """
        gone = -tokens_to_remove
        if gone < 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if gone > self.seen:
            raise ValueError(f"cannot take back {gone} tokens: the cache has seen {self.seen}")
        if gone and not all(ledger.whole() for ledger in self.ledgers):
            raise ValueError(
                f"a SinkCache cannot take back {gone} tokens once it has evicted: what they evicted is gone. Keep a "
                "cache.fork() from before the tokens you may want to undo"
            )
        for index, layer in enumerate(self.layers):
            if gone and not isinstance(layer, SinkLayer) and not _can_crop(layer):
                raise ValueError(
                    f"layer {index} is a {type(layer).__name__} that no longer holds what {gone} tokens hid"
                )
        super().crop(tokens_to_remove)
        if gone:
            real = self.lanes.crop(gone)
            for ledger in self.ledgers:
                ledger.crop(gone, real)

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Keeps the rows `beam_idx`, in that order."""
        self._rows(beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, numbers or a mask."""
        rows = torch.arange(self._batch())[indices.cpu()]
        self._rows(rows, lambda layer: layer.batch_select_indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        rows = torch.arange(self._batch()).repeat_interleave(repeats)
        self._rows(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    def _batch(self) -> int:
        stores = (layer.store for layer in self.layers if isinstance(layer, SinkLayer))
        return next((store.keys.shape[0] for store in stores if store is not None), 0)

    def _rows(self, rows: Tensor, native: Any) -> None:
        if self._batch() == 0:
            return
        lanes = self.lanes.select(rows.cpu())
        for ledger in self.ledgers:
            if lanes is not None:
                ledger.regroup(lanes)
        for layer in self.layers:
            layer.rows(rows) if isinstance(layer, SinkLayer) else native(layer)


def _bounded(config: PreTrainedConfig, layers: list[Any], sliding: str) -> list[int]:
    unknown = [type(each) for each in layers if isinstance(each, DynamicLayer) and type(each) not in _KNOWN]
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of a kind SinkCache does not know and so cannot bound: "
            f"{unknown[0].__name__}"
        )
    kinds = _KNOWN if sliding == "bound" else _KNOWN[:1]
    bounded = [index for index, layer in enumerate(layers) if type(layer) in kinds]
    if not bounded:
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ValueError(f"{type(config).__name__} has no full-attention layer to bound, only {names or 'unknown'}")
    return bounded


def _turn(layer: Any, rotation: Rotation, rows: Tensor | None, slots: Any, move: int) -> None:
    """Moves keys of `rows` for good: those in `slots` of a bounded layer, all of a native window, which are young."""
    phase = rotation.phase(torch.tensor([move]), layer.keys)
    if isinstance(layer, SinkLayer):
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
