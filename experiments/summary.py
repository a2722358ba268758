"""What the tables say: one line per run, and runs compared on the very tokens that a sampled recompute scored."""

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from experiments.measure import perplexity_from
from experiments.results import Results, Row
from experiments.runs import Setting, labels

HEADINGS = (
    "method",
    "sinks",
    "budget",
    "positions",
    "chunk",
    "perplexity",
    "after evict.",
    "x full",
    "MiB",
    "ms/token",
)


@dataclass(frozen=True)
class Line:
    """A run in a table. `after`: perplexity after the first eviction; `ratio`: to full, on the same tokens."""

    method: str
    sinks: int | None
    budget: int | None
    positions: str | None
    chunk: int | None
    perplexity: float
    after: float | None
    ratio: float | None
    mib: float
    ms_per_token: float
    attend: str | None
    bos: str
    scored: int

    @property
    def sampled(self) -> bool:
        """Whether tokens were skipped, so that the perplexity is not that of the text."""
        return self.method.startswith("recompute ")

    def cells(self) -> tuple[str, ...]:
        """One string for each of `HEADINGS`."""
        name = self.method + (" *" if self.attend == "token" else "") + (" +BOS" if self.bos == "prepend" else "")
        plain = (self.sinks, self.budget, self.positions, self.chunk)
        return (
            name,
            *("-" if value is None else str(value) for value in plain),
            "below" if self.sampled else number(self.perplexity),
            "below" if self.sampled else number(self.after),
            "below" if self.sampled else number(self.ratio),
            number(self.mib),
            number(self.ms_per_token),
        )


@dataclass(frozen=True)
class Compared:
    """Runs on the tokens that a sampled recompute scored after its first window: (label, perplexity, to full)."""

    title: str
    rows: list[tuple[str, float, float | None]]


def number(value: float | None) -> str:
    """Two decimals for small numbers, fewer for great ones; "-" for none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def setting(row: Row) -> Setting:
    """The setting a row was measured in."""
    return Setting(**row["setting"])


def lines(results: Results, keys: Sequence[str]) -> list[Line]:
    """A line for each run in `keys`, in their order."""
    return [_line(results, results[key], _full(results, keys, results[key])) for key in keys]


def compared(results: Results, keys: Sequence[str]) -> list[Compared]:
    """For each recompute that skipped tokens, every run with its budget, and full, on the tokens it did score."""
    found = []
    for key in keys:
        mine = setting(results[key])
        if mine.method != "recompute" or mine.every == 1:
            continue
        theirs = [other for other in keys if _comparable(setting(results[other]), mine)]
        common = results.nll(key)
        full = _full(results, keys, results[key])
        rows, shown = [], dict(zip(theirs, labels([setting(results[other]) for other in theirs]), strict=True))
        for other in theirs:
            value, ratio = _on(results.nll(other), common, mine, full)
            rows.append((shown[other], value, ratio))
        count = int((~common[mine.first_after :].isnan()).sum())
        title = (
            f"On the {count} tokens that {mine.label} scored: each {_ordinal(mine.every or 1)} after the first window"
        )
        found.append(Compared(title, rows))
    return found


def write_csv(path: Path, table: Sequence[Line]) -> None:
    """Writes the lines, unrounded."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Line.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(line) for line in table)


def _line(results: Results, row: Row, full: Float[Tensor, " tokens"] | None) -> Line:
    mine = setting(row)
    nll = results.nll(row["key"])
    ratio = 1.0 if mine.method == "full" else _on(nll, nll, mine, full)[1]
    return Line(
        mine.name,
        mine.sinks,
        mine.budget,
        mine.positions,
        mine.chunk,
        row["perplexity"],
        row["perplexity_after"],
        ratio,
        row["bytes"] / 2**20,
        row["ms_per_token"],
        mine.attend,
        mine.bos,
        row["scored"],
    )


def _on(
    nll: Float[Tensor, " tokens"],
    common: Float[Tensor, " tokens"],
    mine: Setting,
    full: Float[Tensor, " tokens"] | None,
) -> tuple[float, float | None]:
    """Perplexity of `nll` on the tokens scored in `common` after the first eviction of `mine`; its ratio to full's."""
    value = perplexity_from(nll.masked_fill(common.isnan(), math.nan), mine.first_after)
    whole = None if full is None else perplexity_from(full.masked_fill(common.isnan(), math.nan), mine.first_after)
    return value or math.nan, value / whole if value and whole else None


def _full(results: Results, keys: Sequence[str], row: Row) -> Float[Tensor, " tokens"] | None:
    for key in keys:
        other = setting(results[key])
        if other.method == "full" and other.bos == setting(row).bos:
            return results.nll(key)
    return None


def _comparable(other: Setting, mine: Setting) -> bool:
    every = other.every == mine.every if other.method == "recompute" else True
    return other.bos == mine.bos and other.budget in (None, mine.budget) and every


def _ordinal(count: int) -> str:
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"
