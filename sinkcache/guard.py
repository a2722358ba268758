"""Watches a model's forward passes, so that a cache is told what it is given and sees whether it was used.

A cache sees keys and values only. Whether rows are padded, which positions the model was given and whether every layer
came by are known at the model's own door; two forward hooks, which torch offers for this, ask the cache there, and hand
the model the mask and positions that fit what the cache holds. A pass without such a cache is none of our business and
goes through untouched.
"""

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHOWN = threading.local()  # who the attention computed next is shown to, and who after that
_ARGUMENTS: WeakKeyDictionary[nn.Module, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()


def uncompiled(function: _Function) -> _Function:
    """`function`, left as it is by torch.compile: what it decides changes with every token."""
    return cast(_Function, torch.compiler.disable(function))


class Guarded(ABC):
    """A cache that wants to know of the passes it takes part in."""

    reads_attention = False  # it is shown the attention, which is then not the model's to return

    @abstractmethod
    def begin_step(
        self, model: nn.Module, tokens: Tensor, attention_mask: Any, position_ids: Tensor | None
    ) -> dict[str, Any]:
        """Arguments to give to the pass over `tokens`, `[batch, q_len]` ids or embeddings, in place of its own.

        Raises ValueError or RuntimeError if the pass would go wrong.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Raises RuntimeError if the pass that has ended did not store its tokens."""


@uncompiled
def arguments(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of `model.forward`, in order; looked up once for each forward a model has had."""
    forward = id(getattr(model.forward, "__func__", model.forward))
    if model not in _ARGUMENTS or _ARGUMENTS[model][0] != forward:
        _ARGUMENTS[model] = (forward, tuple(inspect.signature(model.forward).parameters))
    return _ARGUMENTS[model][1]


def cache_argument(model: nn.Module) -> str:
    """The name under which `model` takes a cache: "cache" since transformers 5.24, else "past_key_values"."""
    return "cache" if "cache" in arguments(model) else "past_key_values"


def guard(model: nn.Module) -> None:
    """Has `model` announce its passes to the `Guarded` caches it is given; once is enough, more do nothing."""
    if _before in model._forward_pre_hooks.values():  # also of a copy of a guarded model
        return
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, with_kwargs=True)


def show_to(layer: Any) -> None:
    """Has the attention that is computed next shown to `layer`, which has just handed out the keys for it."""
    _SHOWN.next = layer


def show_all_to(layer: Any) -> None:
    """Has every attention shown to `layer` that is not shown to another; None: to nobody."""
    _SHOWN.next = _SHOWN.all = layer


@uncompiled
def shown_to() -> Any:
    """Who the attention that is about to be computed is shown to; None: nobody. It counts as shown."""
    layer, _SHOWN.next = getattr(_SHOWN, "next", None), getattr(_SHOWN, "all", None)
    return layer


def _before(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    if not torch.compiler.is_compiling():
        shown_to()  # whoever a pass that died was to be shown to is no longer waiting
    given = _named(model, args, kwargs)
    cache = _cache(given)
    if cache is None:
        return None
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    if tokens is None:
        return None
    if given.get("use_cache") is False:
        raise ValueError(
            "use_cache is off, so that generate would read everything anew in each step: pass use_cache=True (some "
            "models' configs turn it off)"
        )
    if given.get("output_attentions") and cache.reads_attention:
        raise ValueError(
            "output_attentions cannot be had beside a policy that reads attention: leave it out, or use another policy"
        )
    changes = cache.begin_step(model, tokens, given.get("attention_mask"), given.get("position_ids"))
    return ((), {**given, **changes}) if changes else None


def _after(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    cache = _cache(_named(model, args, kwargs))
    if cache is not None:
        cache.end_step()


def _named(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    return {**dict(zip(arguments(model), args, strict=False)), **kwargs}


def _cache(given: dict[str, Any]) -> Guarded | None:
    for name in ("cache", "past_key_values"):
        if isinstance(given.get(name), Guarded):
            return given[name]
    return None
