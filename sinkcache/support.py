"""What a model must be like for its cache to be bounded, asked of its config and of the model itself."""

from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sinkcache.policy import Watch
from sinkcache.positions import Rotation
from sinkcache.probe import Found, probe

Positions = Literal["cache", "original"]

_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer)  # of the growing kinds
_PROBED: WeakKeyDictionary[nn.Module, tuple[Any, Found]] = WeakKeyDictionary()


def decoder_config(model: Any, positions: Positions) -> PreTrainedConfig:
    """The config of the decoder of `model`, a causal LM or its config.

    Raises TypeError if it is neither, or a config where the model is needed; ValueError if it is an encoder-decoder, or
    its generation config asks for a cache of its own.
    """
    config = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"model must be a causal LM or its config, got {type(model).__name__}: load it first, with transformers or "
            "sinkcache.models.load"
        )
    if config is model and positions == "cache":
        raise TypeError(
            f'positions="cache" needs the model, got its {type(config).__name__}: how keys rotate is found by running '
            'it. Pass the model, or positions="original"'
        )
    if isinstance(model, nn.Module) and getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise TypeError(f"model must have a language-model head, {type(model).__name__} has none: load a causal LM")
    if config.is_encoder_decoder:
        raise ValueError(f"{type(config).__name__} is an encoder-decoder: SinkCache serves decoder-only models")
    implementation = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if implementation is not None:
        raise ValueError(
            f"model.generation_config.cache_implementation is {implementation!r}, which generate refuses together "
            "with a cache: set it to None"
        )
    return config.get_text_config(decoder=True)


def found_in(model: nn.Module) -> Found:
    """How the layers of `model` rotate their keys (see `probe`); probed again only when that changed."""
    weight = cast(Any, model).get_input_embeddings().weight
    sums = [float(buffer.sum()) for name, buffer in model.named_buffers() if "inv_freq" in name and not buffer.is_meta]
    state = (weight.dtype, weight.device, sums)  # a cast rounds frequencies, and casting back leaves them so
    if model not in _PROBED or _PROBED[model][0] != state:
        _PROBED[model] = (state, probe(model))
    return _PROBED[model][1]


def rotations_of(model: nn.Module) -> list[Rotation | str | None]:
    """Per layer its rotation, None, or why it is unknown."""
    return list(found_in(model).rotations)


def frequency_limit(config: PreTrainedConfig, positions: Positions) -> int | None:
    """The position from which the model rotates with other frequencies, None if it never does.

    Raises ValueError if it does and `positions`, or transformers, leave no way to stay below.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = {each.get("rope_type", each.get("type")) for each in (parameters, *nested)}
    if "longrope" in kinds:
        raise ValueError(
            "rope_type is longrope: past the original length the model changes its frequencies and transformers drops "
            "the caller's cache. Not supported"
        )
    if "dynamic" not in kinds:
        return None
    if positions == "original":
        raise ValueError(
            "rope_type is dynamic: keys rotated past the trained length no longer fit earlier ones. Use "
            'positions="cache" with sinkcache.stream, which keeps positions below it'
        )
    return cast(int, config.max_position_embeddings)


def check_watch(model: Any, watch: Watch, ordered: bool, rotations: list[Any]) -> None:
    """Raises ValueError if layers with these `rotations` cannot tell a policy what it asks for."""
    if ordered:
        raise ValueError(
            "this model goes by the order of its cache (ALiBi), which rows and heads that keep tokens of their own do "
            "not have: use Window or StreamingLLM, with evict_every=1"
        )
    if watch.attention and not isinstance(model, nn.Module):
        raise TypeError("a policy that reads attention needs the model, whose attention it is shown: got its config")
    latent = any(isinstance(each, Rotation) and each.values for each in rotations)
    if latent and (watch.window or watch.queries or watch.keys or watch.values):
        raise ValueError(
            "keys of latent attention are not stored as they are attended to, so a policy cannot read them, nor what "
            "the newest queries make of them: use one that reads positions, or the mass of attention (H2O, TOVA)"
        )
    unknown = [each for each in rotations if isinstance(each, str)]
    if watch.queries and unknown:
        raise ValueError(f"a policy that reads queries must know how they are rotated: {unknown[0]}")


def scales_by_position(config: PreTrainedConfig) -> bool:
    """Whether queries are scaled by their absolute position, which re-basing would change."""
    return "llama_4_scaling_beta" in (getattr(config, "rope_parameters", None) or {})


def bounded_layers(config: PreTrainedConfig, layers: list[Any], sliding: str) -> list[int]:
    """Which of `layers`, those of the native cache, are to be bounded: full attention, and "bound" sliding windows.

    Raises ValueError if there are none, or layers are of a growing kind that is not known.
    """
    unknown = [type(each) for each in layers if isinstance(each, DynamicLayer) and type(each) not in _KNOWN]
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of a kind SinkCache does not know and so cannot bound: "
            f"{unknown[0].__name__}"
        )
    kinds = _KNOWN if sliding == "bound" else _KNOWN[:1]
    bounded = [index for index, layer in enumerate(layers) if type(layer) in kinds]
    if not bounded:
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        slides = any(getattr(layer, "is_sliding", False) for layer in layers)
        raise ValueError(
            f"{type(config).__name__} has no full-attention layer to bound, only {names or 'unknown'}"
            + ('. Use sliding="bound" to bound layers inside their windows' if slides else "")
        )
    return bounded


def check_sliding(config: PreTrainedConfig, layers: list[Any], budgets: list[int | float]) -> int | None:
    """The least sliding window among `layers`, which are to be bounded; None if none of them slides.

    Raises ValueError if a budget does not fit into its layer's window, or windows do not slide but jump.
    """
    windows = [
        (layer.sliding_window, budget) for layer, budget in zip(layers, budgets, strict=True) if layer.is_sliding
    ]
    if not windows:
        return None
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(
            "this model attends in chunks, which jump and do not slide: an evicting cache cannot follow them. Use "
            'sliding="native"'
        )
    for window, budget in windows:
        if isinstance(budget, float) or budget > window:
            raise ValueError(
                f"a layer with a sliding window of {window} cannot hold a budget of {budget}: the oldest would be "
                f"hidden by the window. Use at most {window} tokens"
            )
    return min(window for window, _ in windows)
