"""One bounded layer of a transformers cache: asks its ledger what to do and has its store do it."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sinkcache.ledger import Ledger
from sinkcache.positions import Rotation
from sinkcache.store import Store, at


class SinkLayer(CacheLayerMixin):
    """Holds at most the budget of its `ledger`; `rotation` is None where the layer's keys carry no position.

    `is_sliding`: the model masks this layer as a sliding window. `record_past`: transformers wants to take tokens back.
    """

    supports_early_init = False  # the budget may be a share of a prompt that is not there yet

    def __init__(self, ledger: Ledger, rotation: Rotation | None, is_sliding: bool = False) -> None:
        self.ledger, self.rotation, self.is_sliding = ledger, rotation, is_sliding
        self.store: Store | None = None
        self.record_past = False
        self._latent = rotation is not None and rotation.values
        self.seen = 0
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """The buffer of keys, slots in no particular order; None before the first token."""
        if self.store is None:
            return None
        return self.store.values if self._latent else self.store.keys

    @keys.setter
    def keys(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            raise AttributeError("a SinkLayer's buffers cannot be replaced: its store writes them in place")

    @property
    def values(self) -> Tensor | None:
        """The buffer of values, slots as in `keys`."""
        if self.store is None:
            return None
        return self.store.keys if self._latent else self.store.values

    @values.setter
    def values(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            raise AttributeError("a SinkLayer's buffers cannot be replaced: its store writes them in place")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers for the budgets that are settled: a share of a row's prompt is once it has tokens."""
        self.store = Store(self.ledger.capacity or 0, key_states, value_states)
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self,
        key_states: Float[Tensor, "batch num_kv_heads q_len head_dim"],
        value_states: Float[Tensor, "batch num_kv_heads q_len value_dim"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Stores a step's keys and values; returns those its queries attend to, the step's own last.

        Raises ValueError if the batch size changed, RuntimeError if gradients would flow into the cache.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("SinkCache is for inference: run the model under torch.no_grad()")
        if self.store is not None and self.store.keys.shape[0] != key_states.shape[0]:
            raise ValueError(
                f"the cache holds a batch of {self.store.keys.shape[0]} and was given {key_states.shape[0]} rows: "
                "call cache.reset(), or keep the batch as it was"
            )
        if self._latent:
            key_states, value_states = value_states, key_states  # the store turns its keys
        step = self.ledger.step(self.seen, key_states.shape[2])
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        store.grow(self.ledger.capacity or 0)
        if step.turns is not None and self.rotation is not None:
            turns = step.turns
            store.turn(turns.slots, turns.fresh, turns.top, self.rotation, turns.phase(self.rotation, key_states))
        attended = None
        if not step.in_place or step.order is not None:
            attended = store.joined(step.held, step.dropped, key_states, value_states, step.order)
        store.write(step.targets, at(key_states, step.sources), at(value_states, step.sources))
        attended = store.read(step.length) if attended is None else attended
        self.seen += step.q_len
        return (attended[1], attended[0]) if self._latent else attended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next step's queries see, and the offset at which its own tokens stand where they belong."""
        kept = self.ledger.kept_before(query_length)
        return kept + query_length, self.seen - kept

    def get_seq_length(self) -> int:
        """Tokens seen, which is what positions count; not tokens kept."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: a stream has no end."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def offload(self) -> None:
        """Moves the buffers to the CPU, until the layer's next step."""
        if self.store is not None:
            self.store.to(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the buffers to where the layer computes."""
        if self.store is not None:
            self.store.to(self.device)

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back: as long as none was evicted."""
        return self.ledger.whole()

    def activate_past_recording(self) -> None:
        """Announces that tokens may be taken back; from now on a step that would evict is an error."""
        self.record_past = True

    def stored_keys(self) -> Float[Tensor, "batch num_kv_heads kept head_dim"]:
        """The keys held (of latent attention: what turns), as they arrived, in the order of their positions; a copy.

        Some key of the row where a row of a padded batch holds fewer.
        """
        assert self.store is not None
        lanes = self.ledger.lanes.of
        order = self.ledger.order() if lanes is None else self.ledger.order()[lanes]
        keys = self.store.as_arrived(order.shape[1], self.ledger.turned(), self.rotation)
        order = order.to(self.device)[:, None, :, None].expand(*keys.shape[:2], -1, keys.shape[3])
        return keys.gather(2, order)

    def reset(self) -> None:
        """Frees the buffers and forgets the stream."""
        self.store = None
        self.is_initialized = False
        self.seen = 0

    def rows(self, chosen: Int[Tensor, " batch"]) -> None:
        """Keeps the rows `chosen`, in that order."""
        if self.store is not None:
            self.store.rows(chosen)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest columns, -`tokens_to_remove` of them, once the ledger has."""
        self.seen += tokens_to_remove
