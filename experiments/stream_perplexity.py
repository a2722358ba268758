"""Perplexity of a long text under full, window and sink caches: StreamingLLM's figure 3 and tables 1, 2 and 6.

Paper: Xiao, Tian, Chen, Han, Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv
2309.17453. Expected there (Llama-2-13B, first book of PG-19's test split, 65,000 tokens, cache of 1024): the window
alone 5158, recomputed for each token 5.43, 4 sinks and window 5.40. How far a window collapses is the model's own: from
1.05 to several hundred times.

Expected here (SmolLM2-135M in float32, the first 4,096 tokens of *Persuasion*, chunks of 64, original positions, no
BOS, budget 256): full 31.65, window 60.76, 4 sinks 35.64, 1 sink 35.62; 4 sinks in a budget of 1024: 32.45. About a
minute a run on two cores; `--demo` ends within five.

    python -m experiments.stream_perplexity --text persuasion.txt --positions original --sinks 1,4

Of a text of millions of tokens nothing is held but the scores, 8 bytes a token; every 50,000 tokens a checkpoint is
written, from which the same command goes on after Ctrl-C or kill -9, with the same figures to the last bit (one
thread). The paper's 4 million tokens of PG-19 (figure 5), 6 hours a method on one core:

    python -m experiments.stream_perplexity --dataset emozilla/pg19-test --tokens 4_000_000 --method window,sinks \\
        --chunk 64 --budget 256 --threads 1
"""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import contextmanager

import torch
import transformers
from rich.console import Console

from experiments.checkpoints import Checkpoint, forget, stands_at
from experiments.costs import costs
from experiments.demo import generate
from experiments.measure import measure
from experiments.options import Options, Parser, options, parser
from experiments.progress import Bar
from experiments.report import FORGETS, write_report
from experiments.results import Results, Row
from experiments.runs import Setting, key
from experiments.sources import Source, of_dataset, of_files, of_text
from experiments.subject import TYPES, Subject, long_subject
from experiments.summary import lines, number, write_csv
from experiments.table import show
from sinkcache.models import load
from sinkcache.predictions import REBASE_AT
from sinkcache.texts import embedded


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 130 after Ctrl-C. Ends with 2 and a line if it cannot be run."""
    command = parser()
    asked = options(command, list(sys.argv[1:] if argv is None else argv))
    console = Console()
    try:
        with _settled(asked):
            return _run(console, command, asked)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print("\nstopped", highlight=False)
        return 130


def _run(console: Console, command: Parser, asked: Options) -> int:
    given = asked.given
    if importlib.util.find_spec("matplotlib") is None:
        command.error('the figures need matplotlib: run `pip install "sinkcache[experiments]"`')
    text = _text(asked)
    if text.bytes is not None and text.bytes < given.tokens:
        command.error(
            f"text {text.name!r} has {text.bytes} bytes, so fewer tokens than --tokens {given.tokens}: "
            "lower it or give a longer text"
        )
    results = Results(given.out)
    with console.status(f"loading {given.model}"):
        loaded = load(given.model, TYPES[given.dtype], given.revision, given.device)
        read = long_subject(loaded, text, given.tokens, given.model, given.revision, given.bucket, given.out)
    if "prepend" in given.bos and read.bos is None:
        command.error(f"--bos prepend: the tokenizer of {given.model} has no BOS token: use --bos none")
    if given.tokens > REBASE_AT:
        read.identity["rebase_at"] = REBASE_AT  # shorter texts are read as ever
    for said in costs(read, asked.settings):
        console.print(said, highlight=False, soft_wrap=True)
    whole = _measure_all(console, asked, read, results)
    keys = [each for each in (key(setting, read.identity) for setting in asked.settings) if each in results]
    if keys:
        _report(console, asked, results, keys)
    if not whole:
        left = len(asked.settings) - len(keys)
        console.print(
            f"\nStopped: {len(keys)} of {len(asked.settings)} runs are finished and kept in {results.path}. The same "
            f"command, without --fresh, goes on with the other {left}{_where(asked, read)}.",
            highlight=False,
        )
        return 130
    if given.demo:
        generate(console, read, given.seed)
        console.print(
            "Next: python -m experiments.stream_perplexity --text BOOK.txt --sinks 0,1,2,4,8 --budget 256,1024",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def _report(console: Console, asked: Options, results: Results, keys: Sequence[str]) -> None:
    folder = asked.given.out
    show(console, results, keys)
    write_csv(folder / "results.csv", lines(results, keys))
    report = write_report(folder, results, keys, asked.command)
    console.print(f"\n{FORGETS}", highlight=False)
    console.print(f"Report: {report}", highlight=False, soft_wrap=True)


def _text(asked: Options) -> Source:
    given = asked.given
    if given.text is not None:
        return of_files(given.text)
    if given.dataset is not None:
        return of_dataset(given.dataset, given.config, given.split, given.column)
    return of_text(embedded())


def _measure_all(console: Console, asked: Options, read: Subject, results: Results) -> bool:
    """Does the runs that are not done yet; False if Ctrl-C came between."""
    given = asked.given
    keys = {key(setting, read.identity): setting for setting in asked.settings}
    todo = {each: setting for each, setting in keys.items() if given.fresh or each not in results}
    if len(todo) < len(keys):
        console.print(
            f"{len(keys) - len(todo)} of {len(keys)} runs are done already (--fresh redoes them)", highlight=False
        )
    for each in keys.keys() - todo.keys():
        forget(given.out / "checkpoints", each)
    if not todo:
        return True
    bar = Bar(console, len(todo), read.tokens)
    with bar.progress:
        for each, setting in todo.items():
            bar.run(setting.name)
            try:
                row = _measure_one(asked, read, setting, each, results, bar)
            except KeyboardInterrupt:
                return False
            scored = "" if row["scored"] >= read.tokens - 1 else f" of {row['scored']:,} tokens scored"
            bar.say(f"{setting.label}: perplexity {number(row['perplexity'])}{scored} in {row['seconds']:.0f} s")
    return True


def _where(asked: Options, read: Subject) -> str:
    """Where the run under way was left, if it has a checkpoint."""
    keys = [key(setting, read.identity) for setting in asked.settings]
    at = max(stands_at(asked.given.out / "checkpoints", each) for each in keys)
    return f", the first from token {at:,} of {read.tokens:,}" if at else ""


def _measure_one(asked: Options, read: Subject, setting: Setting, name: str, results: Results, bar: Bar) -> Row:
    """The row of one run, filed; a long one leaves checkpoints until then."""
    given = asked.given
    if setting.method == "full" or read.tokens <= given.checkpoint_every:
        row, nll = measure(read, setting, name, given.seed, bar.tell)
        results.add(row, nll)
        return row
    checkpoint = Checkpoint(given.out / "checkpoints", name)
    try:
        if given.fresh:
            checkpoint.drop()
        row, nll = measure(read, setting, name, given.seed, bar.tell, checkpoint, given.checkpoint_every)
        results.add(row, nll)
        checkpoint.drop()
    finally:
        checkpoint.close()
    return row


@contextmanager
def _settled(asked: Options):
    """Threads and seed as asked for, no bars of transformers' own; threads are put back afterwards."""
    before = torch.get_num_threads()
    torch.manual_seed(asked.given.seed)
    transformers.logging.disable_progress_bar()
    try:
        if asked.given.threads is not None:
            torch.set_num_threads(asked.given.threads)
        yield
    finally:
        torch.set_num_threads(before)
        transformers.logging.enable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
