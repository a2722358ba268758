"""KV-cache eviction for streaming language models: a bounded transformers cache with attention sinks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkcache.cache import SinkCache
    from sinkcache.conversation import turn
    from sinkcache.policy import Entries, Policy
    from sinkcache.streaming import prefill, stream

__all__ = ["Entries", "Policy", "SinkCache", "prefill", "stream", "turn"]
__version__ = "0.1.0"

_HOMES = {
    "Entries": "policy",
    "Policy": "policy",
    "SinkCache": "cache",
    "prefill": "streaming",
    "stream": "streaming",
    "turn": "conversation",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: a plan needs neither torch nor transformers, which take seconds."""
    if name == "policies":  # a module that `import sinkcache` has always brought
        return import_module("sinkcache.policies")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"sinkcache.{_HOMES[name]}"), name)
    return value
