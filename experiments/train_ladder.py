"""A ladder of checkpoints to watch a sink emerge on: a tiny GPT-NeoX, trained here and now, offline.

A synthetic task and no language: nothing here is a claim about natural text. The task (`experiments.backcopy`) has work
for attention at three characters only. Each seed has a folder: `step0`, `step16` and so on, as `save_pretrained` leaves
them; `ladder.json`, what was asked for and found; `held_out.json` and `held_out.txt`, streams to measure on.
Share: of what queries attend to that are no triggers, from position 64 on, the part that falls on the first token, in
the head where that is most; even attention would give 1.1%. The control `no-bos` is trained and measured on streams
without BOS, whose first token is a character like any other. Expected after 2,000 steps (a minute or two on an idle
core): 63%, 88% and 94% for seeds 0, 1 and 2; below 2% for the control.

    python -m experiments.train_ladder --seeds 0,1,2 --control none,no-bos --jobs 2
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from experiments.backcopy import CONTROLS, SYNTHETIC, Recipe, Tell, Training, backcopy, held_out_files, measured
from experiments.options import Parser, at_least, choices, numbers
from experiments.results import Row
from sinkcache.texts import embedded

STEPS = [0, 16, 64, 100, 128, 200, 256, 400, 512, 700, 1000, 1300, 1600, 2000]


class Ladder:
    """The folder of a recipe's checkpoints. Raises ValueError if something else is in it."""

    def __init__(self, folder: Path, recipe: Recipe, fresh: bool = False) -> None:
        recipe.check()
        text = embedded()
        self.folder, self.recipe, self.fresh = folder, recipe, fresh
        self.process = backcopy(text, CONTROLS[recipe.control])
        self.settings = {**recipe.settings(), "text": text.name, "text_sha256": text.sha256}
        self.found: Row = {}
        if (folder / "ladder.json").exists():
            self.found = {} if fresh else self.read()
            before = self.settings if fresh else self.found.get("settings", {})
            other = [f"{name}={before.get(name)!r}" for name, each in self.settings.items() if before.get(name) != each]
            if other:
                raise ValueError(f"{folder} was trained with {', '.join(other)}: give another --out, or --fresh")
        elif folder.exists() and any(not each.name.startswith(".") for each in folder.iterdir()):
            raise ValueError(f"{folder} holds something, and no ladder: give another --out or --name")

    def read(self) -> Row:
        """What `ladder.json` says now."""
        return json.loads((self.folder / "ladder.json").read_text(encoding="utf-8"))

    def train(self, threads: int, tell: Tell) -> None:
        """Goes on from the last checkpoint, unless all are there; on disk each is whole or missing."""
        if self.found.get("finished") and self._has(self.found["checkpoints"]):
            return
        training, before = Training(self.recipe, self.process), torch.get_num_threads()
        torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()
        try:
            self._begin(training, threads)
            for step in self.recipe.steps[len(training.checkpoints) :]:
                training.go_to(step, tell)
                tell(self._keep(training))
            self._write(training, finished=True)
            (self.folder / "state.pt").unlink(missing_ok=True)
        finally:
            transformers.logging.enable_progress_bar()
            torch.set_num_threads(before)

    def _begin(self, training: Training, threads: int) -> None:
        """Brings `training` to the last checkpoint, or clears the folder if there is none to go on from."""
        state = self.folder / "state.pt"
        saved = torch.load(state, weights_only=True) if self.found and state.exists() else None
        if saved is not None and self._has(saved["checkpoints"]):
            training.restore(saved)
        else:
            self.found = {}
            for each in [state, *self.folder.glob("step[0-9]*"), self.folder / "ladder.json"]:
                shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
        run: Row = {"from_step": training.step, "threads": threads, "python": platform.python_version()}
        run |= {each.__name__: each.__version__ for each in (torch, transformers, tokenizers)}
        self.found = {"runs": [*self.found.get("runs", []), run]}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(training, finished=False)
        for name, content in held_out_files(self.process, self.recipe.tokens).items():
            _put(self.folder / name, lambda path, content=content: path.write_bytes(content.encode()))

    def _keep(self, training: Training) -> Row:
        """Files a checkpoint, and then that training has come so far."""
        folder, parts = self.folder / f"step{training.step}", (training.model, self.process.tokenizer())
        _put(folder, lambda path: [part.save_pretrained(path) for part in parts])
        found = measured(folder, self.process, self.recipe.tokens)
        training.checkpoints.append(row := {"step": training.step, **found, "seconds": training.seconds()})
        _put(self.folder / "state.pt", lambda path: torch.save(training.state(), path))
        self._write(training, finished=False)
        return row

    def _write(self, training: Training, finished: bool) -> None:
        told = {"about": SYNTHETIC, "settings": self.settings, "triggers": self.process.triggers}
        self.found |= {**told, "finished": finished, "checkpoints": training.checkpoints}
        _put(self.folder / "ladder.json", lambda path: path.write_text(json.dumps(self.found, indent=1), "utf-8"))

    def _has(self, checkpoints: Sequence[Row]) -> bool:
        return all((self.folder / f"step{row['step']}").is_dir() for row in checkpoints)


