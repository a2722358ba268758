"""Reads a text of any length by one method, a block at a time, from where a checkpoint left it.

Between two blocks all that the rest of the reading depends on is the cache, how far it has `read`, and the logits after
the last token read, which score the first token of the next block.

Positions are re-based as `sinkcache.stream` does, from 32,768 tokens on: float32 angles stay exact however long the
text is. Shorter texts are read as `sinkcache.metrics.score` reads them, to the last bit.
"""

from collections.abc import Iterator
from itertools import islice
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from experiments.runs import Setting
from experiments.subject import Subject
from sinkcache.metrics import Scored, recompute, reread
from sinkcache.predictions import Reader

WINDOWS = 8  # that recompute reads at once
_STRETCH = 1 << 16  # tokens of a text that recompute and reread are shown at once


class Reading:
    """One text read by one method. `blocks` yields scores in the lumps in which the model computes them.

    `read`: tokens read of the stream, which begins with the BOS if there is one; without a cache, the next token of it
    to score. `before`: the logits after the last token read.
    """

    def __init__(self, subject: Subject, setting: Setting, cache: Cache | None) -> None:
        self.subject, self.setting, self.cache = subject, setting, cache
        self.bos = subject.bos if setting.bos == "prepend" else None
        self.length = subject.tokens + (self.bos is not None)
        self.read = 0
        self.before: Float[Tensor, "1 vocab"] | None = None
        token = self.setting.attend == "token" and self.setting.chunk != 1
        self._reader = None
        if cache is not None:
            self._reader = Reader(subject.model, cache, self.bos is not None, "token" if token else "held")
            self._reader.check(min(self.length, _STRETCH), setting.chunk or 1)

    def blocks(self) -> Iterator[list[Scored]]:
        """The scores of what is left, by block."""
        if self._reader is not None:
            return self._through(self._reader)
        return self._rereads() if self.setting.method == "reread" else self._recomputes()

    def ids(self, start: int, stop: int) -> Int[Tensor, "1 q_len"]:
        """Tokens of the stream, up to its end."""
        if self.bos is None:
            return self.subject.piece(start, min(stop, self.length))
        piece = self.subject.piece(max(0, start - 1), min(stop, self.length) - 1)
        return torch.cat([piece.new_full((1, 1), self.bos), piece], dim=1) if start == 0 else piece

    def _through(self, reader: Reader) -> Iterator[list[Scored]]:
        reader.read, reader.before = self.read, self.before
        while self.read < self.length:
            predicted = reader.predict(self.ids(self.read, self.read + (self.setting.chunk or 1)))
            self.read, self.before = reader.read, reader.before
            if len(predicted.targets):
                yield [Scored(predicted.start, predicted.nll)]

    def _rereads(self) -> Iterator[list[Scored]]:
        budget, every = cast(int, self.setting.budget), cast(int, self.setting.every)
        while (start := max(0, self.read - 1)) < self.length - 1:
            base = max(0, start - (budget - 1)) // every * every
            ids = self.ids(base, start + _whole(every) + 1)
            for scored in reread(self.subject.model, ids, budget, every):
                if scored.start + base > start:
                    yield [self._next(Scored(scored.start + base, scored.nll))]

    def _recomputes(self) -> Iterator[list[Scored]]:
        budget, every = cast(int, self.setting.budget), cast(int, self.setting.every)
        while True:
            base = max(0, -(-(self.read - budget - 1) // every)) * every  # whole lumps of windows are done
            if self.read and base + budget + 1 >= self.length:
                return
            ids = self.ids(base, base + budget + 1 + _whole(every * WINDOWS))
            scores = recompute(self.subject.model, ids, budget, every, WINDOWS)
            window = list(islice(scores, 1))
            if self.read == 0:
                yield [self._next(each) for each in window]
            while lump := [Scored(each.start + base, each.nll) for each in islice(scores, WINDOWS)]:
                yield [self._next(each) for each in lump]

    def _next(self, scored: Scored) -> Scored:
        self.read = scored.start + len(scored.nll)
        return scored if self.bos is None else Scored(scored.start - 1, scored.nll)


def _whole(tokens: int) -> int:
    """The least multiple of `tokens` that is no less than a stretch."""
    return -(-_STRETCH // tokens) * tokens
