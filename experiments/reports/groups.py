"""What may stand in one table: cells of one model under one set of conditions, at one budget, read in one way."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from experiments.reports.source import Measured, called, later
from experiments.results import Row

CONDITIONS = ("model", "revision", "weights", "dtype", "device", "attention", "threads", "versions")
_LINE = ("method", "name", "policy", "budgets", "every")


class Setting(NamedTuple):
    """How the documents of a table were read. `tokens` is None unless a document was read at several lengths."""

    tokens: int | None
    bos: int | None
    positions: str | None
    chunk: int | None
    budget: int | None

    @property
    def title(self) -> str:
        """In a few words."""
        parts = [f"budget {self.budget}"] if self.budget is not None else ["no budget"]
        return ", ".join([*parts, *self.common])

    @property
    def common(self) -> list[str]:
        """The words for all but the budget."""
        parts = [f"{self.positions} positions"] if self.positions else []
        parts += [f"chunk {self.chunk}"] if self.chunk is not None else []
        parts += [f"{self.tokens:,} tokens"] if self.tokens is not None else []
        return parts + ([f"BOS {self.bos} in front"] if self.bos is not None else [])


@dataclass
class Line:
    """A policy in a table, or a method without one: its cells by document."""

    label: str
    method: str
    cells: dict[str, Measured] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """Of its cells."""
        return [each.row for each in self.cells.values()]


@dataclass
class Panel:
    """A table: its lines, over documents in the order of their names."""

    setting: Setting
    lines: list[Line]

    @property
    def documents(self) -> list[str]:
        """The names of all, whether every line has them or not."""
        return sorted({name for line in self.lines for name in line.cells})

    @property
    def rows(self) -> list[Row]:
        """Of all cells."""
        return [row for line in self.lines for row in line.rows]


@dataclass
class Group:
    """All tables of one model under one set of conditions."""

    conditions: Row
    panels: list[Panel] = field(default_factory=list)
    retrieval: list[Row] = field(default_factory=list)
    title: str = ""

    def families(self) -> list[list[Panel]]:
        """The panels that differ in nothing but the budget, smallest budget first."""
        found: dict[tuple, list[Panel]] = {}
        for panel in self.panels:
            found.setdefault(panel.setting[:-1], []).append(panel)
        return list(found.values())


def groups(stream: Sequence[Measured], retrieval: Sequence[Row], notes: list[str]) -> list[Group]:
    """The cells by conditions; adds to `notes` what is left out."""
    made: dict[str, Group] = {}
    cells: dict[str, list[Measured]] = {}
    for each in stream:
        cells.setdefault(_group(each.row, made), []).append(each)
    for row in retrieval:
        made[_group(row, made)].retrieval.append(row)
    for key, members in cells.items():
        made[key].panels = _panels(members, notes)
    found = [made[key] for key in sorted(made)]
    for group in found:
        group.title = _title(group, found)
    return found


def named(conditions: Row, names: Sequence[str]) -> str:
    """Conditions in words: `names` of them."""
    parts = []
    for name in names:
        value = conditions.get(name)
        if name == "versions":
            parts += [f"{each} {version}" for each, version in sorted((value or {}).items())]
        elif value is not None:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def differing(found: Sequence[Group]) -> list[str]:
    """The conditions in which groups of one model differ."""
    return [each for each in CONDITIONS if len({json.dumps(group.conditions[each]) for group in found}) > 1]


def _group(row: Row, made: dict[str, Group]) -> str:
    conditions = {name: row["asked"].get(name) for name in CONDITIONS}
    key = json.dumps(conditions, sort_keys=True)
    made.setdefault(key, Group(conditions))
    return key


def _title(group: Group, found: Sequence[Group]) -> str:
    name = group.conditions["model"]
    others = differing([other for other in found if other.conditions["model"] == name])
    return f"{name} ({named(group.conditions, others)})" if others else str(name)


def _panels(cells: Sequence[Measured], notes: list[str]) -> list[Panel]:
    read_at: dict[str, set[int]] = {}
    for each in cells:
        read_at.setdefault(each.asked["text"], set()).add(each.asked["tokens"])
    lengths = any(len(tokens) > 1 for tokens in read_at.values())
    whole = [_setting(each.asked, lengths) for each in cells]
    settings = {each for each, cell in zip(whole, cells, strict=True) if cell.asked["method"] == "policy"}
    for each, cell in zip(whole, cells, strict=True):  # methods that no policy stands beside
        if cell.asked["method"] != "policy" and not any(_serves(each, other) for other in settings):
            settings.add(each)
    return [_panel(setting, cells, whole, notes) for setting in sorted(settings, key=_order)]


def _order(setting: Setting) -> list[tuple[bool, float, str]]:
    return [
        (each is not None, 0, each) if isinstance(each, str) else (each is not None, each or 0, "") for each in setting
    ]


def _setting(asked: Row, lengths: bool) -> Setting:
    tokens = asked["tokens"] if lengths else None
    return Setting(tokens, asked.get("bos"), asked.get("positions"), asked.get("chunk"), asked.get("budget"))


def _serves(mine: Setting, table: Setting) -> bool:
    """Whether a method without a policy, in setting `mine`, belongs into a table: its chunk need not be the same."""
    return mine[:2] == table[:2] and mine.budget in (None, table.budget)


def _panel(setting: Setting, cells: Sequence[Measured], settings: Sequence[Setting], notes: list[str]) -> Panel:
    lines: dict[str, Line] = {}
    chosen: dict[tuple[str, str], tuple[int, Measured]] = {}
    for cell, mine in zip(cells, settings, strict=True):
        if not (mine == setting or (cell.asked["method"] != "policy" and _serves(mine, setting))):
            continue
        key = json.dumps([cell.asked.get(each) for each in _LINE])
        far = (mine.chunk not in (None, setting.chunk)) + (mine.positions not in (None, setting.positions))
        before = chosen.get((key, cell.asked["text"]))
        if before is not None and before[0] == far:
            _say_twice(before[1].row, cell.row, notes)
        if before is None or far < before[0] or (far == before[0] and later(cell.row, before[1].row)):
            chosen[key, cell.asked["text"]] = far, cell
    for (key, text), (_, cell) in sorted(chosen.items(), key=lambda item: item[0]):
        line = lines.setdefault(key, Line(str(cell.asked["name"]), cell.asked["method"]))
        line.cells[text] = cell
    found = list(lines.values())
    shared = {name for name, count in Counter(line.label for line in found).items() if count > 1}
    for line in found:
        line.label = _longer(line) if line.label in shared else line.label
    return Panel(setting, found)


def _say_twice(one: Row, other: Row, notes: list[str]) -> None:
    differ = [name for name in {**one["asked"], **other["asked"]} if one["asked"].get(name) != other["asked"].get(name)]
    note = (
        f"{called(one)} and {called(other)} differ in {', '.join(sorted(differ)) or 'nothing'} only: the later is shown"
    )
    if note not in notes:
        notes.append(note)


def _longer(line: Line) -> str:
    asked: dict[str, Any] = line.rows[0]["asked"]
    more = [str(asked[each]) for each in ("policy", "budgets", "every") if asked.get(each) is not None]
    return f"{asked['name']}: {', '.join(more)}" if more else line.label
