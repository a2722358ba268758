"""Attention functions of ours, registered with transformers under names of their own.

`packed`: one decoding step reads each key once, not once per query head. With grouped heads and no mask, transformers
asks torch for `enable_gqa`, which on a CPU has no fast kernel in half precision: a step over 4,096 tokens takes twice
as long as it need (see benchmarks/README.md). Here a single query's heads become the rows of one small matrix per key
head, which every kernel serves. All other steps, and all other devices, go to transformers' own sdpa attention.

`fit`: transformers makes one mask for all full-attention layers. Where these hold different numbers of tokens it is
made for the longest, and each layer takes the columns at its end: its own slots, all visible, and the step's tokens.

`reveal`: a policy may ask what attention a token receives. The layer that has just handed out its keys is then shown
the attention computed over them, by the model's own function where its queries are enough. A layer whose heads hold
different tokens says in a mask of its own who sees what. Flash attention keeps its name (`sinkcache.flash`) and makes
the output of every step, so that a policy changes what is kept and nothing else; what keys receive of all queries, if
the policy reads it, is computed beside, at the price of one more product of queries and keys. Only where heads hold
different tokens, which the kernel cannot be told, are both computed by blocks.
"""

import sys
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from sinkcache.devices import device_of
from sinkcache.flash import Columns, is_flash, show, shows
from sinkcache.guard import show_all_to, shown_to, uncompiled
from sinkcache.observe import Kernel, attention
from sinkcache.onlooker import Onlooker, Trial

_PACKED, _EAGER = "sinkcache_packed", "sinkcache_eager"
_OURS = {"sdpa": _PACKED, "eager": _EAGER, _PACKED: _PACKED, _EAGER: _EAGER}
_FITS: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # what a model was found to stand


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
    if "flash" in str(current) or "fit" in _FITS.get(model, ()):  # unpadded, flash attention takes no mask
        return
    if current not in _OURS or not _settable(model):
        raise ValueError(
            f"budgets that differ between layers need a mask for each, which {current} attention of "
            f"{type(model).__name__} cannot be given: use sdpa or eager attention, or one budget"
        )
    expected = _read(model)
    _set(model, _OURS[current])
    if not _alike(model, expected, _longer_mask(model)):
        _set(model, current)
        raise ValueError(
            f"budgets that differ between layers need a mask for each, and {type(model).__name__} cuts masks in a way "
            "of its own: give one budget"
        )
    _FITS.setdefault(model, set()).add("fit")


def reveal(model: Any) -> None:
    """Has `model` attend where the layer that stores its keys can be shown it, all of it, as `expose` does.

    Raises ValueError as `expose` does, or if layers share keys.
    """
    config = cast(Any, model).config.get_text_config(decoder=True) if isinstance(model, nn.Module) else None
    if getattr(config, "num_kv_shared_layers", 0):
        name = type(model).__name__
        raise ValueError(f"a policy that reads attention cannot see all of it in {name}, whose layers share keys")
    expose(model)


