"""Results that are kept one by one, so that a long experiment can be stopped and goes on where it was."""

import hashlib
import json
from pathlib import Path

from experiments.results import Row
from experiments.whole import put


class Cells:
    """Finished cells in `folder`, one JSON file each: a policy on a text at a budget, its perplexity and its recall."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self.folder, self.fresh = folder, fresh
        self._new: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, identity: Row) -> Row:
        """What is known of a cell: its identity at least."""
        path = self._path(identity)
        if (self.fresh and path not in self._new) or not path.exists():
            return dict(identity)
        return json.loads(path.read_text(encoding="utf-8"))

    def write(self, identity: Row, **found: float) -> None:
        """Adds to a cell; on disk is what was there before, or all of it."""
        row = {**self.read(identity), **found}
        put(self._path(identity), json.dumps(row, indent=1, sort_keys=True))
        self._new.add(self._path(identity))

    def _path(self, identity: Row) -> Path:
        whole = json.dumps(identity, sort_keys=True).encode()
        return self.folder / f"{hashlib.sha256(whole).hexdigest()[:16]}.json"
