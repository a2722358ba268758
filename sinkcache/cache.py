"""`SinkCache`: a transformers cache that holds at most `budget` tokens a layer, chosen by an eviction policy."""

import copy
import os
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from sinkcache.attention import fit, reveal
from sinkcache.book import check_budget
from sinkcache.bounded import BoundedLayer
from sinkcache.budgets import asked_budgets
from sinkcache.files import read, write
from sinkcache.guard import guard
from sinkcache.lanes import Lanes
from sinkcache.layer import SinkLayer
from sinkcache.ledger import Ledger
from sinkcache.memory import held_bytes, storage, tensors_of
from sinkcache.origin import Origin
from sinkcache.passes import Announced
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policy import Policy
from sinkcache.positions import Rotation
from sinkcache.probe import Found
from sinkcache.ragged import RaggedLayer
from sinkcache.scored import ScoredLayer
from sinkcache.slots import Slots
from sinkcache.support import (
    Positions,
    bounded_layers,
    check_sliding,
    check_watch,
    decoder_config,
    found_in,
    frequency_limit,
    scales_by_position,
)
from sinkcache.tally import Tallies, Tally


class SinkCache(Announced):
    """Holds at most `budget` tokens in each full-attention layer of `model`; pass it to `model.generate(cache=...)`.

    It bounds memory and keeps generation fluent past the trained length; it does not extend what the model remembers:
    an evicted token is gone. Sliding-window and linear-attention layers keep their native cache.

    `model`: a causal LM, which is probed (three short passes) and announces its passes to the cache from then on; or
    its config, where `positions` is "original": it is trusted, nothing is probed, no pass is checked, and padding is
    not seen.
    `budget`: tokens a layer holds, sinks and the newest token included; or a share in (0, 1] of the prompt, settled by
    the first step or by `prefill` (which knows the whole prompt; `generate(prefill_chunk_size=...)` shows the cache the
    first chunk alone); or a list of one for each bounded layer. Layers that hold different numbers need a mask each:
    the model's attention is then set to one that cuts the mask to each layer's keys (sdpa and eager attention).
    `positions`: "cache" (positions inside the cache, as in StreamingLLM), "original" (those of the stream), or None for
    the policy's own.
    `sliding`: "native", or "bound": layers with a sliding window are bounded too; the budget must fit into the window.

    `offload`: "cpu" keeps every layer's storage on the CPU but while that layer computes.
    `evict_every`: a full layer gives up so many tokens at once, so that scores are asked for once in so many decoding
    steps; it then holds between `budget - evict_every` and `budget`.

    Rows of a batch padded on the left, or with holes, are each as they would be alone: pads are never held. Holes are
    refused beside sliding windows, which count them.

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
        evict_every: int = 1,
    ) -> None:
        chosen = _checked(policy, positions, sliding, offload, evict_every)
        config = decoder_config(model, chosen)
        limit = frequency_limit(config, chosen)
        layers: list[Any] = DynamicCache(config=config).layers
        bounded = bounded_layers(config, layers, sliding)
        asked = asked_budgets(budget, len(bounded))
        for each in asked:
            if isinstance(each, int):
                check_budget(policy, each, evict_every)
        self.window = check_sliding(config, [layers[index] for index in bounded], asked)
        self.watched, self.offloaded = isinstance(model, nn.Module), offload == "cpu"
        found = found_in(model) if isinstance(model, nn.Module) else Found([None] * len(layers), ordered=False)
        self.rotations, self.ordered = list(found.rotations), found.ordered
        if self.ordered and chosen == "original":
            raise ValueError(
                'positions="original" cannot be had: this model goes by the order of its cache (ALiBi), so distance is '
                'counted inside the cache. Use positions="cache"'
            )
        self.policy, self.positions, self.sliding, self.evict_every = policy, chosen, sliding, evict_every
        scored = policy.watch().anything or policy.across_heads or evict_every > 1
        if scored:
            check_watch(model, policy.watch(), self.ordered, [self.rotations[index] for index in bounded])
        self.lanes = Lanes()
        ledgers = self._accounts(asked, limit, scored)
        self.ledgers = list(ledgers.values())
        self._scales = scales_by_position(config)
        for index, each in zip(bounded, asked, strict=True):
            rotation = self.rotations[index]
            if isinstance(rotation, str) and chosen == "cache":
                raise ValueError(f'positions="cache" cannot be had: {rotation}. Use positions="original"')
            known = rotation if isinstance(rotation, Rotation) else None
            account, slides = ledgers[repr(each)], layers[index].is_sliding
            if scored:
                kind = RaggedLayer if policy.across_heads else ScoredLayer
                layers[index] = kind(account, known, slides, policy, index, chosen == "cache")
                layers[index].offloaded = self.offloaded
            else:
                layers[index] = SinkLayer(account, known, slides)
        if scored and evict_every == 1 and not policy.watch().own and not policy.across_heads:
            _join_all([each for each in layers if isinstance(each, ScoredLayer)])
        if len(ledgers) > 1:
            fit(model)
        self.reads_attention = policy.watch().attention or policy.across_heads
        if self.reads_attention:
            reveal(model)
        super().__init__(layers=layers)
        self.origin = Origin(model)
        if isinstance(model, nn.Module):
            guard(model)

    def _accounts(self, asked: list[int | float], limit: int | None, scored: bool) -> dict[str, Any]:
        """What keeps count for the layers of each budget, by what was asked: 1 is not 1.0."""
        accounts: dict[str, Any] = {}
        for each in asked:
            if scored:
                accounts[repr(each)] = Tallies(Tally(self.policy, each, limit, self.evict_every), self.lanes)
            else:
                book = Slots(self.policy, each, self.positions == "cache", limit, self.ordered)
                accounts[repr(each)] = Ledger(book, self.lanes)
        return accounts

    @property
    def nbytes(self) -> int:
        """Bytes of storage held by all layers, native ones and turned keys' originals included."""
        return held_bytes(self)

    @property
    def slots(self) -> Slots:
        """The one book that all layers and rows follow; raises ValueError where budgets or rows differ."""
        if not isinstance(self.ledgers[0], Ledger):
            raise ValueError("each layer, row and head of this cache keeps tokens of its own: no one book tells of all")
        if len(self.ledgers) > 1 or len(self.lanes) > 1:
            raise ValueError("layers or rows of this cache hold different numbers of tokens: no one book tells of all")
        return self.ledgers[0].books[0]

    def kept(self, layer: int) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions that layer number `layer` holds, ascending; a copy.

        In a padded batch they count a row's own tokens, and rows that hold fewer are filled up with -1 in front. Raises
        ValueError if that layer keeps its native cache.
        """
        bounded = self.layers[layer]
        if not isinstance(bounded, BoundedLayer):
            raise ValueError(f"layer {layer} is not bounded: it keeps its native {type(bounded).__name__}")
        return bounded.kept()

    def reset(self) -> None:
        """Frees the storage and forgets the stream; the cache can be used again."""
        super().reset()
        for layer in cast(list[Any], self.layers):
            if hasattr(layer, "record_past"):
                layer.record_past = False
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

    def describe(self) -> str:
        """A table: layer, kind, policy, budget, kept, evicted, bytes; of a padded batch, of the row with the most."""
        rows: list[tuple[str, ...]] = [("layer", "kind", "policy", "budget", "kept", "evicted", "bytes")]
        for index, layer in enumerate(self.layers):
            mine = tensors_of(layer)  # of bounded layers all of each; several may share a storage
            bounded = isinstance(layer, BoundedLayer)
            held = str(sum(each.numel() * each.element_size() for each in mine) if bounded else storage(mine))
            if isinstance(layer, BoundedLayer):
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
        with torch.inference_mode(False):  # or its books could not be written later
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
        offload: Literal["cpu"] | None = None,
    ) -> "SinkCache":
        """The cache that was saved at `path`, which goes on as that one would have; `model` is the one it was made for.

        `policy` must be given if it is none of `sinkcache.policies`; it and `positions` must be those of the file.
        Where the cache is kept (`offload`) is not in the file.
        Raises FileNotFoundError if there is no file, ValueError if it is damaged, or another's.
        """
        saved = read(path, model, policy, positions)
        cache = cls(model, **saved.arguments, offload=offload)
        saved.restore(cache, model)
        return cache


def _join_all(layers: list[ScoredLayer]) -> None:
    """Has those of `layers` decide together that share a budget, and whose keys both move or both do not."""
    first: dict[tuple[int, bool], ScoredLayer] = {}
    for layer in layers:
        leader = first.setdefault((id(layer.ledger), layer.in_cache), layer)
        if leader is not layer:
            layer.peers = leader.peers
            layer.peers.layers.append(layer)


def _checked(policy: Any, positions: Any, sliding: Any, offload: Any, evict_every: Any) -> Positions:
    """The convention to use; raises TypeError or ValueError for what is none of the choices."""
    if not isinstance(policy, Policy):
        given = f"a {type(policy).__name__}" if isinstance(policy, nn.Module) else repr(policy)
        raise TypeError(f"policy must be a Policy object such as StreamingLLM(num_sinks=4), got {given}")
    if inner := [each for each in _within(policy) if each.across_heads]:
        raise ValueError(
            f"heads compete by the policy that the cache is given, not by one within it: put {type(inner[0]).__name__} "
            f"outermost, got {policy!r}"
        )
    chosen = cast(Positions, policy.convention if positions is None else positions)
    if chosen not in ("cache", "original"):
        raise ValueError(f'positions must be "cache" or "original", got {chosen!r}')
    if sliding not in ("native", "bound"):
        raise ValueError(f'sliding must be "native" or "bound", got {sliding!r}')
    if offload not in ("cpu", None):
        raise ValueError(f'offload must be "cpu" or None, got {offload!r}')
    if not isinstance(evict_every, int) or isinstance(evict_every, bool) or evict_every < 1:
        raise ValueError(f"evict_every must be 1 or more tokens, got {evict_every!r}")
    return chosen


def _within(policy: Policy) -> list[Policy]:
    """The policies that `policy` holds, and those that these hold."""
    held = [each for each in vars(policy).values() if isinstance(each, Policy)]
    return held + [deeper for each in held for deeper in _within(each)]
