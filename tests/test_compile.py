"""An ordinary SinkCache under `torch.compile`: its own work breaks graphs, but is not traced anew in every step."""

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from conftest import VOCABULARY, build
from torch import Tensor, nn
from torch._dynamo.utils import counters

from sinkcache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

BUDGET = 12


@pytest.fixture
def frames(monkeypatch) -> Iterator[Any]:
    """Counts the frames traced so far; where dynamo would give up, and run what recompiles uncompiled, is an error."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users do not run under it, and it breaks graphs
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield lambda: counters["frames"]["total"]
    torch._dynamo.reset()


def plain(family: str, **changes: Any) -> nn.Module:
    """A model with transformers' own rotary module, which compiles; `conftest`'s exact one does not."""
    model = build(family, **changes)
    for module in model.modules():
        vars(module).pop("forward", None)
    return model


def decode(model: Any, forward: Any, cache: SinkCache, ids: Tensor, positions: bool) -> Tensor:
    """Logits of `ids` read one by one, with position_ids as `generate` passes them or without."""
    logits = []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            given: dict[str, Any] = {"position_ids": torch.full((len(ids), 1), cache.seen)} if positions else {}
            given[cache_argument(model)] = cache
            logits.append(forward(input_ids=token, use_cache=True, **given).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "policy", "convention", "positions"),
    [
        (5, StreamingLLM(4), "cache", False),
        (5, StreamingLLM(4), "cache", True),
        (20, StreamingLLM(4), "original", True),
        (20, Window(), "cache", False),
    ],
)
def test_a_full_window_is_traced_at_most_twice_in_a_hundred_steps(frames, prompt, policy, convention, positions):
    model = plain("llama")
    ids = torch.randint(1, VOCABULARY, (1, prompt + 120), generator=torch.Generator().manual_seed(5))
    one, other = (SinkCache(model, policy, BUDGET, convention) for _ in range(2))
    for cache in (one, other):
        decode(model, model, cache, ids[:, :prompt], positions)
    compiled = torch.compile(model, backend="eager")
    filling = ids[:, prompt : prompt + 20]
    torch.testing.assert_close(
        decode(model, compiled, one, filling, positions), decode(model, model, other, filling, positions)
    )
    before = frames()
    full = ids[:, prompt + 20 :]
    torch.testing.assert_close(
        decode(model, compiled, one, full, positions), decode(model, model, other, full, positions)
    )
    assert frames() - before <= 2
