"""What caches that hold a policy must keep, checked on a model: see `sinkcache.testing.check_policy`."""

import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sinkcache.bounded import BoundedLayer
from sinkcache.cache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.policy import Policy

Kept = list[list[list[list[int]]]]  # per bounded layer, row and head


class Run:
    """A policy and the model that reads with caches of `budget` tokens."""

    def __init__(self, policy: Policy, budget: int, model: nn.Module | None) -> None:
        self.policy, self.budget, self._model = policy, budget, model

    @cached_property
    def model(self) -> nn.Module:
        return _tiny(16 * self.budget + 256) if self._model is None else self._model

    def cache(self) -> SinkCache:
        return SinkCache(self.model, self.policy, self.budget)

    def tokens(self, rows: int, length: int) -> Int[Tensor, "batch q_len"]:
        config = cast(Any, self.model).config.get_text_config()
        generator = torch.Generator().manual_seed(length)
        device = cast(Any, self.model).get_input_embeddings().weight.device
        return torch.randint(1, config.vocab_size, (rows, length), generator=generator).to(device)

    @torch.no_grad()
    def read(self, cache: SinkCache, tokens: Tensor, mask: Tensor | None = None) -> Float[Tensor, "batch q_len words"]:
        extra: dict[str, Any] = {cache_argument(self.model): cache}
        if mask is not None:
            extra["attention_mask"] = mask
        try:
            return self.model(input_ids=tokens, **extra).logits
        except Exception as error:
            told = f"a cache of {self.budget} tokens failed in a step of {tokens.shape[1]} after {cache.seen}"
            raise AssertionError(f"{self.policy!r}: {told} ({type(error).__name__}: {error})") from error

    def kept(self, cache: SinkCache) -> Kept:
        bounded = [index for index, layer in enumerate(cache.layers) if isinstance(layer, BoundedLayer)]
        layers = [cache.kept(index).tolist() for index in bounded]
        return [[[[p for p in head if p >= 0] for head in row] for row in layer] for layer in layers]

    def require(self, holds: bool, broken: str) -> None:
        if not holds:
            raise AssertionError(f"{self.policy!r}: {broken}")

    def check_bound(self, cache: SinkCache) -> None:
        """Raises AssertionError unless `cache` is within its budget and holds the newest token."""
        together = getattr(self.policy, "across_heads", False)
        for index, layer in enumerate(self.kept(cache)):
            for heads in layer:
                most = sum(map(len, heads)) / len(heads) if together else max(map(len, heads))
                told = f"bounded layer {index} after {cache.seen} tokens"
                self.require(most <= self.budget, f"{told} holds {most} tokens, more than its budget of {self.budget}")
                newest = min(max(head, default=-1) for head in heads)
                self.require(newest == cache.seen - 1, f"{told} does not hold the newest, but {newest} at most")


def _bound(run: Run) -> None:
    cache, long = run.cache(), 2 * run.budget + 3
    chunks = [long, 1, 1, 1, run.budget // 2 + 2, *[1] * min(run.budget, 20)]
    for piece in run.tokens(2, sum(chunks)).split(chunks, dim=1):
        run.read(cache, piece)
        run.check_bound(cache)


def _padded(run: Run) -> None:
    pad = run.budget // 3 + 1
    chunks = [run.budget + pad + 5, *[1] * 8, 7, *[1] * 4]
    tokens = run.tokens(2, sum(chunks))
    mask = torch.ones_like(tokens)
    mask[1, :pad] = 0
    cache, alone, end = run.cache(), run.cache(), 0
    for chunk in chunks:
        start, end = max(end, pad), end + chunk
        run.read(cache, tokens[:, end - chunk : end], mask[:, :end])
        run.read(alone, tokens[1:, start:end])
        for index, (both, one) in enumerate(zip(run.kept(cache), run.kept(alone), strict=True)):
            told = f"a padded row keeps other tokens than alone, in bounded layer {index}: {_first(both[1], one[0])}"
            run.require(both[1] == one[0], f"{told}. Leave out what is not entries.valid, and keep rows apart")


def _copies(run: Run) -> None:
    cache = run.cache()
    run.read(cache, run.tokens(2, run.budget + 9))
    run.read(cache, run.tokens(2, 1))
    others = {"a fork": cache.fork(), "a pickled copy": pickle.loads(pickle.dumps(cache))}
    pieces = [run.tokens(2, length) for length in (1, 1, 5, 1, run.budget // 2 + 1, 1)]
    expected = [(run.read(cache, piece), run.kept(cache)) for piece in pieces]
    for name, other in others.items():
        for piece, (logits, kept) in zip(pieces, expected, strict=True):
            found, same = run.read(other, piece), "a policy has no memory: what it knows of a token is in entries"
            run.require(run.kept(other) == kept, f"{name} of the cache keeps other tokens than the cache: {same}")
            run.require(torch.allclose(found, logits), f"{name} of the cache computes other logits than it: {same}")


def _generates(run: Run) -> None:
    cache, prompt, new = run.cache(), run.tokens(1, run.budget // 2 + 1), 3 * run.budget
    extra: dict[str, Any] = {cache_argument(run.model): cache}
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    try:
        found = cast(Any, run.model).generate(prompt, attention_mask=torch.ones_like(prompt), **asked, **extra)
    except Exception as error:
        raise AssertionError(f"{run.policy!r}: generate failed ({type(error).__name__}: {error})") from error
    run.require(found.shape[1] == prompt.shape[1] + new, f"generate ended after {found.shape[1]} tokens")
    run.check_bound(cache)


CACHES: dict[str, Callable[[Run], None]] = {
    "a cache is within its budget after each step, and holds the newest token": _bound,
    "a padded row keeps what it keeps alone": _padded,
    "a fork and a pickled copy of a cache go on as it does": _copies,
    "generate runs for three budgets of tokens": _generates,
}


def _first(one: list[list[int]], other: list[list[int]]) -> str:
    """Where two rows differ."""
    head = next((head for head, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
    lost, more = sorted(set(other[head]) - set(one[head])), sorted(set(one[head]) - set(other[head]))
    return f"head {head} lacks {lost[:5]} and has {more[:5]}"


def _tiny(length: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=length,
        initializer_range=0.3,  # at transformers' own 0.02 no fault shows
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().eval()
