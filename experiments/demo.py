"""What a bounded cache is for: `model.generate` that runs past its budget in memory that does not grow."""

from typing import Any, cast

import torch
from rich.console import Console
from transformers import TextStreamer

from experiments.subject import Subject
from sinkcache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM

_PROMPT = "The old lighthouse keeper opened the door, looked out at the sea, and began to tell his story."
_BUDGET = 32
_SECONDS = 15.0
_TOKENS = 2000  # more than the time allows


def generate(console: Console, subject: Subject, seed: int) -> None:
    """Prints text as it is generated for about 15 s, and the bytes held before and after."""
    model, tokenizer = subject.model, subject.tokenizer
    cache = SinkCache(model, StreamingLLM(num_sinks=4), budget=_BUDGET)
    ids = cast(Any, tokenizer)(_PROMPT, return_tensors="pt")["input_ids"][:, : _BUDGET - 1].to(subject.ids.device)
    code = f"model.generate(input_ids, {cache_argument(model)}=SinkCache(model, StreamingLLM(4), budget={_BUDGET}))"
    console.print(f"\n[bold]Generation past the budget[/bold], {_SECONDS:.0f} seconds of it", highlight=False)
    console.print(code, style="dim", highlight=False, markup=False)
    console.print()
    torch.manual_seed(seed)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], use_cache=True, **{cache_argument(model): cache})
    before, read = cache.nbytes, cache.seen
    cast(Any, model).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        max_new_tokens=_TOKENS,
        max_time=_SECONDS,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        min_new_tokens=_TOKENS,  # goes on past the end of a story
        **{cache_argument(model): cache},
    )
    after = f"{cache.nbytes / 2**20:.2f} MiB after {cache.seen}"
    console.print(
        f"\nBytes held: {before / 2**20:.2f} MiB after {read} tokens, {after}. The {cache.kept(0).shape[-1]} held "
        "are the first 4 tokens and the newest; what was evicted is forgotten. Slots are set aside at once; the few "
        "bytes more are the first tokens' keys as they arrived.",
        highlight=False,
    )
