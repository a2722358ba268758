"""Phases: one policy for prompts, another for decoding.

Idea: what a prompt should be cut down by (SnapKV, ExpectedAttention) need not be what a token at a time should, where
few queries have been seen or a cheap score is wanted. Many published methods are such a pair, with "evict nothing" as
the second: here both work within the same budget.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from sinkcache.policy import Entries, Policy, Watch

OPTIONS = {"mass": ("decay", "group"), "window": ("window", "reduce", "group"), "queries": ("skip",)}


@dataclass(frozen=True)
class Phases(Policy):
    """Scores as `prefill` does where the last step had more than one token, as `decode` does where it had one.

    Room for the first token after a prompt is made by `prefill`. Raises ValueError if both read the same thing of the
    tokens in different ways, such as the attention of 8 and of 32 queries: it is recorded once.
    """

    prefill: Policy
    decode: Policy

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if not isinstance(policy := getattr(self, name), Policy):
                raise ValueError(f"{name} must be a policy object, such as SnapKV(), got {policy!r}")
        self.watch()

    @property
    def convention(self) -> str:  # type: ignore[override]  # that of both
        return "cache" if self.prefill.convention == self.decode.convention == "cache" else "original"

    def watch(self) -> Watch:
        return _union(self.prefill.watch(), self.decode.watch())

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return (self.prefill if entries.new > 1 else self.decode).score(entries)

    def check(self, budget: int) -> None:
        self.prefill.check(budget)
        self.decode.check(budget)


def _union(one: Watch, other: Watch) -> Watch:
    """What both ask for; raises ValueError if an option has two values that both count."""
    wanted = {name: getattr(one, name) or getattr(other, name) for name in ("mass", "keys", "values", "queries")}
    chosen = {option: {getattr(watch, option) for watch in (one, other) if _counts(watch, option)} for option in _NAMES}
    for option, values in chosen.items():
        if len(values) > 1:
            raise ValueError(
                f"prefill and decode must watch with the same {option}, got {' and '.join(map(repr, sorted(values)))}: "
                "give both policies the same"
            )
    return Watch(**wanted, **{option: values.pop() for option, values in chosen.items() if values})


def _counts(watch: Watch, option: str) -> bool:
    """Whether an option of `watch` makes a difference to what it asks for."""
    return any(getattr(watch, asked) for asked, options in OPTIONS.items() if option in options)


_NAMES = sorted({option for options in OPTIONS.values() for option in options})
