"""What is written beside the page: every cell as CSV and as parquet, and the figures of the tables as CSV."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.reports.bootstrap import Estimate
from experiments.reports.contest import COSTS, Contest
from experiments.reports.groups import CONDITIONS, Group
from experiments.reports.retrieval import Task
from experiments.results import Row
from experiments.whole import put

_ESTIMATES = ("perplexity", "after", "ratio", "to_best", "gap", "kl", "top1", "recall", "bits_per_byte")
_PLAIN = ("kind", *CONDITIONS, "task", "language", "tokens", "bos", "budget", "positions", "chunk", "on", "name")
_ABOUT = (*_PLAIN, "method", "policy", "standing", "documents", "scored", "bytes", "bytes_peak")


def flat(row: Row) -> Row:
    """A cell with a column for each figure, a dot between the names; lists stay as they are, the command is text."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found.update({f"{name}.{inner}": each for inner, each in flat(value).items()})
        else:
            found[name] = " ".join(map(str, value)) if name == "command" and isinstance(value, list) else value
    return found


def write_cells(folder: Path, rows: Sequence[Row]) -> None:
    """Writes `cells.csv`, whose lists are JSON, and `results.parquet`, whose lists are lists."""
    cells = [flat(row) for row in rows]
    columns = sorted({name for cell in cells for name in cell})
    put(folder / "cells.csv", _csv(columns, [{name: _plain(value) for name, value in cell.items()} for cell in cells]))
    put(folder / "results.parquet", _parquet(columns, cells))


def write_summary(folder: Path, stream: Sequence[tuple[Group, Contest]], tasks: Sequence[tuple[Group, Task]]) -> None:
    """Writes `summary.csv`: a line for each line of a table, unrounded."""
    intervals = [f"{name}{end}" for name in (*_ESTIMATES, "accuracy", "held") for end in ("", "_low", "_high")]
    costs = [f"{name}{end}" for name in COSTS for end in ("", "_low", "_high")]
    rows = [line for group, contest in stream for line in _contest(group, contest)]
    rows += [line for group, task in tasks for line in _task(group, task)]
    put(folder / "summary.csv", _csv([*_ABOUT, *intervals, *costs], rows))


def _contest(group: Group, contest: Contest) -> list[Row]:
    made = []
    for result in contest.results:
        line: Row = {"kind": "stream", **_conditions(group), **contest.panel.setting._asdict()}
        asked = result.line.rows[0]["asked"] if result.line.rows else {}
        line |= {"on": contest.of or "all tokens", "name": result.line.label, "method": result.line.method}
        line |= {"policy": asked.get("policy"), "standing": result.standing, "documents": len(result.line.cells)}
        line |= {"scored": contest.tokens.count, "bytes": result.bytes, "bytes_peak": result.bytes_peak}
        for name in _ESTIMATES:
            line |= _interval(name, getattr(result, name))
        for name, spread in result.costs.items():
            line |= {name: spread.value, f"{name}_low": spread.low, f"{name}_high": spread.high}
        made.append(line)
    return made


def _task(group: Group, task: Task) -> list[Row]:
    made = []
    for line in task.lines:
        row: Row = {"kind": "retrieval", **_conditions(group), **task.setting._asdict(), "on": "all trials"}
        row |= {"name": line.label, "method": line.method, "standing": line.standing, "scored": line.trials}
        row |= _interval("accuracy", line.accuracy()) | _interval("held", line.held())
        made.append(row)
    return made


def _conditions(group: Group) -> Row:
    return {name: _plain(value) for name, value in group.conditions.items()}


def _interval(name: str, found: Estimate | None) -> Row:
    return {} if found is None else {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _plain(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, dict)) else value


def _csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _parquet(columns: Sequence[str], cells: Sequence[Row]) -> bytes:
    import pyarrow as pa  # optional
    import pyarrow.parquet as parquet

    arrays = {}
    for name in columns:
        values = [cell.get(name) for cell in cells]
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # of several kinds
            arrays[name] = pa.array([None if value is None else json.dumps(value) for value in values])
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(arrays), sink)
    return sink.getvalue().to_pybytes()
