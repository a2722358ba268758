"""What runs left in their folders, read for a report: finished cells with their scores, failed ones, and complaints."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.grid.store import DONE, FAILED, Store
from experiments.results import Row

_CLOSE = 1e-6  # relative, between a cell's perplexity and that of its scores: both are float64
_SCORES = ("nll", "kl", "agree")
_OF_ALL = {"asked": ("kind", "name", "method", "model")}
_NEEDED = {
    "stream": {"asked": ("text", "text_sha256", "tokens"), "figures": ("scored",)},
    "retrieval": {"asked": ("task", "trials"), "figures": ("hits",)},
}


class Unusable(ValueError):
    """There is nothing in the folder that a report could be made of."""


@dataclass(frozen=True)
class Measured:
    """A finished cell of kind "stream": its row, and one number a token, NaN where none was scored."""

    row: Row
    nll: Float[np.ndarray, " tokens"]
    kl: Float[np.ndarray, " tokens"]
    agree: Float[np.ndarray, " tokens"]

    @property
    def asked(self) -> Row:
        """What was asked for."""
        return self.row["asked"]


@dataclass
class Found:
    """All of some folders. `rows`: every cell, finished or failed; `notes`: what a reader must know of them."""

    rows: list[Row] = field(default_factory=list)
    stream: list[Measured] = field(default_factory=list)
    retrieval: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(folders: Sequence[str | Path]) -> Found:
    """The cells of `folders`; of two with one key, the one that did not fail, or was measured later.

    Raises Unusable if a folder has none.
    """
    found, rows, places = Found(), {}, {}
    for folder in map(Path, folders):
        store = Store(folder)
        read_here, damaged = rows_of(folder)
        if damaged:
            found.notes.append(f"{damaged} damaged line{'s' * (damaged > 1)} of {folder / 'results.jsonl'} passed over")
        for row in read_here:
            before = rows.get(row["key"])
            if before is None or _holds(row, before):
                rows[row["key"]], places[row["key"]] = row, store
            if before is not None and before["status"] == row["status"] and before["figures"] != row["figures"]:
                found.notes.append(f"{called(row)} was measured twice, with other figures: the later ones are shown")
    found.rows = sorted(rows.values(), key=lambda row: row["key"])
    for row in found.rows:
        if row["status"] != DONE:
            found.failed.append(row)
            continue
        try:
            _file(found, row, places[row["key"]])
        except Unusable as error:
            found.notes.append(f"{called(row)} is left out: {error}")
    _without_older_texts(found)
    _once(found)
    return found


def _holds(row: Row, before: Row) -> bool:
    """Whether `row` is shown and not `before`: a finished cell rather than one that failed, else the later."""
    if row["status"] != before["status"]:
        return row["status"] == DONE
    return later(row, before)


def rows_of(folder: Path) -> tuple[list[Row], int]:
    """The cells in `folder`, of each key its last line, and the count of damaged lines. Raises Unusable if none."""
    path = folder / "results.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise Unusable(f"{folder} has no results.jsonl to read: {error.strerror}") from error
    rows, damaged = {}, 0
    for line in filter(bytes.strip, lines):
        row = _parsed(line)
        if row is None:
            damaged += 1
        else:
            rows.pop(row["key"], None)
            rows[row["key"]] = row
    if not rows:
        raise Unusable(f"{path} holds no cell")
    return list(rows.values()), damaged


def called(row: Row) -> str:
    """A cell in a few words."""
    asked = row["asked"]
    about = [str(asked.get("text") or asked.get("task") or "?")]
    about += [f"budget {asked['budget']}"] if asked.get("budget") is not None else []
    about += [f"{asked['positions']} positions"] if asked.get("positions") else []
    about += [f"{each} {asked[each]}" for each in ("chunk", "length", "depth") if asked.get(each) is not None]
    return f"{asked.get('name', '?')} on {', '.join(about)} (cell {row['key']})"


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("key"), str) or not isinstance(row.get("asked"), dict):
        return None
    empty: dict[str, Any] = {"status": FAILED, "reason": None, "kind": row["asked"].get("kind"), "command": []}
    row = {**empty, "date": "", "function": "", **row}
    return {**row, **{part: row.get(part) or {} for part in ("figures", "cost", "host")}}


def _file(found: Found, row: Row, store: Store) -> None:
    kind = row["kind"]
    if kind not in _NEEDED:
        raise Unusable(f"its kind is {kind!r}, of which no report knows")
    for part, names in (*_OF_ALL.items(), *_NEEDED[kind].items()):
        lacking = [name for name in names if row[part].get(name) is None]
        if lacking:
            raise Unusable(f"its {part} lack {', '.join(lacking)}")
    if kind == "retrieval":
        found.retrieval.append(row)
    else:
        found.stream.append(_checked(row, store))


def _checked(row: Row, store: Store) -> Measured:
    """With the scores, which must be of this text and make these figures."""
    tokens, path = row["asked"]["tokens"], store.folder / "scores" / f"{row['key']}.safetensors"
    try:
        scores = store.scores(row["key"])
    except ValueError as error:
        raise Unusable(str(error)) from error
    if "nll" not in scores:
        raise Unusable(f"its scores are not there: {path}")
    for name in _SCORES:
        shape = scores.setdefault(name, np.full(tokens, np.nan)).shape
        if shape != (tokens,):
            raise Unusable(f"{path} has {name} of shape {shape}, where {tokens} tokens were read")
    nll = scores["nll"].astype(np.float64)
    scored, figures = nll[~np.isnan(nll)], row["figures"]
    if len(scored) != figures["scored"]:
        raise Unusable(f"{path} scores {len(scored)} tokens, the row says {figures['scored']}")
    with np.errstate(over="ignore"):
        value = float(np.exp(scored.mean())) if len(scored) else math.nan
    told = figures.get("perplexity")
    if not math.isclose(value, math.inf if told is None else told, rel_tol=_CLOSE):  # None: beyond all numbers
        raise Unusable(f"{path} makes perplexity {value:.6g}, the row says {told}")
    return Measured(row, nll, scores["kl"].astype(np.float64), scores["agree"].astype(np.float64))


def _without_older_texts(found: Found) -> None:
    newest: dict[str, Measured] = {}
    for each in found.stream:
        name = each.asked["text"]
        if name not in newest or later(each.row, newest[name].row):
            newest[name] = each

    def current(each: Measured) -> bool:
        return each.asked["text_sha256"] == newest[each.asked["text"]].asked["text_sha256"]

    older = [each for each in found.stream if not current(each)]
    found.stream = [each for each in found.stream if current(each)]
    for name in sorted({each.asked["text"] for each in older}):
        mine = [each for each in older if each.asked["text"] == name]
        hashes = sorted({each.asked["text_sha256"][:12] for each in mine})
        found.notes.append(
            f"{name!r} has changed: {len(mine)} cells of its older text (SHA-256 {', '.join(hashes)}) are left out, "
            f"those of {newest[name].asked['text_sha256'][:12]} are shown"
        )


def _once(found: Found) -> None:
    """Has the same tokens under one name, that of their newest cell: a document counts once."""
    named: dict[str, Measured] = {}
    for each in found.stream:
        ids = str(each.asked.get("ids_sha256"))
        if ids not in named or later(each.row, named[ids].row):
            named[ids] = each
    kept: dict[str, Measured] = {}
    for each in found.stream:
        ids, text = each.asked.get("ids_sha256"), each.asked["text"]
        name = text if ids is None else named[ids].asked["text"]
        asked = {**each.asked, "text": name}
        if name != text and (note := f"{text!r} and {name!r} are the same tokens: one document") not in found.notes:
            found.notes.append(note)
        same = json.dumps(asked, sort_keys=True)
        if same not in kept or later(each.row, kept[same].row):
            kept[same] = replace(each, row={**each.row, "asked": asked})
    found.stream = list(kept.values())


def later(row: Row, other: Row) -> bool:
    """Whether `row`, which is read after `other`, was measured later; on one date it is taken to be."""
    return row["date"] >= other["date"]
