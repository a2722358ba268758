"""Every policy at equal budgets: streaming perplexity, and how much of the full model's attention it holds on to.

Recall (`sinkcache.recording.recall`): of the attention that a query pays where nothing is evicted, the share that falls
on what a policy would show it at that moment; mean over queries from the first eviction on, query heads and layers.
"best per query" is the bound: for each query the tokens it attends to most, as many as a policy shows it. Recall does
not see errors pile up in the hidden states, and perplexity does.

Positions are original, for all policies alike. `gap` is the share of the way from the sinks' perplexity down to the
full cache's. Expected (SmolLM2-135M, Persuasion, 4,096 tokens, chunk 64, budget 256): full 31.65, StreamingLLM 35.64,
H2O 34.38, Clairvoyant with a horizon of 64, 256 and 1024: 34.64, 33.90, 33.03. About a minute a cell on one core.

    python -m experiments.policy_quality --text persuasion.txt emma.txt --budget 128,256,512
"""

import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from experiments.calibrated import Calibrated
from experiments.cells import Cells
from experiments.contestants import ALWAYS, HORIZONS, LAYERED, POLICIES, made
from experiments.options import Parser, at_least, choices, numbers
from experiments.plots import COLOURS, DASHES, INK, LEGEND, MARKS, panel
from experiments.results import Row
from experiments.subject import Subject, subject
from experiments.summary import number
from sinkcache import SinkCache
from sinkcache.metrics import perplexity
from sinkcache.models import EMBEDDED, load
from sinkcache.recording import Recording, recall, record
from sinkcache.texts import embedded, from_file

FULL, BEST = "full", "best per query"


def loaded(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model called `name` and its tokenizer, without transformers' own progress bar."""
    transformers.logging.disable_progress_bar()
    try:
        return load(name)
    finally:
        transformers.logging.enable_progress_bar()


class Measured:
    """The cells of one text: taken from the files, or measured and filed."""

    def __init__(self, console: Console, read: Subject, chunk: int, cells: Cells) -> None:
        self.console, self.read, self.chunk, self.cells = console, read, chunk, cells
        self.calibrated = Calibrated(cells.folder.parent, self._say)
        self._recording: Recording | None = None

    def rows(self, names: Sequence[str], budgets: Sequence[int]) -> list[Row]:
        """The full cache, then by budget each policy and the bound."""
        whole = self._identity(FULL, FULL, None)
        if "perplexity" not in self.cells.read(whole):
            value = self._perplexity(FULL, DynamicCache(config=self.read.model.config))
            self.cells.write(whole, perplexity=value, recall=1.0)
        full = self.cells.read(whole)
        return [full, *(row for budget in budgets for row in self._at(names, budget, full["perplexity"]))]

    def _at(self, names: Sequence[str], budget: int, full: float) -> list[Row]:
        empty = Recording(self.chunk, self.read.tokens, {})
        asked = {name: self.calibrated.budgets(self.read, budget) if name in LAYERED else budget for name in names}
        named = {name: self._identity(name, repr(made(name, budget, lambda: empty)), budget) for name in names}
        for name in named:
            if name in LAYERED:
                named[name]["budgets"] = asked[name]
        bound = self._identity(BEST, BEST, budget)
        todo = [name for name in names if "recall" not in self.cells.read(named[name])]
        alike = [name for name in todo if name not in LAYERED]
        if alike or "recall" not in self.cells.read(bound):
            self._recall(alike or ["Window"], budget, budget, [*(named[name] for name in alike or ["Window"]), bound])
        for name in todo:
            if name in LAYERED:
                self._recall([name], budget, asked[name], [named[name]])
        for name, identity in named.items():
            if "perplexity" not in self.cells.read(identity):
                policy = made(name, budget, self._recorded)
                cache = SinkCache(self.read.model, policy, asked[name], positions="original")
                self.cells.write(identity, perplexity=self._perplexity(f"{name}, budget {budget}", cache))
        rows = [self.cells.read(identity) for identity in named.values()]
        sinks = next(row["perplexity"] for row in rows if row["name"] == "StreamingLLM")
        gaps = [(sinks - row["perplexity"]) / (sinks - full) if sinks != full else math.nan for row in rows]
        return [*({**row, "gap": gap} for row, gap in zip(rows, gaps, strict=True)), self.cells.read(bound)]

    def _recall(self, names: Sequence[str], budget: int, asked: int | list[int], identities: Sequence[Row]) -> None:
        """Measures and files the recall of `names`, and of the bound if there is one identity more."""
        self._say(f"budget {budget}: recall of {', '.join(names)}")
        policies = [made(name, budget, self._recorded) for name in names]
        found = recall(self.read.model, self.read.ids, policies, asked, self.chunk)
        for identity, value in zip(identities, found, strict=False):
            self.cells.write(identity, recall=value)

    def _perplexity(self, what: str, cache: Any) -> float:
        self._say(f"perplexity of {what}")
        return perplexity(self.read.model, cache, self.read.ids, self.chunk).value

    def _recorded(self) -> Recording:
        if self._recording is None:
            self._say("recording what is attended to")
            self._recording = record(self.read.model, self.read.ids, self.chunk)
        return self._recording

    def _identity(self, name: str, policy: str, budget: int | None) -> Row:
        about = ("text", "ids_sha256", "tokens", "model", "weights", "dtype", "device", "versions")
        told = {each: self.read.identity[each] for each in about}
        return {**told, "chunk": self.chunk, "positions": "original", "name": name, "policy": policy, "budget": budget}

    def _say(self, what: str) -> None:
        self.console.print(f"{self.read.identity['text']}: {what}", style="dim", highlight=False, soft_wrap=True)


def over_texts(rows: Sequence[Row]) -> list[Row]:
    """For each policy and budget, over texts: the geometric mean of perplexities, the means of gap and recall."""
    groups: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["budget"]), []).append(row)
    merged = []
    for (name, budget), group in groups.items():
        one: Row = {"name": name, "budget": budget, "text": f"{len(group)} texts"}
        for value in ("gap", "recall"):
            if value in group[0]:
                one[value] = sum(row[value] for row in group) / len(group)
        if "perplexity" in group[0]:
            one["perplexity"] = math.exp(sum(math.log(row["perplexity"]) for row in group) / len(group))
        merged.append(one)
    return merged


