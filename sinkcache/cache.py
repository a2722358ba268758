"""`SinkCache`: a transformers cache that holds at most `budget` tokens a layer, chosen by an eviction policy."""

from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sinkcache.budgets import asked_budget
from sinkcache.guard import Guarded, guard
from sinkcache.layer import SinkLayer
from sinkcache.memory import held_bytes, storage, tensors_of
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policy import Policy
from sinkcache.positions import Rotation, same
from sinkcache.slots import Slots
from sinkcache.support import Positions, decoder_config, frequency_limit, rotations_of, scales_by_position

_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer)  # of the growing kinds
_COUNTING = (SinkLayer, DynamicSlidingWindowLayer)


class SinkCache(Cache, Guarded):
    """Holds at most `budget` tokens in each full-attention layer of `model`; pass it to `model.generate(cache=...)`.

    It bounds memory and keeps generation fluent past the trained length; it does not extend what the model remembers:
    an evicted token is gone. Sliding-window and linear-attention layers keep their native cache.

    `model`: a causal LM, which is probed (three short passes) and announces its passes to the cache from then on; or
    its config, where `positions` is "original": it is trusted, nothing is probed and no pass is checked.
    `budget`: tokens a layer holds, sinks and the newest token included; or a share in (0, 1] of the prompt, settled by
    the first step or by `prefill` (which knows the whole prompt; `generate(prefill_chunk_size=...)` shows the cache the
    first chunk alone); or a list of one number for each bounded layer, which must be equal for now.
    `positions`: "cache" (positions inside the cache, as in StreamingLLM), "original" (those of the stream), or None for
    the policy's own.

    Raises TypeError for arguments of another kind, ValueError for values out of range and for models that cannot be
    bounded exactly, each with its reason.
    """

    def __init__(
        self,
        model: nn.Module | PreTrainedConfig,
        policy: Policy = StreamingLLM(),  # noqa: B008 - frozen and without state
        budget: int | float | list[int] = 1024,
        positions: Positions | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            given = f"a {type(policy).__name__}" if isinstance(policy, nn.Module) else repr(policy)
            raise TypeError(f"policy must be a Policy object such as StreamingLLM(num_sinks=4), got {given}")
        chosen = cast(Positions, policy.convention if positions is None else positions)
        if chosen not in ("cache", "original"):
            raise ValueError(f'positions must be "cache" or "original", got {chosen!r}')
        config = decoder_config(model, chosen)
        limit = frequency_limit(config, chosen)
        layers = DynamicCache(config=config).layers
        bounded = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        unknown = [type(each) for each in layers if isinstance(each, DynamicLayer) and type(each) not in _KNOWN]
        if unknown:
            raise ValueError(
                f"{type(config).__name__} has layers of a kind SinkCache does not know and so cannot bound: "
                f"{unknown[0].__name__}"
            )
        if not bounded:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ValueError(f"{type(config).__name__} has no full-attention layer to bound, only {kinds or 'unknown'}")
        asked = asked_budget(budget, len(bounded))
        if isinstance(asked, int):
            policy.check(asked)
        self._watched = isinstance(model, nn.Module)
        self.rotations = rotations_of(model) if isinstance(model, nn.Module) else [None] * len(layers)
        self.policy, self.positions = policy, chosen
        self.slots = Slots(policy, asked, chosen == "cache", limit)
        self._before: int | None = None  # tokens seen when the pass under way began
        self._checked: int | None = None  # the model that was last found to rotate as the cache does
        self._scales = scales_by_position(config)
        for index in bounded:
            rotation = self.rotations[index]
            if isinstance(rotation, str) and chosen == "cache":
                raise ValueError(f'positions="cache" cannot be had: {rotation}. Use positions="original"')
            layers[index] = SinkLayer(self.slots, rotation if isinstance(rotation, Rotation) else None)
        super().__init__(layers=layers)
        if isinstance(model, nn.Module):
            guard(model)

    @property
    def seen(self) -> int:
        """Tokens of the stream read so far."""
        return self.slots.seen

    @property
    def nbytes(self) -> int:
        """Bytes of storage held by all layers, native ones and turned keys' originals included."""
        return held_bytes(self)

    def kept(self, layer: int) -> Int[Tensor, "batch num_kv_heads kept"]:
        """Stream positions that layer number `layer` holds, ascending; a copy.

        Raises ValueError if that layer keeps its native cache.
        """
        bounded = self.layers[layer]
        if not isinstance(bounded, SinkLayer):
            raise ValueError(f"layer {layer} is not bounded: it keeps its native {type(bounded).__name__}")
        batch, heads = bounded.store.keys.shape[:2] if bounded.store is not None else (1, 1)
        return self.slots.kept().expand(batch, heads, -1).clone()

    def reset(self) -> None:
        """Frees the storage and forgets the stream; the cache can be used again."""
        super().reset()
        for layer in self.layers:
            if type(layer) is DynamicSlidingWindowLayer:  # before transformers 5.18 its keys stayed, as zeros
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.slots.reset()

    def check_rebase(self) -> None:
        """Raises ValueError if some layer's rotation is unknown, so that positions cannot be re-based."""
        unknown = [each for each in self.rotations if isinstance(each, str)]
        if unknown or not self._watched:
            reason = unknown[0] if unknown else "the cache was made from a config, so its rotations are unknown"
            raise ValueError(f"positions cannot be re-based: {reason}")
        if self._scales:
            raise ValueError("positions cannot be re-based: this model scales its queries by their position")

    def rebase(self, shift: int) -> None:
        """From the next step on, the model's positions are the stream's minus `shift`; stored keys are moved to fit.

        `stream` calls it so that positions stay small. Raises ValueError if some layer's rotation is unknown.
        """
        self.check_rebase()
        move = self.slots.shift - shift
        baked = self.slots.rebase(shift)
        for layer, rotation in zip(self.layers, self.rotations, strict=True):
            keys = getattr(layer, "keys", None)
            if not isinstance(rotation, Rotation) or keys is None or move == 0:
                continue
            phase = rotation.phase(torch.tensor([move]), keys)
            if isinstance(layer, SinkLayer):
                assert layer.store is not None
                layer.store.bake(baked, rotation, phase)
            else:  # a native window: every key it holds is young; a copy, since it may be an inference tensor
                turned = keys.clone()
                rotation.put(turned, rotation.pick(keys) * phase)
                cast(Any, layer).keys = turned

    def describe(self) -> str:
        """A table: layer, kind, policy, budget, kept, evicted, bytes."""
        rows: list[tuple[str, ...]] = [("layer", "kind", "policy", "budget", "kept", "evicted", "bytes")]
        for index, layer in enumerate(self.layers):
            held = str(storage(tensors_of(layer)))
            if isinstance(layer, SinkLayer):
                kept = self.slots.held if layer.store is not None else 0
                budget = self.slots.capacity if self.slots.capacity is not None else self.slots.asked
                row = ("full", repr(self.policy), str(budget), str(kept), str(layer.seen - kept))
            else:
                row = (type(layer).__name__, "native", "-", "-", "-")
            rows.append((str(index), *row, held))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def begin_step(self, model: nn.Module, q_len: int, attention_mask: Any, position_ids: Tensor | None) -> None:
        """Raises ValueError for another model, padding, masks and positions it cannot serve, RuntimeError if torn."""
        if apart := self._apart():
            raise RuntimeError(
                f"layers {apart} have not seen {self.seen} tokens as the others have: a forward pass was interrupted. "
                "Call cache.reset() and read the prompt again"
            )
        if q_len < 1:
            raise ValueError(
                f"no new tokens: the cache has seen {self.seen} and was given no more. Pass the whole conversation, or "
                "the new tokens with an attention_mask as wide as both; for another text call cache.reset() first"
            )
        if self._watched and id(model) != self._checked and not self._made_for(model):
            raise ValueError(
                f"this cache was made for a model that rotates otherwise than this {type(model).__name__}: make one "
                "for each model"
            )
        self._checked = id(model)
        self._check_mask(q_len, attention_mask)
        self._check_positions(q_len, position_ids)
        self._before = self.seen

    def end_step(self) -> None:
        """Raises RuntimeError if some layer did not store its tokens here."""
        apart = self._apart()
        if self.seen == self._before or apart:
            raise RuntimeError(
                f"the model did not store its tokens in layers {apart or 'of this cache'}: it bypassed the SinkCache "
                "it was given, so what it computed is not bounded. Report the model; do not trust this output"
            )
        self._before = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers' caches do; raises RuntimeError in a pass that was not announced, so could not be checked."""
        if self._watched and self._before is None:
            raise RuntimeError(
                "these keys come from a pass that was not announced to the SinkCache: call the very causal LM it was "
                "made for, not another model or a part of it"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError unless nothing is to be removed: an evicted token cannot come back."""
        for layer in self.layers:
            if isinstance(layer, SinkLayer):
                layer.crop(tokens_to_remove)

    def _check_mask(self, q_len: int, mask: Any) -> None:
        if not isinstance(mask, Tensor):
            return
        if mask.ndim == 2:
            if mask.shape[1] != self.seen + q_len:
                raise ValueError(
                    f"attention_mask covers {mask.shape[1]} tokens, but the cache has seen {self.seen} and {q_len} are "
                    f"new: pass a mask of width {self.seen + q_len}, or none"
                )
            if not bool(mask.bool().all()):
                raise ValueError(
                    f"attention_mask hides {int((~mask.bool()).sum())} tokens: padded batches are not supported yet. "
                    "Run rows of different lengths one by one"
                )
        elif mask.ndim == 4 and mask.shape[-1] != self.slots.kept_before() + q_len:
            raise ValueError(
                f"attention_mask is {mask.shape[-1]} keys wide, but {self.slots.kept_before() + q_len} will be "
                "attended to: the tokens held before the step, then the step's own"
            )

    def _check_positions(self, q_len: int, position_ids: Tensor | None) -> None:
        if position_ids is None:
            if self.slots.shift != 0:
                self.rebase(0)  # the model will count from the tokens seen
            return
        if position_ids.ndim == 3 and bool((position_ids == position_ids[:1]).all()):
            position_ids = position_ids[0]  # multimodal positions of text: all axes count alike
        if position_ids.ndim != 2:
            raise ValueError(
                f"position_ids of shape {tuple(position_ids.shape)} are not [batch, tokens]: multimodal positions are "
                "not supported yet"
            )
        if position_ids.device.type != "cpu" and q_len == 1 and self.seen > 0 and self.slots.shift == 0:
            return  # would wait for the device in every decoding step
        first = int(position_ids[0, 0])
        expected = torch.arange(first, first + q_len, device=position_ids.device)
        if position_ids.shape[1] != q_len or not bool((position_ids == expected).all()):
            raise ValueError(
                f"position_ids are not {q_len} positions in a row from {first}, the same in each row: padded batches "
                "and packed sequences are not supported yet. Run rows one by one"
            )
        if self.seen > 0 and first not in (self.seen, self.seen - self.slots.shift):
            raise ValueError(
                f"position_ids begin at {first}, but the cache has seen {self.seen} tokens: pass positions that go on "
                "from there, or none, and leave use_cache on"
            )
        if self.seen - first != self.slots.shift:
            self.rebase(self.seen - first)

    def _made_for(self, model: nn.Module) -> bool:
        other = rotations_of(model)
        return len(other) == len(self.rotations) and all(map(same, self.rotations, other))

    def _apart(self) -> list[int]:
        """The layers that count tokens and have not seen what the others have."""
        counting = ((index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, _COUNTING))
        return [index for index, layer in counting if layer.get_seq_length() != self.seen]
