"""A plan as a person reads it, and as a spreadsheet does."""

import csv
import io
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sinkcache.planner import NOT_COUNTED, Plan
from sinkcache.planner.kinds import KINDS
from sinkcache.planner.users import Users

_MIB, _BAR = 2**20, 12
_SHOWN = 6  # settings that save, at most


def tables(made: Plan, users: Users | None = None, verdict: dict[str, Any] | None = None) -> list[Table | str]:
    """What a person reads: tables, and sentences that say what was assumed and what is not counted."""
    model = made.model
    weights = "" if model.weights is None else f", weights {mib(model.weights)} MiB ({model.weights:,} bytes)"
    parts: list[Table | str] = [f"{model.name} ({model.model_type}), cache in {model.dtype}{weights}", _kinds(made)]
    parts += [f"{row.kind}: {KINDS[row.kind]}; {row.formula} bytes at T tokens" for row in made.kinds]
    if model.weights is not None and made.per_token:
        parts.append(f"The cache is as large as the weights at {model.weights // made.per_token:,} tokens in all.")
    parts += ["", _engines(made), f"Rules: {', '.join(dict.fromkeys(row.rules for row in made.engines))}."]
    parts += dict.fromkeys(f"No figure: {row.refused}" for row in made.engines if row.refused is not None)
    if users is not None:
        parts += [_users(users), *_mix(users), *_saved(users)]
    parts += [f"Assumed: {each}" for each in model.assumed]
    parts += [f"Warning: {each}" for each in made.warnings]
    if verdict is not None:
        same = "exact" if verdict["exact"] else "NOT what was planned"
        parts.append(
            f"Verified: {verdict['counted_bytes']:,} bytes counted after {verdict['tokens']:,} tokens "
            f"({verdict['what']}), {verdict['planned_bytes']:,} planned: {same}"
        )
    return [*parts, f"Not counted: {NOT_COUNTED}."]


def csv_lines(made: Plan, users: Users | None = None) -> list[str]:
    """One line for each kind and engine and length, under a heading: what, name, rules, tokens, bytes, peak, users."""
    rows: list[tuple[Any, ...]] = [("what", "name", "rules", "tokens", "bytes", "peak_bytes", "users")]
    for row in made.kinds:
        name = f"{row.layers} {row.kind}"
        rows += [
            ("kind", name, "", length, total, "", "") for length, total in zip(made.lengths, row.totals, strict=True)
        ]
    served = {} if users is None else {each.name: each.users for each in users.engines}
    for row in made.engines:
        if row.refused is not None:
            rows.append(("refused", row.name, row.rules, "", "", "", ""))
            continue
        counts = served.get(row.name, ("",) * len(made.lengths))
        for length, held, peak, count in zip(made.lengths, row.held, row.peak, counts, strict=True):
            rows.append(("engine", row.name, row.rules, length, held, peak, count))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().splitlines()


def mib(size: int) -> str:
    """Bytes as MiB, with the two decimals that engines print."""
    return f"{size / _MIB:,.2f}"


def _table(title: str, names: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, name in enumerate(names):
        words = index == 0 or not name
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def _kinds(made: Plan) -> Table:
    """A row for each kind, with a bar of its share at the longest length."""
    longest = max(made.lengths)
    table = _table("Layers", ["kind", "layers", "bytes/token", "fixed bytes", f"MiB at {longest:,}", ""])
    whole = sum(row.totals[made.lengths.index(longest)] for row in made.kinds) or 1
    for row in made.kinds:
        total = row.totals[made.lengths.index(longest)]
        fixed = row.fixed + row.capped * (row.window or 0)
        bar = "#" * round(_BAR * total / whole)
        table.add_row(row.kind, str(row.layers), f"{row.per_token:,}", f"{fixed:,}", mib(total), bar)
    return table


def _engines(made: Plan) -> Table:
    names = ["one conversation, MiB", *(f"{length:,}" for length in made.lengths), "peak", "bytes"]
    table = _table("Engines", names)
    table.add_row("what queries can see", *map(mib, made.least), "", f"{made.least[-1]:,}")
    for row in made.engines:
        if row.refused is None:
            table.add_row(row.name, *map(mib, row.held), mib(row.peak[-1]), f"{row.held[-1]:,}")
    return table


def _users(users: Users) -> Table:
    title = f"Users in {mib(users.memory)} MiB ({users.memory:,} bytes), by memory alone"
    names = ["tokens of each", *(f"{length:,}" for length in users.lengths), "longest of one"]
    table = _table(title, names)
    for each in users.engines:
        table.add_row(each.name, *(f"{count:,}" for count in each.users), f"{each.longest:,}")
    return table


def _mix(users: Users) -> list[Table | str]:
    parts: list[Table | str] = []
    if users.classes:
        names = [f"{each.prompt:,}+{each.answer:,} ({each.share:.0%})" for each in users.classes]
        table = _table("Users of the mix at once", ["", "all", *names])
        for each in users.engines:
            table.add_row(each.name, f"{sum(each.mix):,}", *(f"{count:,}" for count in each.mix))
        parts.append(table)
    if users.asked is not None:
        found = f"a budget of {users.budget:,} tokens a layer" if users.budget else "no budget"
        parts.append(f"A SinkCache serves {users.asked:,} such users with {found}, at most.")
    return parts


def _saved(users: Users) -> list[Table | str]:
    """The settings that save most of the longest conversation."""
    found = [(knob, each.name) for each in users.engines for knob in each.knobs if knob.saved > 0]
    if not found:
        return []
    table = _table(
        f"What saves most of a conversation of {max(users.lengths):,}", ["setting", "saves MiB", "leaves MiB"]
    )
    for knob, engine in sorted(found, key=lambda pair: -pair[0].saved)[:_SHOWN]:
        table.add_row(f"{knob.name} ({engine})", mib(knob.saved), mib(knob.bytes))
    return [table]
