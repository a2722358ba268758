"""Plants faults in a copy of the library, one at a time, and says which test finds each.

    .venv/bin/python tests/mutations/plant.py [--only WORD] [--list] [--jobs N] [--timeout SECONDS] [--markdown FILE]

The faults are in faults.py. Each is planted in a copy of sinkcache/, policies/ and tests/ in a temporary folder; the
tests it names run there until one fails, in a process forked from this one, which has torch and transformers in memory.
Hypothesis draws the same examples each time and does not shrink them. Before all that, every test that is named runs
once without a fault. Ends with 1 if a fault survived, no longer fits the source, or broke what is no test.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("sinkcache", "policies", "tests", "pyproject.toml")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
PRELOADED = (
    "beartype",
    "einops",
    "hypothesis",
    "jaxtyping",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)
# transformers has imported anyio, whose pytest plugin would be rewritten: no test of ours uses it
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning")
BASELINE_SECONDS = 1800
NO_VERDICT = 70  # exit status of a process that could not say what its tests did
CONFTEST = """
from hypothesis import Phase, settings


def pytest_collection_modifyitems(items):
    for test in {getattr(item.obj, "__func__", item.obj) for item in items}:
        if (own := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
            phases = [Phase.explicit, Phase.generate]
            test._hypothesis_internal_use_settings = settings(own, phases=phases, derandomize=True, database=None)
"""


@dataclass(frozen=True)
class Found:
    """What became of a fault: `caught`, and by what, or what is wrong."""

    fault: Fault
    caught: bool
    what: str
    seconds: float = 0.0


@dataclass
class Run:
    """pytest at work in a process of its own, which is killed `seconds` after it began."""

    pid: int
    log: Path
    began: float
    seconds: float
    status: int | None = None
    hung: bool = False

    def ended(self) -> bool:
        """Whether it has come to its end, or was brought to it."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done and time.monotonic() - self.began > self.seconds:
            os.killpg(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            done = self.hung = True
        if done:
            self.status = os.waitstatus_to_exitcode(status)
        return bool(done)


def main() -> int:
    """Plants what was asked for; the exit status."""
    options = _options()
    asked = [fault for fault in FAULTS if options.only.lower() in f"{fault.name} {fault.file}".lower()]
    if options.list:
        for fault in asked:
            print(f"{fault.file}: {fault.name}  [{' '.join(fault.tests)}]")
        return 0
    if not asked:
        print(f"no fault has {options.only!r} in its name or file")
        return 1
    began = time.monotonic()
    os.environ.update(ENVIRONMENT, PYTHONDONTWRITEBYTECODE="1")
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="sinkcache-faults-") as folder:
        copies = [_copy(Path(folder) / str(job)) for job in range(max(1, options.jobs))]
        found = [Found(fault, False, why) for fault in asked if (why := _misfit(fault, copies[0]))]
        fitting = [fault for fault in asked if not _misfit(fault, copies[0])]
        if fitting and not _green(copies[0], fitting):
            return 1
        found += _plant(fitting, copies, options.timeout)
    found.sort(key=lambda each: FAULTS.index(each.fault))
    _report(found, time.monotonic() - began, options.markdown)
    return int(not all(each.caught for each in found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name or file has WORD in it")
    parser.add_argument("--list", action="store_true", help="name the faults and plant none")
    parser.add_argument("--jobs", type=int, default=1, help="faults planted at a time, each in a copy of its own")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="a fault that hangs is caught")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    return parser.parse_args()


def _misfit(fault: Fault, copy: Path) -> str:
    """Why the fault cannot be planted in the source as it is; empty if it can."""
    path = copy / fault.file
    times = path.read_text().count(fault.text) if path.is_file() else 0
    return "" if times == 1 else f"NO LONGER FITS: its text is in {fault.file} {times} times"


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "conftest.py").write_text(CONFTEST)
    return folder


def _green(copy: Path, faults: list[Fault]) -> bool:
    """Whether all tests that are named pass without a fault, on the library in `copy`."""
    wanted = sorted({test for fault in faults for test in fault.paths()})
    files = {test for test in wanted if "::" not in test}
    run = _start(
        copy, [test for test in wanted if test in files or test.partition("::")[0] not in files], BASELINE_SECONDS
    )
    while not run.ended():
        time.sleep(0.2)
    if run.status == 0:
        print(f"without a fault all is green, {time.monotonic() - run.began:.0f} s", flush=True)
    else:
        print(f"without a fault the tests are not green:\n{run.log.read_text()[-4000:]}")
    return run.status == 0


def _plant(faults: list[Fault], copies: list[Path], seconds: float) -> list[Found]:
    """Each fault in a copy that is free, as many at a time as there are copies."""
    found: list[Found] = []
    waiting, free = list(faults), list(copies)
    running: dict[Path, tuple[Fault, str, Run]] = {}
    try:
        while waiting or running:
            while waiting and free:
                fault, copy = waiting.pop(0), free.pop()
                whole = (copy / fault.file).read_text()
                (copy / fault.file).write_text(whole.replace(fault.text, fault.instead))
                running[copy] = (fault, whole, _start(copy, fault.paths(), seconds))
            time.sleep(0.05)
            for copy in [copy for copy, (_, _, run) in running.items() if run.ended()]:
                fault, whole, run = running.pop(copy)
                (copy / fault.file).write_text(whole)
                free.append(copy)
                found.append(_judged(fault, run))
                print(f"{found[-1].seconds:5.1f} s  {fault.name}: {found[-1].what}", flush=True)
    finally:  # of Ctrl-C too, which does not reach processes in sessions of their own
        for _, _, run in running.values():
            os.killpg(run.pid, signal.SIGKILL)
    return found


def _start(copy: Path, tests: list[str], seconds: float) -> Run:
    """pytest on `tests`, which knows no library but that in `copy`."""
    log = copy.with_suffix(".log")
    sys.stdout.flush()
    if pid := os.fork():
        return Run(pid, log, time.monotonic(), seconds)
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if this was started in the background
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(copy)
        sys.path[0] = str(copy)
        sys.dont_write_bytecode = True  # a fault of the same length, in the same second, would not be compiled
        status = pytest.main([*PYTEST, *tests])
        library = sys.modules.get("sinkcache")
        if library is not None and not str(library.__file__).startswith(str(copy)):
            print(f"the library under test is {library.__file__}")
            status = NO_VERDICT
        sys.stdout.flush()
        os._exit(int(status))
    except BaseException:
        log.open("a").write(traceback.format_exc())
    finally:
        os._exit(NO_VERDICT)


def _judged(fault: Fault, run: Run) -> Found:
    seconds, log = time.monotonic() - run.began, run.log.read_text()
    if run.hung:
        return Found(fault, True, f"caught: no end within {run.seconds:.0f} s", seconds)
    if run.status == 0:
        return Found(fault, False, f"SURVIVED {' '.join(fault.tests)}", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+?)(?:\[.*)?(?: - .*)?$", log, flags=re.MULTILINE)
    if run.status == 1 and failed:
        return Found(fault, True, f"caught by {failed[1]}", seconds)
    if run.status is not None and run.status < 0:
        return Found(fault, True, f"caught: the process died of signal {-run.status}", seconds)
    last = (log.strip().splitlines() or ["nothing said"])[-1]
    return Found(fault, False, f"NO TEST: pytest ended with {run.status}, {last}", seconds)


def _report(found: list[Found], seconds: float, markdown: Path | None) -> None:
    rows = [f"| {each.fault.name} | {each.fault.file} | {each.what.removeprefix('caught by ')} |" for each in found]
    caught = sum(each.caught for each in found)
    table = "\n".join(["| fault | planted in | caught by |", "|---|---|---|", *rows])
    print(f"\n{table}\n\n{caught} of {len(found)} faults caught, in {seconds:.0f} s")
    if markdown is not None:
        markdown.write_text(f"{table}\n")


if __name__ == "__main__":
    sys.exit(main())
