"""Time of one decoding step against the length before it: with a cache, and without, where all is read anew.

In each repeat one pass without a cache and one step of every cache follow on each other, so that whatever else the
machine does meets them alike; medians are over repeats, the first of which is a warm-up that does not count. A cache
grows by a token in each repeat.

Expected: uncached / cached grows with the length; a SinkCache's step stops growing at its budget. Run time: 3 minutes
for SmolLM2-135M on 2 cores with the defaults.

    python -m experiments.step_time --lengths 128,512,2048 --policy StreamingLLM --budget 256
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from statistics import median

from rich.console import Console

from experiments.options import Parser, at_least, numbers
from experiments.results import Row
from experiments.table import _print
from experiments.twins import Bench, Method, bench, lines, load_now, methods, parser, plot, read, run, seconds

_ANEW = "without a cache"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 130 after Ctrl-C."""
    return run(_parser(), sys.argv[1:] if argv is None else argv, _body)


def _body(given: Namespace, console: Console) -> int:
    asked = methods(given)
    loaded, rows = bench(given, console), []
    for length in sorted(given.lengths):
        found = _measured(loaded, asked, length, given)
        medians = {name: median(taken) for name, taken in found["seconds"].items()}
        rows.append({**loaded.identity, "tokens": length, **found, "medians": medians,
                     "uncached_over_cached": medians[_ANEW] / medians["full"]})  # fmt: skip
    _show(console, given, rows)
    busy = [row["load"] for row in rows if row["load"] is not None]
    told = f"; load while measuring {min(busy):.1f} to {max(busy):.1f}" if busy else ""
    console.print(f"\nMedians of {given.repeats} repeats{told}. Written: {given.out}", highlight=False, soft_wrap=True)
    return 0


def _measured(loaded: Bench, asked: Sequence[Method], length: int, given: Namespace) -> Row:
    """Seconds of each repeat, by method, and the machine's load then."""
    cell = {"what": "step", "methods": {each.name: repr(each.policy) for each in asked}, "tokens": length,
            "repeats": given.repeats, "chunk": given.chunk}  # fmt: skip
    known = loaded.known(cell)
    if known is not None:
        return known
    loaded.say(f"{length:,} tokens: reading them into {len(asked)} caches, then {given.repeats} repeats")
    ids, caches = loaded.tokens(length + given.repeats), {}
    for method in asked:
        caches[method.name] = method.cache(loaded.twin(method))
        for part in ids[:, : length - 1].split(given.chunk, dim=1):
            read(loaded.twin(method), caches[method.name], part)
    taken: dict[str, list[float]] = {name: [] for name in (_ANEW, *caches)}
    for repeat in range(given.repeats + 1):
        taken[_ANEW].append(seconds(loaded.model, None, ids[:, :length]))
        at = length - 1 + repeat
        for method in asked:
            taken[method.name].append(seconds(loaded.twin(method), caches[method.name], ids[:, at : at + 1]))
    return loaded.file(cell, {"seconds": {name: each[1:] for name, each in taken.items()}, "load": load_now()})


def _show(console: Console, given: Namespace, rows: Sequence[Row]) -> None:
    names = list(rows[0]["medians"])
    cells = [
        (f"{row['tokens']:,}", *(f"{1000 * row['medians'][name]:.1f}" for name in names),
         f"{row['uncached_over_cached']:.1f}") for row in rows
    ]  # fmt: skip
    title = f"{given.model}, {given.dtype}: milliseconds of a decoding step"
    _print(console, title, ("tokens", *names, "uncached / cached"), cells)
    lines(given.out, rows)
    drawn = {name: [(row["tokens"], 1000 * row["medians"][name]) for row in rows] for name in names}
    plot(given.out / "step_time.png", "tokens of the context", "milliseconds of a step, median", drawn)


def _parser() -> Parser:
    made = parser("step_time", "Time of a decoding step, with a cache and without.", "StreamingLLM,H2O", "256")
    made.add_argument("--lengths", type=numbers(2), default="128,256,512,1024", metavar="N,N", help="of the context")
    made.add_argument("--repeats", type=at_least(1), default=5, metavar="N", help="counted ones, after a warm-up")
    made.add_argument("--chunk", type=at_least(1), default=256, metavar="N", help="tokens read into a cache at once")
    return made


if __name__ == "__main__":
    sys.exit(main())
