"""Cells measured on a Ray cluster, whichever machines it has: one queue, and a lost worker loses the cell it was at.

The nodes need sinkcache, of the same version, and the models under the same names; this folder and the tokens travel.
"""

import importlib.util
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

import experiments
from experiments.grid.cell import Cell
from experiments.grid.options import LOCAL
from experiments.grid.pool import Outcome, attempt, first_line

_QUIET = {"log_to_driver": False, "logging_level": "warning"}


def check_ray(address: str | None) -> None:
    """Raises ModuleNotFoundError if a cluster is asked for and its package is not here."""
    if address is not None and importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError('--ray needs the package ray: run `pip install "sinkcache[ray]"`')


def on_ray(cells: Sequence[Cell], address: str, workers: int, threads: int, retries: int) -> Generator[Outcome]:
    """Measures cells on the cluster at `address`; on one of `workers` processes that is started here, where that is
    "local". Each cell has `threads` CPUs to itself, and a GPU if it is to be measured on one.

    A cell whose worker or node is lost is tried again `retries` times. Closing the iterator takes back what is queued.
    """
    import ray
    from ray.exceptions import RayError

    started = not ray.is_initialized()
    if started:
        _connect(ray, address, workers, threads)
    task, how = ray.remote(_attempt), {"num_cpus": threads, "max_retries": retries, "retry_exceptions": False}
    waiting = {}
    for cell in cells:
        gpus = int(cell.asked.get("device") == "cuda")
        waiting[task.options(num_gpus=gpus, **how).remote(cell, threads)] = cell
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for reference in ready:
                cell = waiting.pop(reference)
                try:
                    outcome = Outcome(cell, *ray.get(reference))
                except RayError as error:
                    times = f"{retries + 1} time{'s' if retries else ''}"
                    outcome = Outcome(cell, None, f"its worker was lost {times}: {first_line(error)}")
                yield outcome
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str, workers: int, threads: int) -> None:
    if address == LOCAL:
        ray.init(num_cpus=max(1, workers) * threads, include_dashboard=False, **_QUIET)
        return
    here = str(Path(experiments.__file__).parent)
    try:
        ray.init(address=address, runtime_env={"py_modules": [here]}, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray {address}: no cluster answers ({first_line(error)}); start one with `ray start --head`"
        ) from error


def _attempt(cell: Cell, threads: int) -> tuple[Any, str | None]:
    torch.set_num_threads(threads)
    outcome = attempt(cell)
    return outcome.found, outcome.reason
