"""`FixedSinkCache`: sinks and a window in buffers of one shape, so that decoding compiles to one graph.

A decoded token always attends to the same `budget` slots: those of the sinks, then a ring in which the token at stream
position p takes slot `num_sinks + (p - num_sinks) % (budget - num_sinks)`. What changes from step to step is a counter
in a tensor; no shape and no Python number does, so nothing is traced twice.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from sinkcache.guard import Guarded, guard
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policies.window import Window
from sinkcache.policy import Policy
from sinkcache.positions import Rotation, same
from sinkcache.support import Positions, decoder_config, frequency_limit, rotations_of


class FixedSinkCache(StaticCache, Guarded):  # with flash attention, generate keeps the mask for a StaticCache alone
    """Holds `budget` tokens a layer; for `torch.compile(model, fullgraph=True)` and for a `generate` that compiles.

    Computes what `SinkCache` does with the same `policy` (`Window`, `StreamingLLM`), `budget` (tokens) and `positions`,
    where every layer of `model` has full attention. Read the prompt uncompiled: steps of several tokens are checked,
    which breaks a graph, and refused where rows are padded; a compiled step of one token is not checked. `reset` keeps
    the buffers. Positions grow with the stream, and models compute their angles in float32: for millions of tokens use
    `SinkCache` with `sinkcache.stream`. Raises TypeError or ValueError, with the reason, for what it cannot serve.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy = StreamingLLM(),  # noqa: B008 - frozen and without state
        budget: int = 1024,
        positions: Positions | None = None,
    ) -> None:
        if type(policy) not in (Window, StreamingLLM):
            raise ValueError(f"policy must be Window or StreamingLLM, got {policy!r}: for any other use SinkCache")
        chosen = cast(Positions, policy.convention if positions is None else positions)
        if chosen not in ("cache", "original"):
            raise ValueError(f'positions must be "cache" or "original", got {chosen!r}')
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ValueError(f"budget must be a number of tokens, at least 1, got {budget!r}: shares are for SinkCache")
        policy.check(budget)
        config = decoder_config(model, chosen)
        if frequency_limit(config, chosen) is not None:
            raise ValueError("rope_type is dynamic, which needs small positions: use SinkCache with sinkcache.stream")
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        if kinds != {DynamicLayer}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"{type(config).__name__} has layers other than full attention ({names}): use SinkCache")
        self.policy, self.positions, self.rotations = policy, chosen, rotations_of(model)
        unknown = [rotation for rotation in self.rotations if isinstance(rotation, str)]
        if unknown and chosen == "cache":
            raise ValueError(f'positions="cache" cannot be had: {unknown[0]}. Use positions="original"')
        num_sinks = policy.num_sinks if isinstance(policy, StreamingLLM) else 0
        moving = self.rotations if num_sinks and chosen == "cache" else [None] * len(self.rotations)
        Cache.__init__(self, layers=[FixedLayer(budget, num_sinks, cast(Rotation | None, each)) for each in moving])
        self._before: int | None = None  # tokens seen when the pass under way began; -1 where they were not counted
        guard(model)

    @property
    def seen(self) -> int:
        """Tokens of the stream read so far; waits for the device."""
        return max(self._counts())

    @property
    def nbytes(self) -> int:
        """Bytes of storage held by all layers."""
        held = [each.untyped_storage() for layer in self.layers for each in cast(FixedLayer, layer).tensors()]
        return sum({each.data_ptr(): each.nbytes() for each in held}.values())

    def begin_step(self, model: nn.Module, tokens: Tensor, attention_mask: Any, position_ids: Tensor | None) -> dict:
        """Nothing to change; raises ValueError for padding and what else it cannot serve, RuntimeError if torn."""
        if not (torch.compiler.is_compiling() and tokens.shape[1] == 1):
            self._check(model, tokens.shape[1], attention_mask, position_ids)
        return {}

    def end_step(self) -> None:
        """Raises RuntimeError if some layer did not store its tokens here."""
        if not torch.compiler.is_compiling():
            before, self._before = self._before, None
            if before != -1 and before in self._counts():
                raise RuntimeError("the model did not store its tokens in each layer of this cache: report the model")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers' caches do; raises RuntimeError in a pass that was not announced, so could not be checked."""
        if self._before is None and not torch.compiler.is_compiling():
            raise RuntimeError("this pass was not announced to the cache: call the very causal LM it was made for")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _counts(self) -> set[int]:
        return {int(cast(FixedLayer, layer).get_seq_length()) for layer in self.layers}

    @torch.compiler.disable(reason="FixedSinkCache checks steps of several tokens: read the prompt uncompiled")
    def _check(self, model: nn.Module, q_len: int, mask: Any, position_ids: Tensor | None) -> None:
        first = cast(FixedLayer, self.layers[0])
        flash = mask is None and "flash" in str(cast(Any, model).config._attn_implementation)
        if q_len == 1 and first.is_initialized and first.device.type != "cpu" and not flash:
            self._before = -1
            return  # would wait for the device in every decoding step
        counts = self._counts()
        if len(counts) > 1:
            raise RuntimeError(f"layers have seen {sorted(counts)} tokens, a pass was interrupted: call cache.reset()")
        seen, (length, offset) = counts.pop(), (int(each) for each in first.get_mask_sizes(q_len))
        if seen == 0 and not all(map(same, self.rotations, rotations_of(model))):
            raise ValueError(f"this cache was made for a model that rotates otherwise than this {type(model).__name__}")
        if q_len < 1:
            raise ValueError("no new tokens: pass the new ones too, or for another text call cache.reset() first")
        if flash and length + offset > seen + q_len:
            raise ValueError(f"flash attention reads empty slots without attention_mask=torch.ones(_, {seen + q_len})")
        given = [each for each in (mask.values() if isinstance(mask, dict) else [mask]) if isinstance(each, Tensor)]
        fits = all(_is_causal(each, seen, q_len, length, offset) for each in given)
        if position_ids is not None:
            fits &= bool((position_ids.cpu() == torch.arange(seen, seen + q_len)).all())
        if not fits:
            raise ValueError(
                f"position_ids are not {q_len} in a row from {seen}, or attention_mask does more than show those their "
                "past: padded batches are not supported by FixedSinkCache. Run rows of different lengths one by one"
            )
        self._before = seen


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


def _is_causal(mask: Tensor, seen: int, q_len: int, length: int, offset: int) -> bool:
    """Whether `mask` shows each new token what is held and its own past, and nothing else."""
    if mask.ndim == 2:
        return mask.shape[1] == seen + q_len and bool(mask.bool().all())
    causal = torch.arange(length) + offset <= torch.arange(seen, seen + q_len)[:, None]
    shown = (mask if mask.dtype == torch.bool else mask >= 0).cpu()
    return shown.shape[-1] == length and bool((shown == causal).all())
