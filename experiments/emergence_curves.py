"""Curves over training: what the cells of a series of checkpoints say together, step by step."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.emergence_cells import DONE
from experiments.emergence_measure import CACHES
from experiments.onset import TIMES_UNIFORM, Onset, onsets
from experiments.results import Row
from experiments.revisions import STEPS

HEADS_OVER = 0.3  # mean share from which a head is counted
BANDS = {  # of Pythia-410M at 2,048 tokens in percent: the published curve, read with some room
    **{step: (0.0, 0.3) for step in STEPS if step <= 512},
    **{1000: (0.3, 0.8), 2000: (1.5, 3.0), 4000: (6.0, 10.0), 8000: (11.0, 15.0), 16000: (15.0, 19.0)},
    143000: (18.0, 22.0),
}
MOST_OF_A_LAYER, LOW_LAYERS, LOW = (30.0, 38.0), 6, 1.0  # at the last step: the top layer, and layers 0 to 5 below 1%


@dataclass(frozen=True)
class Point:
    """A checkpoint, by the cells of all documents, in their order."""

    step: int
    rows: list[Row]

    @cached_property
    def share(self) -> Float[Tensor, "layers num_heads"]:
        """The first token's, mean over queries and documents."""
        return torch.tensor([row["facts"]["share"] for row in self.rows], dtype=torch.float64).mean(dim=0)

    @cached_property
    def uniform(self) -> float:
        """The same if each query attended evenly."""
        found = [sum(row["facts"]["uniform"]) / len(row["facts"]["uniform"]) for row in self.rows]
        return sum(found) / len(found)

    @property
    def layers(self) -> list[float]:
        """The share by layer, mean over heads."""
        return self.share.mean(dim=1).tolist()

    def by_document(self) -> list[float]:
        """The share of each document, mean over layers and heads."""
        rows = torch.tensor([row["facts"]["share"] for row in self.rows], dtype=torch.float64)
        return rows.mean(dim=(1, 2)).tolist()

    @property
    def rates(self) -> str:
        """Under which name the rates are of segments that begin as the documents do."""
        return "rates" if self.rows[0]["begins"] == "plain" else "rates_bos"

    def rate(self, field: str, eps: str) -> list[float] | None:
        """Sink_k^eps, k from 1, over the segments of all documents; None if not measured."""
        if any(row[field] is None for row in self.rows):
            return None
        weights = torch.tensor([row["segments"] for row in self.rows], dtype=torch.float64)
        rates = torch.tensor([row[field][eps] for row in self.rows], dtype=torch.float64)
        return (weights @ rates / weights.sum()).tolist()

    def mean(self, name: str, over: Any) -> float | None:
        """Mean over documents of `over` applied to the layers' values of a fact; None where a value is none."""
        found = [row["facts"][name] for row in self.rows]
        if name == "massive":
            found = [[each["ratio"] for each in one] for one in found]
        if any(not one or None in one for one in found):
            return None
        return sum(over(one) for one in found) / len(found)

    def perplexity(self, cache: str, tokens: str = "all") -> float | None:
        """Over the tokens of all documents: these are of equal length. None if not measured or beyond all numbers."""
        found = [None if row["perplexity"] is None else row["perplexity"][cache][tokens] for row in self.rows]
        known = [each for each in found if each is not None]
        return math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(found) else None

    def figures(self) -> Row:
        """What is told of this checkpoint, one number each."""
        first, first_bos = self.rate("rates", "0.3"), self.rate("rates_bos", "0.3")
        mean, most = float(self.share.mean()), float(self.share.max())
        return {
            "step": self.step,
            "documents": len(self.rows),
            "share": mean,
            "uniform": self.uniform,
            "x_uniform": mean / self.uniform,
            "max_layer": max(self.layers),
            "max_head": most,
            "max_head_x_uniform": most / self.uniform,
            "heads_over": int((self.share > HEADS_OVER).sum()),
            "heads": self.share.numel(),
            "sink_rate": first and first[0],
            "sink_rate_bos": first_bos and first_bos[0],
            "massive": self.mean("massive", max),
            "value_norm": self.mean("value_norm", _mean),
            "entropy": self.mean("entropy", lambda layers: _mean([each for layer in layers for each in layer])),
            **{f"perplexity_{name}": self.perplexity(name) for name in CACHES},
            **{f"perplexity_{name}_after": self.perplexity(name, "after") for name in CACHES},
        }


