"""Where cells are kept: one JSON line each, appended whole, and beside it the arrays of each.

A folder is written to by one process at a time. A line that a killed process left unfinished is passed over, and its
cell counts as not done; of two lines with one key the later holds. Nothing is ever taken out of the file.
"""

import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from safetensors.numpy import load_file, save

from experiments.grid.cell import Cell, Found
from experiments.results import Row
from experiments.whole import put

DONE, FAILED = "done", "failed"


class Store:
    """The cells in `folder`, as `results.jsonl` and `scores/KEY.safetensors` have them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"
        self.damaged = 0  # lines that are no cell, or whose arrays are lost
        self._rows: dict[str, Row] = {}
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            row = _parsed(line)
            if row is None or (row.get("arrays") and not self._scores(row["key"]).is_file()):
                self.damaged += bool(line.strip())
                continue
            self._rows.pop(row["key"], None)  # so that it stands where it was written last
            self._rows[row["key"]] = row

    def writing(self) -> FileLock:
        """A lock to be held while cells are added. Raises ValueError if another process holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"--out {self.folder} is being written to by another run: wait for it, or give another folder"
            ) from error
        for unfinished in (self.folder / "scores").glob(".*"):  # of a process that was killed
            unfinished.unlink()
        return lock

    def find(self, key: str) -> Row | None:
        """The last line of a cell, None if there is none."""
        return self._rows.get(key)

    def rows(self, kind: str | None = None) -> list[Row]:
        """Every cell, or those of which `kind` is asked, in the order in which they were written."""
        return [row for row in self._rows.values() if kind is None or row["kind"] == kind]

    def scores(self, key: str) -> dict[str, np.ndarray]:
        """The arrays of a cell, by name; none for one that has none. Raises ValueError if the file is damaged."""
        path = self._scores(key)
        if not path.exists():
            return {}
        try:
            return load_file(path)
        except Exception as error:  # safetensors' own kind of error, which it does not export for numpy
            raise ValueError(f"{path} is damaged ({error}): delete it, and the cell is measured again") from error

    def add(self, cell: Cell, found: Found, command: Sequence[str]) -> Row:
        """Files a finished cell; on disk afterwards is all of it, or none that counts."""
        if found.scores:
            self._scores(cell.key).parent.mkdir(parents=True, exist_ok=True)
            arrays = {name: np.ascontiguousarray(array, dtype=np.float64) for name, array in found.scores.items()}
            put(self._scores(cell.key), save(arrays))
        about = {"figures": found.figures, "cost": found.cost, "arrays": sorted(found.scores)}
        return self._append(cell, {"status": DONE, "reason": None, **about}, command)

    def fail(self, cell: Cell, reason: str, command: Sequence[str]) -> Row:
        """Files why a cell cannot be measured."""
        about = {"figures": {}, "cost": {}, "arrays": []}
        return self._append(cell, {"status": FAILED, "reason": " ".join(reason.split()), **about}, command)

    def _append(self, cell: Cell, what: Row, command: Sequence[str]) -> Row:
        row = {
            "key": cell.key,
            "function": cell.function,
            "kind": cell.asked["kind"],
            "asked": cell.asked,
            **what,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": {"python": platform.python_version(), "system": platform.system(), "cores": os.cpu_count()},
            "command": list(command),
        }
        line = json.dumps(row, sort_keys=True, allow_nan=False).encode() + b"\n"
        with open(self.path, "a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line  # after a line cut short
            written = file.write(line)
            if written != len(line):
                raise OSError(f"{self.path}: the disk is full")
            os.fsync(file.fileno())
        self._rows.pop(cell.key, None)
        self._rows[cell.key] = row
        return row

    def _scores(self, key: str) -> Path:
        return self.folder / "scores" / f"{key}.safetensors"


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
        whole = row["key"] and row["status"] in (DONE, FAILED) and row["kind"] == row["asked"]["kind"]
        return row if whole else None
    except (ValueError, TypeError, KeyError):
        return None
