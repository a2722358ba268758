"""An inspection as a person reads it."""

import math

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sinkcache.inspection import FIRST_QUERY, Inspection, Sinks


def tables(found: Inspection) -> list[Table | str]:
    """What a person reads, 80 columns wide: tables, and between them the sentences that say what was measured."""
    kinds, sinks = _table("Layers"), _table("Sinks")
    alike: dict[tuple, list[int]] = {}
    for layer in found.layers:
        size = "-" if layer.bytes_per_token is None else f"{layer.bytes_per_token:,}"
        alike.setdefault((layer.kind, layer.rope, "yes" if layer.bounded else "no, native", size), []).append(
            layer.index
        )
    for name in ("layers", "kind", "rotary positions", "bounded", "bytes/token"):
        kinds.add_column(name, justify="right" if "/" in name else "left")
    for row, indices in alike.items():
        kinds.add_row(_ranges(indices), *row)
    positions = [f'positions "{name}": {why or "possible"}' for name, why in found.positions.items()]
    for name in ("sinks", "perplexity"):
        sinks.add_column(name, justify="right")
    for num_sinks, value in found.sinks.perplexity.items():
        sinks.add_row(str(num_sinks), f"{value:.2f}")
    return [kinds, *positions, _attention(found), _mean(found), *([sinks] if sinks.rows else []), _advice(found.sinks)]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)


def _attention(found: Inspection) -> Table:
    table = _table("Attention received")
    for name in ("layer", "first token", "", "most, if another"):
        table.add_column(name, justify="right" if name in ("layer", "first token") else "left")
    for layer in found.layers:
        if layer.first_share is None:
            table.add_row(str(layer.index), "-", "", "")
            continue
        other = f"{layer.top_share:.1%} at position {layer.top_position}" if layer.top_position else ""
        table.add_row(str(layer.index), f"{layer.first_share:.1%}", "#" * round(30 * layer.first_share), other)
    return table


def _mean(found: Inspection) -> str:
    shares = [layer.first_share for layer in found.layers if layer.first_share is not None]
    if not shares:
        return "Attention could not be read from any layer."
    return (
        f"The first token, {found.first_token!r}, receives {math.fsum(shares) / len(shares):.1%} of attention in the "
        f"mean over layers and {max(shares):.1%} at most; uniform attention would give it {found.uniform:.1%} (queries "
        f"{FIRST_QUERY + 1} to {found.tokens}, mean over heads)."
    )


def _advice(sinks: Sinks) -> str:
    if sinks.recommended is None:
        return f"Sinks were not measured: {sinks.tokens} tokens are fewer than twice the budget of {sinks.budget}."
    return (
        f"Recommended: {sinks.recommended}, the fewest within 1% of the best. Measured on this sample alone: its first "
        f"{sinks.tokens:,} tokens in chunks of {sinks.chunk}, budget {sinks.budget}, positions {sinks.positions!r}."
    )


def _ranges(indices: list[int]) -> str:
    """Ascending numbers as ranges: "0-4, 6"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
