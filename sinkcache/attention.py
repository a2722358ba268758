"""Attention functions of ours, registered with transformers under names of their own.

`packed`: one decoding step reads each key once, not once per query head. With grouped heads and no mask, transformers
asks torch for `enable_gqa`, which on a CPU has no fast kernel in half precision: a step over 4,096 tokens takes twice
as long as it need (see benchmarks/README.md). Here a single query's heads become the rows of one small matrix per key
head, which every kernel serves. All other steps, and all other devices, go to transformers' own sdpa attention.

`fit`: transformers makes one mask for all full-attention layers. Where these hold different numbers of tokens it is
made for the longest, and each layer takes the columns at its end: its own slots, all visible, and the step's tokens.
"""

import sys
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from sinkcache.devices import device_of

_PACKED, _EAGER = "sinkcache_packed", "sinkcache_eager"


def packed() -> str:
    """The name to give to `model.set_attn_implementation`; registers the function under it."""
    AttentionInterface.register(_PACKED, attend)
    AttentionMaskInterface.register(_PACKED, sdpa_mask)
    return _PACKED


def fit(model: Any) -> None:
    """Has `model` attend with masks cut to each layer's keys: sdpa becomes `packed`, eager attention stays eager.

    Raises ValueError if its attention is another, or cannot be set.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            "budgets that differ between layers need the model, whose attention must cut the mask: got a config"
        )
    current = cast(Any, model).config._attn_implementation
    if current in (_PACKED, _EAGER) or "flash" in str(current):  # unpadded, flash attention takes no mask
        return
    if current not in ("sdpa", "eager") or not _settable(model):
        raise ValueError(
            f"budgets that differ between layers need a mask for each, which {current} attention of "
            f"{type(model).__name__} cannot be given: use sdpa or eager attention, or one budget"
        )
    AttentionInterface.register(_EAGER, attend_eagerly)
    AttentionMaskInterface.register(_EAGER, eager_mask)
    expected = _read(model)
    cast(Any, model).set_attn_implementation(packed() if current == "sdpa" else _EAGER)
    if not _cuts_at_the_end(model, expected, boolean=current == "sdpa"):
        cast(Any, model).set_attn_implementation(current)
        raise ValueError(
            f"budgets that differ between layers need a mask for each, and {type(model).__name__} cuts masks in a way "
            "of its own: give one budget"
        )


def attend(
    module: nn.Module,
    query: Float[Tensor, "batch num_heads q_len head_dim"],
    key: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    value: Float[Tensor, "batch num_kv_heads kv_len value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch q_len num_heads value_dim"], None]:
    """Attention of a step's queries, as transformers' sdpa attention computes it."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("packed attention has no learned sinks (s_aux), which this model needs: use eager attention")
    num_kv_heads = key.shape[1]
    attention_mask = _cut(attention_mask, key)
    plain = attention_mask is None and dropout == 0.0 and kwargs.get("position_bias") is None
    plain = plain and kwargs.get("softcap") is None
    if not plain or query.shape[2] != 1 or query.shape[1] == num_kv_heads or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    grouped = rearrange(query, "b (h g) 1 d -> b h g d", h=num_kv_heads)
    output = scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return rearrange(output, "b h g d -> b 1 (h g) d"), None


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of a step's queries, as the model's own eager attention computes it."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, _cut(attention_mask, key), **kwargs)


def _cut(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The columns of the mask that are this layer's; those it lacks are in front."""
    if mask is None or mask.ndim != 4 or mask.shape[-1] <= key.shape[2]:
        return mask
    return mask[..., -key.shape[2] :]


def _read(model: nn.Module, mask: Tensor | None = None) -> Tensor:
    device = device_of(model)
    with torch.no_grad():
        given = {} if mask is None else {"attention_mask": mask.to(device)}
        return model(input_ids=torch.tensor([[1, 2]], device=device), use_cache=False, **given).logits


def _cuts_at_the_end(model: nn.Module, expected: Tensor, boolean: bool) -> bool:
    """Whether two tokens under a mask of four keys, the first two of which nobody has, are read as without it."""
    shown = torch.tensor([[False, False, True, False], [False, False, True, True]])[None, None]
    dtype = cast(Any, model).get_input_embeddings().weight.dtype
    mask = shown if boolean else torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 0.1  # other kernels
    try:
        got = _read(model, mask)
    except Exception:  # whatever it is that a mask of this width does to it
        return False
    return float((got - expected).norm()) <= tolerance * float(expected.norm())


def _settable(model: nn.Module) -> bool:
    can = getattr(model, "_can_set_attn_implementation", None)
    return bool(can and can())
