"""One layer of a `FixedSinkCache`: slots for the first tokens of the stream, then a ring of the newest.

The token at stream position p takes slot `num_sinks + (p - num_sinks) % (capacity - num_sinks)`. What changes from step
to step is a counter in a tensor; no shape and no Python number does, so nothing is traced twice.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sinkcache.positions import Rotation


class FixedLayer(CacheLayerMixin):
    """`capacity` slots: `num_sinks` for the first tokens of the stream, the others a ring of the newest.

    `rotation` turns the sinks' keys forward by the tokens evicted, from a copy of how they arrived; None: none move.
    """

    is_compileable = True
    is_sliding = False
    device: torch.device
    seen: Int[Tensor, ""]
    arrived: Float[Tensor, "batch num_kv_heads sinks head_dim"]
    inv_freq: Float[Tensor, " freq"]

    def __init__(self, capacity: int, num_sinks: int, rotation: Rotation | None) -> None:
        super().__init__()
        self.capacity, self.num_sinks, self.rotation = capacity, num_sinks, rotation
        self.empty = True  # not for steps of one token: those would be traced once more

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers; their addresses never change, which CUDA graphs need."""
        self.device = key_states.device
        shape = (*key_states.shape[:2], self.capacity)
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
            self.keys = key_states.new_zeros(*shape, key_states.shape[-1])  # a mask hides zeros, it would not hide NaN
            self.values = value_states.new_zeros(*shape, value_states.shape[-1])
            self.seen = torch.zeros((), dtype=torch.int64, device=self.device)
            if self.rotation is not None:
                self.arrived = self.keys[:, :, : self.num_sinks].clone()
                self.inv_freq = self.rotation.inv_freq.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in self.tensors():
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(
        self,
        key_states: Float[Tensor, "batch num_kv_heads q_len head_dim"],
        value_states: Float[Tensor, "batch num_kv_heads q_len value_dim"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Stores a step's keys and values; returns those its queries attend to, under a mask of `get_mask_sizes`.

        Raises ValueError if the batch size changed, RuntimeError if gradients would flow into the cache.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("FixedSinkCache is for inference: run the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        buffers, q_len = (cast(Tensor, self.keys), cast(Tensor, self.values)), key_states.shape[2]
        if (rows := len(buffers[0])) != len(key_states):
            raise ValueError(f"the cache holds {rows} rows and was given {len(key_states)}: make another cache")
        if self.rotation is not None:
            self._turn(self.rotation)
        attended = buffers if q_len == 1 else self._joined(key_states, value_states)
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            if q_len == 1:
                buffer.index_copy_(2, self._slots(self.seen[None]), new)
            else:
                self._merge(buffer, self._holders(q_len), new)
        if self.rotation is not None:
            self._merge(self.arrived, torch.arange(self.num_sinks, device=self.device), key_states)
        self.seen.add_(q_len)
        self.empty = False
        return attended

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """How many keys the next step attends to, and the offset at which a causal mask hides the empty ones."""
        if query_length > 1 and self.empty:
            return query_length, 0
        return self.capacity - 1 + query_length, self._evicted()

    def get_seq_length(self) -> Any:
        """Tokens seen, as a tensor once there were any; not tokens kept."""
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        """-1: a stream has no end."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def tensors(self) -> list[Tensor]:
        """Every tensor this layer keeps alive."""
        return [each for each in vars(self).values() if isinstance(each, Tensor)]

    def reset(self) -> None:
        """Forgets the stream; the buffers stay where they are."""
        self.empty = True
        if self.is_initialized:
            self.seen.zero_()

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Puts the rows `beam_idx`, as many as there are, in place of the rows."""
        for each in self.tensors():
            if each.ndim == 4:
                each.copy_(each.index_select(0, beam_idx.to(each.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError unless nothing is to be removed: an evicted token cannot come back."""
        if tokens_to_remove != 0:
            raise NotImplementedError("a FixedSinkCache cannot take back tokens: what they evicted is gone")

    def _evicted(self) -> Tensor | int:
        """How many of the tokens seen the next one will not attend to."""
        return (self.seen + 1 - self.capacity).clamp(min=0) if self.is_initialized else 0

    def _turn(self, rotation: Rotation) -> None:
        """Rewrites the sinks' keys as they arrived, turned by the tokens evicted; angles in float64."""
        sinks = cast(Tensor, self.keys)[:, :, : self.num_sinks]
        wide = torch.promote_types(sinks.dtype, torch.float32)
        angles = self._evicted() * self.inv_freq
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        real, imaginary = rotation.pairs(self.arrived).to(wide).unbind(-1)  # inductor compiles no complex numbers
        rotation.pairs(sinks).copy_(torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1))

    def _slots(self, positions: Int[Tensor, " kv_len"]) -> Int[Tensor, " kv_len"]:
        """Where tokens at `positions` go."""
        ring = self.num_sinks + (positions - self.num_sinks) % (self.capacity - self.num_sinks)
        return torch.where(positions < self.num_sinks, positions, ring)

    def _holders(self, q_len: int) -> Int[Tensor, " kv_len"]:
        """Which position each slot holds after `q_len` more tokens; of slots not yet in use, any."""
        slots, newest = torch.arange(self.capacity, device=self.device), self.seen + q_len - 1
        return torch.where(slots < self.num_sinks, slots, newest - (newest - slots) % (self.capacity - self.num_sinks))

    def _merge(self, buffer: Tensor, holders: Int[Tensor, " kv_len"], new: Tensor) -> None:
        """Writes into the slots of `buffer` those of the `new` tokens that are among their `holders`."""
        source = holders - self.seen
        is_new = (source >= 0) & (source < new.shape[2])
        buffer.copy_(torch.where(is_new[:, None], new.index_select(2, source.clamp(0, new.shape[2] - 1)), buffer))

    def _joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of what is held, oldest first and without what a full layer drops; the new tokens; then filling."""
        if self.empty:
            return keys, values
        columns = torch.arange(self.capacity - 1 + keys.shape[2], device=self.device)
        positions = torch.where(columns < self.num_sinks, columns, columns + self._evicted())
        new = self.capacity + (positions - self.seen).clamp(0, keys.shape[2] - 1)
        chosen = torch.where(positions < self.seen, self._slots(positions), new)
        every = torch.cat([cast(Tensor, self.keys), keys], 2), torch.cat([cast(Tensor, self.values), values], 2)
        return every[0].index_select(2, chosen), every[1].index_select(2, chosen)
