"""Attention that tells what each key received, computed by blocks of queries: never a [q_len, kv_len] matrix.

Probabilities are float32 and those of the model: scaled, soft-capped, masked, with learned sinks in the sum. One pass
serves both the output and the sums, so that in decoding scores cost no second look at the keys.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkcache.policy import Watch

_BLOCK = 128  # queries at a time


@dataclass(frozen=True)
class Kernel:
    """What a model's attention does beside the product: `scaling`, `softcap` on logits, learned `sinks`, one a head."""

    scaling: float
    softcap: float | None = None
    sinks: Float[Tensor, " num_heads"] | None = None

    def probabilities(
        self,
        queries: Float[Tensor, "batch num_heads q_len head_dim"],
        keys: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
        shown: Tensor | None,
    ) -> Float[Tensor, "batch num_kv_heads group q_len kv_len"]:
        """Of each query over all keys, in float32 at least; `shown` is a mask, boolean or to add, `[batch, 1 or
        num_heads or num_kv_heads, q_len, kv_len]`, or of the last keys alone, all before being visible."""
        heads, group = keys.shape[1], queries.shape[1] // keys.shape[1]
        split = queries.unflatten(1, (heads, group))
        logits = torch.matmul(split.flatten(2, 3), keys.transpose(-1, -2)).unflatten(2, split.shape[2:4])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(self.scaling)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap).mul_(self.softcap)
        if shown is not None:
            by_head = shown.shape[1] == queries.shape[1] > 1 and group > 1
            mask = shown.unflatten(1, (heads, group)) if by_head else shown[:, :, None]
            newest = logits[..., logits.shape[-1] - mask.shape[-1] :]  # a mask of fewer keys is that of the last
            if mask.dtype == torch.bool:
                newest.masked_fill_(~mask, torch.finfo(logits.dtype).min)
            else:
                newest.add_(mask)
        if self.sinks is None:
            return logits.softmax(dim=-1)
        sinks = self.sinks.to(logits.dtype).reshape(1, heads, group, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def attention(
    queries: Float[Tensor, "batch num_heads q_len head_dim"],
    keys: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    values: Float[Tensor, "batch num_kv_heads kv_len value_dim"],
    mask: Tensor | None,
    kernel: Kernel,
    weights: Float[Tensor, "rows q_len"] | None = None,
    heads: int | None = None,
    group: str = "mean",
) -> tuple[Float[Tensor, "batch num_heads q_len value_dim"], Float[Tensor, "batch heads kv_len"]]:
    """The output of causal attention, and the probability each key received, summed over queries by their `weights`.

    Without a `mask` each query sees the keys up to its own, the last query all of them. Query heads that share one of
    `heads` (by default of the keys) count by their mean, or by the greatest with `group="max"`.
    """
    q_len, kv_len, heads = queries.shape[2], keys.shape[2], heads or keys.shape[1]
    plain = kernel.softcap is None and kernel.sinks is None and mask is None and weights is None
    if q_len == 1 and plain and heads == keys.shape[1] and group == "mean":
        return _decoded(queries, keys, values, kernel.scaling)
    outputs, received = [], None
    for start in range(0, q_len, _BLOCK):
        block = queries[:, :, start : start + _BLOCK]
        upto, shown = kv_len, None
        if mask is not None:
            shown = mask[..., start : start + _BLOCK, :]
        elif q_len > 1:
            upto = kv_len - q_len + start + block.shape[2]
            shown = torch.ones(block.shape[2], block.shape[2], dtype=torch.bool, device=keys.device).tril()[None, None]
        probabilities = kernel.probabilities(block, keys[:, :, :upto], shown)
        spread = torch.matmul(probabilities.to(values.dtype).flatten(2, 3), values[:, :, :upto])
        outputs.append(spread.unflatten(2, probabilities.shape[2:4]).flatten(1, 2))
        mine = None if weights is None else weights[:, start : start + _BLOCK]
        sums = _sums(probabilities, mine, heads, group)
        if received is None:
            received = sums if upto == kv_len else torch.nn.functional.pad(sums, (0, kv_len - upto))
        else:
            received[..., :upto] += sums
    assert received is not None
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), received


def from_recent(
    queries: Float[Tensor, "batch num_heads q_len head_dim"],
    query_positions: Int[Tensor, "batch q_len"],
    keys: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    positions: Int[Tensor, "batch num_kv_heads kv_len"],
    kernel: Kernel,
    watch: Watch,
) -> Float[Tensor, "batch num_kv_heads kv_len"]:
    """What each key receives from `queries`, each of which sees the keys of positions up to its own, -1 being none."""
    received = []
    group = queries.shape[1] // keys.shape[1]
    for head in range(keys.shape[1]):  # a head at a time, so that a long prompt's matrix stays small
        mine, here = slice(head, head + 1), slice(head * group, (head + 1) * group)
        shown = _at_or_before(positions[:, head], query_positions)
        sinks = None if kernel.sinks is None else kernel.sinks[here]
        part = Kernel(kernel.scaling, kernel.softcap, sinks)
        probabilities = part.probabilities(queries[:, here], keys[:, mine], shown[:, None])[:, 0]
        probabilities = probabilities * shown[:, None]  # a query that sees nothing gives nothing
        merged = probabilities.mean(dim=1) if watch.group == "mean" else probabilities.amax(dim=1)
        received.append(merged.sum(dim=1) if watch.reduce == "sum" else merged.amax(dim=1))
    return torch.stack(received, dim=1)


def _decoded(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """One query's attention in as few calls as there can be; all in place but the products."""
    (batch, num_heads, _, dim), heads = queries.shape, keys.shape[1]
    grouped = queries.reshape(batch, heads, num_heads // heads, dim)
    logits = torch.matmul(grouped, keys.transpose(2, 3))
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.to(wide).mul_(scaling).softmax(dim=-1)
    spread = torch.matmul(probabilities.to(values.dtype), values)
    return spread.reshape(batch, num_heads, 1, values.shape[-1]), probabilities.mean(dim=2)


def _at_or_before(
    positions: Int[Tensor, "batch kv_len"], query_positions: Int[Tensor, "batch q_len"]
) -> Bool[Tensor, "batch q_len kv_len"]:
    return (positions[:, None] <= query_positions[:, :, None]) & (positions[:, None] >= 0)


def _sums(
    probabilities: Float[Tensor, "batch num_kv_heads group q_len kv_len"],
    weights: Float[Tensor, "rows q_len"] | None,
    heads: int,
    group: str,
) -> Float[Tensor, "batch heads kv_len"]:
    batch, _, _, q_len, kv_len = probabilities.shape
    merged = probabilities.reshape(batch, heads, -1, q_len, kv_len)
    if group == "max":
        merged = merged.amax(dim=2, keepdim=True)
    if weights is None:
        return merged.sum(dim=(2, 3)) / merged.shape[2]
    each = weights[:, None, None].to(merged.dtype).expand(-1, -1, merged.shape[2], -1).flatten(1) / merged.shape[2]
    return torch.matmul(each[:, None, None], merged.flatten(2, 3))[:, :, 0]
