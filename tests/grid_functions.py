"""What the cells of test_grid.py call, in processes of their own: it must be importable there."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

from experiments.grid.cell import Cell, Found


def square(cell: Cell) -> Found:
    number = cell.asked["number"]
    return Found({"square": number**2}, {"twice": np.array([2.0 * number, np.nan])}, {"seconds": time.perf_counter()})


def threads(cell: Cell) -> Found:
    return Found({"threads": torch.get_num_threads(), "process": os.getpid()})


def signals(cell: Cell) -> Found:
    return Found({"deaf": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())})


def tell(cell: Cell) -> Found:
    return Found({"told": cell.payload})


def fail(cell: Cell) -> Found:
    raise cell.payload


def die(cell: Cell) -> Found:
    """Kills its process at the first `times` attempts, each of which leaves a file in `folder`; then squares."""
    folder = Path(cell.asked["folder"])
    tries = len(list(folder.glob(f"{cell.key}-*")))
    (folder / f"{cell.key}-{tries}").touch()
    if tries < cell.asked["times"]:
        time.sleep(cell.asked.get("seconds", 0))
        os.kill(os.getpid(), signal.SIGKILL)
    return square(cell)


def slow(cell: Cell) -> Found:
    Path(cell.asked["folder"], str(os.getpid())).touch()
    time.sleep(60)
    return square(cell)
