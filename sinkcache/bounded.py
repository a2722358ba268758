"""What every bounded layer of a transformers cache is, whoever decides what it keeps."""

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sinkcache.accounts import Accounts
from sinkcache.positions import Rotation
from sinkcache.store import Store


class BoundedLayer(CacheLayerMixin):
    """Holds at most the budget of its `ledger`; `rotation` is None where the layer's keys carry no position.

    `is_sliding`: the model masks this layer as a sliding window. `record_past`: transformers wants to take tokens back.
    """

    supports_early_init = False  # the budget may be a share of a prompt that is not there yet
    reads_attention = False  # the layer must be shown the queries

    def __init__(self, ledger: Accounts, rotation: Rotation | None, is_sliding: bool = False) -> None:
        self.ledger: Any = ledger
        self.rotation, self.is_sliding = rotation, is_sliding
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
        self._refuse(buffer)

    @property
    def values(self) -> Tensor | None:
        """The buffer of values, slots as in `keys`."""
        if self.store is None:
            return None
        return self.store.keys if self._latent else self.store.values

    @values.setter
    def values(self, buffer: Tensor | None) -> None:
        self._refuse(buffer)

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
        q_len = key_states.shape[2]
        step = self.ledger.step(self.seen, q_len)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        self._grow(self.ledger.capacity or 0)
        attended = self._read(self.store, step, key_states, value_states)
        self.seen += q_len
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
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the buffers to where the layer computes."""
        if self.store is not None:
            self._move(self.device)

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back: as long as none was evicted."""
        return self.ledger.whole()

    def activate_past_recording(self) -> None:
        """Announces that tokens may be taken back; from now on a step that would evict is an error."""
        self.record_past = True

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

    def tensors(self) -> list[Tensor]:
        """Every tensor that this layer keeps alive."""
        return [] if self.store is None else self.store.tensors()

    @abstractmethod
    def kept(self) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions held, ascending, rows that hold fewer filled up with -1 in front; a copy, on the CPU."""

    @abstractmethod
    def stored_keys(self) -> Float[Tensor, "batch num_kv_heads kept head_dim"]:
        """The keys held (of latent attention: what turns), as they arrived, in the order of `kept`; a copy.

        Some key of the row where a row of a padded batch holds fewer.
        """

    @abstractmethod
    def _read(self, store: Store, step: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the step's keys and values; what its queries attend to."""

    def _grow(self, capacity: int) -> None:
        assert self.store is not None
        self.store.grow(capacity)

    def _move(self, device: torch.device) -> None:
        if self.store is not None:
            self.store.to(device)

    def _refuse(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            raise AttributeError("a bounded layer's buffers cannot be replaced: its store writes them in place")
