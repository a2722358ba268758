"""The file of finished runs: one JSON line each, appended whole; and beside it each run's scores, token by token."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Row = dict[str, Any]


class Results:
    """Finished runs in `folder`, by key: `results.jsonl`, and `scores/KEY.pt` with one number per token of the text.

    A line that a killed process left unfinished is passed over, and its run counts as not done. Of two lines with one
    key the later holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"
        (folder / "scores").mkdir(parents=True, exist_ok=True)
        self._rows: dict[str, Row] = {}
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "key" in row and self._scores(row["key"]).exists():
                self._rows[row["key"]] = row

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Row:
        return self._rows[key]

    def nll(self, key: str) -> Float[Tensor, " tokens"]:
        """Negative log-likelihoods in nats, float64, by token of the text; NaN where none was scored."""
        return torch.load(self._scores(key), weights_only=True)

    def add(self, row: Row, nll: Float[Tensor, " tokens"]) -> None:
        """Files a finished run; what is on disk afterwards is all of it or none."""
        handle, unfinished = tempfile.mkstemp(dir=self.folder / "scores", suffix=".unfinished")
        os.close(handle)
        torch.save(nll, unfinished)
        os.replace(unfinished, self._scores(row["key"]))
        line = json.dumps(row, sort_keys=True).encode() + b"\n"
        with open(self.path, "a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line  # after a line cut short
            file.write(line)
            os.fsync(file.fileno())
        self._rows[row["key"]] = row

    def _scores(self, key: str) -> Path:
        return self.folder / "scores" / f"{key}.pt"
