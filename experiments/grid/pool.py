"""Cells measured by processes of this machine: one queue, and a process that dies loses the cell it was at, no more."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from experiments.grid.cell import Cell, Found, measured


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `found`, or a `reason` why nothing was."""

    cell: Cell
    found: Found | None
    reason: str | None = None


def here(cells: Iterable[Cell], threads: int) -> Generator[Outcome]:
    """Measures cells one after the other in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for cell in cells:
            yield attempt(cell)
    finally:
        torch.set_num_threads(before)


def attempt(cell: Cell) -> Outcome:
    """Measures a cell; whatever goes wrong with it is its outcome."""
    try:
        return Outcome(cell, measured(cell))
    except KeyboardInterrupt:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Outcome(cell, None, f"out of memory: {first_line(error)}")
    except Exception as error:
        return Outcome(cell, None, f"{type(error).__name__}: {first_line(error)}")


def spread(cells: Iterable[Cell], workers: int, threads: int, retries: int) -> Generator[Outcome]:
    """Measures cells in `workers` processes, each of which has the next GPU to itself if there are any.

    A cell whose process died is tried again `retries` times, in a new process. Closing the iterator ends the processes.
    """
    queue = deque((cell, 0) for cell in cells)
    crew = [_Worker(number, threads) for number in range(min(workers, len(queue)))]
    try:
        for worker in crew:
            worker.take(queue)
        while busy := [worker for worker in crew if worker.job is not None]:
            ready = wait([worker.connection for worker in busy])
            for worker in (each for each in busy if each.connection in ready):
                outcome = worker.finished()
                if outcome is None:
                    outcome = _lost(worker, queue, retries)
                    worker.restart()
                worker.take(queue)
                if outcome is not None:
                    yield outcome
            for worker in crew:
                worker.take(queue)  # what a dead one gave back
    finally:
        for worker in crew:
            worker.stop()


def _lost(worker: "_Worker", queue: deque[tuple[Cell, int]], retries: int) -> Outcome | None:
    """Gives a dead process' cell back to the queue, or gives it up."""
    assert worker.job is not None
    cell, tries = worker.job
    if tries < retries:
        queue.append((cell, tries + 1))
        return None
    worker.process.join()
    code = worker.process.exitcode
    how = "was killed, as the system does where memory runs out" if code == -signal.SIGKILL else f"ended with {code}"
    return Outcome(cell, None, f"its process {how}, {tries + 1} time{'s' if tries else ''}")


class _Worker:
    """A process and the cell it is at, with the number of times that was tried before."""

    def __init__(self, number: int, threads: int) -> None:
        self.number, self.threads = number, threads
        self.job: tuple[Cell, int] | None = None
        self.process: BaseProcess
        self.connection: Connection
        self.start()

    def start(self) -> None:
        """Has a new process, which waits for cells."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.number, self.threads), daemon=True)
        with _deaf():
            self.process.start()
        theirs.close()

    def restart(self) -> None:
        """Has a new process in the place of one that died."""
        self.stop()
        self.job = None
        self.start()

    def take(self, queue: deque[tuple[Cell, int]]) -> None:
        """Sends the next cell, if there is one and none is under way."""
        if self.job is None and queue:
            self.job = queue.popleft()
            with contextlib.suppress(OSError):  # it died meanwhile, which `finished` finds out
                self.connection.send(self.job[0])

    def finished(self) -> Outcome | None:
        """The outcome of the cell, None if the process died at it."""
        try:
            found, reason = self.connection.recv()
        except (EOFError, OSError):
            return None
        assert self.job is not None
        cell, self.job = self.job[0], None
        return Outcome(cell, found, reason)

    def stop(self) -> None:
        """Ends the process, whatever it is at."""
        self.connection.close()
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A process begun within never hears Ctrl-C, not as it imports either; one that comes meanwhile waits."""
    if not hasattr(signal, "pthread_sigmask"):  # not every system has it
        yield
        return
    resource_tracker.ensure_running()  # which would let it through, were it begun within
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, number: int, threads: int) -> None:
    """Measures what comes until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_watch_parent, daemon=True).start()
    if (devices := torch.cuda.device_count()) > 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible(number, devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    torch.set_num_threads(threads)
    while True:
        try:
            cell: Any = connection.recv()
            outcome = attempt(cell)
            connection.send((outcome.found, outcome.reason))
        except (EOFError, OSError):
            return


def _visible(number: int, devices: int, given: str | None) -> str:
    """The GPU of worker `number`, of those that are `given` to this program, in turn."""
    names = given.split(",") if given else [str(each) for each in range(devices)]
    return names[number % len(names)]


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error).strip() or repr(error)).splitlines()[0]
