"""The figures of a table: of each policy, on tokens that all have scored, with intervals, and who ties with the best.

Perplexities are exponentials of sums over tokens divided by the count of tokens, over all documents at once: never a
mean of perplexities. What compares policies is of the tokens after the first eviction, before which they are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

from experiments.reports.bootstrap import Estimate, Units
from experiments.reports.fairness import unfair
from experiments.reports.groups import Line, Panel
from experiments.reports.sums import Sums, Tokens
from experiments.results import Row

BEST, TIED, UNRANKED, BOUND = "best", "tied", "not ranked", "bound"
ANCHORS = ("StreamingLLM", "window", "Window")  # where the gap to the full cache begins: the first that is there
COSTS = ("prefill_seconds", "ms_per_token", "tokens_per_second")
BOUNDS = ("Clairvoyant",)  # which know the text to come: no policy to choose


@dataclass(frozen=True)
class Spread:
    """Of a cost over documents: the least, the one in the middle, the greatest."""

    low: float
    value: float
    high: float


@dataclass
class Result:
    """A line's figures; None where there is none. `standing`: BEST, TIED, UNRANKED, BOUND, or nothing."""

    line: Line
    perplexity: Estimate
    after: Estimate
    ratio: Estimate | None = None
    to_best: Estimate | None = None
    gap: Estimate | None = None
    kl: Estimate | None = None
    top1: Estimate | None = None
    recall: Estimate | None = None
    bits_per_byte: Estimate | None = None
    bytes: float | None = None
    bytes_peak: float | None = None
    costs: dict[str, Spread] = field(default_factory=dict)
    standing: str = ""


@dataclass
class Contest:
    """Lines on the same tokens. `notes`: who is not ranked, and why; `standings` says who is best."""

    panel: Panel
    tokens: Tokens
    results: list[Result]
    units: Units
    notes: list[str]
    of: str | None = None  # the line that scored only these tokens

    @property
    def rows(self) -> list[Row]:
        """Of the cells that it is made of."""
        return [row for result in self.results for row in result.line.rows]


def contests(panel: Panel) -> list[Contest]:
    """That of the lines which scored every token; then one for each line that scored some only."""
    lengths, most = {}, {}
    for name in panel.documents:
        masks = [~np.isnan(line.cells[name].nll) for line in panel.lines if name in line.cells]
        most[name] = max(masks, key=lambda mask: int(mask.sum()))
        lengths[name] = max(len(mask) for mask in masks)
    sampled = [line for line in panel.lines if not _covers(line, most)]
    whole = [line for line in panel.lines if line not in sampled]
    made = [_contest(panel, whole, _tokens(panel, most), None)]
    for line in sampled:
        scored = {name: ~np.isnan(cell.nll) for name, cell in line.cells.items()}
        tokens = _tokens(panel, scored)
        tokens = Tokens(tokens.after, tokens.after)  # of the first window it scored every token
        others = [
            other for other in panel.lines if _covers(other, tokens.after) and set(other.cells) & set(tokens.after)
        ]
        if tokens.count:
            made.append(_contest(panel, others, tokens, line.label))
    return made


def starts(panel: Panel) -> dict[str, int]:
    """By document, the first token that every policy predicted with something evicted; 0 where none evicts."""
    found = dict.fromkeys(panel.documents, 0)
    for line in panel.lines:
        for name, cell in line.cells.items():
            found[name] = max(found[name], _start(cell.row))
    return found


def _start(row: Row) -> int:
    """The first token that is predicted by a chunk before which something was evicted; 0 where nothing is."""
    first, budget, chunk = row["figures"].get("first_after"), row["asked"].get("budget"), row["asked"].get("chunk")
    return (first or 0) + (-budget % chunk if first and budget and chunk else 0)


def _tokens(panel: Panel, counted: dict[str, Bool[np.ndarray, " tokens"]]) -> Tokens:
    first = starts(panel)
    after = {name: mask & (np.arange(len(mask)) >= first[name]) for name, mask in counted.items()}
    return Tokens(counted, after)


