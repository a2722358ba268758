"""Retrieval: how often an answer was right, by policy and by where the question's answer stood, with intervals."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from experiments.reports.bootstrap import Estimate, Units, mean
from experiments.reports.contest import BEST, BOUND, BOUNDS, TIED, UNRANKED
from experiments.reports.source import later
from experiments.results import Row

_Z = 1.959963984540054  # of a normal distribution, 95% lie within so many standard deviations


class Trials(NamedTuple):
    """How a task was set."""

    task: str
    language: str | None
    positions: str | None
    chunk: int | None
    budget: int | None

    @property
    def title(self) -> str:
        """In a few words."""
        parts = [self.task, *([self.language] if self.language else [])]
        parts += [f"budget {self.budget}" if self.budget is not None else "no budget"]
        parts += [f"{self.positions} positions"] if self.positions else []
        return ", ".join(parts + ([f"chunk {self.chunk}"] if self.chunk is not None else []))


class Place(NamedTuple):
    """Where what is asked for stood: `depth`, a share of the prompt of `length` tokens, or `distance` lines back."""

    length: int | None
    depth: float | None
    distance: int | None
    prompts: str


@dataclass
class Hits:
    """A policy's cells of a task, by place."""

    label: str
    method: str
    cells: dict[Place, Row] = field(default_factory=dict)
    standing: str = ""

    @property
    def trials(self) -> int:
        """Of all places."""
        return sum(len(row["figures"]["hits"]) for row in self.cells.values())

    def accuracy(self, chosen: Sequence[Place] | None = None) -> Estimate | None:
        """Share of right answers with Wilson's interval, over `chosen` places or all; None without a trial."""
        rows = [self.cells[place] for place in chosen or self.cells if place in self.cells]
        hits = [hit for row in rows for hit in row["figures"]["hits"]]
        return wilson(sum(map(int, hits)), len(hits))

    def held(self, chosen: Sequence[Place] | None = None) -> Estimate | None:
        """Share of trials in which what was asked for was still held when the answer began; None where not known."""
        rows = [self.cells[place] for place in chosen or self.cells if place in self.cells]
        known = [int(each) for row in rows for each in row["figures"].get("visible") or [] if each is not None]
        return wilson(sum(known), len(known))


@dataclass
class Task:
    """A table: its lines, best first. `notes`: what a reader must know of them."""

    setting: Trials
    lines: list[Hits]
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Of all cells."""
        return [row for line in self.lines for row in line.cells.values()]

    @property
    def places(self) -> list[Place]:
        """All of them, in order."""
        known = {place for line in self.lines for place in line.cells}
        return sorted(
            known, key=lambda place: [(value is not None, value if value is not None else 0) for value in place]
        )

    def by(self, name: str) -> dict[float, list[Place]]:
        """The places by one of their fields, those that have it, smallest first."""
        found: dict[float, list[Place]] = {}
        for place in self.places:
            value = getattr(place, name)
            if value is not None:
                found.setdefault(value, []).append(place)
        return dict(sorted(found.items()))


def tasks(rows: Sequence[Row]) -> list[Task]:
    """A table for each task, language and setting; a method without a policy is in those of every budget."""
    settings = {_setting(row) for row in rows if row["asked"]["method"] == "policy"}
    for row in rows:
        if row["asked"]["method"] != "policy" and not any(_serves(_setting(row), each) for each in settings):
            settings.add(_setting(row))
    ordered = sorted(settings, key=lambda each: (json.dumps(each[:4]), each.budget or 0))
    return [_task(setting, rows) for setting in ordered]


def wilson(hits: int, trials: int) -> Estimate | None:
    """Share with the 95% interval of Wilson (1927), which stays within 0 and 1; None of no trials."""
    if not trials:
        return None
    share = hits / trials
    middle = (share + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2)) / (1 + _Z**2 / trials)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def _setting(row: Row) -> Trials:
    asked = row["asked"]
    return Trials(asked["task"], asked.get("language"), asked.get("positions"), asked.get("chunk"), asked.get("budget"))


def _serves(mine: Trials, table: Trials) -> bool:
    return mine[:2] == table[:2] and mine.budget in (None, table.budget)


def _task(setting: Trials, rows: Sequence[Row]) -> Task:
    lines: dict[str, Hits] = {}
    for row in rows:
        asked, mine = row["asked"], _setting(row)
        if mine == setting or (asked["method"] != "policy" and _serves(mine, setting)):
            key = json.dumps([asked.get(each) for each in ("method", "name", "policy", "budgets")])
            line = lines.setdefault(key, Hits(str(asked["name"]), asked["method"]))
            place = _place(asked)
            if place not in line.cells or later(row, line.cells[place]):
                line.cells[place] = row
    found = [lines[key] for key in sorted(lines)]
    names = [line.label for line in found]
    for line in found:
        if names.count(line.label) > 1:
            line.label = f"{line.label}: {next(iter(line.cells.values()))['asked'].get('policy')}"
    task = Task(setting, found)
    _stand(task)
    task.lines.sort(key=lambda line: (line.method != "full", -_share(line), line.label))
    return task


def _place(asked: Row) -> Place:
    distance = asked.get("distance")
    if isinstance(distance, dict):
        distance = distance.get("lines")
    return Place(
        asked.get("length"), asked.get("depth"), distance, f"{asked.get('prompts_sha256')} {asked.get('seed')}"
    )


def _share(line: Hits) -> float:
    found = line.accuracy()
    return found.value if found else 0.0


def _stand(task: Task) -> None:
    """Names the best and who ties with it, over the same trials; who lacks some is not ranked."""
    places, ranked = task.places, []
    for line in task.lines:
        missing = len([place for place in places if place not in line.cells])
        if missing:
            task.notes.append(f"{line.label} lacks {missing} of {len(places)} cells: its accuracy is of the others.")
            line.standing = UNRANKED if line.method == "policy" else ""
        elif line.label.startswith(BOUNDS):
            line.standing = BOUND
        elif line.method == "policy":
            ranked.append(line)
    if len(ranked) < 2:
        return
    best = min(ranked, key=lambda line: (-_share(line), line.label))
    if _share(best) == 0:  # nobody found anything
        return
    right = {line.label: _all_hits(line, places) for line in ranked}
    for line in ranked:
        mine, theirs = right[line.label], right[best.label]
        if line is best:
            line.standing = BEST
        elif len(mine) == len(theirs):
            units = Units((1,) * len(mine))
            found = mean(units, mine - theirs, np.ones(len(mine))).estimate(units)
            line.standing = TIED if found.contains(0.0) else ""


def _all_hits(line: Hits, places: Sequence[Place]) -> np.ndarray:
    return np.array([float(hit) for place in places for hit in line.cells[place]["figures"]["hits"]])
