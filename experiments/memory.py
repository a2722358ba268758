"""Bytes that a run holds in keys and values, over the text."""

from typing import Any, cast

import torch
from transformers import Cache, DynamicCache

from experiments.runs import Setting
from experiments.subject import Subject
from sinkcache.memory import held_bytes
from sinkcache.streaming import step


class Memory:
    """Bytes a run holds, over the text; and what comes on top, where it is known."""

    def __init__(self, subject: Subject, setting: Setting, cache: Cache | None) -> None:
        self.subject, self.setting, self.cache = subject, setting, cache
        self.curve: list[list[int]] = []
        self.anew = self._of_one_pass() if cache is None else 0
        self.before = 0
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    @property
    def _cuda(self) -> bool:
        return self.subject.identity["device"] == "cuda"

    def held(self) -> int:
        """Bytes of keys and values."""
        return self.anew if self.cache is None else held_bytes(self.cache)

    def look(self, upto: int) -> None:
        """Notes the bytes held after `upto` tokens, once a bucket."""
        bucket = self.subject.identity["bucket"]
        if not self.curve or upto // bucket > self.curve[-1][0] // bucket or upto == self.subject.tokens:
            self.curve.append([upto, self.held()])

    def row(self) -> dict[str, Any]:
        """The fields of the result: a `transient` is the copy of one layer's keys and values that a step attends to."""
        peak = torch.cuda.max_memory_allocated() - self.before if self._cuda else None
        return {
            "bytes": self.curve[-1][1],
            "bytes_curve": self.curve,
            "bytes_transient": self._transient(),
            "bytes_peak": peak,
        }

    def _transient(self) -> int | None:
        if self.cache is None:
            return None
        if self.setting.budget is None:
            attended = self.subject.tokens
        else:
            attended = 0 if self.setting.chunk == 1 else self.setting.budget - 1 + cast(int, self.setting.chunk)
        return layer_bytes(self.cache, attended)

    def _of_one_pass(self) -> int:
        """What an ordinary cache of one of the passes holds."""
        length = cast(int, self.setting.budget)
        if self.setting.method == "reread":
            length += cast(int, self.setting.every) - 1
        cache = DynamicCache(config=self.subject.model.config)
        step(self.subject.model, cache, self.subject.piece(0, min(length, self.subject.tokens)), last_only=True)
        return held_bytes(cache)


def layer_bytes(cache: Cache, tokens: int) -> int | None:
    """Bytes of the keys and values of `tokens` tokens in the layer where they take most; None before any are held."""
    layers = [layer for layer in cast(Any, cache).layers if getattr(layer, "keys", None) is not None]
    return max((tokens * (layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes) for layer in layers), default=None)
