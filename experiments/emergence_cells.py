"""What was found of a checkpoint on a document: one file a cell, whole or not there, and the same on every run.

What differs between two runs, as seconds and the machine do, is in `log.jsonl` beside them.
"""

import hashlib
import json
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from experiments.results import Row
from experiments.whole import put

DONE, FAILED = "done", "failed"


class Store:
    """The cells in a folder. A cell is found by what was `asked` for, and by the weights it was measured on.

    A file that cannot be read counts as not there. With `fresh`, so does what earlier runs left.
    """

    def __init__(self, folder: Path, fresh: bool) -> None:
        self.folder, self.log = folder / "cells", folder / "log.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._cells: dict[str, dict[Path, Row]] = {}
        for path in sorted(self.folder.glob("*.json")) if not fresh else ():
            try:
                row = json.loads(path.read_text(encoding="utf-8"))
                self._cells.setdefault(hash_of(row["asked"]), {})[path] = row
            except (OSError, ValueError, KeyError, TypeError):
                continue

    def find(self, asked: Row, weights: str | None) -> Row | None:
        """The cell of these weights; without, of the one that is known. A finished cell goes before a failed one."""
        found = list(self._cells.get(hash_of(asked), {}).values())
        alike = [row for row in found if weights is None or row["weights"] in (weights, None)]
        return min(alike, key=lambda row: row["status"] != DONE, default=None)

    def known_as(self, **about: Any) -> Iterator[Row]:
        """Finished cells in whose `asked` all this stands."""
        for cells in self._cells.values():
            for row in cells.values():
                if row["status"] == DONE and all(row["asked"].get(name) == value for name, value in about.items()):
                    yield row

    def add(self, asked: Row, identity: Row, found: Row) -> Row:
        """Files a cell, in the place of a failure of the same."""
        row = {"asked": asked, **identity, **found}
        path = self.folder / f"{hash_of({'asked': asked, **identity})}.json"
        cells = self._cells.setdefault(hash_of(asked), {})
        put(path, json.dumps(row, sort_keys=True, allow_nan=False) + "\n")
        for other in [each for each, past in cells.items() if past["status"] == FAILED and each != path]:
            other.unlink(missing_ok=True)
            del cells[other]
        cells[path] = row
        return row

    def note(self, asked: Row, seconds: float, threads: int) -> None:
        """Appends to the log what a cell took, and where."""
        about = {name: asked[name] for name in ("series", "revision", "document", "control")}
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        device = torch.cuda.get_device_name() if asked["device"] == "cuda" else platform.processor() or "cpu"
        host = {"python": platform.python_version(), "system": platform.system(), "device": device, "threads": threads}
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"date": when, **about, "seconds": round(seconds, 3), **host}) + "\n")


def hash_of(asked: Row) -> str:
    """16 hexadecimal digits for what a cell depends on."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
