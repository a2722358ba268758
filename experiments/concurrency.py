"""How many users a model serves at once: 1, 2, 4 ... until memory or time is out, full cache against SinkCache.

A limit of memory is for the caches: the planner tells how many users it has room for, and their bytes are measured.
Throughput and percentiles are of decoding steps alone; what a user waits while prompts of others are read stands apart.
Exit code 1 if measured bytes are not the planner's, or caches that were to fit do not.

Expected: users in the same memory in proportion to the bytes of a conversation. Run time: 5 minutes for SmolLM2-135M
on 2 cores with the defaults; there --memory is 128MiB unless it is given, on other devices there is none.

    python -m experiments.concurrency --memory 256MiB --mix 256:0.8,1024:0.2 --policy StreamingLLM --budget 128
"""

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console

from experiments.cache_bytes import engines
from experiments.crowd import Crowd, between, by_length, counts, fitting, knee, out_of_memory, percentile, waits
from experiments.options import Parser, at_least
from experiments.results import Row
from experiments.table import _print
from experiments.twins import Bench, Method, bench, lines, methods, parser, plot, run
from sinkcache.planner.capacity import Class
from sinkcache.planner.engines import Engine
from sinkcache.planner.weights import parsed

_MIB = 2**20
_ON_CPU = 128 * _MIB
_SHARES = (0.5, 0.9, 0.99)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if bytes are not the planner's, 130 after Ctrl-C."""
    return run(_parser(), sys.argv[1:] if argv is None else argv, _body)


def _body(given: Namespace, console: Console) -> int:
    asked, classes = methods(given), _classes(given)
    rules = engines(asked, given.chunk)
    if given.memory is None and given.device.type == "cpu":
        given.memory = _ON_CPU
    loaded, rows, ends = bench(given, console), [], []
    for method in asked:
        found, end = _served(loaded, method, rules[method.name], classes, given)
        rows += found
        ends.append(end)
    _show(console, given, rows, ends)
    wrong = [row for row in rows if row["bytes"] != row["planned"]]
    short = [end for end in ends if end["planned_users"] is not None and end["why"] == "memory" and
             end["users"] != end["planned_users"]]  # fmt: skip
    for row in wrong:
        console.print(f"{row['method']}, {row['users']} users: {row['bytes']:,} bytes, not {row['planned']:,}")
    exact = "bytes are not the planner's" if wrong or short else "bytes and users equal the planner's"
    console.print(f"\n{exact}. Written: {given.out}", highlight=False, soft_wrap=True)
    return 1 if wrong or short else 0


def _served(loaded: Bench, method: Method, rule: Engine, classes: list[Class], given: Namespace) -> tuple[list, Row]:
    """A row for each number of users, and how it ended."""
    fits = fitting(rule, loaded.planned, given.memory, classes)
    crowd, rows, why, beyond = Crowd(loaded, method, classes, given.chunk), [], "most", None
    ahead = counts(given.most if fits is None else min(fits, given.most))
    if fits is not None and fits <= given.most:
        why, beyond = "memory", fits + 1
    while ahead:
        users = ahead.pop(0)
        try:
            row = _row(loaded, crowd, rule, users)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            why, beyond = "out of memory", users
        else:
            loaded.say(f"{method.name}: {users} users, {row['throughput']:.1f} tokens/s, {row['bytes']:,} bytes")
            late = given.step_limit is not None and row["p50"] > given.step_limit
            if late or (given.memory is not None and row["bytes"] + row["spare"] > given.memory):
                why, beyond = "step limit" if late else "memory", users
                break
            rows.append(row)
        if why == "out of memory" and beyond is not None:
            ahead = between(rows[-1]["users"] if rows else 0, beyond)
    users = rows[-1]["users"] if rows else 0
    needed = rule.together(loaded.planned, by_length(classes, users + 1))
    end = {"method": method.name, "users": users, "planned_users": fits, "why": why, "beyond": beyond,
           "next_bytes": needed, "knee": knee([(each["users"], _work(each, given)) for each in rows])}  # fmt: skip
    return rows, end


def _row(loaded: Bench, crowd: Crowd, rule: Engine, users: int) -> Row:
    """What so many users get and take."""
    found, lengths = crowd.measure(users), by_length(crowd.classes, users)
    planned = sum(rule.held(loaded.planned, length) * number for length, number in lengths.items())
    prompts, steps = crowd.prompts(), found["steps"]
    waited = waits(prompts, users)
    tokens = sum(length * number for length, number in lengths.items())
    made = {"method": crowd.method.name, "users": users, "tokens": tokens, **found, "planned": planned,
            "spare": rule.together(loaded.planned, lengths) - planned,
            "throughput": users * len(steps) / sum(steps), "prompt_seconds": list(prompts.values()),
            "waits_mean": sum(waited) / users, "waits_longest": waited[-1], "compute": sum(steps)}  # fmt: skip
    return {**loaded.identity, **made, **{f"p{100 * each:g}": percentile(steps, each) for each in _SHARES}}


def _work(row: Row, given: Namespace) -> float:
    """Seconds of the median step; on the CPU those that it kept cores busy, whatever else the machine did."""
    return percentile(row["cpu"], 0.5) if given.device.type == "cpu" else row["p50"]


