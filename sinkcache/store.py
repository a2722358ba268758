"""The memory of one layer: two buffers of `capacity` slots, allocated once and written in place.

Slots are in no order: attention over held tokens does not depend on it (keys carry their own position), so a new token
simply takes the slot of the evicted one. A key stays as it arrived. Where it must be read at another position the
buffer holds the turned key and `arrived` holds the original, so that no key is ever rounded twice.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Complex, Float, Int, Shaped
from torch import Tensor

from sinkcache.positions import Rotation

Index = slice | Tensor  # which slots, in every row: a run where they are one, else int64 [slots] on the CPU


@dataclass(frozen=True)
class At:
    """Slots that are not the same in each row: `slots[i]` of row `rows[i]`, on the CPU."""

    rows: Int[Tensor, " places"]
    slots: Int[Tensor, " places"]
    _on: dict = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rows` and `slots` on `device`; moved once for all layers."""
        if device not in self._on:
            self._on[device] = (self.rows.to(device), self.slots.to(device))
        return self._on[device]


class Store:
    """Keys `[batch, num_kv_heads, capacity, head_dim]` and values, of which the owner says which slots are in use."""

    def __init__(
        self,
        capacity: int,
        keys: Float[Tensor, "batch num_kv_heads q_len head_dim"],
        values: Float[Tensor, "batch num_kv_heads q_len value_dim"],
    ) -> None:
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
            # zeros: a slot that a row does not use is masked, but NaN times a weight of zero would still be NaN
            self.keys = keys.new_zeros(*keys.shape[:2], capacity, keys.shape[-1])
            self.values = values.new_zeros(*values.shape[:2], capacity, values.shape[-1])
        self.arrived: Complex[Tensor, "batch num_kv_heads moved freq"] | None = None
        self._turning: tuple[slice, Tensor, Tensor] | None = None  # a run of slots that turns in each step: from, to

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_turning": None}  # views, which a pickle would cut off from their buffers

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` slots, without a copy."""
        if length == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, :length], self.values[:, :, :length]

    def write(
        self,
        slots: Index | At,
        keys: Float[Tensor, "rows num_kv_heads written head_dim"],
        values: Float[Tensor, "rows num_kv_heads written value_dim"],
    ) -> None:
        """Overwrites `slots` with as many tokens, as `at` gives them."""
        _assign(self.keys, slots, keys)
        _assign(self.values, slots, values)

    def put(
        self,
        places: Int[Tensor, " written"],
        keys: Float[Tensor, "batch num_kv_heads q_len head_dim"],
        values: Float[Tensor, "batch num_kv_heads q_len value_dim"],
    ) -> None:
        """Overwrites `places`, slots counted through all rows and heads, with as many tokens."""
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, places, new.reshape(-1, new.shape[-1]))

    def joined(
        self,
        held: int,
        dropped: int | None,
        keys: Float[Tensor, "batch num_kv_heads q_len head_dim"],
        values: Float[Tensor, "batch num_kv_heads q_len value_dim"],
        order: Int[Tensor, " held"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The first `held` slots but `dropped`, or those in `order`, then the new tokens: a copy if any is held."""
        if held == 0:
            return keys, values
        if order is not None:
            return torch.cat([at(self.keys, order), keys], dim=2), torch.cat([at(self.values, order), values], dim=2)
        runs = (slice(0, held),) if dropped is None else (slice(0, dropped), slice(dropped + 1, held))
        return (
            torch.cat([*(self.keys[:, :, run] for run in runs), keys], dim=2),
            torch.cat([*(self.values[:, :, run] for run in runs), values], dim=2),
        )

    def turn(self, slots: Index | At, fresh: Index | At | None, top: int, rotation: Rotation, phase: Tensor) -> None:
        """Rewrites `slots` (all below `top`) as their arrived keys turned by `phase`, complex `[moved or 1, freq]`.

        `fresh` slots turn for the first time: their keys are put aside as they arrived.
        """
        if fresh is not None:
            self._reserve(top, rotation)
            assert self.arrived is not None
            _assign(self.arrived, fresh, rotation.pick(at(self.keys, fresh)))
        assert self.arrived is not None
        if isinstance(slots, slice):
            if self._turning is None or self._turning[0] != slots:
                self._turning = (slots, self.arrived[:, :, slots], rotation.pairs(self.keys[:, :, slots]))
            self._turning[2].copy_(torch.view_as_real(self._turning[1] * phase))
        else:
            rows = at(self.keys, slots)
            rotation.put(rows, at(self.arrived, slots) * phase)
            _assign(self.keys, slots, rows)

    def turn_each(
        self,
        fresh: Bool[Tensor, "batch num_kv_heads kv_len"],
        turning: Bool[Tensor, "batch num_kv_heads kv_len"],
        rotation: Rotation,
        phase: Complex[Tensor, "batch num_kv_heads kv_len freq"],
    ) -> None:
        """Rewrites the first slots, where they are `turning`, as their arrived keys turned by `phase`, each by its own.

        `fresh` ones turn for the first time: their keys are put aside as they arrived.
        """
        self._reserve(self.keys.shape[2], rotation)
        assert self.arrived is not None
        keys, arrived = self.keys[:, :, : phase.shape[2]], self.arrived[:, :, : phase.shape[2]]
        picked = rotation.pick(keys)
        arrived.copy_(torch.where(fresh[..., None], picked, arrived))
        rotation.put(keys, torch.where(turning[..., None], arrived * phase, picked))

    def bake(self, slots: Index | At, rotation: Rotation, phase: Tensor) -> None:
        """Turns the keys in `slots` for good, rounding them once more."""
        rows = at(self.keys, slots).clone()
        rotation.put(rows, rotation.pick(rows) * phase)
        _assign(self.keys, slots, rows)

    def as_arrived(
        self, length: int, turned: Index | At, rotation: Rotation | None
    ) -> Float[Tensor, "batch num_kv_heads kv_len head_dim"]:
        """A copy of the keys in the first `length` slots, the `turned` ones turned back exactly."""
        keys = self.keys[:, :, :length].clone()
        if rotation is not None and self.arrived is not None:
            rows = at(keys, turned).clone()
            rotation.put(rows, at(self.arrived, turned))
            _assign(keys, turned, rows)
        return keys

    def rows(self, chosen: Tensor) -> None:
        """Keeps the batch rows `chosen` (int64 `[batch]`, repeats allowed), in that order; frees the others."""
        self._turning = None  # its views would keep the old buffers alive
        with torch.inference_mode(False):
            self.keys = self.keys.index_select(0, chosen.to(self.keys.device))
            self.values = self.values.index_select(0, chosen.to(self.values.device))
            if self.arrived is not None:
                self.arrived = self.arrived.index_select(0, chosen.to(self.arrived.device))

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` slots at least."""
        more = capacity - self.keys.shape[2]
        if more > 0:
            self._turning = None  # its views would keep the old buffers alive
            with torch.inference_mode(False):
                self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, more))
                self.values = torch.nn.functional.pad(self.values, (0, 0, 0, more))

    def to(self, device: torch.device) -> None:
        """Moves every tensor to `device`."""
        if self.keys.device != device:
            self._turning = None  # its views would keep the old buffers alive
            with torch.inference_mode(False):
                self.keys, self.values = self.keys.to(device), self.values.to(device)
                self.arrived = None if self.arrived is None else self.arrived.to(device)

    def tensors(self) -> list[Tensor]:
        """Every tensor this store keeps alive."""
        return [tensor for tensor in (self.keys, self.values, self.arrived) if tensor is not None]

    def _reserve(self, top: int, rotation: Rotation) -> None:
        have = 0 if self.arrived is None else self.arrived.shape[2]
        if have >= top:
            return
        wide = torch.promote_types(self.keys.dtype, torch.float32) == torch.float64
        dtype = torch.complex128 if wide else torch.complex64
        shape = (*self.keys.shape[:2], top, rotation.inv_freq.shape[0])
        with torch.inference_mode(False):
            grown = torch.zeros(shape, dtype=dtype, device=self.keys.device)
        if self.arrived is not None:
            grown[:, :, :have] = self.arrived
        self.arrived, self._turning = grown, None


def at(
    buffer: Float[Tensor, "batch heads slots dim"] | Complex[Tensor, "batch heads slots dim"], slots: Index | At
) -> Tensor:
    """The `slots` of a buffer, `[batch, heads, slots, dim]`; `[1, heads, places, dim]` where rows differ."""
    if isinstance(slots, slice):
        return buffer[:, :, slots]
    if isinstance(slots, At):
        rows, places = slots.on(buffer.device)
        return rearrange(buffer[rows, :, places], "place h d -> 1 h place d")
    return buffer.index_select(2, slots.to(buffer.device))


def rows_at(
    buffer: Shaped[Tensor, "batch buffers slots dim"], slots: Int[Tensor, "batch num_kv_heads kept"]
) -> Shaped[Tensor, "batch num_kv_heads kept dim"]:
    """A copy of `slots`, of each row and head its own, or some of a buffer that all heads share; of any slot for -1.

    By rows of flat memory: a gather whose index is expanded is thousands of times slower in half precision on a CPU.
    """
    batch, buffers, length, dim = buffer.shape
    first = torch.arange(batch * buffers, device=buffer.device).reshape(batch, buffers, 1) * length
    flat = (slots.clamp_min(0) + first).flatten()
    return buffer.reshape(-1, dim).index_select(0, flat).reshape(*slots.shape, dim)


def _assign(buffer: Tensor, slots: Index | At, rows: Tensor) -> None:
    if isinstance(slots, slice):
        buffer[:, :, slots].copy_(rows)
    elif isinstance(slots, At):
        chosen, places = slots.on(buffer.device)
        buffer[chosen, :, places] = rearrange(rows, "1 h place d -> place h d").to(buffer.dtype)
    else:
        buffer.index_copy_(2, slots.to(buffer.device), rows)
