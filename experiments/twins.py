"""What measured twins of the planner share: the full cache and a `SinkCache` for each policy, options, cells, clocks.

Each method runs on a model of its own, of shared weights: a policy that reads attention changes how its model computes.
Tokens are drawn by chance: neither the bytes of a cache nor the time of a step depends on what is read.
"""

import copy
import importlib.util
import io
import json
import os
import platform
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from jaxtyping import Int
from rich.console import Console
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import sinkcache
from experiments.cells import Cells
from experiments.contestants import LAYERED, POLICIES
from experiments.options import Parser, at_least, numbers
from experiments.plots import INK, LEGEND, panel
from experiments.results import Row
from experiments.subject import TYPES, _fingerprint
from experiments.whole import put
from sinkcache import SinkCache
from sinkcache.guard import arguments, cache_argument
from sinkcache.models import EMBEDDED, load
from sinkcache.options import device
from sinkcache.planner.engines import Engine
from sinkcache.planner.in_sinkcache import bounded
from sinkcache.planner.in_transformers import Dynamic
from sinkcache.planner.kinds import Model
from sinkcache.planner.sources import model_of
from sinkcache.plugins import named
from sinkcache.policy import Policy

_COLOURS = [INK, "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]  # Okabe and Ito's
_MARKS = ["o", "s", "^", "D", "v", "P", "X"]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Method:
    """A cache by what tables call it: `DynamicCache` where there is no policy, else a `SinkCache`."""

    name: str
    policy: Policy | None = None
    budget: int = 0

    def engine(self, chunk: int) -> Engine:
        """The planner's rule for it; raises ValueError where there is none."""
        return Dynamic(chunk) if self.policy is None else bounded(self.policy, self.budget, chunk)

    def cache(self, model: PreTrainedModel) -> Cache:
        """An empty one for `model`."""
        return DynamicCache(config=model.config) if self.policy is None else SinkCache(model, self.policy, self.budget)


@dataclass
class Bench:
    """A loaded model with its plan, a model for each method, and the finished cells."""

    model: PreTrainedModel
    planned: Model
    identity: Row
    cells: Cells
    console: Console
    _twins: dict[str, PreTrainedModel] = field(default_factory=dict)

    def twin(self, method: Method) -> PreTrainedModel:
        """The model that `method` has to itself; weights are shared."""
        if method.name not in self._twins:
            shared: dict[int, Any] = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
            self._twins[method.name] = copy.deepcopy(self.model, shared)
        return self._twins[method.name]

    def tokens(self, count: int) -> Int[Tensor, "1 kv_len"]:
        """The first `count` tokens, always the same."""
        chance = torch.Generator().manual_seed(0)
        words = cast(Any, self.model).get_input_embeddings().weight.shape[0]
        return torch.randint(words, (1, count), generator=chance).to(self.model.device)

    def known(self, wanted: Row) -> Row | None:
        """What a finished cell found; None if it is still to be measured."""
        return self.cells.read({**self.identity, **wanted}).get("found")

    def file(self, wanted: Row, found: Row) -> Row:
        """Keeps what a cell found."""
        self.cells.write({**self.identity, **wanted}, found=found)  # pyright: ignore[reportArgumentType]
        return found

    def say(self, line: str) -> None:
        """A line on how far it is."""
        self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def bench(given: Namespace, console: Console) -> Bench:
    """Loads the model that was asked for."""
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.logging.disable_progress_bar()
    model, _ = load(given.model, TYPES[given.dtype], given.revision, given.device)
    on_cuda = model.device.type == "cuda"
    identity = {
        "model": given.model,
        "weights": _fingerprint(model),
        "dtype": given.dtype,
        "device": torch.cuda.get_device_name(model.device) if on_cuda else platform.machine(),
        "attention": str(model.config._attn_implementation),
        "threads": torch.get_num_threads(),
        "versions": {each.__name__: each.__version__ for each in (sinkcache, torch, transformers)},
    }
    return Bench(model, model_of(model), identity, Cells(given.out / "cells", given.fresh), console)


def methods(given: Namespace) -> list[Method]:
    """The full cache, then every policy at every budget; raises ValueError for what cannot be made."""
    made = {"full": Method("full")}
    for text in given.policy:
        for budget in given.budget:
            try:
                policy = POLICIES[text](budget) if text in POLICIES and text not in LAYERED else named(text)
                policy.check(budget)
            except ValueError as error:
                raise ValueError(f"--policy {text} at --budget {budget}: {error}") from error
            made[f"{text}, {budget:,}"] = Method(f"{text}, {budget:,}", policy, budget)
    return list(made.values())


def read(model: PreTrainedModel, cache: Cache | None, ids: Int[Tensor, "batch q_len"]) -> None:
    """One pass over `ids`, of whose logits the last alone are computed; with `cache`, or without any."""
    more: Row = {"logits_to_keep": 1} if "logits_to_keep" in arguments(model) else {}
    more |= {"use_cache": False} if cache is None else {cache_argument(model): cache, "use_cache": True}
    with torch.inference_mode():
        model(input_ids=ids, **more)


def seconds(model: PreTrainedModel, cache: Cache | None, ids: Int[Tensor, "batch q_len"]) -> float:
    """How long a pass takes, until the device has finished."""
    _finish(model)
    start = time.perf_counter()
    read(model, cache, ids)
    _finish(model)
    return time.perf_counter() - start


def _finish(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def load_now() -> float | None:
    """Processes that want a core, mean of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def lines(out: Path, rows: Sequence[Row]) -> Path:
    """Writes a JSON line for each row."""
    put(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return out / "results.jsonl"


def plot(
    path: Path,
    across: str,
    up: str,
    measured: Mapping[str, Points],
    expected: Mapping[str, Points] | None = None,
) -> Path:
    """Draws marks of what was `measured`, joined by lines, both axes logarithmic; `expected` is a line of its own."""
    figure, axes = panel(across, up)
    for number, (name, points) in enumerate(measured.items()):
        if not points:
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        line = "" if expected else ("-", "--", ":", "-.")[number // len(_COLOURS) % 4]
        look: dict[str, Any] = {"color": colour, "marker": _MARKS[number % len(_MARKS)], "markersize": 5}
        axes.plot(*zip(*points, strict=True), linestyle=line or "none", label=name, **look)
        if expected:
            axes.plot(*zip(*expected[name], strict=True), color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({at for points in measured.values() for at, _ in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45 if len(ticks) > 8 else 0)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if ticks:
        axes.figure.legend(**LEGEND)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150, facecolor="white")
    put(path, image.getvalue())
    return path


def parser(name: str, description: str, policy: str, budget: str) -> Parser:
    """The options that all of these commands have."""
    made = Parser(prog=name, description=description)
    made.add_argument("--model", default=EMBEDDED, help="hub id, folder, or the embedded one")
    made.add_argument("--revision", help="branch, tag or commit of a hub id")
    made.add_argument("--dtype", choices=TYPES, default="float32", help="of the weights and the cache")
    made.add_argument("--device", type=device, default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1, ...")
    made.add_argument("--policy", type=_policies, default=policy, metavar="NAME,NAME", help=(
        "beside the full cache, which is always there; as experiments/contestants.py names them, or written out, as "
        f"in H2O(recent=64); none: the full cache alone; without, {policy}"))  # fmt: skip
    made.add_argument("--budget", type=numbers(1), default=budget, metavar="N,N", help=(
        f"tokens a layer of a SinkCache holds; without, {budget}"))  # fmt: skip
    made.add_argument("--threads", type=at_least(1), metavar="N", help="of torch; without, torch's own choice")
    made.add_argument("--out", type=Path, default=Path("out") / name, metavar="DIR", help="for what is written")
    made.add_argument("--fresh", action="store_true", help="measure finished cells again")
    return made


def _policies(text: str) -> list[str]:
    """The parts of a list whose commas within brackets divide nothing."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [each.strip() for each in dict.fromkeys(parts) if each.strip() != "none"]


def run(command: Parser, argv: Sequence[str], body: Callable[[Namespace, Console], int]) -> int:
    """Runs a command's `body`; 130 after Ctrl-C. Ends the program with 2 and a line if it cannot be run."""
    given, console = command.parse_args(list(argv)), Console()
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError('the figure needs matplotlib: run `pip install "sinkcache[experiments]"`')
        return body(given, console)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: what is finished is kept in {given.out}", highlight=False)
        return 130
