"""Policies at equal bytes on your model and your documents: perplexity, divergence, recall, memory and time.

Every combination of model, policy, budget, position convention, chunk and document is a cell, measured once and kept
under a hash of all its figures depend on; stop the command whenever you like. Beside the policies asked for there are
always the model's own cache ("full"), the newest tokens alone ("window"), the window read anew for each token
("recompute", a sample of them unless told otherwise) and every so many ("reread"), and "Clairvoyant", which knows what
the text will attend to. All hold equally many tokens, which is asserted.

Expected (SmolLM2-135M in float32, *Persuasion*, 4,096 tokens, chunks of 64, original positions, budget 256): full
31.65, window 60.76, StreamingLLM 35.64, H2O(recent=budget//2) 34.38.

    python -m experiments.compare_policies --text a.txt b.txt --policy "H2O(recent=64)" "SnapKV()" --budget 256,1024
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import transformers
from rich.console import Console

from experiments.documents import Document, Refused, stretches
from experiments.entrants import Entrant, at_budget, baselines, check_on, usual
from experiments.entrants import add_options as add_entrants
from experiments.grid.cell import Cell
from experiments.grid.cluster import check_ray
from experiments.grid.networks import Network, network
from experiments.grid.networks import add_options as add_models
from experiments.grid.options import add_options as add_work
from experiments.grid.options import check_workers
from experiments.grid.run import run
from experiments.grid.store import FAILED, Store
from experiments.options import Parser, add_dataset, at_least, check_dataset, numbers
from experiments.reports.command import report
from experiments.results import Row
from experiments.stream_cell import POLICY, RECOMPUTE, REREAD
from sinkcache.texts import Text, embedded, from_dataset, from_file

FUNCTION = "experiments.stream_cell:measure"
_CHARACTERS = 16  # of a dataset fetched per token asked for; English has 3 to 5
_REFERENCE_CHUNK = 64  # tokens that the full cache reads at once beside a method that reads the text in its own way


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0, 1 if a cell failed, 130 after Ctrl-C. Ends with 2 and a line if it cannot be run."""
    command, console = parser(), Console()
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = command.parse_args(arguments)
    try:
        check_ray(given.ray)
        documents = _documents(given)
        networks = [network(name, given) for name in given.model]
        check_workers(given, [each.nbytes for each in networks])
        cells = [cell for each in networks for cell in cells_of(each, documents, given)]
        store = Store(given.out)
        for line in (*_notes(networks, given.tokens), *_changed(store, cells)):
            console.print(line, highlight=False, soft_wrap=True)
        rows = run(cells, store, console, given, ["python", "-m", "experiments.compare_policies", *arguments])
        return _end(console, given.out, rows)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: finished cells are kept in {given.out}; the same command goes on", highlight=False)
        return 130