def _show(console: Console, given: Namespace, rows: Sequence[Row], ends: Sequence[Row]) -> None:
    mix = ", ".join(f"{each.prompt:,} + {each.answer} ({each.share:.0%})" for each in _classes(given))
    console.print(f"\n{given.model}, {given.dtype}: conversations of {mix} tokens", style="bold", highlight=False)
    cells = [
        (row["method"], f"{row['users']:,}", f"{row['tokens']:,}", f"{row['bytes'] / _MIB:.2f}",
         f"{row['bytes'] - row['planned']:+,}" if row["bytes"] != row["planned"] else "0",
         *(f"{row[each]:.1f}" for each in ("waits_mean", "waits_longest", "compute"))) for row in rows
    ]  # fmt: skip
    heads = ("cache", "users", "tokens in all", "MiB", "less formula", "waits s", "longest s", "steps s")
    _print(console, "Bytes of all caches, and seconds of waiting and of steps", heads, cells)
    cells = [
        (row["method"], f"{row['users']:,}", f"{row['throughput']:.1f}", f"{row['throughput'] / row['users']:.2f}",
         *(f"{1000 * row[f'p{100 * each:g}']:.0f}" for each in _SHARES),
         f"{1000 * percentile(row['cpu'], 0.5):.0f}") for row in rows
    ]  # fmt: skip
    heads = ("cache", "users", "tokens/s", "of each", "p50 ms", "p90 ms", "p99 ms", "CPU ms")
    _print(console, "Throughput, and milliseconds of a step of all users", heads, cells)
    _ends(console, given, rows, ends)


def _ends(console: Console, given: Namespace, rows: Sequence[Row], ends: Sequence[Row]) -> None:
    whose = "without a limit" if given.memory is None else f"in {given.memory / _MIB:,.1f} MiB of caches"
    full = ends[0]["users"]
    cells = [
        (end["method"], f"{end['users']:,}", f"{end['users'] / full:.2f}" if full else "-",
         "-" if end["planned_users"] is None else f"{end['planned_users']:,}",
         "none" if end["knee"] is None else f"{end['knee']:,}", end["why"],
         "-" if end["beyond"] is None else f"{end['beyond']:,}", f"{end['next_bytes'] / _MIB:.2f}") for end in ends
    ]  # fmt: skip
    heads = ("cache", "users", "x full", "planned", "knee", "ended by", "at", "MiB for one more")
    _print(console, f"Users {whose}", heads, cells)
    busy = [row["load"] for row in rows if row["load"] is not None]
    told = f" Load while measuring: {min(busy):.1f} to {max(busy):.1f}." if busy else ""
    note = (
        "Steps give each user a token. Waits: for prompts of others, read one by one. CPU: median of what a step keeps "
        "cores busy, threads together; on a machine that others use too the rest is their work." + told
    )
    console.print(note, style="dim", highlight=False, soft_wrap=True)
    lines(given.out, [*rows, *ends])
    for what, up in (("throughput", "tokens a second, all users"), ("p50", "seconds of a step, median")):
        drawn = {end["method"]: [(row["users"], row[what]) for row in rows if row["method"] == end["method"]]
                 for end in ends}  # fmt: skip
        plot(given.out / f"concurrency_{what}.png", "users at once", up, drawn)


def _classes(given: Namespace) -> list[Class]:
    found = [Class(prompt, given.steps, share) for prompt, share in (given.mix or {given.prompt: 1}).items()]
    if abs(sum(each.share for each in found) - 1) > 1e-6:
        raise ValueError(f"--mix: the shares must sum to 1, got {sum(each.share for each in found):g}")
    return found


def _mix(text: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for part in text.split(","):
        length, _, share = part.partition(":")
        try:
            found[at_least(1)(length)] = float(share)
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(f"is written as 256:0.8,1024:0.2 (prompt:share), got {text!r}") from None
        if not 0 < found[int(length)] <= 1:
            raise argparse.ArgumentTypeError(f"a share must be in (0, 1], got {share}")
    if len(found) != text.count(":"):
        raise argparse.ArgumentTypeError(f"a length is there twice: {text!r}")
    return found


def _size(text: str) -> int:
    try:
        found = parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found:
        raise argparse.ArgumentTypeError("must be 1 byte or more, got 0")
    return found


def _seconds(text: str) -> float:
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be seconds, more than 0, got {text!r}")


def _parser() -> Parser:
    made = parser("concurrency", "How many users fit and what they get.", "StreamingLLM,H2O", "64")
    made.add_argument("--prompt", type=at_least(1), default=256, metavar="N", help="tokens read of each user")
    made.add_argument("--mix", type=_mix, metavar="N:SHARE,...", help="prompts of several lengths, as 256:0.8,1024:0.2")
    made.add_argument("--steps", type=at_least(1), default=17, metavar="N", help="tokens written, the first to warm")
    made.add_argument("--chunk", type=at_least(1), default=64, metavar="N", help="tokens of a prompt read at once")
    made.add_argument("--memory", type=_size, metavar="SIZE", help="for all caches; without, 128MiB on the CPU")
    made.add_argument("--step-limit", type=_seconds, metavar="SECONDS", help="for the median step")
    made.add_argument("--most", type=at_least(1), default=1 << 20, metavar="N", help="users to try")
    return made


if __name__ == "__main__":
    sys.exit(main())
