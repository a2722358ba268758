"""`FixedSinkCache`: sinks and a window in buffers of one shape, so that decoding compiles to one graph.

A decoded token always attends to the same `budget` slots, which each layer keeps (see `sinkcache.ring`). The cache says
what it can serve, and checks each pass that is not compiled.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from sinkcache.guard import Guarded, guard
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policies.window import Window
from sinkcache.policy import Policy
from sinkcache.positions import Rotation, same
from sinkcache.ring import FixedLayer
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


def _is_causal(mask: Tensor, seen: int, q_len: int, length: int, offset: int) -> bool:
    """Whether `mask` shows each new token what is held and its own past, and nothing else."""
    if mask.ndim == 2:
        return mask.shape[1] == seen + q_len and bool(mask.bool().all())
    causal = torch.arange(length) + offset <= torch.arange(seen, seen + q_len)[:, None]
    shown = (mask if mask.dtype == torch.bool else mask >= 0).cpu()
    return shown.shape[-1] == length and bool((shown == causal).all())
