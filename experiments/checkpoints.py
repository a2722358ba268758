"""Where a long run stands, on disk: a killed process loses what it read since, and nothing else.

A checkpoint is a folder named by the run's key, so that another text, model or version never finds it: the cache and
the logits after its last token in a file each, the scores so far in one that only grows, and `state.json`, which names
the others and is replaced last. Whatever moment a process is killed at, the state on disk and what it names are whole.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from experiments.results import Row
from experiments.whole import put
from sinkcache import SinkCache, container

try:
    import fcntl  # not every system has it
except ImportError:
    fcntl = None


@dataclass
class Stand:
    """How far a run is: `read` and `before` of its `Reading`, `upto` tokens of the text gone through.

    `told` is what the figures have gathered, as JSON has it.
    """

    read: int
    upto: int
    nll: Float[Tensor, " upto"]
    before: Float[Tensor, "1 vocab"] | None
    cache: SinkCache | None
    told: Row = field(default_factory=dict)


class Checkpoint:
    """The checkpoint of the run `key`, below `folder`; one process at a time may hold it."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder / key, key
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "ab")  # noqa: SIM115 - held until the run ends
        self._digest, self._stored = hashlib.sha256(), 0
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise ValueError(f"another process is at the run {key}, see {self.folder}: wait for it") from None

    def load(self, model: nn.Module) -> Stand | None:
        """Where the run stood; None if it has not begun. Raises ValueError if it is damaged, or another run's."""
        path = self.folder / "state.json"
        if not path.exists():
            return None
        try:
            return self._load(json.loads(path.read_bytes()), model)
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = str(error) or type(error).__name__
            raise ValueError(f"checkpoint {self.folder} cannot be used: {said}. Give --fresh to begin anew") from error

    def save(self, stand: Stand) -> None:
        """Replaces the checkpoint; raises OSError as writing does, and leaves the one before."""
        names = {"cache": f"cache-{stand.read}.safetensors", "before": f"before-{stand.read}.safetensors"}
        if stand.cache is not None:
            stand.cache.save(self.folder / names["cache"])
        if stand.before is not None:
            container.write(self.folder / names["before"], {}, {"before": stand.before})
        self._append(stand.nll)
        state = {
            "key": self.key,
            "read": stand.read,
            "upto": stand.upto,
            "scores_sha256": self._digest.hexdigest(),
            "cache": names["cache"] if stand.cache is not None else None,
            "before": names["before"] if stand.before is not None else None,
            "told": stand.told,
        }
        put(self.folder / "state.json", json.dumps(state))
        for path in self.folder.iterdir():
            if path.name not in (*names.values(), "state.json", "scores.f64", "lock"):
                path.unlink()

    def drop(self) -> None:
        """Deletes it: the run is filed, or begins anew."""
        (self.folder / "state.json").unlink(missing_ok=True)  # first, so that it never names what is gone
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()
        self._digest, self._stored = hashlib.sha256(), 0

    def close(self) -> None:
        """Lets another process have it; without a checkpoint nothing is left of the folder."""
        if not (self.folder / "state.json").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _append(self, nll: Float[Tensor, " upto"]) -> None:
        new = nll[self._stored :].numpy().tobytes()
        with open(os.open(self.folder / "scores.f64", os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.seek(self._stored * nll.itemsize)
            file.write(new)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(new)
        self._stored = len(nll)

    def _load(self, state: Row, model: nn.Module) -> Stand:
        if state["key"] != self.key:
            raise ValueError(f"it is of the run {state['key']}")
        with open(self.folder / "scores.f64", "rb") as file:
            scores = bytearray(file.read(8 * state["upto"]))
        self._digest, self._stored = hashlib.sha256(scores), state["upto"]
        if self._digest.hexdigest() != state["scores_sha256"]:
            raise ValueError("its scores are damaged")
        nll = torch.frombuffer(scores, dtype=torch.float64)
        cache: Any = None if state["cache"] is None else SinkCache.load(self.folder / state["cache"], model)
        before = None if state["before"] is None else container.read(self.folder / state["before"])[1]["before"]
        return Stand(state["read"], state["upto"], nll, before, cache, state["told"])


def forget(folder: Path, key: str) -> None:
    """Deletes what a process that was killed as it filed the run `key` has left below `folder`."""
    if not (folder / key).exists():
        return
    with suppress(ValueError):  # another process is about to
        checkpoint = Checkpoint(folder, key)
        checkpoint.drop()
        checkpoint.close()


def stands_at(folder: Path, key: str) -> int:
    """The token that the checkpoint of the run `key` below `folder` stands at; 0 if there is none that can be read."""
    try:
        return int(json.loads((folder / key / "state.json").read_bytes())["upto"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
