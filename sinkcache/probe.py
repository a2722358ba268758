"""Finds out how each layer of a model rotates its keys, by looking at keys and not at model names.

A model reads one token at three positions, as three rows of a batch. A single token attends to itself alone, so no
hidden state depends on the position, and the keys of a layer differ by its rotation and nothing else. Candidates are
the frequencies the model itself holds (`*inv_freq` buffers) in both pairings of channels. Then nine tokens are read
with the cached ones in another order: a model whose logits change looks at the order of its cache and not at positions
in the keys (ALiBi, for one). Such a model can be served if its bias is distance within the cache, which is what it is
tried on next: a cache that has forgotten three tokens, once said and once not.
"""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkcache.devices import device_of
from sinkcache.guard import arguments, cache_argument
from sinkcache.positions import Rotation, same

_HALF_TOLERANCE, _TOLERANCE = 3e-2, 1e-3  # relative; bfloat16 rounds keys by up to 0.4%, twice
_FAR = 1021  # tokens; far enough to tell scaled frequencies apart, within the reach of every model


@dataclass(frozen=True)
class Found:
    """What the probe found: per layer of the model's cache its rotation, None if it has no keys with a position, or why
    neither is known; and whether the model goes by the order of its cache (`ordered`) and not by positions in the keys.
    """

    rotations: list[Rotation | str | None]
    ordered: bool


def probe(model: nn.Module) -> Found:
    """Runs the model a few times on a few tokens.

    Raises ValueError if the model is not in memory, adds positions to its hidden states, or goes by the order of its
    cache in a way that an evicting cache cannot serve.
    """
    device = device_of(model)
    with _evaluating(model):
        rotations = _rotations(model, device)
        return Found(rotations, _goes_by_order(model, device))


def _rotations(model: nn.Module, device: torch.device) -> list[Rotation | str | None]:
    config = cast(Any, model).config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or _FAR + 1
    far = max(1, min(_FAR, longest - 2))  # at the very end dynamic frequencies that grew would not be set back
    told = "position_ids" in arguments(model)
    where = torch.tensor([0, 1, far if told else 2])
    token = min(7, cast(Any, model).get_input_embeddings().weight.shape[0] - 1)
    cache = DynamicCache(config=config)
    if told:
        _read(model, torch.full((3, 1), token, device=device), where[:, None].to(device), cache)
    else:  # one row of the same token again and again: its keys are alike unless they, or hidden states, have positions
        _read(model, torch.full((1, 3), token, device=device), None, cache)
    if all(getattr(layer, "keys", None) is None for layer in cache.layers):
        raise ValueError(f"{type(model).__name__} stores no keys in its cache: it has no attention layer to bound")
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
        dtype = keys.dtype
        keys, values = ((each if told else each.transpose(0, 2)).cpu().double()[:, :, -1] for each in (keys, values))
        outcome = _explain(keys, values, where, frequencies, _tolerance(dtype))
        if isinstance(outcome, str):
            result.append(f"layer {index}: {outcome}")
            continue
        known = next((each for each in found if same(each, outcome)), outcome)  # one object for all that turn alike
        found.append(known)
        result.append(known)
    return result


def _explain(
    keys: Tensor, values: Tensor, where: Tensor, frequencies: list[Tensor], tolerance: float
) -> Rotation | str | None:
    turning, latent = keys, False
    if _distance(values, values[:1]) > tolerance:
        if _distance(keys, keys[:1]) > tolerance:
            raise ValueError(
                "this model adds positions to its hidden states (learned or sinusoidal positions): a token cannot be "
                "moved or outlive them. SinkCache needs rotary or no position embeddings; to read past the trained "
                "length, read the newest tokens anew from time to time (sinkcache.metrics.reread)"
            )
        turning, latent = values, True
    elif _distance(keys, keys[:1]) <= tolerance:
        return None
    best, error = None, tolerance
    for inv_freq in frequencies:
        if 2 * len(inv_freq) > turning.shape[-1]:
            continue
        for layout in ("half", "interleaved"):
            rotation = Rotation(inv_freq, layout, latent)
            turned = turning[:1].expand_as(turning).clone()
            rotation.put(turned, rotation.pick(turned) * rotation.phase(where, turning)[:, None])
            if (miss := _distance(turned, turning)) < error:
                best, error = rotation, miss
    return best or "no frequencies of the model explain how its keys change with the position"


def _goes_by_order(model: nn.Module, device: torch.device) -> bool:
    """Whether logits change with the order of the cache; raises ValueError where that is not distance in the cache."""
    config = cast(Any, model).config.get_text_config(decoder=True)
    tokens = torch.arange(9, device=device)[None] % cast(Any, model).get_input_embeddings().weight.shape[0]
    cache = DynamicCache(config=config)
    _read(model, tokens[:, :8], _upto(model, 8, device), cache)

    def last(change: Callable[[DynamicLayer], Any]) -> Tensor:
        changed = copy.deepcopy(cache)
        for index, layer in enumerate(changed.layers):
            if type(layer) is DynamicLayer and layer.keys is not None:
                changed.layers[index] = change(layer)
        positions = None if "position_ids" not in arguments(model) else torch.full((1, 1), 8, device=device)
        return _read(model, tokens[:, 8:], positions, changed).cpu().double()

    dtype = cast(Any, model).get_input_embeddings().weight.dtype
    tolerance = 5 * _HALF_TOLERANCE if _tolerance(dtype) == _HALF_TOLERANCE else _TOLERANCE
    if _distance(last(_flipped), last(lambda layer: layer)) <= tolerance:
        return False
    try:
        follows = _distance(last(_shortened), last(_cropped)) <= tolerance
    except Exception:  # whatever it is that a model of such a kind trips over
        follows = False
    if not follows:
        raise ValueError(
            "this model attends by the order of its cache and not by positions in its keys (ALiBi or a relative bias), "
            "and counts evicted tokens in: SinkCache needs rotary or no position embeddings"
        )
    return True


class _Shortened(DynamicLayer):
    """Holds its newest five tokens, and says that it has seen three more."""

    def get_seq_length(self) -> int:
        return super().get_seq_length() + 3

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, 3


def _shortened(layer: DynamicLayer) -> DynamicLayer:
    short = _Shortened()
    short.update(*(cast(Tensor, each)[:, :, 3:] for each in (layer.keys, layer.values)))
    return short


def _cropped(layer: DynamicLayer) -> DynamicLayer:
    layer.keys, layer.values = (cast(Tensor, each)[:, :, 3:] for each in (layer.keys, layer.values))
    return layer


def _flipped(layer: DynamicLayer) -> DynamicLayer:
    layer.keys, layer.values = (cast(Tensor, each).flip(2) for each in (layer.keys, layer.values))
    return layer


def _upto(model: nn.Module, count: int, device: torch.device) -> Tensor | None:
    return torch.arange(count, device=device)[None] if "position_ids" in arguments(model) else None


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE if dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE


def _read(model: nn.Module, tokens: Tensor, positions: Tensor | None, cache: DynamicCache) -> Tensor:
    extra = {} if positions is None else {"position_ids": positions}
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache}, **extra).logits


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
