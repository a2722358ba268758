"""What the methods that are not bounded ask of a machine on a long text: refused, or said, before any work."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from experiments.runs import Setting
from experiments.subject import Subject
from sinkcache.memory import held_bytes
from sinkcache.streaming import step

_LONG = 65_536  # tokens from which costs are said


def costs(subject: Subject, settings: Sequence[Setting]) -> Iterator[str]:
    """A line for each method that a long text makes dear. Raises ValueError if the full cache cannot fit."""
    if subject.tokens <= _LONG:
        return
    trained = getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    beyond = trained is not None and subject.tokens > trained
    methods = {setting.method for setting in settings}
    if "full" in methods:
        needed, there = _full_bytes(subject), _memory(subject)
        if there is not None and needed > there:
            raise ValueError(
                f"the full cache of {subject.tokens:,} tokens takes {needed / 2**30:,.1f} GiB and there are "
                f"{there / 2**30:,.1f} GiB: leave full out of --method, or lower --tokens"
            )
        outside = f"; beyond the trained {trained:,} tokens the model is out of its range" if beyond else ""
        yield (
            f"full: {needed / 2**30:,.1f} GiB of keys and values at the end, time grows with the square of the tokens, "
            f"and no checkpoint is kept{outside}"
        )
    for setting in settings:
        if setting.method in ("recompute", "reread"):
            budget, every = setting.budget or 1, setting.every or 1
            read = budget + (0 if setting.method == "recompute" else every)
            times = read / every
            yield f"{setting.label}: the model reads {times:,.1f} tokens for each of the text"
    if beyond and any(each.positions == "original" and each.method == "sinks" for each in settings):
        yield (
            f"original positions: beyond the trained {trained:,} tokens the first ones are farther away than the model "
            "has ever seen; --positions cache keeps them near"
        )


def _full_bytes(subject: Subject) -> int:
    """What an ordinary cache holds at the end."""
    cache = DynamicCache(config=subject.model.config)
    tokens = min(16, subject.tokens)
    step(subject.model, cache, subject.piece(0, tokens), last_only=True)
    return held_bytes(cache) // tokens * subject.tokens


def _memory(subject: Subject) -> int | None:
    """Bytes of memory where the model is; None if this system does not say."""
    if subject.identity["device"] == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return machine_bytes()


def machine_bytes() -> int | None:
    """Bytes of this machine's memory; None if its system does not say."""
    names: Any = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
