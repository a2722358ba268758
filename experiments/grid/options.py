"""What every command that measures a grid of cells can be told about how to do it."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.costs import machine_bytes
from experiments.options import at_least

LOCAL = "local"


def add_options(group: Any, out: Path) -> None:
    """Adds the options to a parser, or to a group of one."""
    group.add_argument("--out", type=Path, default=out, metavar="DIR", help="for all that is written")
    group.add_argument("--workers", type=at_least(0), default=1, metavar="N", help=(
        "processes that measure cells side by side, each with a GPU if there are any; 0: this process"))  # fmt: skip
    group.add_argument("--threads", type=at_least(1), metavar="N", help=(
        "of torch in each process, on the CPU; without, all cores shared out; 1: figures to the bit"))  # fmt: skip
    group.add_argument("--retries", type=at_least(0), default=2, metavar="N", help="for a cell whose process died")
    group.add_argument("--retry-failed", action="store_true", help="measure again what failed before")
    group.add_argument("--fresh", action="store_true", help="measure finished cells again")
    group.add_argument("--ray", metavar="ADDRESS", help=(
        f"measure on a Ray cluster: its address, auto for the one this machine is in, or {LOCAL} for one that is "
        'started here with --workers processes; needs pip install "sinkcache[ray]"'))  # fmt: skip


def threads(given: argparse.Namespace) -> int:
    """Of each process."""
    return given.threads or max(1, (os.cpu_count() or 1) // max(1, given.workers))


def check_workers(given: argparse.Namespace, sizes: Sequence[int | None]) -> None:
    """Raises ValueError if weights of such sizes, loaded by each worker, do not fit into this machine's memory."""
    if given.device != "cpu" or given.ray is not None:
        return
    whole = machine_bytes()
    most = max((size for size in sizes if size is not None), default=0) * max(1, given.workers)
    if whole is not None and most > whole:
        raise ValueError(
            f"the weights take {most / 2**30:.1f} GiB in --workers {given.workers} and this machine has "
            f"{whole / 2**30:.1f} GiB: fewer workers, or --dtype bfloat16"
        )
