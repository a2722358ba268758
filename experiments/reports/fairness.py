"""Whether policies that are compared hold as much: one that holds more is shown, and not ranked."""

from collections import Counter
from collections.abc import Sequence

from experiments.reports.groups import Line


def unfair(lines: Sequence[Line]) -> tuple[list[Line], list[str]]:
    """The policies that hold more entries than the others, and a note on each that holds more or fewer.

    What the others hold is what most of them do; of two counts that are as frequent, the smaller.
    """
    out, notes = [], []
    for name in sorted({name for line in lines for name in line.cells}):
        told = [(line.label, _held(line, name)) for line in lines]
        held = {label: count for label, count in told if count is not None}
        counts = Counter(held.values())
        usual = min(counts, key=lambda value: (-counts[value], value), default=0)
        for line in lines:
            mine = held.get(line.label, usual)
            if mine == usual:
                continue
            more = mine > usual
            consequence = "MORE to look back at: it is not ranked" if more else "less to look back at"
            notes.append(
                f"Unequal budgets: {line.label} holds {mine:,.0f} entries of {name} where the others hold "
                f"{usual:,.0f}, {consequence}."
            )
            if more and line not in out:
                out.append(line)
    return out, notes


def _held(line: Line, name: str) -> float | None:
    held = line.cells[name].row["figures"].get("held") if name in line.cells else None
    return None if held is None else round(held, 3)  # a mean, which is not exact
