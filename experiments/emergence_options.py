"""The command line of `experiments.sink_emergence`, checked as far as it can be before anything is loaded."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.documents import Document, of_ids, stretches
from experiments.emergence_measure import CONTROLS
from experiments.options import Parser, at_least, choices, numbers
from experiments.revisions import SIZES, TOKENS_PER_STEP, Revision, ladder, listed, preset
from experiments.subject import TYPES
from sinkcache.sinks import FIRST_QUERY
from sinkcache.texts import embedded, from_file

OF_THE_EMBEDDED = 4  # documents, if not told another number


def asked(command: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The options in `argv`; ends the program with a line if they make no sense."""
    given = command.parse_args(list(argv))
    if not (given.model or given.preset or given.ladder):
        command.error("give --preset pythia-SIZE, --model ID --revisions ..., or --ladder FOLDER")
    if given.model is None and (given.revisions or given.steps):
        command.error("--revisions and --steps are of a --model")
    if given.text and given.ids:
        command.error("--text and --ids exclude each other: give one")
    if given.device == "cuda" and not torch.cuda.is_available():
        command.error("--device cuda: this torch sees no CUDA device: use --device cpu")
    if given.tokens <= given.first_query:
        command.error(f"--tokens {given.tokens} has no query from --first-query {given.first_query} on")
    if given.budget is not None and given.budget + 1 >= given.tokens:
        command.error(f"--budget {given.budget} evicts nothing from --tokens {given.tokens}: lower the budget")
    return given


def series(given: argparse.Namespace) -> dict[str, list[Revision]]:
    """By name, the checkpoints of each model. Raises ValueError if there are none, or two of one name."""
    asked_for = [preset(each) for each in given.preset]
    if given.model is not None:
        asked_for.append(listed(given.model, given.revisions, given.steps))
    asked_for += [ladder(each) for each in given.ladder]
    found: dict[str, list[Revision]] = {}
    for revisions in asked_for:
        name = revisions[0].series
        if name in found:
            raise ValueError(
                f"two models are called {name!r}: measure them into different --out folders, or rename one"
            )
        found[name] = revisions
    return found


def documents(given: argparse.Namespace, revisions: Sequence[Revision]) -> list[Document]:
    """What these checkpoints read: what was given, else what a ladder held out, else the embedded text.

    Raises ValueError if one is certainly shorter than the first query that is measured.
    """
    held_out = Path(revisions[0].source).parent / "held_out.json"
    if given.text:
        found = stretches([from_file(each) for each in given.text], given.documents or 1)
    elif given.ids:
        found = of_ids(given.ids, given.documents)
    elif revisions[0].name is None and held_out.is_file():
        found = of_ids(held_out, given.documents)
    else:
        found = stretches([embedded()], given.documents or OF_THE_EMBEDDED)
    for each in found:
        if each.shorter_than(given.first_query + 1):
            raise ValueError(
                f"document {each.name!r} is too short: queries are measured from --first-query {given.first_query} on"
            )
    if len({each.name for each in found}) < len(found):
        raise ValueError("two texts have one name: rename one, as results are told by name")
    return found


def tokens_per_step(given: argparse.Namespace, source: str, told: int | None) -> int | None:
    """Tokens of a training step: as given, as the ladder tells, or Pythia's; None if unknown."""
    pythia = TOKENS_PER_STEP if source.startswith("EleutherAI/pythia-") else None
    return given.tokens_per_step or told or pythia


def parser() -> Parser:
    """The options, each with its default in its help."""
    made = Parser(
        prog="sink_emergence",
        description="Since which training step a model has an attention sink: its checkpoints, one after the other.",
        epilog="Lists are separated by commas. Finished cells are kept in --out and skipped the next time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what, read, how, run = (
        made.add_argument_group(name) for name in ("checkpoints", "what is read", "what is measured", "the run")
    )
    sizes = ", ".join(f"pythia-{each}" for each in SIZES)
    what.add_argument("--preset", nargs="+", default=[], metavar="NAME", help=f"13 checkpoints each, of {sizes}")
    what.add_argument("--model", metavar="ID", help="hub id, or a folder; with --revisions")
    what.add_argument("--revisions", type=_listed, default=[], metavar="R,R", help="of the hub id, or folders in it")
    what.add_argument(
        "--steps", type=numbers(0), default=[], metavar="N,N", help="of the revisions; else in their names"
    )
    what.add_argument(
        "--ladder", nargs="+", default=[], metavar="DIR", help="folders with step0, step16 ...; one a seed"
    )
    what.add_argument("--tokens-per-step", type=at_least(1), metavar="N", help="of training; known of presets, ladders")
    _reading(read)
    _measuring(how)
    _running(run)
    return made


def _reading(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 files; else the embedded text")
    group.add_argument("--ids", metavar="FILE", help='JSON, lists of ids, as they are or under "ids"; a ladder has one')
    group.add_argument(
        "--documents", type=at_least(1), metavar="N", help="stretches of each text, or rows of ids; else 1, 4 or 16"
    )
    group.add_argument(
        "--tokens", type=at_least(2), default=2048, metavar="N", help="of a document, up to the trained length"
    )
    group.add_argument("--bos", choices=("none", "prepend"), default="none", help="a BOS token as the first of these")


def _measuring(group: argparse._ArgumentGroup) -> None:
    first = "index of the first query whose attention counts"
    group.add_argument("--first-query", type=at_least(1), default=FIRST_QUERY, metavar="N", help=first)
    group.add_argument(
        "--segments", type=at_least(1), default=100, metavar="N", help="of 64 tokens, at most, over all documents"
    )
    budget = "tokens a bounded cache holds; else 256, or a quarter of a document of 512 tokens or fewer"
    group.add_argument("--budget", type=at_least(5), metavar="N", help=budget)
    group.add_argument("--chunk", type=at_least(1), default=64, metavar="N", help="tokens read at once for perplexity")
    group.add_argument("--no-perplexity", action="store_true", help="measure attention alone")
    group.add_argument(
        "--controls", type=choices(*CONTROLS), default=[], help="of the last checkpoint: any of " + ", ".join(CONTROLS)
    )
    group.add_argument("--dtype", default="float32", choices=TYPES, help="of the weights")
    group.add_argument("--draws", type=at_least(1), default=1000, metavar="N", help="resamples of the documents")
    group.add_argument("--seed", type=int, default=0, help="of the controls and the resamples")


def _running(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the model runs")
    group.add_argument("--threads", type=at_least(1), metavar="N", help="of torch on the CPU; else torch's own choice")
    group.add_argument(
        "--out", type=Path, default=Path("out/sink_emergence"), metavar="DIR", help="for what is written"
    )
    group.add_argument(
        "--delete-weights", action="store_true", help="delete a revision that this command downloaded, once measured"
    )
    group.add_argument("--retry-failed", action="store_true", help="measure again what failed before")
    group.add_argument("--fresh", action="store_true", help="measure finished cells again")


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
