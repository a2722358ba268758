"""Measures what of a grid is not known yet, and files each cell as soon as it is found."""

import argparse
from collections.abc import Generator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.grid.cell import Cell
from experiments.grid.cluster import on_ray
from experiments.grid.options import threads
from experiments.grid.pool import Outcome, here, spread
from experiments.grid.store import FAILED, Store
from experiments.results import Row

_OF_LATE = 3600.0  # seconds over which the time left is reckoned


def left(cells: Sequence[Cell], store: Store, given: argparse.Namespace) -> list[Cell]:
    """The cells that are to be measured."""
    known = {} if given.fresh else {row["key"]: row["status"] for row in store.rows()}
    again = (None, FAILED) if given.retry_failed else (None,)
    return [cell for cell in cells if known.get(cell.key) in again]


def run(
    cells: Sequence[Cell], store: Store, console: Console, given: argparse.Namespace, command: Sequence[str]
) -> list[Row]:
    """The rows of all cells, each once; a cell that cannot be measured is filed as failed, and the rest go on.

    Raises ValueError if another run writes to the same folder, OSError if a result cannot be written: what was filed
    before stays, and so it does on Ctrl-C.
    """
    cells = list({cell.key: cell for cell in cells}.values())
    with store.writing():
        todo = left(cells, store, given)
        if len(todo) < len(cells):
            console.print(f"{len(cells) - len(todo)} of {len(cells)} cells are known already", highlight=False)
        with _progress(console) as progress:
            task = progress.add_task("", total=len(cells), completed=len(cells) - len(todo))
            outcomes = _outcomes(todo, given)
            try:
                for outcome in outcomes:
                    _file(store, outcome, command, progress)
                    progress.update(task, advance=1, description=outcome.cell.title)
                    if not console.is_terminal:  # in a log a bar is not drawn
                        done = f"{progress.tasks[0].completed:.0f} of {len(cells)} cells"
                        console.print(f"{done}: {outcome.cell.title}", highlight=False, soft_wrap=True)
            finally:
                outcomes.close()
    rows = [store.find(cell.key) for cell in cells]
    return [row for row in rows if row is not None]


def _outcomes(todo: Sequence[Cell], given: argparse.Namespace) -> Generator[Outcome]:
    if given.ray is not None:
        return on_ray(todo, given.ray, given.workers, threads(given), given.retries)
    if given.workers == 0:
        return here(todo, threads(given))
    return spread(todo, given.workers, threads(given), given.retries)


def _file(store: Store, outcome: Outcome, command: Sequence[str], progress: Progress) -> None:
    reason = outcome.reason or "unknown"
    if outcome.found is not None:
        try:
            store.add(outcome.cell, outcome.found, command)
            return
        except (TypeError, ValueError) as error:  # a figure that JSON does not know
            reason = f"what was found cannot be kept: {error}"
    store.fail(outcome.cell, reason, command)
    progress.console.print(f"failed: {outcome.cell.title}: {reason}", style="red", highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, speed_estimate_period=_OF_LATE)
