"""One run: a method in one setting. The grid of them that a command asks for, and the key each is filed under."""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from sinkcache.policies import StreamingLLM, Window
from sinkcache.policy import Policy

METHODS = {
    "full": "the ordinary cache, which keeps every token",
    "window": "the newest `budget` tokens alone: the first token of the text is evicted like any other",
    "sinks": "StreamingLLM: the first `sinks` tokens for ever, and the newest of the rest, `budget` tokens in all",
    "recompute": "no cache between tokens: the newest `budget` tokens are read anew for each token",
    "reread": "no cache between stretches: the newest `budget` tokens are read anew every so many tokens",
}


@dataclass(frozen=True)
class Setting:
    """A method and what it is given; None where the method has no such thing.

    `every`: `recompute` scores each `every`-th token after the first window, `reread` reads anew every `every` tokens.
    """

    method: str
    bos: str
    budget: int | None = None
    sinks: int | None = None
    positions: str | None = None
    chunk: int | None = None
    attend: str | None = None
    every: int | None = None

    @property
    def name(self) -> str:
        """The method as tables call it; a recompute that skips tokens says so."""
        if self.method == "recompute" and self.every != 1:
            return f"recompute 1/{self.every}"
        return f"reread {self.every}" if self.method == "reread" else self.method

    @property
    def label(self) -> str:
        """The setting in a few words."""
        return self.described()

    def described(self, hidden: Collection[str] = ()) -> str:
        """The setting in a few words, without the fields `hidden`."""
        parts = [self.name]
        parts += (
            [f"{self.sinks} sinks" if self.sinks != 1 else "1 sink"]
            if self.method == "sinks" and self.sinks is not None
            else []
        )
        parts += [f"budget {self.budget}"] if self.budget is not None and "budget" not in hidden else []
        parts += [f"{self.positions} positions"] if self.positions and "positions" not in hidden else []
        parts += [f"chunk {self.chunk}"] if self.chunk and "chunk" not in hidden else []
        parts += ["token by token"] if self.attend == "token" else []
        parts += ["BOS"] if self.bos == "prepend" else []
        return ", ".join(parts)

    @property
    def policy(self) -> Policy | None:
        """The eviction policy, None for a method that evicts nothing from a cache."""
        if self.method == "window":
            return Window()
        return StreamingLLM(num_sinks=self.sinks or 0) if self.method == "sinks" else None

    @property
    def first_after(self) -> int | None:
        """The first token of the text predicted by a query for which, read singly, something has been evicted."""
        return None if self.budget is None else self.budget + (self.bos == "none")

    def check(self, tokens: int) -> None:
        """Raises ValueError if this cannot be run on a text of `tokens` tokens, or would show nothing."""
        if self.budget is not None and tokens <= self.budget + 1:
            raise ValueError(
                f"--budget {self.budget} evicts nothing from --tokens {tokens}: lower the budget or raise the tokens"
            )
        policy = self.policy
        if policy is not None and self.budget is not None:
            policy.check(self.budget)
        if self.attend == "token" and self.positions == "cache" and self.method == "sinks" and self.chunk != 1:
            raise ValueError(
                f"--attend token cannot be had with sinks at cache positions in chunks of {self.chunk}, whose keys "
                "move within the chunk: use --positions original or --chunk 1"
            )


def grid(
    methods: Sequence[str],
    budgets: Sequence[int],
    sinks: Sequence[int],
    positions: Sequence[str],
    chunks: Sequence[int],
    attends: Sequence[str],
    boses: Sequence[str],
    recompute_every: int,
    reread_every: Sequence[int],
) -> list[Setting]:
    """Every setting asked for, once, in the order of `METHODS`; 0 sinks are the window, full is run at one chunk."""
    bounded = list(product(boses, budgets, positions, chunks, attends))
    numbers = ([0] if "window" in methods else []) + (list(sinks) if "sinks" in methods else [])

    def settings() -> Iterator[Setting]:
        for bos in boses if "full" in methods else ():
            yield Setting("full", bos, chunk=chunks[0])
        for number, (bos, budget, where, chunk, attend) in product(sorted(set(numbers)), bounded):
            yield Setting("sinks" if number else "window", bos, budget, number, where, chunk, attend)
        for bos, budget in product(boses, budgets if "recompute" in methods else ()):
            yield Setting("recompute", bos, budget, every=recompute_every)
        for bos, budget, every in product(boses, budgets if "reread" in methods else (), reread_every):
            yield Setting("reread", bos, budget, every=every)

    return list(dict.fromkeys(settings()))


def labels(settings: Sequence[Setting]) -> list[str]:
    """A label for each setting, without what they all have in common."""
    fields = ("budget", "positions", "chunk")
    hidden = [name for name in fields if len({getattr(each, name) for each in settings} - {None}) < 2]
    return [each.described(hidden) for each in settings]


def key(setting: Setting, identity: dict[str, Any]) -> str:
    """What a run is filed under: a hash of the setting, its policy's fields and `identity`, all else that matters."""
    policy = setting.policy
    fields = {"policy": type(policy).__name__, **asdict(policy)} if policy is not None else {}
    whole = json.dumps([asdict(setting), fields, identity], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
