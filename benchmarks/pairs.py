"""Which of kvpress' presses is raced against which of our policies, and how, in `benchmarks.head_to_head`."""

from dataclasses import dataclass
from typing import Any

from experiments.calibrated import POLICY
from sinkcache.policies import (
    H2O,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LagKV,
    Protect,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)
from sinkcache.policy import Policy

STREAMING: dict[str, Any] = {"held": 128, "chunk": 32, "tokens": 1024, "observation_window": 16, "lag": 32}
CONTINUATION: dict[str, Any] = {
    "context": 1024,
    "tokens": 192,
    "ratios": [0.5, 0.75, 0.9],
    "observation_window": 64,
    "lag": 32,
}


@dataclass(frozen=True)
class Pair:
    """Their press and our policy for the same algorithm; None where a side has none.

    `by_layer`: layers share the same memory as experiments/calibrated.json says.
    """

    press: str | None
    policy: Policy | None
    by_layer: bool = False


def streaming_pairs() -> list[Pair]:
    """The first table's rows."""
    window, lag = STREAMING["observation_window"], STREAMING["lag"]
    return [
        Pair("window, sorted", Window()),
        Pair("streaming", StreamingLLM(4)),
        Pair("streaming, sorted", StreamingLLM(4)),
        Pair("snapkv", SnapKV(window)),
        Pair("snapkv, sorted", SnapKV(window)),
        Pair("tova", TOVA()),
        Pair("observed", H2O(recent=0, reduce="mean")),
        Pair("expected", ExpectedAttention(epsilon=0.0)),
        Pair("keydiff", KeyDiff()),
        Pair("knorm", Knorm()),
        Pair("lagkv", LagKV(4, lag)),
        Pair("lagkv, sorted", LagKV(4, lag)),
        Pair("random", Random()),
        Pair(None, H2O()),
        Pair(None, H2O(half_life=64)),
        Pair(None, SnapKV(window, pooling="none")),
        Pair(None, Protect(KeyDiff())),
        Pair(None, Protect(Knorm())),
        Pair(None, POLICY),
        Pair(None, POLICY, by_layer=True),
    ]


def continuation_pairs() -> list[Pair]:
    """The second table's rows."""
    window, lag = CONTINUATION["observation_window"], CONTINUATION["lag"]
    return [
        Pair("streaming", StreamingLLM(4)),
        Pair("snapkv", SnapKV(window)),
        Pair("adakv(snapkv)", None),
        Pair("tova", TOVA()),
        Pair("observed", H2O(recent=0, reduce="mean")),
        Pair("expected", ExpectedAttention(epsilon=0.0)),
        Pair("keydiff", KeyDiff()),
        Pair("knorm", Knorm()),
        Pair("lagkv", LagKV(4, lag)),
        Pair("random", Random()),
        Pair(None, H2O(half_life=64)),
        Pair(None, POLICY),
        Pair(None, POLICY, by_layer=True),
        Pair(None, ExpectedAttention(recent=32)),
    ]
