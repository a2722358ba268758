"""What it costs to keep what a policy scores: a decoding step at a full budget, and the scores of a long prompt.

    python -m benchmarks.policies [--budget 1024] [--prompt 4096] [--dtypes float32,bfloat16] [--rounds 15]

Steps are whole forward passes of one token through a random model of SmolLM2-135M's shape, whose layers hold `budget`
tokens, positions "original". The ratio is to StreamingLLM in the same round.

cat+top-k   H2O as its published code keeps tokens: concatenate, take the top of given scores, gather; the scores
            themselves are not computed; attention is transformers' own sdpa
/16         sixteen tokens go at a time (`evict_every=16`)

A prompt's attention is that of one layer, its scores included; the ratio is to torch's causal attention alone.

One thread, CPU time of that thread (others' load on the machine does not count), contenders in turn within each round,
median over rounds; the ratio is the median of the rounds' own ratios.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from benchmarks.decode import SHAPES, cell
from benchmarks.machine import machine
from sinkcache import SinkCache, prefill
from sinkcache.attention import packed
from sinkcache.guard import cache_argument
from sinkcache.observe import Kernel, attention, from_recent
from sinkcache.policies import H2O, TOVA, ExpectedAttention, KeyDiff, Knorm, SnapKV, StreamingLLM
from sinkcache.policy import Watch

_HEADS, _DIM = (9, 3), 64  # SmolLM2-135M's


class CatTopK(DynamicLayer):
    """Appends by concatenation, keeps the top of random scores and the newest by an expanded gather."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        if keys.shape[2] > self.budget:
            scores = torch.rand(keys.shape[:3])
            scores[..., -32:] = 2
            best = (
                scores.topk(self.budget, dim=-1)
                .indices.sort(dim=-1)
                .values[..., None]
                .expand(-1, -1, -1, keys.shape[3])
            )
            self.keys, self.values = keys.gather(2, best), values.gather(2, best)
        return keys, values


def contenders(model: nn.Module, budget: int) -> dict[str, Cache]:
    """A cache of each kind."""
    config: Any = model.config

    def held(policy: Any, every: int = 1) -> SinkCache:
        return SinkCache(model, policy, budget, "original", evict_every=every)

    return {
        "StreamingLLM": held(StreamingLLM(4)),
        "H2O": held(H2O()),
        "H2O mean": held(H2O(reduce="mean")),
        "TOVA": held(TOVA()),
        "SnapKV": held(SnapKV()),
        "SnapKV /16": held(SnapKV(), 16),
        "Expected /16": held(ExpectedAttention(), 16),
        "KeyDiff /16": held(KeyDiff(), 16),
        "Knorm": held(Knorm()),
        "cat+top-k": Cache(layers=[CatTopK(budget) for _ in range(config.num_hidden_layers)]),
    }


def steps(model: nn.Module, budget: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round's step, per contender."""
    caches, name = contenders(model, budget), cache_argument(model)
    prompt = torch.randint(1, 49152, (1, budget + 40))
    for cache in caches.values():
        cast(Any, model).set_attn_implementation(packed())
        if isinstance(cache, SinkCache):
            prefill(model, cache, prompt)
        else:
            model(prompt[:, :budget], use_cache=True, **{name: cache})
    seconds: dict[str, list[float]] = {each: [] for each in caches}
    for turn in range(rounds + 2):
        for each, cache in caches.items():
            seen = cache.seen if isinstance(cache, SinkCache) else budget
            cast(Any, model).set_attn_implementation(packed() if isinstance(cache, SinkCache) else "sdpa")
            started = time.thread_time()
            model(prompt[:, :1], position_ids=torch.full((1, 1), seen), use_cache=True, **{name: cache})
            if turn >= 2:  # the first two warm up
                seconds[each].append(time.thread_time() - started)
    return seconds


def prompts(length: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of one layer's attention over a prompt, per what it tells."""
    heads, kv_heads = _HEADS
    queries = torch.randn(1, heads, length, _DIM, dtype=dtype)
    keys, values = torch.randn(2, 1, kv_heads, length, _DIM, dtype=dtype)
    repeated = [each.repeat_interleave(heads // kv_heads, dim=1) for each in (keys, values)]
    kernel, positions = Kernel(_DIM**-0.5), torch.arange(length).expand(1, kv_heads, -1)
    weights = (0.5 ** (1 / 64)) ** torch.arange(length - 1, -1, -1)[None].float()

    def window(count: int) -> Callable[[], Tensor]:
        newest = torch.arange(length - count, length)[None]
        return lambda: from_recent(queries[:, :, -count:], newest, keys, positions, kernel, Watch(window=count))

    ways: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: scaled_dot_product_attention(queries, repeated[0], repeated[1], is_causal=True),
        "H2O": lambda: attention(queries, keys, values, None, kernel),
        "H2O, half-life": lambda: attention(queries, keys, values, None, kernel, weights),
        "scores of 32 queries": window(32),
    }
    seconds: dict[str, list[float]] = {each: [] for each in ways}
    for turn in range(rounds + 1):
        for each, way in ways.items():
            started = time.thread_time()
            way()
            if turn >= 1:
                seconds[each].append(time.thread_time() - started)
    return seconds


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budget", type=int, default=1024, help="tokens held (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of weights and cache (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console(width=100)
    console.print(machine())
    decoding = Table("step", title=f"{options.budget} tokens held: ms (ratio to StreamingLLM)")
    reading = Table("attention", title=f"a prompt of {options.prompt}: ms a layer (ratio to sdpa)")
    columns: list[list[dict[str, list[float]]]] = [[], []]
    for dtype in options.dtypes.split(","):
        config = LlamaConfig(max_position_embeddings=8192, bos_token_id=None, **SHAPES["SmolLM2-135M"])
        model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        with torch.no_grad():
            columns[0].append(steps(model, options.budget, options.rounds))
            columns[1].append(prompts(options.prompt, getattr(torch, dtype), max(options.rounds // 3, 3)))
        decoding.add_column(dtype, justify="right")
        reading.add_column(dtype, justify="right")
    for table, measured in zip((decoding, reading), columns, strict=True):
        first = next(iter(measured[0]))
        for each in measured[0]:
            table.add_row(each, *(cell(seconds[each], seconds[first]) for seconds in measured))
        console.print(table)


if __name__ == "__main__":
    main()
