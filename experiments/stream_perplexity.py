"""Perplexity of a long text under full, window and sink caches: StreamingLLM's figure 3 and tables 1, 2 and 6.

Paper: Xiao, Tian, Chen, Han, Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv
2309.17453. Expected there (Llama-2-13B, first book of PG-19's test split, 65,000 tokens, cache of 1024): the window
alone 5158, recomputed for each token 5.43, 4 sinks and window 5.40. How far a window collapses is the model's own: from
1.05 to several hundred times.

Expected here (SmolLM2-135M in float32, the first 4,096 tokens of *Persuasion*, chunks of 64, original positions, no
BOS, budget 256): full 31.65, window 60.76, 4 sinks 35.64, 1 sink 35.62; 4 sinks in a budget of 1024: 32.45. About a
minute a run on two cores; `--demo` ends within five.

    python -m experiments.stream_perplexity --text persuasion.txt --positions original --sinks 1,4
"""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import contextmanager

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text as Styled

from experiments.demo import generate
from experiments.measure import measure
from experiments.options import Options, Parser, options, parser
from experiments.report import FORGETS, write_report
from experiments.results import Results
from experiments.runs import key
from experiments.subject import TYPES, Subject, subject
from experiments.summary import lines, number, write_csv
from experiments.table import show
from sinkcache.models import load
from sinkcache.texts import Text, embedded, from_dataset, from_file

_CHARACTERS = 16  # of a dataset fetched per token asked for; English has 3 to 5


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
    if len(text.text.encode()) < given.tokens:
        command.error(
            f"text {text.name!r} has {len(text.text.encode())} bytes, so fewer tokens than --tokens {given.tokens}: "
            "lower it or give a longer text"
        )
    results = Results(given.out)
    with console.status(f"loading {given.model}"):
        loaded = load(given.model, TYPES[given.dtype], given.revision, given.device)
        read = subject(loaded, text, given.tokens, given.model, given.revision, given.bucket)
    if "prepend" in given.bos and read.bos is None:
        command.error(f"--bos prepend: the tokenizer of {given.model} has no BOS token: use --bos none")
    whole = _measure_all(console, asked, read, results)
    keys = [each for each in (key(setting, read.identity) for setting in asked.settings) if each in results]
    if keys:
        show(console, results, keys)
        write_csv(given.out / "results.csv", lines(results, keys))
        report = write_report(given.out, results, keys, asked.command)
        console.print(f"\n{FORGETS}", highlight=False)
        console.print(f"Report: {report}", highlight=False, soft_wrap=True)
    if not whole:
        left = len(asked.settings) - len(keys)
        console.print(
            f"\nStopped: {len(keys)} of {len(asked.settings)} runs are finished and kept in {results.path}. The same "
            f"command, without --fresh, goes on with the other {left}.",
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


def _text(asked: Options) -> Text:
    given = asked.given
    if given.text is not None:
        return from_file(given.text)
    if given.dataset is not None:
        characters = _CHARACTERS * given.tokens
        return from_dataset(given.dataset, given.config, given.split, given.column, characters)
    return embedded()


def _measure_all(console: Console, asked: Options, read: Subject, results: Results) -> bool:
    """Does the runs that are not done yet; False if Ctrl-C came between."""
    keys = {key(setting, read.identity): setting for setting in asked.settings}
    todo = {each: setting for each, setting in keys.items() if asked.given.fresh or each not in results}
    if len(todo) < len(keys):
        console.print(
            f"{len(keys) - len(todo)} of {len(keys)} runs are done already (--fresh redoes them)", highlight=False
        )
    if not todo:
        return True
    with _progress(console) as progress:
        task = progress.add_task("", total=len(todo) * read.tokens)
        for number_, (each, setting) in enumerate(todo.items(), start=1):
            progress.update(task, description=f"{number_}/{len(todo)} {setting.name}")
            try:
                row, nll = measure(read, setting, each, asked.given.seed, lambda count: progress.advance(task, count))
            except KeyboardInterrupt:
                return False
            results.add(row, nll)
            scored = "" if row["scored"] >= read.tokens - 1 else f" of {row['scored']:,} tokens scored"
            done = f"{setting.label}: perplexity {number(row['perplexity'])}{scored} in {row['seconds']:.0f} s"
            progress.console.print(done, highlight=False)
    return True


class _Speed(TextColumn):
    """Tokens of the text a second, of late."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Styled:
        """The speed, or a dash before it is known."""
        return Styled(f"{task.speed:,.0f} tokens/s" if task.speed else "- tokens/s", style="cyan")


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


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
