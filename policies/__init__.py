"""Eviction policies, one paper a file."""

if __name__ == "policies":
    raise ImportError("import sinkcache.policies: the policies/ directory is part of the sinkcache package")

from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policies.window import Window

__all__ = ["StreamingLLM", "Window"]
