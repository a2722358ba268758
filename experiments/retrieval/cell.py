"""One cell of retrieval: the answers of a policy to prompts of one task, length and depth, or to those of a stream."""

import time
from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from experiments.grid.cell import Cell, Found
from experiments.grid.networks import loaded
from experiments.results import Row
from experiments.retrieval.answering import answered, right
from sinkcache import SinkCache
from sinkcache.models import source
from sinkcache.plugins import named

FUNCTION = "experiments.retrieval.cell:measure"
WHOLE = "whole"


def measure(cell: Cell) -> Found:
    """What a cell asks for; its payload is what is read, each through a cache of its own."""
    asked, start, cpu = cell.asked, time.perf_counter(), time.process_time()
    model, tokenizer = loaded(asked), _tokenizer(asked["model"], asked["revision"], asked["weights"])
    chunk = None if asked["chunk"] == WHOLE else asked["chunk"]
    found = [each for reading in cell.payload for each in answered(model, _cache(model, asked), reading, chunk)]
    expected = [question.expected for reading in cell.payload for question in reading.questions]
    answers = [str(tokenizer.decode(each.ids)) for each in found]
    hits = [int(right(*pair)) for pair in zip(answers, expected, strict=True)]
    figures: dict[str, Any] = {
        "hits": hits,
        "accuracy": sum(hits) / len(hits),
        "answers": answers,
        "expected": expected,
        "visible": [each.visible for each in found],
        "held_share": [each.share for each in found],
        "tokens": [len(reading.ids) for reading in cell.payload],
    }
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return Found(figures, {}, spent)


def _cache(model: PreTrainedModel, asked: Row) -> Cache:
    if asked["policy"] is None:
        return DynamicCache(config=model.config)
    return SinkCache(model, named(asked["policy"]), asked["budgets"] or asked["budget"], asked["positions"])


@lru_cache(maxsize=1)
def _tokenizer(name: str, revision: str | None, _weights: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(source(name, revision), revision=revision)