@dataclass(frozen=True)
class Curve:
    """A series of checkpoints by step, those of which each document was measured; `controls` of the last one.

    `told` is what another program wrote of them, by step: the ladder's own table.
    """

    series: str
    source: str
    points: list[Point]
    controls: dict[str, list[Row]]
    tokens_per_step: int | None
    told: dict[int, Row]

    def onsets(self, draws: int, seed: int) -> dict[str, Onset]:
        """By definition; empty without a checkpoint."""
        if not self.points:
            return {}
        hits = [[torch.tensor(row["heads"]).flatten() for row in point.rows] for point in self.points]
        even = [_mean(row["facts"]["uniform"]) for row in self.points[-1].rows]
        return onsets(
            [point.step for point in self.points],
            torch.tensor([point.by_document() for point in self.points], dtype=torch.float64),
            torch.tensor(even, dtype=torch.float64),
            torch.stack([torch.stack(each) for each in hits]),
            torch.tensor([row["segments"] for row in self.points[-1].rows]),
            draws,
            seed,
        )

    def first_active_layer(self) -> int | None:
        """At the last checkpoint, the first layer whose share is 10 x uniform."""
        last = self.points[-1]
        return next((index for index, each in enumerate(last.layers) if each >= TIMES_UNIFORM * last.uniform), None)

    def summary(self, draws: int, seed: int) -> Row:
        """All that is told of the series, as plain data."""
        last = self.points[-1].figures() if self.points else None
        return {
            "series": self.series,
            "source": self.source,
            "tokens_per_step": self.tokens_per_step,
            "onset": {name: asdict(each) for name, each in self.onsets(draws, seed).items()},
            "final": last and {**last, "first_active_layer": self.first_active_layer()},
            "steps": [{**point.figures(), "layers": point.layers} for point in self.points],
            "controls": {name: Point(self.points[-1].step, rows).figures() for name, rows in self.controls.items()},
            "told": {str(step): row for step, row in self.told.items()},
            "published": self.published(),
        }

    def published(self) -> list[Row]:
        """Of Pythia-410M, read as it was: each measured figure beside the published one, in percent."""
        if self.source != "EleutherAI/pythia-410m" or not self.points or not _as_published(self.points[0].rows[0]):
            return []
        found = [
            _met(f"step {point.step}", 100 * float(point.share.mean()), BANDS.get(point.step)) for point in self.points
        ]
        last = self.points[-1]
        if last.step == max(BANDS):
            layers = [100 * each for each in last.layers]
            found.append(_met("last step, top layer", max(layers), MOST_OF_A_LAYER))
            found.append(_met("last step, most of layers 0 to 5", max(layers[:LOW_LAYERS]), (0.0, LOW)))
        return [each for each in found if each is not None]


def whole(rows: Sequence[Row | None]) -> bool:
    """Whether all cells of a checkpoint are there and finished."""
    return bool(rows) and all(row is not None and row["status"] == DONE for row in rows)


def told_by(folder: Path) -> tuple[dict[int, Row], int | None]:
    """By step what a ladder's own `ladder.json` says of a checkpoint, and tokens a step; nothing if it has none."""
    try:
        found = json.loads((folder / "ladder.json").read_text(encoding="utf-8"))
        rows = {
            int(row["step"]): {"share": row["share"], "x_uniform": row["x_uniform"]} for row in found["checkpoints"]
        }
        return rows, int(found["settings"]["batch"]) * int(found["settings"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}, None


def _as_published(row: Row) -> bool:
    return row["tokens"] == 2048 and row["asked"]["first_query"] == 64 and row["asked"]["bos"] == "none"


def _met(name: str, value: float, band: tuple[float, float] | None) -> Row | None:
    if band is None:
        return None
    return {"figure": name, "percent": value, "low": band[0], "high": band[1], "met": band[0] <= value <= band[1]}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
