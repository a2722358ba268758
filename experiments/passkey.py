"""Retrieval under a bounded cache: a five-digit number is read, then much else, then it is asked for.

Tasks: `passkey`, one number at a depth of the prompt; `multikey`, several with names, one asked for; `late`, the same
prompts, but the question is not there before all else was read and evicted from; `early`, the question stands in front
as well; `streameval`, lines in one cache without end and a question every few, about the line so many back. Answers are
generated greedily and count if their first number is the one that was read.

"held" is the share of trials in which, as the answer began, some head of some layer still held all of the number's
tokens. What is outside the cache is gone: where nothing is held, nothing but luck is right.

The full cache and the window are always there. Expected (SmolLM2-135M-Instruct, passkey, English): full 100% at 512 and
1,024 tokens, any depth; a window finds what is within its budget of the end and nothing else.

    python -m experiments.passkey --task passkey,streameval --length 512,1024 --budget 128 --policy "H2O(recent=64)"
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import transformers
from rich.console import Console

from experiments.entrants import add_options as add_entrants
from experiments.grid.cluster import check_ray
from experiments.grid.networks import add_options as add_models
from experiments.grid.networks import network
from experiments.grid.options import add_options as add_work
from experiments.grid.options import check_workers
from experiments.grid.run import run
from experiments.grid.store import FAILED, Store
from experiments.options import Parser, at_least, choices, numbers
from experiments.results import Row
from experiments.retrieval.cell import WHOLE
from experiments.retrieval.plan import TASKS, cells_of, check
from experiments.retrieval.report import show, write
from experiments.retrieval.wording import LANGUAGES
from sinkcache.texts import from_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0, 1 if a cell failed, 130 after Ctrl-C. Ends with 2 and a line if it cannot be run."""
    command, console = _parser(), Console()
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = command.parse_args(arguments)
    try:
        check(given)
        check_ray(given.ray)
        text = None if given.text is None else from_file(given.text)
        networks = [network(name, given) for name in given.model]
        check_workers(given, [each.nbytes for each in networks])
        cells = [cell for each in networks for cell in cells_of(each, text, given)]
        line = ["python", "-m", "experiments.passkey", *arguments]
        rows = run(cells, Store(given.out), console, given, line)
        return _end(console, given.out, rows)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: finished cells are kept in {given.out}; the same command goes on", highlight=False)
        return 130


def _end(console: Console, out: Path, rows: Sequence[Row]) -> int:
    done = [row for row in rows if row["status"] != FAILED]
    show(console, done)
    if done:
        console.print(f"\n{write(out, done)}", highlight=False, soft_wrap=True)
    if len(done) < len(rows):
        console.print(f"{len(rows) - len(done)} of {len(rows)} cells failed: --retry-failed measures them again")
    return int(len(done) < len(rows))


def _parser() -> Parser:
    made = Parser(
        prog="passkey",
        description="Numbers found again under eviction policies: by length, depth and distance, at equal budgets.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what, how, work = (made.add_argument_group(name) for name in ("what is read", "how it is read", "the work"))
    add_models(what)
    what.add_argument("--task", type=choices(*TASKS), default="passkey", metavar="T,T", help=", ".join(TASKS))
    what.add_argument("--language", type=choices(*LANGUAGES), default="en", help="of the words", metavar="en,ko")
    what.add_argument("--length", type=numbers(1), default="512,1024", metavar="N,N", help="tokens of a prompt")
    what.add_argument("--depth", type=_shares, default="0.1,0.5,0.9", metavar="D,D", help=(
        "where the number stands: 0 at the beginning of the prose, 1 at its end"))  # fmt: skip
    what.add_argument("--keys", type=at_least(2), default=3, metavar="N", help="numbers in a prompt with names")
    what.add_argument("--distance", type=numbers(1), default="20", metavar="N,N", help="streameval: lines back")
    what.add_argument("--every", type=at_least(1), default=10, metavar="K", help="streameval: lines to a question")
    what.add_argument("--trials", type=at_least(1), default=10, metavar="N", help="prompts, or questions of a stream")
    what.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the first prompt")
    what.add_argument("--text", metavar="FILE", help="a UTF-8 file whose sentences are the prose; without, our own")
    _add_ways(how)
    add_work(work, Path("out/passkey"))
    return made


def _add_ways(how: argparse._ArgumentGroup) -> None:
    add_entrants(how)
    how.add_argument("--chunk", type=_chunks, default="64", metavar="N,N", help=(
        f"tokens read at once, each chunk evicted from; {WHOLE}: all, then evicted from once"))  # fmt: skip
    how.add_argument("--no-full", action="store_true", help="leave the full cache out, where prompts are too long")


def _shares(text: str) -> list[float]:
    try:
        found = list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 1 for each in found):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 1, got {text!r}")
    return found


def _chunks(text: str) -> list[int | str]:
    one = at_least(1)
    return list(dict.fromkeys(WHOLE if part.strip() == WHOLE else one(part) for part in text.split(",")))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main())
