"""Answers by greedy generation through a cache, and what of the number asked for was held as the answer began."""

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from experiments.retrieval.prompts import Question, Reading
from sinkcache import SinkCache, prefill
from sinkcache.bounded import BoundedLayer
from sinkcache.devices import device_of
from sinkcache.guard import cache_argument
from sinkcache.streaming import step

_PIECE = 512  # tokens that a full cache reads at once
_BEYOND = 2  # tokens generated after as many as the number has, so that a longer number is not taken for it


class Answer(NamedTuple):
    """The ids generated; of the number's tokens, the share held over layers and heads, and whether one held all."""

    ids: list[int]
    share: float
    visible: int


def answered(model: PreTrainedModel, cache: Cache, reading: Reading, chunk: int | None) -> Iterator[Answer]:
    """The answer to each question, all that is before it read through `cache`, `chunk` tokens at once; None: all."""
    ids, done = torch.tensor([reading.ids], device=device_of(model)), 0
    for question in reading.questions:
        for end in (reading.pause, question.end - 1):
            if end > done:
                _read(model, cache, ids[:, done:end], chunk)
                done = end
        last = question is reading.questions[-1]
        yield _answer(model, cache if last else _copy(cache), ids[:, : question.end], question)


def right(answer: str, expected: str) -> bool:
    """Whether the first number in `answer` is the one expected."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == expected


class _Watch(LogitsProcessor):
    """Notes what is held of a number when the first logits of an answer are there, and changes none."""

    def __init__(self, cache: Cache, number: tuple[int, ...]) -> None:
        self.cache, self.number = cache, number
        self.found: tuple[float, int] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.found is None:
            self.found = held(self.cache, self.number)
        return scores


def held(cache: Cache, number: tuple[int, ...]) -> tuple[float, int]:
    """Of the tokens at the positions `number`, the share that bounded layers hold, over layers and heads; whether some
    head of a layer holds all of them. A cache without bounded layers holds all."""
    wanted, shares = torch.tensor(number), []
    for index, layer in enumerate(cache.layers):
        if isinstance(cache, SinkCache) and isinstance(layer, BoundedLayer):
            kept = cache.kept(index)[0]
            shares.append((kept[:, None, :] == wanted[:, None]).any(dim=-1).double().mean(dim=-1))
    if not shares:
        return 1.0, 1
    every = torch.cat(shares)
    return float(every.mean()), int((every == 1).any())


def _read(model: PreTrainedModel, cache: Cache, ids: Tensor, chunk: int | None) -> None:
    if isinstance(cache, SinkCache):
        prefill(model, cache, ids, chunk or ids.shape[1])
        return
    for piece in ids.split(_PIECE, dim=1):
        step(model, cache, piece, last_only=True)


def _copy(cache: Cache) -> Cache:
    return cache.fork() if isinstance(cache, SinkCache) else copy.deepcopy(cache)


def _answer(model: PreTrainedModel, cache: Cache, ids: Tensor, question: Question) -> Answer:
    watch = _Watch(cache, question.number)
    given: dict[str, Any] = {cache_argument(model): cache, "logits_processor": LogitsProcessorList([watch])}
    ends = getattr(model.generation_config, "eos_token_id", None)
    pad = ends[0] if isinstance(ends, list) else ends
    new = len(question.number) + _BEYOND
    how = GenerationConfig(max_new_tokens=new, do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=pad)
    with torch.no_grad():
        out = cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), generation_config=how, **given)
    assert watch.found is not None
    return Answer(out[0, ids.shape[1] :].tolist(), *watch.found)
