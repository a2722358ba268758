"""Measures one run: reads a text by one method; how well each token was predicted, in which memory and time."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import chain, islice
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache

from experiments.results import Row
from experiments.runs import Setting
from experiments.subject import Subject
from sinkcache import SinkCache
from sinkcache.memory import held_bytes
from sinkcache.metrics import Attend, Perplexity, Scored, recompute, reread, score
from sinkcache.streaming import step
from sinkcache.support import Positions

_WINDOWS = 8  # that recompute reads at once


def measure(
    subject: Subject, setting: Setting, key: str, seed: int, advance: Callable[[int], None]
) -> tuple[Row, Float[Tensor, " tokens"]]:
    """The result row of a run, and its negative log-likelihood by token of the text, NaN where none was scored.

    `advance` is called with the number of tokens of the text gone through since the last call.
    """
    cache = _cache(subject, setting)
    memory = _Memory(subject, setting, cache)
    bucket = subject.identity["bucket"]
    result = Perplexity(bos=subject.bos if setting.bos == "prepend" else None, bucket=bucket)
    nll = torch.full((subject.tokens,), math.nan, dtype=torch.float64)
    pace, done = [], 0  # seconds per scored token, by block
    start, start_cpu = time.perf_counter(), time.process_time()
    last = start
    for block in _blocks(subject, setting, cache):
        now = _now(subject)
        pace.append((now - last) / sum(len(scored.nll) for scored in block))
        for scored in block:
            result.add(scored)
            nll[scored.start : scored.start + len(scored.nll)] = scored.nll
        upto = block[-1].start + len(block[-1].nll)
        memory.look(upto)
        advance(upto - done)
        done, last = upto, _now(subject)
    advance(subject.tokens - done)
    row = {
        "key": key,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **subject.identity,
        "setting": asdict(setting),
        "policy": repr(setting.policy) if setting.policy else None,
        "perplexity_after": perplexity_from(nll, setting.first_after),
        **_figures(result, pace, subject.tokens),
        **memory.row(),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "seed": seed,
        "host": subject.host,
    }
    return row, nll


def _figures(result: Perplexity, pace: list[float], tokens: int) -> Row:
    return {
        "perplexity": result.value,
        "scored": result.tokens,
        "curve": [[min(end, tokens), value] for end, value in result.curve()],
        "ms_per_token": 1000 * statistics.median(pace),
        "tokens_per_second": 1 / statistics.median(pace),
    }


def perplexity_from(nll: Float[Tensor, " tokens"], first: int | None) -> float | None:
    """The perplexity of the scored tokens from number `first` on; None without a `first`, or if none was scored."""
    if first is None:
        return None
    chosen = nll[first:][~nll[first:].isnan()]
    return math.exp(float(chosen.mean())) if len(chosen) else None


def _cache(subject: Subject, setting: Setting) -> Cache | None:
    if setting.policy is not None:
        assert setting.budget is not None
        return SinkCache(subject.model, setting.policy, setting.budget, cast(Positions, setting.positions))
    return DynamicCache(config=subject.model.config) if setting.method == "full" else None


def _blocks(subject: Subject, setting: Setting, cache: Cache | None) -> Iterator[list[Scored]]:
    """Scores, in the lumps in which the model computes them."""
    bos = subject.bos if setting.bos == "prepend" else None
    if cache is not None:
        attend = cast(Attend, setting.attend or "held")
        for scored in score(subject.model, cache, subject.ids, setting.chunk or 1, bos, attend):
            yield [scored]
        return
    assert setting.budget is not None
    assert setting.every is not None
    ids = subject.ids if bos is None else torch.cat([subject.ids.new_full((1, 1), bos), subject.ids], dim=1)
    lump = 1
    if setting.method == "reread":
        scores = reread(subject.model, ids, setting.budget, setting.every)
    else:
        scores, lump = recompute(subject.model, ids, setting.budget, setting.every, _WINDOWS), _WINDOWS
    if bos is not None:
        scores = (Scored(scored.start - 1, scored.nll) for scored in scores)
    scores = iter(scores)
    blocks = chain([list(islice(scores, 1))], iter(lambda: list(islice(scores, lump)), []))
    yield from blocks


class _Memory:
    """Bytes a run holds, over the text; and what comes on top, where it is known."""

    def __init__(self, subject: Subject, setting: Setting, cache: Cache | None) -> None:
        self.subject, self.setting, self.cache = subject, setting, cache
        self.curve: list[list[int]] = []
        self.anew = self._of_one_pass() if cache is None else 0
        self.before = 0
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    @property
    def _cuda(self) -> bool:
        return self.subject.identity["device"] == "cuda"

    def look(self, upto: int) -> None:
        """Notes the bytes held after `upto` tokens, once a bucket."""
        bucket = self.subject.identity["bucket"]
        if not self.curve or upto // bucket > self.curve[-1][0] // bucket or upto == self.subject.tokens:
            self.curve.append([upto, self.anew if self.cache is None else held_bytes(self.cache)])

    def row(self) -> dict[str, Any]:
        """The fields of the result: a `transient` is the copy of one layer's keys and values that a step attends to."""
        peak = torch.cuda.max_memory_allocated() - self.before if self._cuda else None
        return {
            "bytes": self.curve[-1][1],
            "bytes_curve": self.curve,
            "bytes_transient": self._transient(),
            "bytes_peak": peak,
        }

    def _transient(self) -> int | None:
        if self.cache is None:
            return None
        if self.setting.budget is None:
            attended = self.subject.tokens
        else:
            attended = 0 if self.setting.chunk == 1 else self.setting.budget - 1 + cast(int, self.setting.chunk)
        layers = [layer for layer in cast(Any, self.cache).layers if getattr(layer, "keys", None) is not None]
        return max(
            (attended * (layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes) for layer in layers), default=None
        )

    def _of_one_pass(self) -> int:
        """What an ordinary cache of one of the passes holds."""
        length = cast(int, self.setting.budget)
        if self.setting.method == "reread":
            length += cast(int, self.setting.every) - 1
        cache = DynamicCache(config=self.subject.model.config)
        step(self.subject.model, cache, self.subject.ids[:, :length], last_only=True)
        return held_bytes(cache)


def _now(subject: Subject) -> float:
    if subject.identity["device"] == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
