"""Attention with grouped queries packed: one decoding step reads each key once, not once per query head.

With grouped heads and no mask, transformers asks torch for `enable_gqa`, which on a CPU has no fast kernel in half
precision: a step over 4,096 tokens takes twice as long as it need (see benchmarks/README.md). Here a single query's
heads become the rows of one small matrix per key head, which every kernel serves. All other steps, and all other
devices, go to transformers' own sdpa attention.
"""

from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "sinkcache_packed"


def packed() -> str:
    """The name to give to `model.set_attn_implementation`; registers the function under it."""
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    return _NAME


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
    plain = attention_mask is None and dropout == 0.0 and kwargs.get("position_bias") is None
    plain = plain and kwargs.get("softcap") is None
    if not plain or query.shape[2] != 1 or query.shape[1] == num_kv_heads or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    grouped = rearrange(query, "b (h g) 1 d -> b h g d", h=num_kv_heads)
    output = scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return rearrange(output, "b h g d -> b 1 (h g) d"), None
