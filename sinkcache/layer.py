"""One bounded layer of a transformers cache: asks the book of slots what to do and has its store do it."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sinkcache.positions import Rotation
from sinkcache.slots import Slots
from sinkcache.store import Store


class SinkLayer(CacheLayerMixin):
    """Holds at most the budget of its `slots`; `rotation` is None where the layer's keys carry no position."""

    is_sliding = False
    supports_early_init = False  # the budget may be a share of a prompt that is not there yet

    def __init__(self, slots: Slots, rotation: Rotation | None) -> None:
        self.slots, self.rotation = slots, rotation
        self.store: Store | None = None
        self.seen = 0
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """The buffer of keys, slots in no particular order; None before the first token."""
        return None if self.store is None else self.store.keys

    @keys.setter
    def keys(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            raise AttributeError("a SinkLayer's buffers cannot be replaced: offloading it is not supported")

    @property
    def values(self) -> Tensor | None:
        """The buffer of values, slots as in `keys`."""
        return None if self.store is None else self.store.values

    @values.setter
    def values(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            raise AttributeError("a SinkLayer's buffers cannot be replaced: offloading it is not supported")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers; the budget must be settled."""
        assert self.slots.capacity is not None
        self.store = Store(self.slots.capacity, key_states, value_states)
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
        step = self.slots.step(self.seen, key_states.shape[2])
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        if step.turns is not None and self.rotation is not None:
            turns = step.turns
            store.turn(turns.slots, turns.fresh, turns.top, self.rotation, turns.phase(self.rotation, key_states))
        if step.in_place:
            store.write(step.targets, key_states, value_states)
            attended = store.read(step.length)
        else:
            attended = store.joined(step.held, step.dropped, key_states, value_states)
            sources = step.sources if isinstance(step.sources, slice) else step.sources.to(key_states.device)
            store.write(step.targets, key_states[:, :, sources], value_states[:, :, sources])
        self.seen += step.q_len
        return attended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next step's queries see, and the offset at which its own tokens stand where they belong."""
        kept = self.slots.kept_before()
        return kept + query_length, self.seen - kept

    def get_seq_length(self) -> int:
        """Tokens seen, which is what positions count; not tokens kept."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: a stream has no end."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def stored_keys(self) -> Float[Tensor, "batch num_kv_heads kept head_dim"]:
        """The keys held, as they arrived, in the order of their positions; a copy."""
        assert self.store is not None
        order = self.slots.positions[: self.slots.held].argsort().to(self.device)
        return self.store.as_arrived(self.slots.held, self.slots.turned(), self.rotation)[:, :, order]

    def reset(self) -> None:
        """Frees the buffers and forgets the stream."""
        self.store = None
        self.is_initialized = False
        self.seen = 0

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Keeps the rows `beam_idx`, in that order."""
        if self.store is not None:
            self.store.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`."""
        if self.store is not None:
            self.store.rows(torch.arange(self.store.keys.shape[0])[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        if self.store is not None:
            self.store.rows(torch.arange(self.store.keys.shape[0]).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError unless nothing is to be removed: an evicted token cannot come back."""
        if tokens_to_remove != 0:
            raise NotImplementedError(
                f"a SinkCache cannot take back {abs(tokens_to_remove)} tokens: what they evicted is gone. Use "
                "copy.deepcopy before the tokens you may want to undo; assisted decoding is not supported"
            )