def cells_of(one: Network, documents: Sequence[Document], given: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a model, document by document. Raises ValueError if one of them makes no sense."""
    entrants = _entrants(one, given)
    bos = one.tokenizer.bos_token_id if given.bos == "prepend" else None
    if given.bos == "prepend" and bos is None:
        raise ValueError(f"--bos prepend: the tokenizer of {one.name} has no BOS token: use --bos none")
    for document in documents:
        ids = document.ids(one.tokenizer, given.tokens, None)[0].numpy()
        text = {
            "text": document.name,
            "text_sha256": document.sha256,
            "ids_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "tokens": len(ids),
            "bytes_of_text": len(str(one.tokenizer.decode(ids.tolist())).encode()),
            "bos": bos,
            "bucket": given.bucket,
        }
        for entrant in entrants:
            for how in _ways(entrant, given):
                asked = {"kind": "stream", **one.asked, **text, **entrant.asked(), **how}
                yield Cell(FUNCTION, asked, ids)


def _entrants(one: Network, given: argparse.Namespace) -> list[Entrant]:
    always = baselines(given.budget, given.horizon, given.recompute_every, given.reread_every, given.tokens)
    known = {(entrant.budget, repr(entrant.policy)) for entrant in always}
    policies = given.policy or usual(one, given.layer_budgets)
    asked = [at_budget(text, budget, one, given.layer_budgets) for budget in given.budget for text in policies]
    entrants = [*always, *(each for each in asked if (each.budget, repr(each.policy)) not in known)]
    for entrant in entrants:
        check_on(one, entrant)
        if (most := max(entrant.budgets or [0])) > given.tokens:
            raise ValueError(
                f"--policy {entrant.name} has a layer hold {most} of --tokens {given.tokens}: fewer, or more"
            )
    return entrants


def _ways(entrant: Entrant, given: argparse.Namespace) -> Iterator[Row]:
    """How a method reads a text: its positions and chunks, as far as it has any."""
    if entrant.method in (RECOMPUTE, REREAD):
        yield {"positions": None, "chunk": None, "reference_chunk": _REFERENCE_CHUNK}
        return
    for positions, chunk in product(given.positions if entrant.method == POLICY else [None], given.chunk):
        yield {"positions": positions, "chunk": chunk, "reference_chunk": chunk}


def _documents(given: argparse.Namespace) -> list[Document]:
    """The documents asked for. Raises ValueError if one cannot be long enough, or evicts nothing."""
    for budget, chunk in product(given.budget, given.chunk):
        if -(-budget // chunk) * chunk + 1 >= given.tokens:  # the first chunk that finds something evicted
            raise ValueError(
                f"--budget {budget} in chunks of {chunk} evicts nothing from --tokens {given.tokens} before the last "
                "is read: lower --budget or --chunk"
            )
    documents = stretches(_texts(given), given.documents)
    twice = {each.name for each in documents if sum(other.name == each.name for other in documents) > 1}
    if twice:
        raise ValueError(f"two documents are named {min(twice)!r}: give files with different names")
    alike = {(each.sha256, each.index): each.name for each in documents}
    for document in documents:
        if (other := alike[document.sha256, document.index]) != document.name:
            raise ValueError(f"documents {document.name!r} and {other!r} are the same text: leave one out")
        if document.shorter_than(given.tokens):
            raise Refused(f"document {document.name!r} has fewer tokens than --tokens {given.tokens}: lower it")
    return documents


def _texts(given: argparse.Namespace) -> list[Text]:
    check_dataset(given)
    if given.dataset is not None:
        characters = _CHARACTERS * given.tokens * given.documents
        return [from_dataset(given.dataset, given.config, given.split, given.column, characters)]
    return [from_file(each) for each in given.text] or [embedded()]


def _notes(networks: Sequence[Network], tokens: int) -> Iterator[str]:
    """What a person should know before a grid is read."""
    for each in networks:
        if each.trained is not None and tokens > each.trained:
            yield (
                f"{each.name} was trained to read {each.trained:,} tokens and --tokens is {tokens:,}: beyond, its full "
                "cache sets no standard"
            )
    vocabularies = {each.name: hash(tuple(sorted(each.tokenizer.get_vocab().items()))) for each in networks}
    if len(set(vocabularies.values())) > 1:
        yield (
            f"{', '.join(vocabularies)} split text in different ways: documents are as long in tokens and not in "
            "words, and perplexities are compared within a model alone; between models compare bits per byte"
        )


def _changed(store: Store, cells: Sequence[Cell]) -> Iterator[str]:
    """Documents that the folder has results of, under the same name and with another text."""
    now = {cell.asked["text"]: cell.asked["text_sha256"] for cell in cells}
    before = {(row["asked"]["text"], row["asked"]["text_sha256"]) for row in store.rows("stream")}
    for name in sorted({name for name, _ in before if name in now and (name, now[name]) not in before}):
        yield f"document {name!r} is not what it was when {store.folder} was written: its cells are measured anew"


def _end(console: Console, out: Path, rows: Sequence[Row]) -> int:
    failed = [row for row in rows if row["status"] == FAILED]
    if len(failed) < len(rows):
        report([out], out, console)
    if failed:
        console.print(f"{len(failed)} of {len(rows)} cells failed: --retry-failed measures them again", highlight=False)
    return int(bool(failed))


def parser() -> Parser:
    """The options, each with its default in its help."""
    made = Parser(
        prog="compare_policies",
        description="Perplexity, divergence, recall, memory and time of eviction policies at equal budgets.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what, how, work = (made.add_argument_group(name) for name in ("what is read", "how it is read", "the work"))
    add_models(what)
    what.add_argument("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 files; without, the embedded text")
    add_dataset(what)
    what.add_argument("--documents", type=at_least(1), default=1, metavar="N", help="stretches to take from each text")
    what.add_argument("--tokens", type=at_least(2), default=4096, metavar="N", help="of each document")
    what.add_argument("--bos", choices=("none", "prepend"), default="none", help="a BOS token before each document")
    _add_ways(how)
    add_work(work, Path("out/compare_policies"))
    return made


def _add_ways(how: argparse._ArgumentGroup) -> None:
    add_entrants(how)
    how.add_argument("--chunk", type=numbers(1), default="64", metavar="N,N", help="tokens read at once")
    how.add_argument(
        "--horizon", type=at_least(1), default=256, metavar="N", help="tokens that Clairvoyant looks ahead"
    )
    how.add_argument("--recompute-every", type=at_least(1), default=32, metavar="N", help=(
        "recompute scores each N-th token after the first window; 1 is exact and slow"))  # fmt: skip
    how.add_argument("--reread-every", type=at_least(1), default=64, metavar="N", help="tokens between two readings")
    how.add_argument("--bucket", type=at_least(1), default=128, metavar="N", help="tokens per point of the curves")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main())
