"""What is printed under each table and figure: the commands that made its cells, the versions, machines and days."""

import shlex
from collections.abc import Iterable, Sequence

from experiments.page import text
from experiments.reports.groups import named
from experiments.results import Row


def foot(rows: Sequence[Row]) -> str:
    """As HTML."""
    if not rows:
        return ""
    made = "".join(f"<pre>{text(each)}</pre>" for each in commands(rows))
    return f'<div class="foot">{made}<p class="note">{text(facts(rows))}</p></div>'


def commands(rows: Sequence[Row]) -> list[str]:
    """Each command that made one of the cells, as a shell takes it."""
    return _distinct(shlex.join(map(str, row["command"])) for row in rows if row["command"])


def facts(rows: Sequence[Row]) -> str:
    """Count of cells, versions, machines, threads and days, in a line."""
    keys = {row["key"] for row in rows}
    versions = _distinct(named(row["asked"], ["versions"]) for row in rows)
    machines = _distinct(_machine(row) for row in rows)
    days = sorted({str(row["date"])[:10] for row in rows if row["date"]})
    measured = [f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "")] if days else []
    cells = f"{len(keys)} cell{'s' * (len(keys) > 1)}"
    return "; ".join([cells, *(each for each in (*versions, *machines) if each), *measured])


def _machine(row: Row) -> str:
    host = ", ".join(f"{name} {value}" for name, value in sorted(row["host"].items()))
    asked = named(row["asked"], ["device", "dtype", "attention", "threads"])
    return ", ".join(each for each in (host, asked) if each)


def _distinct(each: Iterable[str]) -> list[str]:
    return sorted(set(each))
