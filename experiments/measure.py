"""Measures one run: reads a text by one method; how well each token was predicted, in which memory and time."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache

from experiments.checkpoints import Checkpoint, Stand
from experiments.interrupts import interrupted
from experiments.memory import Memory
from experiments.pace import Pace
from experiments.reading import Reading
from experiments.results import Row
from experiments.runs import Setting
from experiments.subject import Subject
from sinkcache import SinkCache
from sinkcache.metrics import Perplexity, Scored, exponential
from sinkcache.support import Positions


@dataclass(frozen=True)
class Told:
    """How far a run is: tokens of the text gone through, and those of the newest checkpoint, 0 without one.

    `perplexity` is that of the newest stretch, `held` are the bytes of keys and values.
    """

    upto: int
    saved: int
    perplexity: float
    held: int


def measure(
    subject: Subject,
    setting: Setting,
    key: str,
    seed: int,
    tell: Callable[[Told], None],
    checkpoint: Checkpoint | None = None,
    every: int = 0,
) -> tuple[Row, Float[Tensor, " tokens"]]:
    """The result row of a run, and its negative log-likelihood by token of the text, NaN where none was scored.

    `tell` is called after each block, and at once by a run that goes on from its `checkpoint`, which is replaced every
    `every` tokens. Raises KeyboardInterrupt after Ctrl-C, once the block under way is read and the checkpoint is there.
    """
    run = Run(subject, setting, key, checkpoint)
    if run.upto:
        tell(run.told())
    with interrupted() as asked:
        for block in run.reading.blocks():
            run.add(block)
            stop = asked.is_set()
            if checkpoint is not None and (stop or run.upto - run.saved >= every) and run.upto < subject.tokens:
                run.save(checkpoint)
            tell(run.told())
            if stop:
                raise KeyboardInterrupt
    return run.row(seed), run.nll


class Run:
    """What a run has gathered: `nll` by token of the text, of which `upto` are gone through and `saved` are on disk."""

    def __init__(self, subject: Subject, setting: Setting, key: str, checkpoint: Checkpoint | None) -> None:
        self.subject, self.setting, self.key = subject, setting, key
        stand = None if checkpoint is None else checkpoint.load(subject.model)
        cache = stand.cache if stand is not None and stand.cache is not None else _cache(subject, setting)
        self.reading = Reading(subject, setting, cache)
        self.memory = Memory(subject, setting, cache)
        self.result = Perplexity(bos=self.reading.bos, bucket=subject.identity["bucket"])
        self.nll = torch.full((subject.tokens,), math.nan, dtype=torch.float64)
        self.pace, self.upto, self.saved = Pace(), 0, 0
        self.resumed: list[int] = []
        self.spent = [0.0, 0.0]  # seconds by the clock and of the CPU, before a checkpoint
        if stand is not None:
            self._go_on(stand)
        self._start = time.perf_counter(), time.process_time()
        self._last = self._start[0]

    def add(self, block: list[Scored]) -> None:
        """Counts a block in."""
        now = _now(self.subject)
        self.pace.add((now - self._last) / sum(len(scored.nll) for scored in block))
        for scored in block:
            self.result.add(scored)
            self.nll[scored.start : scored.start + len(scored.nll)] = scored.nll
        self.upto = block[-1].start + len(block[-1].nll)
        self.memory.look(self.upto)
        self._last = _now(self.subject)

    def told(self) -> Told:
        """For whoever waits for it."""
        return Told(self.upto, self.saved, self.result.curve()[-1][1], self.memory.held())

    def save(self, checkpoint: Checkpoint) -> None:
        """Replaces the checkpoint by where the run stands."""
        reading = self.reading
        cache = reading.cache if isinstance(reading.cache, SinkCache) else None
        told = {
            "tokens": self.result.tokens,
            "nll": self.result.nll,
            "buckets": sorted(self.result.buckets.items()),
            "pace": asdict(self.pace),
            "memory": self.memory.curve,
            "resumed": self.resumed,
            "spent": self._seconds(),
        }
        checkpoint.save(Stand(reading.read, self.upto, self.nll[: self.upto], reading.before, cache, told))
        self.saved = self.upto
        self._last = _now(self.subject)

    def row(self, seed: int) -> Row:
        """The result."""
        subject, setting = self.subject, self.setting
        seconds, cpu_seconds = self._seconds()
        more: Row = {"resumed_at": self.resumed} if self.resumed else {}
        if subject.spool is not None and len(subject.spool.begins) > 1:
            more["begins"] = subject.spool.begins
        return {
            "key": self.key,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **subject.identity,
            "setting": asdict(setting),
            "policy": repr(setting.policy) if setting.policy else None,
            "perplexity_after": perplexity_from(self.nll, setting.first_after),
            **_figures(self.result, self.pace, subject.tokens),
            **self.memory.row(),
            **more,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "seed": seed,
            "host": subject.host,
        }

    def _go_on(self, stand: Stand) -> None:
        told = stand.told
        self.reading.read, self.reading.before = stand.read, stand.before
        self.nll[: stand.upto] = stand.nll
        self.result.tokens, self.result.nll = told["tokens"], told["nll"]
        self.result.buckets = {index: (count, total) for index, (count, total) in told["buckets"]}
        self.pace, self.memory.curve = Pace(**told["pace"]), told["memory"]
        self.upto = self.saved = stand.upto
        self.resumed, self.spent = [*told["resumed"], stand.upto], told["spent"]

    def _seconds(self) -> list[float]:
        now = time.perf_counter(), time.process_time()
        return [spent + end - start for spent, end, start in zip(self.spent, now, self._start, strict=True)]


def _figures(result: Perplexity, pace: Pace, tokens: int) -> Row:
    return {
        "perplexity": result.value,
        "scored": result.tokens,
        "curve": [[min(end, tokens), value] for end, value in result.curve()],
        "ms_per_token": 1000 * pace.median,
        "tokens_per_second": 1 / pace.median,
    }


def perplexity_from(nll: Float[Tensor, " tokens"], first: int | None) -> float | None:
    """The perplexity of the scored tokens from number `first` on; None without a `first`, or if none was scored."""
    if first is None:
        return None
    chosen = nll[first:][~nll[first:].isnan()]
    return exponential(float(chosen.mean())) if len(chosen) else None


def _cache(subject: Subject, setting: Setting) -> Cache | None:
    if setting.policy is not None:
        assert setting.budget is not None
        return SinkCache(subject.model, setting.policy, setting.budget, cast(Positions, setting.positions))
    return DynamicCache(config=subject.model.config) if setting.method == "full" else None


def _now(subject: Subject) -> float:
    if subject.identity["device"] == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
