"""KV-cache eviction for streaming language models: a bounded transformers cache with attention sinks."""

from sinkcache.cache import SinkCache
from sinkcache.conversation import turn
from sinkcache.policy import Entries, Policy
from sinkcache.streaming import prefill, stream

__all__ = ["Entries", "Policy", "SinkCache", "prefill", "stream", "turn"]
__version__ = "0.1.0"