def _covers(line: Line, tokens: dict[str, Bool[np.ndarray, " tokens"]]) -> bool:
    return all(not (tokens[name] & np.isnan(cell.nll)).any() for name, cell in line.cells.items() if name in tokens)


def _contest(panel: Panel, lines: Sequence[Line], tokens: Tokens, of: str | None) -> Contest:
    names = sorted(tokens.counted)
    units = Units(tuple(len(tokens.counted[name]) for name in names))
    lines = [Line(line.label, line.method, {n: line.cells[n] for n in names if n in line.cells}) for line in lines]
    sums = {line.label: Sums(line, tokens, units, names) for line in lines}
    full = next((sums[line.label] for line in lines if line.method == "full"), None)
    results = [_result(sums[line.label], full, _anchor(sums)) for line in lines]
    ranked, notes = _ranked(lines, names)
    _stand([each for each in results if each.line in ranked], sums)
    for result in results:
        if result.line.method == "policy" and result.line not in ranked:
            result.standing = BOUND if result.line.label.startswith(BOUNDS) else UNRANKED
    results.sort(key=lambda each: (each.line.method != "full", each.after.value, each.line.label))
    return Contest(panel, tokens, results, units, notes, of)


def _anchor(sums: dict[str, Sums]) -> Sums | None:
    found = [label for name in ANCHORS for label in sorted(sums) if label == name or label.startswith(f"{name}(")]
    return sums[found[0]] if found else None


def _ranked(lines: Sequence[Line], names: Sequence[str]) -> tuple[list[Line], list[str]]:
    policies = [line for line in lines if line.method == "policy"]
    out, notes = unfair(policies)
    for line in lines:
        missing = [name for name in names if name not in line.cells]
        if missing:
            out.append(line)
            end = ", it is not ranked." if line.method == "policy" else "."
            notes.append(f"{line.label} lacks {', '.join(missing)}: its figures are of the other documents{end}")
    out += [line for line in policies if line.label.startswith(BOUNDS)]
    return [line for line in policies if line not in out], notes


def _stand(ranked: Sequence[Result], sums: dict[str, Sums]) -> None:
    known = [each for each in ranked if not math.isnan(each.after.value)]
    if len(known) < 2:
        return
    best = min(known, key=lambda each: (each.after.value, each.line.label))
    for each in known:
        each.to_best = sums[each.line.label].ratio(sums[best.line.label])
    if any(each.to_best is None or each.to_best.low is None for each in known if each is not best):
        return  # nobody can say
    for each in known:
        tied = each.to_best is not None and each.to_best.contains(1.0)
        each.standing = BEST if each is best else TIED if tied else ""


def _result(mine: Sums, full: Sums | None, anchor: Sums | None) -> Result:
    made = Result(mine.line, mine.perplexity(), mine.perplexity_after())
    if full is not None:
        made.ratio = mine.ratio(full)
        made.gap = mine.gap(anchor, full) if anchor is not None else None
    made.kl, made.top1, made.recall = mine.plain("kl"), mine.plain("agree"), mine.recall()
    made.bits_per_byte = mine.bits_per_byte()
    rows = mine.line.rows
    made.bytes, made.bytes_peak = (_most(rows, name) for name in ("bytes", "bytes_peak"))
    for name in COSTS:
        values = [row["cost"][name] for row in rows if row["cost"].get(name) is not None]
        if values:
            made.costs[name] = Spread(min(values), float(np.median(values)), max(values))
    if (each := made.costs.get("ms_per_token")) is not None:  # or the middle one of both would not agree
        made.costs["tokens_per_second"] = Spread(1000 / each.high, 1000 / each.value, 1000 / each.low)
    return made


def _most(rows: Sequence[Row], name: str) -> float | None:
    values = [row["figures"].get(name) for row in rows]
    return None if None in values else max(values)
