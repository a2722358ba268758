"""Two runs beside each other: the cells that both have, by what was asked of them, and the figures that differ."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.reports.source import called, rows_of
from experiments.results import Row

ANY = ("versions", "threads", "device")  # what may differ between two cells that are compared


class Change(NamedTuple):
    """A figure that differs. `relative` is None where one of the two is no number."""

    cell: str
    figure: str
    old: Any
    new: Any
    relative: float | None


@dataclass
class Diff:
    """What differs between two runs. `conditions`: the versions, threads or devices that do, with their counts."""

    shared: int = 0
    changes: list[Change] = field(default_factory=list)
    only_old: list[Row] = field(default_factory=list)
    only_new: list[Row] = field(default_factory=list)
    conditions: dict[str, int] = field(default_factory=dict)
    damaged: tuple[int, int] = (0, 0)


def diff(old: Path, new: Path, tolerance: float) -> Diff:
    """Compares two folders; numbers are the same within `tolerance`, relative. Raises Unusable if one is no run."""
    (mine, damaged), (theirs, also) = rows_of(old), rows_of(new)
    found = Diff(damaged=(damaged, also))
    pairs = _pairs(mine, theirs)
    found.shared = len(pairs)
    paired = {id(row) for pair in pairs for row in pair}
    found.only_old = [row for row in mine if id(row) not in paired]
    found.only_new = [row for row in theirs if id(row) not in paired]
    for one, other in pairs:
        for name in ANY:
            for condition in _conditions(name, one["asked"].get(name), other["asked"].get(name)):
                found.conditions[condition] = found.conditions.get(condition, 0) + 1
        found.changes += _changes(one, other, tolerance)
    return found


def show(console: Console, found: Diff) -> None:
    """Prints what differs."""
    for which, count in zip(("first", "second"), found.damaged, strict=True):
        if count:
            _say(console, f"{count} damaged line{'s' * (count > 1)} of the {which} passed over", "yellow")
    for condition, count in sorted(found.conditions.items()):
        _say(console, f"{condition}, in {count} cell{'s' * (count > 1)}", "yellow")
    if found.changes:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for heading in ("cell", "figure", "old", "new", "relative"):
            table.add_column(heading, overflow="fold", justify="left" if heading in ("cell", "figure") else "right")
        for each in found.changes:
            relative = "-" if each.relative is None else f"{each.relative:.2e}"
            table.add_row(each.cell, each.figure, _short(each.old), _short(each.new), relative)
        console.print(table, markup=False, highlight=False)
    for words, rows in (("only in the first", found.only_old), ("only in the second", found.only_new)):
        for row in rows:
            _say(console, f"{words}: {called(row)}", "yellow")
    cells = len({each.cell for each in found.changes})
    _say(console, f"{found.shared} cells in both, {cells} of them with figures that differ", "bold")


def _pairs(mine: Sequence[Row], theirs: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Cells with one key first, then those that ask for the same in all but `ANY`, in their order."""
    by_key = {row["key"]: row for row in theirs}
    pairs = [(row, by_key[row["key"]]) for row in mine if row["key"] in by_key]
    done = {row["key"] for row, _ in pairs}
    waiting: dict[str, list[Row]] = {}
    for row in theirs:
        if row["key"] not in done:
            waiting.setdefault(_same(row), []).append(row)
    for row in mine:
        if row["key"] not in done and (others := waiting.get(_same(row))):
            pairs.append((row, others.pop(0)))
    return pairs


def _same(row: Row) -> str:
    asked = {name: value for name, value in row["asked"].items() if name not in ANY}
    return json.dumps([row["function"], asked], sort_keys=True)


def _conditions(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for each in sorted({*one, *other}):
            yield from _conditions(each, one.get(each), other.get(each))
    elif one != other:
        yield f"{name} differs: {one} and {other}"


def _changes(one: Row, other: Row, tolerance: float) -> Iterator[Change]:
    cell = called(one)
    if one["status"] != other["status"]:
        yield Change(cell, "status", _status(one), _status(other), None)
        return
    mine, theirs = dict(_leaves("", one["figures"])), dict(_leaves("", other["figures"]))
    for name in {**mine, **theirs}:
        if name not in mine or name not in theirs:
            yield Change(cell, name, mine.get(name, "not there"), theirs.get(name, "not there"), None)
        elif not _equal(mine[name], theirs[name], tolerance):
            yield Change(cell, name, mine[name], theirs[name], _relative(mine[name], theirs[name]))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, each in value.items():
            yield from _leaves(f"{name}.{inner}" if name else inner, each)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(f"{name}[{index}]", each)
    else:
        yield name, value


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if not _number(one) or not _number(other):
        return type(one) is type(other) and one == other
    return one == other or (math.isnan(one) and math.isnan(other)) or _apart(one, other) <= tolerance


def _relative(one: Any, other: Any) -> float | None:
    return _apart(one, other) if _number(one) and _number(other) else None


def _apart(one: float, other: float) -> float:
    if not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(other - one) / max(abs(one), abs(other)) if one != other else 0.0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _status(row: Row) -> str:
    return row["status"] + (f": {row['reason']}" if row.get("reason") else "")


def _short(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _say(console: Console, words: str, style: str) -> None:
    console.print(words, style=style, highlight=False, markup=False, soft_wrap=True)
