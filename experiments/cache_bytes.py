"""Bytes that a cache holds as its context grows, measured, against the planner's formula, to the byte.

A context is read in pieces, the last token of each on its own as decoding reads it; then the storage behind every
tensor of the cache is counted. Exit code 1 if some number differs from the formula by one byte.

Expected: differences of 0 everywhere. Run time: 2 minutes for SmolLM2-135M on 2 cores with the defaults.

    python -m experiments.cache_bytes --tokens 32768 --policy StreamingLLM,H2O,SnapKV --budget 512,2048
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console
from transformers import Cache

from experiments.options import Parser, at_least
from experiments.results import Row
from experiments.table import _print
from experiments.twins import Bench, Method, bench, lines, methods, parser, plot, read, run
from sinkcache.memory import storage, tensors_of
from sinkcache.planner.engines import Engine

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if measured bytes are not the formula's, 130 after Ctrl-C."""
    return run(_parser(), sys.argv[1:] if argv is None else argv, _body)


def engines(asked: Sequence[Method], chunk: int) -> dict[str, Engine]:
    """The planner's rule for each method, by name; raises ValueError where it has none."""
    found = {}
    for method in asked:
        try:
            found[method.name] = method.engine(chunk)
        except ValueError as error:
            known = f" ({method.policy!r})" if method.policy is not None else ""
            raise ValueError(f"{method.name}{known} has no formula to be held against: {error}") from error
    return found


def counted(cache: Cache) -> int:
    """Bytes of storage behind all that a cache holds but single numbers, in which sliding layers keep their window."""
    return storage([each for layer in cache.layers for each in tensors_of(layer) if each.ndim > 0])


def _body(given: Namespace, console: Console) -> int:
    asked = methods(given)
    formulas = engines(asked, given.piece)
    loaded, rows = bench(given, console), []
    longest = loaded.planned.max_length
    if longest is not None and given.tokens > longest:
        loaded.say(f"{given.tokens:,} tokens are past the trained length of {longest:,}: bytes are the same")
    for method in asked:
        for tokens, measured in _measured(loaded, method, given).items():
            planned = formulas[method.name].held(loaded.planned, tokens)
            found = {"method": method.name, "tokens": tokens, "measured": measured, "planned": planned}
            rows.append({**loaded.identity, **found, "difference": measured - planned})
    _show(console, given, rows)
    wrong = [row for row in rows if row["difference"]]
    exact = f"{len(wrong)} of {len(rows)} differ from the formula" if wrong else f"all {len(rows)} equal the formula"
    console.print(f"\n{exact}. Written: {given.out}", highlight=False, soft_wrap=True)
    return 1 if wrong else 0


def _measured(loaded: Bench, method: Method, given: Namespace) -> dict[int, int]:
    """Bytes at each length, from the cells, or all measured in one reading."""
    lengths = [*range(given.piece, given.tokens, given.piece), given.tokens]
    cells: dict[int, Row] = {
        each: {"what": "bytes", "method": method.name, "policy": repr(method.policy), "piece": given.piece,
               "tokens": each} for each in lengths
    }  # fmt: skip
    known = {each: found["bytes"] for each, cell in cells.items() if (found := loaded.known(cell)) is not None}
    if len(known) == len(lengths):
        return known
    model = loaded.twin(method)
    cache, ids, start = method.cache(model), loaded.tokens(given.tokens), 0
    for end in lengths:
        for part in (ids[:, start : end - 1], ids[:, end - 1 : end]):
            if part.shape[1]:
                read(model, cache, part)
        start = end
        if end not in known:
            known[end] = loaded.file(cells[end], {"bytes": counted(cache)})["bytes"]
            loaded.say(f"{method.name}: {end:,} tokens, {known[end]:,} bytes")
    return {each: known[each] for each in lengths}


def _show(console: Console, given: Namespace, rows: Sequence[Row]) -> None:
    cells = [
        (row["method"], f"{row['tokens']:,}", f"{row['measured'] / _MIB:.2f}", f"{row['measured']:,}",
         f"{row['planned']:,}", f"{row['difference']:+,}" if row["difference"] else "0") for row in rows
    ]  # fmt: skip
    title = f"{given.model}, {given.dtype}: bytes of storage, read in pieces of {given.piece:,}"
    _print(console, title, ("cache", "tokens", "MiB", "measured", "formula", "difference"), cells)
    lines(given.out, rows)
    names = list(dict.fromkeys(row["method"] for row in rows))
    measured, planned = (
        {name: [(row["tokens"], row[what] / _MIB) for row in rows if row["method"] == name] for name in names}
        for what in ("measured", "planned")
    )
    plot(
        given.out / "cache_bytes.png",
        "tokens of the context",
        "MiB: measured (marks), formula (lines)",
        measured,
        planned,
    )


def _parser() -> Parser:
    made = parser("cache_bytes", "Bytes of a cache against its context, measured and planned.", "StreamingLLM,H2O",
                  "512")  # fmt: skip
    made.add_argument("--tokens", type=at_least(1), default=8192, metavar="N", help="of the longest context")
    made.add_argument("--piece", type=at_least(1), default=1024, metavar="N", help="tokens read and measured at once")
    return made


if __name__ == "__main__":
    sys.exit(main())
