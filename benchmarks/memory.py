"""What a SinkCache holds, to the byte, and that a long stream costs no more at its end than at its start.

    python -m benchmarks.memory [--tokens 1000000] [--chunk 64]

First table: `cache.nbytes` against 2 * layers * kv_heads * budget * head_dim * itemsize, plus the stated scratch: for
positions "cache" the sinks' keys as they arrived, layers * kv_heads * sinks * head_dim * 4 bytes. Second: a stream
through a tiny model, the process's resident memory and the time per token in each tenth. Exit code 1 if bytes differ
from the formula, or memory after the first tenth grows by more than 1%.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import machine
from sinkcache import SinkCache, prefill, stream
from sinkcache.policies import StreamingLLM

_SINKS = 4


def tiny(layers: int = 2, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A random Llama with heads of 16 channels, 2 of them key heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,  # or the stream would be re-based within the table
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def formula(config: LlamaConfig, budget: int, positions: str, itemsize: int) -> tuple[int, int]:
    """Bytes of keys and values, and of scratch."""
    heads, head_dim = config.num_key_value_heads or 0, config.hidden_size // config.num_attention_heads
    held = 2 * config.num_hidden_layers * heads * budget * head_dim * itemsize
    scratch = config.num_hidden_layers * heads * _SINKS * head_dim * 4 if positions == "cache" else 0
    return held, scratch


def bytes_table(console: Console) -> bool:
    """Prints the first table; whether every row agrees."""
    table = Table("dtype", "positions", "budget", "formula", "scratch", "cache.nbytes", title="bytes held, 2 layers")
    agree = True
    for dtype in (torch.float32, torch.bfloat16):
        for positions in ("original", "cache"):
            for budget in (256, 1024, 4096):
                model = tiny(dtype=dtype)
                cache = SinkCache(model, StreamingLLM(_SINKS), budget, positions)
                prefill(model, cache, torch.randint(3, 128, (1, budget + 64)))
                list(stream(model, cache, [5, 6]))
                held, scratch = formula(model.config, budget, positions, dtype.itemsize)
                agree &= cache.nbytes == held + scratch
                name = str(dtype).removeprefix("torch.")
                table.add_row(name, positions, *(f"{each:,}" for each in (budget, held, scratch, cache.nbytes)))
    console.print(table)
    return agree


def resident() -> int:
    """Bytes of this process in memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tokens(count: int) -> Iterator[int]:
    """A cheap stream without a period that matters."""
    state = 1
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        yield 3 + state % 120


def stream_table(console: Console, count: int, chunk: int) -> bool:
    """Prints the second table; whether memory stayed flat after the first tenth."""
    model = tiny()
    cache = SinkCache(model, StreamingLLM(_SINKS), 256)
    table = Table("tokens", "resident MiB", "us per token", "cache bytes", title=f"a stream, chunk {chunk}, budget 256")
    tenth = count // 10
    rows: list[tuple[int, float]] = []
    started = time.perf_counter()
    for index, _ in enumerate(stream(model, cache, tokens(tenth * 10), chunk=chunk), start=1):
        if index % tenth == 0:
            rows.append((resident(), (time.perf_counter() - started) / tenth * 1e6))
            table.add_row(f"{index:,}", f"{rows[-1][0] / 2**20:.1f}", f"{rows[-1][1]:.1f}", f"{cache.nbytes:,}")
            started = time.perf_counter()
    console.print(table)
    growth, drift = rows[-1][0] / rows[0][0] - 1, rows[-1][1] / rows[0][1]
    console.print(f"last tenth against first: memory {growth:+.2%}, time per token x {drift:.2f}; seen {cache.seen:,}")
    return growth <= 0.01


def main() -> int:
    """Prints both tables; 0 if they are as they should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="length of the stream (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=64, help="tokens a step (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    console.print(machine())
    exact = bytes_table(console)
    flat = stream_table(console, options.tokens, options.chunk)
    return 0 if exact and flat else 1


if __name__ == "__main__":
    sys.exit(main())