def expose(model: Any) -> None:
    """Has `model` attend where it can be shown: sdpa becomes `packed`, eager and flash attention stay.

    Raises ValueError if its attention is another, cannot be set, or is not what is computed by blocks.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            "a policy that reads attention, or lets heads compete, needs the model, whose attention it is shown: got a "
            "config"
        )
    current, name = cast(Any, model).config._attn_implementation, type(model).__name__
    served = _OURS.get(current) or (current if is_flash(current) else None)
    if served is None or not _settable(model):
        raise ValueError(
            f"a policy that reads attention, or lets heads compete, cannot be shown {current} attention of {name}: "
            'load it with attn_implementation="sdpa" or "eager" if it has them, or use a policy of positions or keys'
        )
    if f"reveal {served}" not in _FITS.get(model, ()):
        expected, trial = _read(model), Trial()
        _set(model, served)
        show_all_to(trial)
        try:
            alike = _alike(model, expected) and trial.layers > 0
        finally:
            show_all_to(None)
        if not alike:
            _set(model, current)
            raise ValueError(
                f"a policy that reads attention cannot be shown that of {name}, which is not softmax of scaled "
                f"products ({current} attention): try the other of sdpa and eager, or a policy of positions or keys"
            )
        _FITS.setdefault(model, set()).add(f"reveal {served}")
    _set(model, served)


def revealed(name: str) -> bool:
    """Whether attention of that name is shown to the layers that wait for it."""
    return name in _OURS.values() or shows(name)


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
    num_kv_heads = key.shape[1]
    attention_mask = _cut(attention_mask, key)
    if (layer := shown_to()) is not None:
        own = partial(sdpa_attention_forward, dropout=dropout, scaling=scaling, **kwargs)
        return _watched(layer, module, query, key, value, attention_mask, own, scaling, **kwargs)
    if kwargs.get("s_aux") is not None:
        raise ValueError("packed attention has no learned sinks (s_aux), which this model needs: use eager attention")
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
    attention_mask = _cut(attention_mask, key)
    if (layer := shown_to()) is not None:
        own = partial(eager, **kwargs)
        return _watched(layer, module, query, key, value, attention_mask, own, **kwargs)
    return eager(module, query, key, value, attention_mask, **kwargs)


@uncompiled
def _watched(
    layer: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    own: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    columns: Columns | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention that ends the step of `layer`: the model's `own`, or by blocks, for each key's sum or another mask.

    With `columns`, what flash attention makes of the mask, the output is by blocks for another mask alone.
    """
    kernel = Kernel(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if layer.awaiting not in (None, key.shape[2]):
        raise RuntimeError(
            f"{type(module).__name__} attends to {key.shape[2]} keys where its layer handed out {layer.awaiting}: it "
            "attends in a way of its own, which a policy that reads attention cannot follow. Report the model"
        )
    received, shown = None, layer.mask()
    columns = None if isinstance(layer, Trial) else columns
    if layer.watch.mass and shown is None and (columns is not None or layer.last_alone()):
        output = own(module, query, key, value, mask)[0]
        received = _received(layer, query, key, value, mask, kernel, columns)
    elif layer.watch.mass or shown is not None:
        mask = mask if shown is None else shown
        weights, heads = layer.weights(), layer.heads(key)
        output, received = attention(query, key, value, mask, kernel, weights, heads, layer.watch.group)
        output = output.transpose(1, 2).contiguous()
    else:
        output = own(module, query, key, value, mask)[0]
    if isinstance(layer, Onlooker):
        whole = mask if columns is None or columns.plain(key.shape[2]) else columns.mask(query.shape[2], key)
        layer.look(module, key, value, whole)
    layer.observe(query, received, kernel)
    return output, None


def _received(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: Kernel, columns: Columns | None
) -> Tensor:
    """What each key receives where the output is the model's own: of the last query alone, or of all `columns` tell."""
    last, heads, group = layer.last_alone(), layer.heads(key), layer.watch.group
    query, weights = (query[:, :, -1:], None) if last else (query, layer.weights())
    if columns is not None:
        return columns.received(query, key, kernel, weights, heads, group)
    mask = None if mask is None else mask[..., -1:, :]
    return attention(query, key, value, mask, kernel, weights, heads, group)[1]


def _cut(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The columns of the mask that are this layer's; those it lacks are in front."""
    if mask is None or mask.ndim != 4 or mask.shape[-1] <= key.shape[2]:
        return mask
    return mask[..., -key.shape[2] :]


def _set(model: nn.Module, name: str) -> None:
    packed()
    AttentionInterface.register(_EAGER, attend_eagerly)
    AttentionMaskInterface.register(_EAGER, eager_mask)
    if is_flash(name):
        show(model, name, _watched)
    if cast(Any, model).config._attn_implementation != name:
        cast(Any, model).set_attn_implementation(name)


def _read(model: nn.Module, mask: Tensor | None = None) -> Tensor:
    device = device_of(model)
    with torch.no_grad():
        given = {} if mask is None else {"attention_mask": mask.to(device)}
        return model(input_ids=torch.tensor([[1, 2]], device=device), use_cache=False, **given).logits


def _longer_mask(model: nn.Module) -> Tensor:
    """Of two tokens and four keys, the first two of which nobody has."""
    shown = torch.tensor([[False, False, True, False], [False, False, True, True]])[None, None]
    dtype = cast(Any, model).get_input_embeddings().weight.dtype
    boolean = cast(Any, model).config._attn_implementation == _PACKED
    return shown if boolean else torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)


def _alike(model: nn.Module, expected: Tensor, mask: Tensor | None = None) -> bool:
    """Whether two tokens, under `mask`, are read as expected."""
    exact = expected.dtype in (torch.float32, torch.float64)
    try:
        got = _read(model, mask)
    except Exception:  # whatever it is that a mask of another width does to it
        return False
    return float((got - expected).norm()) <= (1e-4 if exact else 0.1) * float(expected.norm())  # other kernels


def _settable(model: nn.Module) -> bool:
    can = getattr(model, "_can_set_attn_implementation", None)
    return bool(can and can())