def markdown(rows: Sequence[Row]) -> str:
    """A line for each policy, the one that closes most of the gap first; three columns for each budget."""
    budgets = sorted({row["budget"] for row in rows} - {None})
    by_name: dict[str, dict[int | None, Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["budget"]] = row

    def worth(name: str) -> float:
        ends = {FULL: math.inf, BEST: -math.inf}
        return ends[name] if name in ends else sum(row["gap"] for row in by_name[name].values())

    heads = [f"{what} {budget}" for budget in budgets for what in ("perplexity", "gap", "recall")]
    lines = [f"| policy | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name in sorted(by_name, key=worth, reverse=True):
        cells = []
        for budget in budgets:
            row = by_name[name].get(budget, by_name[name].get(None, {}))
            gap = "-" if "gap" not in row else f"{row['gap']:.0%}"
            cells += [number(row.get("perplexity")), gap, f"{row['recall']:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(rows: Sequence[Row]) -> Any:
    """Perplexity over the budget, a line for each policy; dashed: the full cache. A window may lie far above it all."""
    drawn, axes = panel("budget, tokens a layer holds", "perplexity")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["name"] == FULL:
            axes.axhline(row["perplexity"], color=INK, linewidth=1, linestyle="--", label=FULL)
        elif "perplexity" in row:
            lines.setdefault(row["name"], []).append((row["budget"], row["perplexity"]))
    colours = [each for each in COLOURS.values() if each != INK]
    for index, (name, points) in enumerate(lines.items()):
        colour, again = colours[index % len(colours)], index // len(colours)
        style = {"linestyle": DASHES[again % len(DASHES)], "marker": MARKS[index % len(MARKS)]}
        axes.plot(*zip(*sorted(points), strict=True), color=colour, markersize=3.5, linewidth=1.4, label=name, **style)
    ticks = sorted({budget for points in lines.values() for budget, _ in points})
    below = [row["perplexity"] for row in rows if "perplexity" in row and row["name"] != "Window"]
    axes.set_ylim(top=max(below) + 0.1 * (max(below) - min(below)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    drawn.legend(**LEGEND)
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 130 after Ctrl-C. Ends with 2 and a line if it cannot be run."""
    command, console = _parser(), Console()
    given = command.parse_args(list(sys.argv[1:] if argv is None else argv))
    names = list(dict.fromkeys([*ALWAYS, *(given.policy or [*POLICIES])]))
    try:
        for budget in given.budget:
            if budget + 1 >= given.tokens:
                raise ValueError(f"--budget {budget} evicts nothing from --tokens {given.tokens}: lower the budget")
            for name in names:
                if name not in HORIZONS:
                    POLICIES[name](budget).check(budget)
        texts = [from_file(each) for each in given.text] or [embedded()]
        network, cells, rows = loaded(given.model), Cells(given.out / "cells", given.fresh), []
        for text in texts:
            read = subject(network, text, given.tokens, given.model, None, bucket=256)
            rows += Measured(console, read, given.chunk, cells).rows(names, given.budget)
        _write(given.out, rows)
        for text in texts:
            _print(console, text.name, [row for row in rows if row["text"] == text.name])
        if len(texts) > 1:
            _print(console, f"all {len(texts)} texts, means", over_texts(rows))
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: finished cells are kept in {given.out}", highlight=False)
        return 130
    return 0


def _print(console: Console, title: str, rows: Sequence[Row]) -> None:
    console.print(f"\n{title}\n\n{markdown(rows)}", highlight=False, markup=False, soft_wrap=True)


def _write(folder: Path, rows: Sequence[Row]) -> None:
    (folder / "cells.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    with open(folder / "cells.csv", "w", newline="", encoding="utf-8") as file:
        columns = ["text", "tokens", "chunk", "name", "policy", "budget", "perplexity", "gap", "recall"]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    figure(over_texts(rows)).savefig(folder / "perplexity_over_budget.png", dpi=150, facecolor="white")


def _parser() -> Parser:
    parser = Parser(prog="policy_quality", description="Perplexity and attention recall of every policy, by budget.")
    parser.add_argument("--model", default=EMBEDDED, help="hub id, folder, or the embedded one")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 files; without, the embedded text")
    parser.add_argument("--tokens", type=at_least(2), default=4096, metavar="N", help="of each text to read")
    parser.add_argument("--chunk", type=at_least(1), default=64, metavar="N", help="tokens read at once")
    parser.add_argument(
        "--budget", type=numbers(1), default=[128, 256, 512], metavar="N,N", help="tokens a layer holds"
    )
    known = choices(*POLICIES, *HORIZONS)
    parser.add_argument("--policy", type=known, metavar="NAME,NAME", help="any of " + ", ".join([*POLICIES, *HORIZONS]))
    parser.add_argument(
        "--out", type=Path, default=Path("out/policy_quality"), metavar="DIR", help="for what is written"
    )
    parser.add_argument("--fresh", action="store_true", help="measure finished cells again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
