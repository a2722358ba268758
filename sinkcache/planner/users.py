"""How many users a plan's engines can serve in a given memory, at each length and of a mix of requests."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sinkcache.planner import Plan, default_choices
from sinkcache.planner.capacity import Class, Knob, knobs, largest_budget, longest, mixed, shared_out, users
from sinkcache.planner.engines import Engine
from sinkcache.planner.in_sinkcache import Bounded


@dataclass(frozen=True)
class Served:
    """One engine: users at each length, the longest conversation of one, users of each class of a mix, and what each
    of its settings would save."""

    name: str
    users: tuple[int, ...]
    longest: int
    mix: tuple[int, ...]
    knobs: list[Knob]


@dataclass(frozen=True)
class Users:
    """What fits into `memory` bytes; `budget`: the largest that serves `asked` users with a SinkCache, if asked."""

    memory: int
    lengths: tuple[int, ...]
    classes: tuple[Class, ...]
    engines: list[Served]
    asked: int | None = None
    budget: int | None = None

    @property
    def anyone(self) -> bool:
        """Whether some engine can serve somebody at some length, or the users that were asked about."""
        if self.asked is not None:
            return bool(self.budget)
        return any(any(each.users) or any(each.mix) for each in self.engines)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, fit for JSON."""
        return dataclasses.asdict(self)


def count_users(
    made: Plan,
    engines: Sequence[Engine],
    memory: int,
    classes: Sequence[Class] = (),
    asked: int | None = None,
    bounded: Callable[[int], Engine] = lambda budget: Bounded(budget=budget),
) -> Users:
    """How many users `engines` serve in `memory` bytes; engines without a rule for the model are left out.

    `asked` users, of the mix or of the longest length: which is the largest budget at which `bounded(budget)`, a
    SinkCache, serves them?
    """
    rows = {row.name for row in made.engines if row.refused is None}
    able = [engine for engine in engines if engine.name in rows]
    found = None
    if asked is not None:
        lengths = {max(made.lengths): asked}
        if classes:
            lengths = {}
            for each, number in shared_out(list(classes), asked).items():
                lengths[each.length] = lengths.get(each.length, 0) + number
        found = largest_budget(bounded, made.model, memory, lengths)
    firsts = {type(engine): engine for engine in reversed(able)}  # variants of one engine turn the same knobs
    served = [_served(engine, made, memory, classes, firsts[type(engine)] is engine) for engine in able]
    return Users(memory, made.lengths, tuple(classes), served, asked, found)


def _served(engine: Engine, made: Plan, memory: int, classes: Sequence[Class], turn: bool) -> Served:
    mix = tuple(mixed(engine, made.model, memory, list(classes)).values()) if classes else ()
    choices = default_choices(engine) if turn else {}
    return Served(
        engine.name,
        tuple(users(engine, made.model, memory, length) for length in made.lengths),
        longest(engine, made.model, memory),
        mix,
        knobs(engine, made.model, max(made.lengths), choices),
    )
