"""Since which training step a model has an attention sink: its checkpoints measured one after the other.

A checkpoint reads documents of 2,048 tokens; of the attention of queries 64 and later, the share that falls on the
first token is told by layer and head, beside what even attention would give (0.174% at that length). Gu et al.'s rates
(arXiv 2410.10781) are of short segments; perplexity with first tokens evicted says what the sink is worth by then.

Onset, each with the middle 95% over resamples of the documents: (a) the mean share is 10 x uniform, for good; (b) there
is a head in which the first token's importance is above 0.3 in half of the segments; (c) half of the last share.

Expected, Pythia-410M in float32: at most 0.2% up to step 512, then 0.5% at 1,000, 2 at 2,000, 8 at 4,000, 13 at 8,000,
17 at 16,000, 20 at 143,000; top layer 34%, layers 0 to 5 none; so (a) at about step 1,870, (c) 5,300. The report says
of each measured step whether it was met. With 24 documents about 12 minutes a checkpoint on two cores for attention
alone, and 10.5 GB of downloads.

    python -m experiments.sink_emergence --preset pythia-410m --delete-weights
    python -m experiments.sink_emergence --ladder out/ladder/*-seed*
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.utils
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.emergence_cells import FAILED, Store
from experiments.emergence_curves import Curve, Point, told_by, whole
from experiments.emergence_options import asked, documents, parser, series, tokens_per_step
from experiments.emergence_report import printed, write_all
from experiments.emergence_run import Job, Run
from experiments.revisions import Downloads

Planned = dict[str, list[Job]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command: 0, 1 if something could not be measured, 130 after Ctrl-C; 2 and a line if it cannot be run."""
    command, console = parser(), Console()
    words = list(sys.argv[1:] if argv is None else argv)
    given = asked(command, words)
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError('the figures need matplotlib: run `pip install "sinkcache[experiments]"`')
        with _settled(given.threads):
            return _run(console, given, words)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: finished cells are kept in {given.out}; the same command goes on", highlight=False)
        return 130


def _run(console: Console, given, words: Sequence[str]) -> int:
    models = series(given)
    read = {name: documents(given, revisions) for name, revisions in models.items()}
    store = Store(given.out, given.fresh)
    run = Run(given, store, Downloads(given.out / "downloads.json"))
    with console.status("looking for the checkpoints") as status:
        run.tell = status.update
        planned = {name: run.plan(revisions, read[name]) for name, revisions in models.items()}
        for jobs in planned.values():
            run.check(jobs)
    _say_what_changed(console, store, planned)
    _measure_all(console, run, planned)
    curves = [_curve(run, given, jobs) for jobs in planned.values()]
    failed = _say_what_failed(console, run, planned)
    summaries = [curve.summary(given.draws, given.seed) for curve in curves]
    if any(curve.points for curve in curves):
        report = write_all(given.out, curves, summaries, failed, words)
        console.print(printed(summaries), highlight=False, markup=False, soft_wrap=True)
        console.print(f"\nReport: {report}", highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _measure_all(console: Console, run: Run, planned: Planned) -> None:
    jobs = [job for each in planned.values() for job in each]
    total, left = sum(len(job.cells) for job in jobs), sum(len(run.left(job)) for job in jobs)
    if left < total:
        console.print(
            f"{total - left} of {total} cells are known already (--fresh measures them again)", highlight=False
        )
    with _progress(console) as progress:
        task = progress.add_task("", total=total, completed=total - left)
        run.tell = lambda what: progress.update(task, description=what)
        run.advance = lambda: progress.advance(task)
        for job in jobs:
            todo, name = run.left(job), f"{job.revision.series} {job.revision.title}"
            freed = run.measure(job)
            rows = run.found(job)[: sum(cell.control is None for cell in job.cells)]
            if todo and whole(rows):
                told = Point(job.revision.step, [row for row in rows if row]).figures()
                line = f"{name}: share {told['share']:.2%}, {told['x_uniform']:.1f} x uniform"
                progress.console.print(line, highlight=False)
            if freed:
                progress.console.print(f"{name}: {freed / 2**20:,.0f} MiB of weights deleted", highlight=False)


def _say_what_changed(console: Console, store: Store, planned: Planned) -> None:
    """Names the documents of which the store knows another text only, or an earlier one."""
    said = set()
    for jobs in planned.values():
        for asked_for in (cell.asked for cell in jobs[0].cells if cell.control is None):
            about = {"series": asked_for["series"], "document": asked_for["document"]}
            texts = {row["asked"]["sha256"] for row in store.known_as(**about)}
            if texts and asked_for["sha256"] not in texts and asked_for["document"] not in said:
                said.add(asked_for["document"])
                line = f"{asked_for['document']} has changed since it was measured: it is measured anew"
                console.print(line, highlight=False, markup=False)


def _say_what_failed(console: Console, run: Run, planned: Planned) -> dict[str, str]:
    """By checkpoint, why it, or something of it, could not be measured; also printed."""
    reasons: dict[str, str] = {}
    for jobs in planned.values():
        for job in jobs:
            for row in run.found(job):
                if row is not None and row["status"] == FAILED:
                    reasons.setdefault(f"{job.revision.series} {job.revision.title}", row["reason"])
    for name, reason in reasons.items():
        console.print(f"failed: {name}: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    if reasons:
        console.print("--retry-failed tries these again", highlight=False)
    return reasons


def _curve(run: Run, given, jobs: Sequence[Job]) -> Curve:
    points, controls = [], {}
    for job in jobs:
        pairs = list(zip(job.cells, run.found(job), strict=True))
        rows = [row for cell, row in pairs if cell.control is None]
        if whole(rows):
            points.append(Point(job.revision.step, [row for row in rows if row]))
        for control in given.controls:
            rows = [row for cell, row in pairs if cell.control == control]
            if whole(rows) and points:
                controls[control] = [row for row in rows if row]
    first = jobs[0].revision
    told, per_step = told_by(Path(first.source).parent) if first.name is None else ({}, None)
    return Curve(first.series, first.source, points, controls, tokens_per_step(given, first.source, per_step), told)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, speed_estimate_period=3600)


@contextmanager
def _settled(threads: int | None) -> Iterator[None]:
    """Threads as asked for, and no bars of other packages between ours."""
    before = torch.get_num_threads()
    transformers.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        transformers.logging.enable_progress_bar()
        huggingface_hub.utils.enable_progress_bars()


if __name__ == "__main__":
    sys.exit(main())
