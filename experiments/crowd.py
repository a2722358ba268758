"""Many conversations at once, of some lengths: their caches, the time of a step of all of them, and who waits.

Conversations of one length are rows of one batch, with a cache of their own for each length; a step gives everybody a
token, batch after batch. Prompts are read one by one: who comes later waits for those before.
"""

import copy
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import Cache, DynamicCache

from experiments.cache_bytes import counted
from experiments.results import Row
from experiments.twins import Bench, Method, load_now, read, seconds
from sinkcache import SinkCache
from sinkcache.planner.capacity import Class, mixed, shared_out
from sinkcache.planner.engines import Engine
from sinkcache.planner.kinds import Model

_TWICE = 2  # times the step of one user: from there on users cost time in proportion, or nearly


def by_length(classes: Sequence[Class], users: int) -> dict[int, int]:
    """Users of each length, prompt and answer together."""
    found: dict[int, int] = {}
    for each, number in shared_out(list(classes), users).items():
        if number:
            found[each.length] = found.get(each.length, 0) + number
    return found


def fitting(engine: Engine, model: Model, memory: int | None, classes: Sequence[Class]) -> int | None:
    """Users that the planner's inverse finds room for; None without a limit."""
    return None if memory is None else sum(mixed(engine, model, memory, list(classes)).values())


def counts(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most}) if most else []


def between(good: int, bad: int) -> list[int]:
    """The number of users to try next, once memory was out at `bad`; none when it is known to an eighth.

    >>> between(16, 32), between(16, 18)
    ([24], [])
    """
    return [(good + bad) // 2] if bad - good > max(1, good // 8) else []


@dataclass
class Crowd:
    """Conversations of `classes` in caches of `method`, of which one of each class is kept with its prompt read."""

    loaded: Bench
    method: Method
    classes: list[Class]
    chunk: int

    def __post_init__(self) -> None:
        self._read: dict[Class, tuple[Cache, float]] = {}

    def measure(self, users: int) -> Row:
        """Seconds of each step, those of them in which this process had a core, and bytes; from the cells if there.

        Raises MemoryError or torch's own error of that kind.
        """
        cell = {**self._cell("users"), "classes": [vars(each) for each in self.classes], "users": users}
        known = self.loaded.known(cell)
        if known is not None:
            return known
        rows = {each: count for each, count in shared_out(self.classes, users).items() if count}
        caches = {each: rows_of(self._one(each)[0], count) for each, count in rows.items()}
        model = self.loaded.twin(self.method)
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(model.device)
        columns = {each: self.loaded.tokens(count).T.contiguous() for each, count in rows.items()}
        taken, busy = [], []
        for step in range(max(each.answer for each in rows)):
            going = [each for each in rows if step < each.answer]
            start = time.process_time()
            taken.append(sum(seconds(model, caches[each], columns[each]) for each in going))
            busy.append(time.process_time() - start)
        found = {
            "steps": taken[1:] or taken,
            "cpu": busy[1:] or busy,
            "bytes": sum(map(counted, caches.values())),
            "load": load_now(),
        }
        if model.device.type == "cuda":
            found["peak_allocated"] = torch.cuda.max_memory_allocated(model.device)
        return self.loaded.file(cell, found)

    def prompts(self) -> dict[Class, float]:
        """Seconds that reading one prompt of each class takes with nobody else."""
        found = {}
        for each in self.classes:
            cell = {**self._cell("prompt"), "tokens": each.prompt}
            known = self.loaded.known(cell)
            found[each] = (known or self.loaded.file(cell, {"seconds": self._one(each)[1]}))["seconds"]
        return found

    def _cell(self, what: str) -> Row:
        return {"what": what, "method": self.method.name, "policy": repr(self.method.policy), "chunk": self.chunk}

    def _one(self, each: Class) -> tuple[Cache, float]:
        """A conversation with its prompt read, and how long that took."""
        if each not in self._read:
            self._read[each] = self._prompt(each)
        return self._read[each]

    def _prompt(self, each: Class) -> tuple[Cache, float]:
        """One that is read anew, after a piece of it was read to warm up."""
        model, ids = self.loaded.twin(self.method), self.loaded.tokens(each.prompt)
        read(model, self.method.cache(model), ids[:, : self.chunk])
        cache = self.method.cache(model)
        return cache, sum(seconds(model, cache, part) for part in ids.split(self.chunk, dim=1))


def rows_of(cache: Cache, count: int) -> Cache:
    """As many rows as `count` that go on from the one row of `cache`, which stays as it is."""
    if isinstance(cache, SinkCache):
        return cache.fork(count)
    twin = cast(DynamicCache, copy.deepcopy(cache))
    with torch.inference_mode():
        if count > 1:
            twin.batch_repeat_interleave(count)
    return twin


def waits(prompts: dict[Class, float], users: int) -> list[float]:
    """Seconds that each user waits while prompts of others are read, one by one, classes in turn."""
    rows = shared_out(list(prompts), users)
    order = sorted(((place + 0.5) / number, index, prompts[each])
                   for index, (each, number) in enumerate(rows.items()) for place in range(number))  # fmt: skip
    waited, sofar = [], 0.0
    for _, _, taken in order:
        waited.append(sofar)
        sofar += taken
    return waited


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values` that a `share` of them does not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def knee(steps: Sequence[tuple[int, float]]) -> int | None:
    """The users up to whom a step takes at most twice what it does for the fewest; None if it does to the end.

    `steps`: users, and seconds of their median step.

    >>> knee([(1, 0.10), (2, 0.11), (4, 0.17), (8, 0.31)])
    4
    """
    for (users, _), (_, taken) in itertools.pairwise(steps):
        if taken > _TWICE * steps[0][1]:
            return users
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there is no more memory: on the CPU torch raises a plain RuntimeError."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(each in str(error) for each in words)
