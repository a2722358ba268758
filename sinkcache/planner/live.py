"""A plan from a cache that holds something: what each of its layers stores of a token is read off its tensors."""

from typing import Any

from sinkcache.planner.kinds import Layer, Model, State

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32", "torch.float64": "f64"}


def from_cache(cache: Any) -> Model:
    """The layers of a live transformers cache, a SinkCache included; its rows count as conversations of their own.

    Raises ValueError if a layer holds nothing yet, or is of a kind that is not known.
    """
    if not cache.layers:
        raise ValueError(f"the {type(cache).__name__} has no layer yet: read a token first")
    layers = [_layer(index, each) for index, each in enumerate(cache.layers)]
    dtypes = {str(each.keys.dtype) for each in cache.layers if getattr(each, "keys", None) is not None}
    if len(dtypes - set(_DTYPES)) or len(dtypes) > 1:
        raise ValueError(f"the cache holds {' and '.join(sorted(dtypes))}: a plan is for one dtype, a floating one")
    return Model(type(cache).__name__, tuple(layers), _DTYPES[dtypes.pop()] if dtypes else "f32", "a live cache")


def _layer(index: int, layer: Any) -> Layer:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    state = _state(layer)
    if keys is None and state is None:
        if type(layer).__name__ == "DummyLayer":
            return Layer("shared")
        raise ValueError(f"layer {index} of the cache, a {type(layer).__name__}, holds nothing yet: read a token first")
    if keys is None or values is None:
        return Layer("linear" if state is not None and state.recurrent else "conv", state=state)
    if keys.ndim != 4:
        raise ValueError(
            f"layer {index} of the cache, a {type(layer).__name__}, holds keys of shape {tuple(keys.shape)}"
        )
    heads, rank, rope = keys.shape[1], keys.shape[-1], values.shape[-1]
    latent = heads == 1 and rank > rope
    extra = getattr(layer, "indexer_keys", None)
    window = getattr(layer, "sliding_window", None)
    if window is None and getattr(layer, "is_sliding", False):  # a static one, as long as its window at most
        window = layer.max_cache_len
    kind = "mla" if latent else "hybrid" if state is not None else "sliding" if window is not None else "full"
    frequencies = getattr(getattr(layer, "rotation", None), "inv_freq", ())  # known of a bounded layer alone
    turned = 2 * len(frequencies)
    return Layer(kind, heads, heads, rank, rope, turned, window, state, 0 if extra is None else extra.shape[-1])


def _state(layer: Any) -> State | None:
    """The state of a layer that has one."""
    conv, recurrent = getattr(layer, "conv_states", None) or {}, getattr(layer, "recurrent_states", None) or {}
    if max(len(conv), len(recurrent)) > 1:
        raise ValueError(f"a {type(layer).__name__} of the cache has {len(conv)} states: no rule is known for it")
    first, second = conv.get(0), recurrent.get(0)
    if first is None and second is None:
        return None
    numbers = 0 if second is None else second[0].numel()
    wide = second is not None and str(second.dtype) == "torch.float32"
    return State(0, 0, numbers, wide) if first is None else State(first.shape[1], first.shape[-1], numbers, wide)