def _put(target: Path, write: Callable[[Path], object]) -> None:
    """Has a file or folder written under another name before it takes the place of what was there."""
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    write(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(unfinished, target)


def _side_by_side(ladders: Sequence[Ladder], jobs: int, threads: int, tell: Callable[[int, Row], None]) -> None:
    """Trains each ladder in a process of its own, `jobs` at a time, and leaves none running whatever happens."""
    context, waiting, running = multiprocessing.get_context("spawn"), list(enumerate(ladders)), cast(dict[Any, Any], {})
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, ladder = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                which = (ladder.folder, ladder.recipe, ladder.fresh)
                process = context.Process(target=_work, args=(theirs, threads, *which), daemon=True)
                before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is this process's to answer
                process.start()
                signal.signal(signal.SIGINT, before)
                theirs.close()
                running[ours] = index, process
            for ours in wait(list(running)):
                index, process = running[ours]
                try:
                    heard = cast(Connection, ours).recv()
                except EOFError:
                    heard = f"training of {ladders[index].folder} broke off"
                if isinstance(heard, str):
                    raise ValueError(heard)
                running.pop(ours) if heard is None else tell(index, heard)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _work(pipe: Connection, threads: int, *which: Any) -> None:
    """What a process does: tells by `pipe` how far it is, at the end nothing, or in a line why it cannot go on."""
    try:
        Ladder(*which).train(threads, pipe.send)
        pipe.send(None)
    except (ValueError, OSError) as error:
        pipe.send(str(error) or type(error).__name__)


def markdown(ladders: Sequence[Ladder]) -> str:
    """A line for each checkpoint on disk."""
    lines = ["| ladder | step | loss | loss of copies | share | x uniform | seconds |", f"|---|{'---:|' * 6}"]
    for ladder in ladders:
        for row in ladder.read()["checkpoints"]:
            cells = f"{row['loss']:.3f} | {row['copy_loss']:.3f} | {row['share']:.1%} | {row['x_uniform']:.1f}"
            lines.append(f"| {ladder.folder.name} | {row['step']} | {cells} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 130 after Ctrl-C. Ends with 2 and a line if it cannot be run."""
    command, console = _parser(), Console()
    given = command.parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        _train(console, ladders := _ladders(given), given.jobs, given.threads)
        console.print(f"\n{markdown(ladders)}\n", highlight=False, markup=False, soft_wrap=True)
        console.print(f"This is {SYNTHETIC}.\nCheckpoints: {given.out}", highlight=False, soft_wrap=True)
    except (ValueError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: finished checkpoints are kept in {given.out}", highlight=False)
        return 130
    return 0


def _ladders(given: argparse.Namespace) -> list[Ladder]:
    """Those asked for, each checked before one is trained."""
    shape = (sorted(given.steps), given.width, given.layers, given.heads, given.tokens, given.batch, given.lr)
    names = [(each, given.name if each == "none" else f"{given.name}-{each}") for each in given.control]
    asked = [(f"{name}-seed{seed}", Recipe(seed, control, *shape)) for control, name in names for seed in given.seeds]
    return [Ladder(given.out / name, recipe, given.fresh) for name, recipe in asked]


def _train(console: Console, ladders: Sequence[Ladder], jobs: int, threads: int) -> None:
    """Trains what is not finished, and says at each checkpoint what was found."""
    texts = [TextColumn(f"{{task.{each}}}") for each in ("description", "fields[loss]")]
    with Progress(*texts, BarColumn(24), MofNCompleteColumn(), console=console, transient=True) as progress:
        tasks = [progress.add_task(each.folder.name, total=each.recipe.steps[-1], loss="") for each in ladders]

        def tell(index: int, row: Row) -> None:
            loss = f"loss {row['loss']:.3f}"
            progress.update(tasks[index], completed=row["step"], loss=loss)
            if "share" in row:
                said = f"{ladders[index].folder.name} step {row['step']}: {loss}, share {row['share']:.1%}"
                progress.console.print(f"{said}, {row['seconds']:.0f} s", highlight=False, markup=False, soft_wrap=True)

        if jobs > 1 and len(ladders) > 1:
            _side_by_side(ladders, jobs, threads, tell)
        else:
            for index, ladder in enumerate(ladders):
                ladder.train(threads, partial(tell, index))


def _parser() -> Parser:
    parser = Parser(prog="train_ladder", description=f"Trains ladders of checkpoints on {SYNTHETIC}.")
    parser.add_argument("--seeds", type=numbers(0), default=[0], metavar="N,N", help="a ladder for each")
    parser.add_argument("--control", type=choices(*CONTROLS), default=["none"], metavar="NAME,NAME", help="or no-bos")
    parser.add_argument("--steps", type=numbers(0), default=STEPS, metavar="N,N", help="where checkpoints are kept")
    parser.add_argument("--width", type=at_least(8), default=32, metavar="N", help="of the hidden states")
    parser.add_argument("--layers", type=at_least(1), default=1, metavar="N", help="of the model")
    parser.add_argument("--heads", type=at_least(1), default=1, metavar="N", help="of a layer")
    parser.add_argument("--tokens", type=at_least(1), default=128, metavar="N", help="of a stream")
    parser.add_argument("--batch", type=at_least(1), default=64, metavar="N", help="streams a step")
    parser.add_argument("--lr", type=_rate, default=3e-3, metavar="X", help="learning rate, constant after warm-up")
    parser.add_argument("--name", default="backcopy", help="of the folders, before -seed0")
    parser.add_argument("--out", type=Path, default=Path("out/ladder"), metavar="DIR", help="for all that is written")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="ladders trained at the same time")
    parser.add_argument("--threads", type=at_least(1), default=1, metavar="N", help="of each")
    parser.add_argument("--fresh", action="store_true", help="train finished ladders again")
    return parser


def _rate(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
