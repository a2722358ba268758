"""One decoding step at a full budget: SinkCache against what else holds N tokens.

    python -m benchmarks.decode [--budgets 256,1024,4096] [--dtypes float32,bfloat16] [--rounds 11]

Each step is a whole forward pass of one token through a random model: SmolLM2-135M's shape (30 layers), and one layer
of an 8B Llama (vocabulary cut to 256, so that the layer is what is measured). All contenders attend to exactly N tokens
with the model's own sdpa attention:

plain       attention over a buffer of N tokens that was filled once: nothing is stored, the floor of any cache
window      SinkCache, Window: the new token overwrites the oldest
sinks       SinkCache, StreamingLLM(4), positions "original"
sinks+move  SinkCache, StreamingLLM(4), positions "cache": the sinks' keys are turned in every step
packed      the same, with sinkcache.attention.packed() in place of sdpa
dynamic     DynamicCache cropped to N - 1 before each step
static      StaticCache of N slots, the last one written again and again
cat         slice and concatenate, as the paper's code does: sinks + window, then the new token

One thread, CPU time of that thread (others' load on the machine does not count), contenders in turn within each round,
median over rounds; the ratio is the median of the rounds' own ratios to `plain`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicLayer

from benchmarks.machine import machine
from sinkcache import SinkCache
from sinkcache.attention import packed
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Llama-8B, 1 layer": {
        "vocab_size": 256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


class Plain(DynamicLayer):
    """Hands out the same N tokens in every step and stores nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() or query_length, 0


class SliceAndCat(DynamicLayer):
    """Evicts by slicing around the oldest token that is no sink, then appends: two concatenations a step."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized and self.keys is not None and self.values is not None:
            self.keys = torch.cat([self.keys[:, :, :4], self.keys[:, :, 5:]], dim=2)
            self.values = torch.cat([self.values[:, :, :4], self.values[:, :, 5:]], dim=2)
        return super().update(key_states, value_states)


def contenders(model: nn.Module, budget: int) -> dict[str, tuple[Cache, Callable[[Any], None]]]:
    """Per name a cache and what is done to it before each step."""
    config: Any = model.config
    layers = config.num_hidden_layers

    def nothing(cache: Any) -> None:
        """Most caches need no help."""

    def crop(cache: Any) -> None:
        cache.crop(-1)

    def rewind(cache: Any) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(budget - 1)

    return {
        "plain": (Cache(layers=[Plain() for _ in range(layers)]), nothing),
        "window": (SinkCache(model, Window(), budget), nothing),
        "sinks": (SinkCache(model, StreamingLLM(4), budget, "original"), nothing),
        "sinks+move": (SinkCache(model, StreamingLLM(4), budget, "cache"), nothing),
        "packed": (SinkCache(model, StreamingLLM(4), budget, "cache"), nothing),
        "dynamic": (DynamicCache(config=config), crop),
        "static": (StaticCache(config=config, max_cache_len=budget), rewind),
        "cat": (Cache(layers=[SliceAndCat() for _ in range(layers)]), nothing),
    }


def measure(model: nn.Module, budget: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round's step, per contender."""
    name = cache_argument(model)
    caches = contenders(model, budget)
    token = torch.full((1, 1), 7)
    position = torch.full((1, 1), budget)
    config: Any = model.config
    shape = (1, config.num_key_value_heads, budget, config.hidden_size // config.num_attention_heads)
    for cache, _ in caches.values():
        for layer in cache.layers:  # as a prompt would
            keys, values = torch.randn(2, *shape, dtype=next(model.parameters()).dtype)
            cast(Any, layer).update(keys, values)
    seconds: dict[str, list[float]] = {each: [] for each in caches}
    for turn in range(rounds + 2):
        for each, (cache, before) in caches.items():
            before(cache)
            cast(Any, model).set_attn_implementation(packed() if each == "packed" else "sdpa")
            given = position if not isinstance(cache, SinkCache) else torch.full((1, 1), cache.seen)
            started = time.thread_time()
            model(token, position_ids=given, use_cache=True, **{name: cache})
            if turn >= 2:  # the first two warm up
                seconds[each].append(time.thread_time() - started)
    return seconds


def main() -> None:
    """Prints one table per shape and dtype."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budgets", default="256,1024,4096", help="tokens held (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of weights and cache (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="counted rounds (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console(width=130)
    console.print(machine())
    for shape, settings in SHAPES.items():
        for dtype in options.dtypes.split(","):
            config = LlamaConfig(max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, **settings)
            model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
            table = Table("budget", title=f"{shape}, {dtype}: ms per step (ratio to plain)")
            with torch.no_grad():
                for row, budget in enumerate(int(each) for each in options.budgets.split(",")):
                    seconds = measure(model, budget, options.rounds)
                    if row == 0:
                        for each in seconds:
                            table.add_column(each, justify="right", no_wrap=True)
                    table.add_row(str(budget), *(cell(mine, seconds["plain"]) for mine in seconds.values()))
            console.print(table)


def cell(mine: list[float], plain: list[float]) -> str:
    """Milliseconds, and in brackets the median ratio to `plain`, round by round."""
    ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
    return f"{statistics.median(mine) * 1e3:.1f} ({ratio:.2f})"


if __name__ == "__main__":
    main()
