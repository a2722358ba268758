"""The policies that experiments compare, by name, each with what it is given at a budget."""

from collections.abc import Callable

from experiments.calibrated import POLICY
from sinkcache import Policy
from sinkcache.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    Clairvoyant,
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
from sinkcache.recording import Recording

POLICIES: dict[str, Callable[[int], Policy]] = {  # at a budget
    "Window": lambda budget: Window(),
    "StreamingLLM": lambda budget: StreamingLLM(num_sinks=4),
    "Random": lambda budget: Protect(Random(), num_sinks=4, recent=32),
    "Knorm": lambda budget: Knorm(num_sinks=4, recent=32),
    "KeyDiff": lambda budget: KeyDiff(num_sinks=4, recent=32),
    "LagKV": lambda budget: LagKV(num_sinks=4, lag=budget // 8),
    "H2O": lambda budget: H2O(recent=budget // 2),
    "H2O-mean": lambda budget: H2O(recent=32, reduce="mean"),
    "H2O-decay": lambda budget: H2O(recent=32, half_life=32),
    "H2O-even": lambda budget: POLICY,
    "H2O-calibrated": lambda budget: POLICY,
    "TOVA": lambda budget: TOVA(),
    "TOVA-head": lambda budget: TOVA(per="head"),
    "SnapKV": lambda budget: SnapKV(),
    "SnapKV-none": lambda budget: SnapKV(pooling="none"),
    "AdaKV": lambda budget: AdaKV(SnapKV(pooling="none")),
    "RKV": lambda budget: RKV(),
    "ExpectedAttention": lambda budget: ExpectedAttention(),
    "ExpectedAttention-128": lambda budget: ExpectedAttention(horizon=128, recent=32),
}
HORIZONS = {"Clairvoyant": 256, "Clairvoyant-64": 64, "Clairvoyant-128": 128, "Clairvoyant-1024": 1024}
LAYERED = ("H2O-calibrated",)  # of which each layer has a budget of its own
ALWAYS = ("Window", "StreamingLLM", "Clairvoyant")


def made(name: str, budget: int, recorded: Callable[[], Recording]) -> Policy:
    """The policy called `name` at a budget; a text is `recorded` for those that must know it."""
    return Clairvoyant(recorded(), HORIZONS[name]) if name in HORIZONS else POLICIES[name](budget)
