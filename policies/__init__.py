"""Eviction policies, one paper a file."""

if __name__ == "policies":
    raise ImportError("import sinkcache.policies: the policies/ directory is part of the sinkcache package")

from sinkcache.policies.adakv import AdaKV
from sinkcache.policies.clairvoyant import Clairvoyant as Clairvoyant  # no file can hold it: not in __all__
from sinkcache.policies.expected_attention import ExpectedAttention
from sinkcache.policies.h2o import H2O
from sinkcache.policies.keydiff import KeyDiff
from sinkcache.policies.knorm import Knorm
from sinkcache.policies.lagkv import LagKV
from sinkcache.policies.phases import Phases
from sinkcache.policies.protect import Protect
from sinkcache.policies.random import Random
from sinkcache.policies.rkv import RKV
from sinkcache.policies.snapkv import SnapKV
from sinkcache.policies.streaming import StreamingLLM
from sinkcache.policies.tova import TOVA
from sinkcache.policies.window import Window

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "ExpectedAttention",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "Phases",
    "Protect",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "Window",
]
