"""Finds out how each layer of a model rotates its keys, by looking at keys and not at model names.

A model reads one token at three positions, as three rows of a batch. A single token attends to itself alone, so no
hidden state depends on the position, and the keys of a layer differ by its rotation and nothing else. Candidates are
the frequencies the model itself holds (`*inv_freq` buffers) in both pairings of channels. Then nine tokens are read
with the cached ones in another order: a model whose logits change looks at the order of its cache and not at positions
in the keys (ALiBi, for one), which an evicting cache cannot serve.
"""

import copy
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkcache.guard import arguments, cache_argument
from sinkcache.positions import Rotation, same

_HALF_TOLERANCE, _TOLERANCE = 3e-2, 1e-3  # relative; bfloat16 rounds keys by up to 0.4%, twice
_FAR = 1021  # tokens; far enough to tell scaled frequencies apart, within the reach of every model


def probe(model: nn.Module) -> list[Rotation | str | None]:
    """Per layer of the model's cache: its rotation, None if it has no keys with a position, or why neither is known.

    Runs the model three times on a few tokens. Raises ValueError if the model takes no position_ids, is not in memory,
    adds positions to its hidden states, or attends by the order of its cache.
    """
    if "position_ids" not in arguments(model):
        raise ValueError(
            f"{type(model).__name__} takes no position_ids, so its positions cannot be told: SinkCache needs rotary or "
            "no position embeddings. If it wraps another model, pass that one"
        )
    weight = cast(Any, model).get_input_embeddings().weight
    if weight.device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on the meta device: load its weights before you attach a SinkCache"
        )
    with _evaluating(model):
        rotations = _rotations(model, weight)
        _check_order(model, weight)
    return rotations


def _rotations(model: nn.Module, weight: Tensor) -> list[Rotation | str | None]:
    config = cast(Any, model).config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or _FAR + 1
    far = max(1, min(_FAR, longest - 2))  # at the very end dynamic frequencies that grew would not be set back
    where = torch.tensor([0, 1, far], device=weight.device)
    cache = DynamicCache(config=config)
    token = torch.full((3, 1), min(7, weight.shape[0] - 1), device=weight.device)
    _read(model, token, where[:, None], cache)
    frequencies = [
        buffer.detach().cpu().double()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    ]
    found: list[Rotation | None] = []
    result: list[Rotation | str | None] = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            result.append(None)  # a linear-attention or shared layer: nothing of its own that has a position
            continue
        outcome = _explain(keys[:, :, -1], values[:, :, -1], where.cpu(), frequencies, weight.dtype)
        if isinstance(outcome, str):
            result.append(f"layer {index}: {outcome}")
            continue
        known = next((each for each in found if same(each, outcome)), outcome)  # one object for all that turn alike
        found.append(known)
        result.append(known)
    return result


def _explain(
    keys: Tensor, values: Tensor, where: Tensor, frequencies: list[Tensor], dtype: torch.dtype
) -> Rotation | str | None:
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
    keys, values = keys.cpu().double(), values.cpu().double()
    if _distance(values, values[:1]) > tolerance:
        if _distance(keys, keys[:1]) > tolerance:
            raise ValueError(
                "this model adds positions to its hidden states (learned or sinusoidal positions): a token cannot be "
                "moved or outlive them. SinkCache needs rotary or no position embeddings"
            )
        return "its values rotate and its keys do not (latent attention), which SinkCache cannot move"
    if _distance(keys, keys[:1]) <= tolerance:
        return None
    best, error = None, tolerance
    for inv_freq in frequencies:
        if 2 * len(inv_freq) > keys.shape[-1]:
            continue
        for layout in ("half", "interleaved"):
            rotation = Rotation(inv_freq, layout)
            turned = keys[:1].expand_as(keys).clone()
            rotation.put(turned, rotation.pick(turned) * rotation.phase(where, keys)[:, None])
            if (miss := _distance(turned, keys)) < error:
                best, error = rotation, miss
    return best or "no frequencies of the model explain how its keys change with the position"


def _check_order(model: nn.Module, weight: Tensor) -> None:
    config = cast(Any, model).config.get_text_config(decoder=True)
    tokens = torch.arange(9, device=weight.device)[None] % weight.shape[0]
    cache = DynamicCache(config=config)
    _read(model, tokens[:, :8], torch.arange(8, device=weight.device)[None], cache)
    turned = copy.deepcopy(cache)
    for layer in turned.layers:
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = layer.keys.flip(2), layer.values.flip(2)
    last = torch.full((1, 1), 8, device=weight.device)
    one, other = (_read(model, tokens[:, 8:], last, each).cpu().double() for each in (cache, turned))
    tolerance = _TOLERANCE if weight.dtype in (torch.float32, torch.float64) else 5 * _HALF_TOLERANCE
    if _distance(other, one) > tolerance:
        raise ValueError(
            "this model attends by the order of its cache and not by positions in its keys (ALiBi or a relative bias): "
            "SinkCache needs rotary or no position embeddings"
        )


def _read(model: nn.Module, tokens: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=positions, use_cache=True, **{cache_argument(model): cache}).logits


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.expand_as(a).norm().clamp_min(1e-30))


@contextmanager
def _evaluating(model: nn.Module):
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
