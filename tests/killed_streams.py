"""Run by `test_long_streams.py` in a process of its own: streams of a tiny model, killed with SIGKILL, end alike.

A child is killed at its n-th call that changes what is on disk, for each n there is, halfway into writing where it
writes; and at moments drawn by chance. Children are forked, so that nothing is imported anew.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
from conftest import VOCABULARY, build
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments import checkpoints, stream_perplexity
from experiments.stream_perplexity import main

_BY_CHANCE = 8
_MOODS = {"date", "seconds", "cpu_seconds", "ms_per_token", "tokens_per_second", "resumed_at"}


def place(folder: Path) -> list[str]:
    """The command, of a model and texts made in `folder`."""
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"w{index}": index + 2 for index in range(VOCABULARY - 2)}}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>").save_pretrained(folder / "m")
    network: Any = build("llama", torch.float32)
    network.save_pretrained(folder / "m")
    for name in ("a", "b"):
        (folder / name).write_text(" ".join(f"w{index * 7 % 90}" for index in range(80)))
    texts = ["--text", str(folder / "a"), str(folder / "b"), "--tokens", "130", "--checkpoint-every", "50"]
    setting = ["--method", "sinks", "--sinks", "2", "--budget", "16", "--chunk", "10", "--bucket", "10"]
    return ["--model", str(folder / "m"), *texts, *setting, "--threads", "1"]


def child(argv: list[str], before: Any) -> int:
    """How a process that runs the command ends: 0, or minus the signal that killed it."""
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        before()
        os._exit(main(argv))
    return process


def ends(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_at(call: int) -> Any:
    """Has the process kill itself in the `call`-th of the calls that a checkpoint or a result is written by."""
    left = [call]

    def dying(real: Any, owner: Any, name: str) -> None:
        def replacement(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(owner, name, replacement)

    def patch() -> None:
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (torch, "save"), (Path, "write_bytes")):
            dying(getattr(owner, name), owner, name)
        dying(checkpoints.Checkpoint._append, checkpoints.Checkpoint, "_append")

    return patch


def result(out: Path) -> tuple[Any, bytes]:
    (row,) = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    nll = torch.load(out / "scores" / f"{row['key']}.pt", weights_only=True)
    assert not any((out / "checkpoints").iterdir()), "a checkpoint is left of a run that is filed"
    return {name: value for name, value in row.items() if name not in _MOODS}, nll.numpy().tobytes()


def run(folder: Path) -> None:
    argv = place(folder)
    stream_perplexity.write_report = lambda *_: Path()  # the pictures take most of the time, and are not in question
    torch.set_num_threads(1)

    def nothing() -> None:
        pass

    began = time.monotonic()
    assert ends(child([*argv, "--out", str(folder / "whole")], nothing)) == 0
    seconds, whole = time.monotonic() - began, result(folder / "whole")
    call, survived = 0, False
    while not survived:
        call += 1
        out = folder / f"call{call}"
        survived = ends(child([*argv, "--out", str(out)], killed_at(call))) == 0
        if not survived:
            assert ends(child([*argv, "--out", str(out)], nothing)) == 0
        assert result(out) == whole, f"killed at write {call}"
        print(f"write {call}: equal", flush=True)
        shutil.rmtree(out)
    chance, kills = random.Random(0), 0
    for number in range(_BY_CHANCE):
        out, code = folder / f"chance{number}", -1
        while code != 0:
            process = child([*argv, "--out", str(out)], nothing)
            if kills < 3 * (number + 1):
                time.sleep(chance.random() * seconds)
                os.kill(process, signal.SIGKILL)
                kills += 1
            code = ends(process)
        assert result(out) == whole, f"killed by chance, {number}"
    print(f"all equal: killed at {call - 1} writes and {kills} times by chance, {seconds:.1f} s a run")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
