"""What a cache makes of the passes it is told of: masks and positions that fit its slots, or an error before any work.

transformers reads a two-dimensional mask by column, at the offset that the cache names. A bounded layer's slots are no
columns, so where a batch is padded the mask is written anew: slots that a row does not use, or is about to give up, are
hidden, then come the step's own columns. Layers with a native cache go on reading the true columns in front of those.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from sinkcache.attention import revealed
from sinkcache.bounded import BoundedLayer
from sinkcache.guard import Guarded, show_to, uncompiled
from sinkcache.held import Held
from sinkcache.padding import check_padding, check_told
from sinkcache.positions import same
from sinkcache.ragged import RaggedLayer
from sinkcache.scored import ScoredLayer
from sinkcache.support import rotations_of

_COUNTING = (BoundedLayer, DynamicSlidingWindowLayer)


class Announced(Held, Guarded):
    """A cache of bounded and native layers that is told of each pass by the model itself."""

    window: int | None  # the least sliding window of the layers that are bounded although they slide
    offloaded: bool  # keys and values are on the CPU but for the layer that computes
    ordered: bool  # the model goes by the order of its cache: its bias is distance there
    reads_attention = False
    chunk: int | None = None  # a prompt that is announced as a whole is read in chunks of so many tokens
    unfinished = False  # the logits of the pass under way are not what it is for: more of a prompt follows
    _checked: int | None = None  # the model that was last found to rotate as the cache does
    _apart_from: int | None = None  # where slots begin in a mask that has the true columns in front of them

    @uncompiled
    def begin_step(
        self, model: nn.Module, tokens: Tensor, attention_mask: Any, position_ids: Tensor | None
    ) -> dict[str, Any]:
        """What the pass over `tokens` must be given in place of its arguments.

        Raises ValueError for another model, and masks and positions it cannot serve; RuntimeError if torn.
        """
        batch, q_len = tokens.shape[:2]
        attention = str(cast(Any, model).config._attn_implementation)
        self._check_pass(model, q_len, attention)
        if attention_mask is None and self.lanes.seen == 0:
            check_told(model, tokens)
        rows = self._batch_for(batch)
        before = vars(self.lanes).copy(), [ledger.books for ledger in self.ledgers]
        try:
            changes = self._read_mask(tokens, attention_mask, rows, attention)
            self._check_room(self._at_once(q_len))
            changes |= self._read_positions(tokens, position_ids)
        except BaseException:  # a pass that is refused leaves the cache as it was
            if rows != batch:
                self.batch_select_indices(torch.tensor([0]))
            vars(self.lanes).update(before[0])
            for ledger, books in zip(self.ledgers, before[1], strict=True):
                ledger.books = books
            raise
        self._before = self.lanes.seen
        return changes

    @uncompiled
    def end_step(self) -> None:
        """Raises RuntimeError if some layer did not store its tokens here."""
        unseen = [layer.index for layer in self.layers if isinstance(layer, ScoredLayer) and layer.awaiting is not None]
        if unseen:
            raise RuntimeError(
                f"the attention of layers {unseen} was not shown to the cache, whose policy reads it: what was read is "
                "lost. Report the model"
            )
        apart = self._apart()
        if self.lanes.seen == self._before or apart:
            raise RuntimeError(
                f"the model did not store its tokens in layers {apart or 'of this cache'}: it bypassed the SinkCache "
                "it was given, so what it computed is not bounded. Report the model; do not trust this output"
            )
        self._before = self.lanes.real = self._apart_from = None

    @uncompiled
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers' caches do; raises RuntimeError in a pass that was not announced, so could not be checked."""
        if self.watched and self._before is None:
            raise RuntimeError(
                "these keys come from a pass that was not announced to the SinkCache: call the very causal LM it was "
                "made for, not another model or a part of it"
            )
        layer: Any = self.layers[layer_idx]
        try:
            if self.offloaded:
                layer.prefetch()
            attended = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if isinstance(layer, ScoredLayer) and layer.reads_attention:
                show_to(layer)  # which ends its step, and moves away, once it was shown
            elif self.offloaded:
                layer.offload()
            return attended
        except BaseException:
            self._before = None  # the pass is over
            raise

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys the next step's queries see in a layer, and from where its mask is read."""
        if not isinstance(self._attending(layer_idx), BoundedLayer):
            return super().get_mask_sizes(query_length, layer_idx)
        kept = self.kept_before(query_length)
        return kept + query_length, self.lanes.seen - kept if self._apart_from is None else self._apart_from

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where a layer's mask is read for the first of the next step's queries."""
        if self._apart_from is None or not isinstance(self._attending(layer_idx), BoundedLayer):
            return self.get_seq_length(layer_idx)
        return self._apart_from + self.kept_before(self._apart_from - self.lanes.seen)

    def kept_before(self, q_len: int) -> int:
        """How many slots the queries of a step of `q_len` tokens are shown, in the layer that has the most."""
        return max(ledger.kept_before(q_len) for ledger in self.ledgers)

    def _check_pass(self, model: nn.Module, q_len: int, attention: str) -> None:
        """Raises RuntimeError after a pass that was interrupted, ValueError for no tokens, or for another model."""
        if apart := self._apart():
            raise RuntimeError(
                f"layers {apart} have not seen {self.lanes.seen} tokens as the others have: a forward pass was "
                "interrupted. Call cache.reset() and read the prompt again"
            )
        if self._before not in (None, self.lanes.seen):
            raise RuntimeError(
                "the last forward pass stored its tokens and then failed: it was interrupted. Call cache.reset() and "
                "read the prompt again"
            )
        if q_len < 1:
            raise ValueError(
                f"no new tokens: the cache has seen {self.lanes.seen} and was given no more. Pass the whole "
                "conversation, or the new tokens with an attention_mask as wide as both (sinkcache.turn makes them); "
                "for another text call cache.reset() first"
            )
        if self.watched and id(model) != self._checked and not self._made_for(model):
            raise ValueError(
                f"this cache was made for a model that rotates otherwise than this {type(model).__name__}: make one "
                "for each model"
            )
        self._checked = id(model)
        if self.reads_attention and not revealed(attention):
            raise ValueError(
                f"the policy reads attention, and the model's was set back to {attention}: make the cache anew, or "
                "leave the model's attention as the cache has set it"
            )
        if len(self.ledgers) > 1 and attention in ("sdpa", "eager"):
            raise ValueError(
                f"budgets that differ between layers need a mask for each, and the model's attention was set back to "
                f"{attention}: make the cache anew, or leave the model's attention as the cache has set it"
            )

    def _read_mask(self, tokens: Tensor, mask: Any, rows: int, attention: str) -> dict[str, Any]:
        (batch, q_len), lanes = tokens.shape[:2], self.lanes
        if rows != batch:
            self.batch_repeat_interleave(batch)  # a prefix that was read once serves a batch that goes on from it
        if isinstance(mask, Tensor) and mask.ndim == 4:
            if lanes.padded:
                raise ValueError("a padded batch takes an attention_mask of shape [batch, tokens], not one of 4 axes")
            if any(isinstance(layer, RaggedLayer) for layer in self.layers):
                raise ValueError(
                    "an attention_mask of 4 axes says nothing of heads that hold different tokens: leave it out, or "
                    "pass one of shape [batch, tokens]"
                )
            if mask.shape[-1] != (width := self.kept_before(q_len) + q_len):
                raise ValueError(
                    f"attention_mask is {mask.shape[-1]} keys wide, but {width} will be attended to: the tokens held "
                    "before the step, then the step's own"
                )
        plain = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        parents = lanes.announce(batch, q_len, plain, ends=not self.unfinished)
        if parents is not None:
            for ledger in self.ledgers:
                ledger.regroup(parents)
        if not lanes.padded:
            return {"attention_mask": None} if self.ordered and plain is not None else {}
        jumps = self.window is not None and self._at_once(q_len) > self.window
        natives = check_padding(self.layers, self.ledgers, self.ordered, mask, attention, jumps)
        if lanes.seen == 0:
            return {}  # no slot is in use: the mask is right as it is
        assert lanes.of is not None
        assert lanes.shown is not None
        shown = self.ledgers[0].shown(q_len)[lanes.of].to(tokens.device)
        if not natives and bool(shown.all()):
            return {"attention_mask": None}
        if natives:
            real = torch.ones(batch, q_len, dtype=torch.bool) if lanes.real is None else lanes.real
            columns = torch.cat([lanes.shown.to(tokens.device), real.to(tokens.device)], dim=1)
            self._apart_from = columns.shape[1]
        else:
            columns = shown.new_ones(batch, lanes.seen + q_len - shown.shape[1])
        return {"attention_mask": torch.cat([columns, shown], dim=1).long()}

    def _read_positions(self, tokens: Tensor, given: Tensor | None) -> dict[str, Any]:
        (batch, q_len), lanes = tokens.shape[:2], self.lanes
        books = self.ledgers[0].books
        shifts = [book.shift for book in books]
        if given is None:
            if lanes.padded:
                return {"position_ids": self.next_positions(q_len, lanes.real).to(tokens.device)}
            if shifts != [0]:
                self.rebase(0)  # the model will count from the tokens seen
            return {}
        if given.ndim == 3 and bool((given == given[:1]).all()):
            given = given[0]  # multimodal positions of text: all axes count alike
        if given.ndim != 2:
            raise ValueError(
                f"position_ids of shape {tuple(given.shape)} are not [batch, tokens]: multimodal positions are not "
                "supported yet"
            )
        if given.device.type != "cpu" and q_len == 1 and lanes.seen > 0 and not any(shifts):
            return {}  # would wait for the device in every decoding step
        if given.shape[1] != q_len:
            raise ValueError(f"position_ids are {given.shape[1]} in a row for {q_len} tokens: give one for each")
        moved = self.ledgers[0].shifts_of(given.expand(batch, q_len).cpu())
        if moved != shifts:
            self.rebase(moved)
        return {}

    def next_positions(self, q_len: int, real: Tensor | None = None) -> Tensor:
        """The model's own positions of the next `q_len` columns, int64 `[batch or 1, q_len]`, on the CPU.

        `real`, `[batch, q_len]`: the columns of a padded batch that are not hidden; None: all.
        """
        lanes = self.lanes
        first = torch.tensor([book.seen - book.shift for book in self.ledgers[0].books])
        if lanes.of is None or (lanes.seen == 0 and real is None):  # lanes may be those of a pass that came to nothing
            return first[:1, None] + torch.arange(q_len)
        real = torch.ones(len(lanes.of), q_len, dtype=torch.bool) if real is None else real
        positions = first[lanes.of][:, None] + real.cumsum(dim=1) - 1
        return positions.where(real, positions.clamp_min(0))  # what a pad is told does not matter

    def _at_once(self, q_len: int) -> int:
        return q_len if self.chunk is None else min(q_len, self.chunk)

    def _check_room(self, q_len: int) -> None:
        if self.window is not None and (kept := self.kept_before(q_len)) > 0 and kept + q_len > self.window:
            raise ValueError(
                f"a step of {q_len} tokens behind the {kept} held is wider than the sliding window of {self.window}, "
                f"which would hide the oldest: use chunks of {max(1, self.window - kept)} at most, or a smaller budget"
            )
        recording = any(isinstance(layer, BoundedLayer) and layer.record_past for layer in self.layers)
        if recording and not all(ledger.whole(q_len) for ledger in self.ledgers):
            raise ValueError(
                f"assisted decoding takes tokens back, and {self.lanes.seen + q_len} tokens do not fit into the budget "
                f"of {self.ledgers[0].capacity}: what they evict could not come back. Use a budget of the prompt and "
                "all new tokens, or no assistant; to go on without one, a cache.fork()"
            )

    def _batch_for(self, batch: int) -> int:
        """The rows that are held, 1 or `batch`; raises ValueError if they are others."""
        stores = [layer.store for layer in self.layers if isinstance(layer, BoundedLayer) and layer.store is not None]
        if not stores:
            if self.lanes.of is not None and len(self.lanes.of) != batch:  # of a pass that never came to store anything
                self.lanes.reset()
                for ledger in self.ledgers:
                    ledger.reset()
            return batch
        if (rows := stores[0].keys.shape[0]) not in (1, batch):
            raise ValueError(
                f"the cache holds a batch of {rows} and was given {batch} rows: call cache.reset(), or keep the batch "
                "as it was"
            )
        return rows

    def _attending(self, layer_idx: int) -> Any:
        layer = self.layers[layer_idx]
        if isinstance(layer, CacheLayerMixin) or layer_idx != 0:
            return layer
        return next((each for each in self.layers if isinstance(each, CacheLayerMixin)), layer)

    def _made_for(self, model: nn.Module) -> bool:
        other = rotations_of(model)
        return len(other) == len(self.rotations) and all(map(same, self.rotations, other))

    def _apart(self) -> list[int]:
        """The layers that count tokens and have not seen what the others have."""
        counting = ((index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, _COUNTING))
        return [index for index, layer in counting if layer.get_seq_length() != self.lanes.seen]
