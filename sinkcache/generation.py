"""Generation as a person watches it: tokens without end, their text as it becomes whole, a status line below it."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from sinkcache.cache import SinkCache
from sinkcache.streaming import prefill, stream


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Tensor:
    """The ids of a prompt, `[1, tokens]`, in the model's chat template if `chat`; ValueError if it has none."""
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("--chat needs a chat template, and this model's tokenizer has none: leave --chat out")
        turns = [{"role": "user", "content": prompt}]
        templated = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        ids = cast(BatchEncoding, templated)["input_ids"]
    else:
        ids = tokenizer(prompt, verbose=False)["input_ids"]  # not verbose: a prompt may exceed the trained length
    if not ids:
        raise ValueError(f"the prompt {prompt[:40]!r} has no tokens for this model: give another")
    return torch.tensor([ids])


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[Any]:
    """The ids that end a generation."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(declared, list):
        return set(declared)
    return {cast(Any, tokenizer.eos_token_id if declared is None else declared)}


def tokens_of(
    model: PreTrainedModel,
    cache: SinkCache,
    input_ids: Tensor,
    chunk: int,
    choose: Callable[[Tensor], int],
    status: "Status",
) -> Iterator[int]:
    """Reads the prompt, then yields token after token without end, each before it is read; in constant memory."""
    cache.resolve(input_ids.shape[1])
    logits = torch.empty(0)
    for piece in input_ids.split(chunk, dim=1):
        logits = prefill(model, cache, piece, chunk)
        status.draw()
    status.started = time.monotonic()
    given: list[int] = []
    following = stream(model, cache, iter(given.pop, None))
    while True:
        token = choose(logits[0])
        status.generated += 1
        status.draw()
        yield token
        given.append(token)
        logits = next(following)


def pieces(tokens: Iterator[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The text of `tokens`, each piece as soon as its characters are whole; in constant memory."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    said: list[int] = []  # of the last piece, as what a token reads depends on the one before
    fresh: list[int] = []
    for token in tokens:
        fresh.append(token)
        text = decode(said + fresh)
        if text.endswith("\ufffd") and len(fresh) < 8:  # part of a character, which is 4 tokens at most
            continue
        yield text[len(decode(said)) :]
        said, fresh = fresh, []
    if fresh:
        yield decode(said + fresh)[len(decode(said)) :]


def sample(temperature: float, top_p: float, generator: torch.Generator, logits: Tensor) -> int:
    """A token id drawn among the likeliest whose probabilities make up `top_p`."""
    chances, ids = (logits.float().cpu() / temperature).softmax(-1).sort(descending=True)
    chances = chances.masked_fill(chances.cumsum(-1) - chances >= top_p, 0)  # the first that reaches it stays
    return int(ids[torch.multinomial(chances, 1, generator=generator)])


class Status:
    """A line at the foot of the terminal that stderr goes to, in a row text does not scroll into; elsewhere nothing."""

    def __init__(self, cache: SinkCache) -> None:
        self.cache, self.console = cache, Console(stderr=True, highlight=False)
        self.generated, self.started, self._drawn = 0, time.monotonic(), 0.0
        self._column = 0  # that text has come to on the terminal
        self._height: int | None = None  # of the terminal the row is reserved on
        self._shown = self.console.is_terminal and not (self.console.is_dumb_terminal or self.console.legacy_windows)

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, *error: object) -> None:
        if self._height is not None:
            self._write(f"\x1b7\x1b[r\x1b[{self._height};1H\x1b[K\x1b8")

    def summary(self) -> str:
        """Tokens generated and their rate, tokens seen and held, and the cache's bytes."""
        rate = self.generated / max(time.monotonic() - self.started, 1e-9)
        return (
            f"{self.generated:,} tokens generated, {rate:.1f} tokens/s; {self.cache.seen:,} seen, "
            f"{max(each.books[0].held for each in self.cache.ledgers):,} held in {self.cache.nbytes / 2**20:.1f} MiB"
        )

    def say(self, text: str) -> None:
        """Writes `text` to standard output at once."""
        sys.stdout.write(text)
        sys.stdout.flush()
        if sys.stdout.isatty():
            line = text.rpartition("\n")
            self._column = cell_len(line[2]) + (0 if line[1] else self._column)

    def draw(self) -> None:
        """Brings the line up to date, ten times a second at most."""
        if not self._shown or self.console.height < 3 or time.monotonic() - self._drawn < 0.1:
            return
        if self._column and self._column % self.console.width == 0:
            return  # a full row: a terminal that is made to come back here may forget that the next character wraps
        self._drawn = time.monotonic()
        height = self.console.height
        if height != self._height:  # at first, or after a change of size: text scrolls in all rows but the last
            self._write(f"\x1b7\x1b[r\x1b8\x1bD\x1b[A\x1b7\x1b[1;{height - 1}r\x1b8")
            self._height = height
        line = Text(self.summary(), style="reverse")
        line.truncate(self.console.width - 1)
        self._write(f"\x1b7\x1b[{height};1H")
        self.console.print(line, end="")
        self._write("\x1b[K\x1b8")

    def _write(self, codes: str) -> None:
        self.console.file.write(codes)
        self.console.file.flush()
