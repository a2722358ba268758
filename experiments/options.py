"""The command line of `experiments.stream_perplexity`, checked as far as it can be before a model is loaded.

Other commands take from here how they end on a mistake, and how lists, numbers and datasets are asked for.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from experiments.runs import METHODS, Setting, grid
from experiments.subject import TYPES
from sinkcache.models import EMBEDDED

_BUCKET = 256  # tokens per point of a curve
_POINTS = 256  # of a curve, at most
DEMO = {
    "method": "full,window,sinks,recompute",
    "budget": "256",
    "tokens": 4096,
    "recompute_every": 32,
    "out": Path("out/demo"),
}


@dataclass(frozen=True)
class Options:
    """What was asked for: `given` holds the plain options, `settings` the runs they make."""

    given: argparse.Namespace
    settings: list[Setting]
    command: list[str]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line}\n")


def options(parser: Parser, argv: list[str]) -> Options:
    """The options in `argv`; ends the program with one line if they make no sense."""
    if "--demo" in argv:
        parser.set_defaults(**DEMO)
    given = parser.parse_args(argv)
    if given.bucket is None:
        given.bucket = bucket_for(given.tokens)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device: use --device cpu")
    try:
        check_dataset(given)
        settings = _settings(given)
    except ValueError as error:
        parser.error(str(error))
    return Options(given, settings, argv)


def _settings(given: argparse.Namespace) -> list[Setting]:
    """The runs asked for. Raises ValueError if one of them makes no sense."""
    settings = grid(
        given.method,
        given.budget,
        given.sinks,
        given.positions,
        given.chunk,
        given.attend,
        given.bos,
        given.recompute_every,
        given.reread_every,
    )
    for setting in settings:
        setting.check(given.tokens)
    return settings


def bucket_for(tokens: int) -> int:
    """Tokens per point of a curve: 256, doubled until no more than 256 points are left."""
    bucket = _BUCKET
    while tokens > _POINTS * bucket:
        bucket *= 2
    return bucket


def parser() -> Parser:
    """The options, each with its default in its help."""
    made = Parser(
        prog="stream_perplexity",
        description="Perplexity of a long text under bounded caches: full, window, sinks + window, recompute.",
        epilog="Lists are separated by commas; every combination that makes sense is run once. Finished runs are "
        "kept in --out and skipped the next time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what, how, run = (made.add_argument_group(name) for name in ("what is read", "how it is read", "the run"))
    what.add_argument("--model", default=EMBEDDED, help="hub id, folder, or the embedded one")
    what.add_argument("--revision", help="branch, tag or commit of a hub id")
    what.add_argument("--dtype", default="float32", choices=TYPES, help="of the weights and the cache")
    what.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the model runs")
    texts = "UTF-8 files, read one after the other; without, the reference prose inside Python"
    what.add_argument("--text", nargs="+", metavar="FILE", help=texts)
    add_dataset(what)
    what.add_argument("--tokens", type=at_least(2), default=4096, metavar="N", help="of the text to read, as 1_000_000")
    _lists(how)
    every = "recompute: score each N-th token after the first window; 1 is exact and slow"
    how.add_argument("--recompute-every", type=at_least(1), default=1, metavar="N", help=every)
    run.add_argument(
        "--out", type=Path, default=Path("out/stream_perplexity"), metavar="DIR", help="for all that is written"
    )
    points = "tokens per point of the curves; without, 256, or what makes 256 points or fewer"
    run.add_argument("--bucket", type=at_least(1), metavar="N", help=points)
    often = "of a longer text: tokens between two checkpoints, from which a killed run goes on"
    run.add_argument("--checkpoint-every", type=at_least(1), default=50_000, metavar="N", help=often)
    run.add_argument(
        "--threads", type=at_least(1), metavar="N", help="of torch on the CPU; without, torch's own choice"
    )
    run.add_argument(
        "--seed", type=int, default=0, help="recorded, and used by the demo's sampling; perplexity is not random"
    )
    run.add_argument("--fresh", action="store_true", help="redo finished runs")
    run.add_argument("--demo", action="store_true", help="a few minutes on two cores, then generation past the budget")
    return made


def _lists(group: Any) -> None:
    methods = "any of " + ", ".join(METHODS)
    group.add_argument("--method", "--methods", type=choices(*METHODS), default="full,window,sinks", help=methods)
    group.add_argument(
        "--budget", type=numbers(1), default="256", metavar="N,N", help="tokens a layer holds, sinks included"
    )
    group.add_argument(
        "--sinks", type=numbers(0), default="4", metavar="N,N", help="first tokens never evicted; 0 is the window"
    )
    group.add_argument(
        "--positions",
        type=choices("cache", "original"),
        default="cache",
        help="inside the cache, or those of the text",
    )
    group.add_argument(
        "--chunk", type=numbers(1), default="64", metavar="N,N", help="tokens read at once; full uses the first"
    )
    group.add_argument(
        "--attend",
        type=choices("held", "token"),
        default="held",
        help="a chunk sees what is held, or each token what it would see read singly",
    )
    group.add_argument(
        "--bos",
        type=choices("none", "prepend"),
        default="none",
        help="a BOS token before the text, as its first token",
    )
    group.add_argument(
        "--reread-every", type=numbers(1), default="64", metavar="K,K", help="reread: tokens between two passes"
    )


def add_dataset(group: Any) -> None:
    """Adds the options that name a dataset, to be read in the place of --text."""
    group.add_argument("--dataset", metavar="NAME", help="a dataset on the hub, such as emozilla/pg19-test")
    group.add_argument("--config", metavar="C", help="of the dataset")
    group.add_argument("--split", default="test", metavar="S", help="of the dataset")
    group.add_argument("--column", default="text", help="of the dataset: the one that holds text")


def check_dataset(given: argparse.Namespace) -> None:
    """Raises ValueError if a dataset is asked for beside files, or one of its configs without it."""
    if given.text and given.dataset is not None:
        raise ValueError("--text and --dataset exclude each other: give one")
    if given.config is not None and given.dataset is None:
        raise ValueError(f"--config {given.config} is of a dataset: give --dataset too")


def numbers(least: int) -> Callable[[str], list[int]]:
    """Reads whole numbers between commas, each `least` or more, into a list without repetitions."""
    one = at_least(least)
    return lambda text: list(dict.fromkeys(one(part) for part in text.split(",")))


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number, `least` or more."""

    def one(text: str) -> int:
        if not re.fullmatch(r"\s*\d+(_\d+)*\s*", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text!r}")
        return int(text)

    return one


def choices(*known: str) -> Callable[[str], list[str]]:
    """Reads words between commas, each one of those `known`, into a list without repetitions."""

    def chosen(text: str) -> list[str]:
        names = list(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return chosen
