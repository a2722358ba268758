"""What is measured of a checkpoint on a document: attention, sinks of short segments, perplexity with these evicted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from experiments.results import Row
from experiments.sinks import SEGMENT, attention_facts, sink_rates
from sinkcache import SinkCache
from sinkcache.metrics import exponential, perplexity
from sinkcache.policies import StreamingLLM, Window
from sinkcache.sinks import attention_sinks

MEASURE = 1  # raised when a change of this file, or of what it calls, changes what is found
ALIKE = 0.3  # importance of the first token from which a head counts as one with a sink: Gu et al.'s epsilon
SHUFFLED, RANDOM, REPEATED = CONTROLS = ("shuffled", "random", "repeated")
CACHES: dict[str, Callable[[Any, int], Any]] = {
    "full": lambda model, budget: DynamicCache(config=model.config),
    "window": lambda model, budget: SinkCache(model, Window(), budget, "cache"),
    "sinks1": lambda model, budget: SinkCache(model, StreamingLLM(1), budget, "cache"),
    "sinks4": lambda model, budget: SinkCache(model, StreamingLLM(4), budget, "cache"),
}


@dataclass(frozen=True)
class Probe:
    """Queries count from `first_query` on; `budget` None measures no perplexity; `segments` at most, of a document."""

    first_query: int
    segments: int
    budget: int | None
    chunk: int

    def measured(self, model: nn.Module, ids: Int[Tensor, "1 kv_len"], bos: int | None) -> Row:
        """All of it, as plain numbers. Raises ValueError if attention cannot be shown, or is not finite."""
        facts = attention_facts(model, ids, self.first_query)
        if not all(math.isfinite(share) for layer in facts["share"] for share in layer):
            raise ValueError("attention is not finite: measure in float32")
        pieces = segments(ids, self.segments, bos)
        led = None if bos is None else torch.cat([pieces.new_full((len(pieces), 1), bos), pieces[:, :-1]], dim=1)
        begins = "plain" if led is None or int(ids[0, 0]) != bos else "bos"
        alike = pieces if led is None or begins == "plain" else led  # a BOS in front where the document has one
        found = {"facts": facts, "begins": begins, "segments": len(pieces), "heads": heads_with_a_sink(model, alike)}
        found |= {"rates": sink_rates(model, pieces), "rates_bos": None if led is None else sink_rates(model, led)}
        found |= {"perplexity": None, "lacks": None}
        if self.budget is not None:
            try:
                found["perplexity"] = perplexities(model, ids, self.budget, self.chunk)
            except ValueError as error:  # no bounded cache for this model: its attention is known nevertheless
                found["lacks"] = str(error).splitlines()[0]
        return _finite(found)


def segments(ids: Int[Tensor, "1 kv_len"], most: int, bos: int | None) -> Int[Tensor, "segments length"]:
    """The first `most` pieces of 64 tokens, or one that is shorter; a BOS in front of the document is left out."""
    tokens = ids[0, 1:] if bos is not None and int(ids[0, 0]) == bos and ids.shape[1] > 1 else ids[0]
    length = min(SEGMENT, len(tokens))
    count = max(1, min(most, len(tokens) // length))
    return tokens[: count * length].view(count, length)


def heads_with_a_sink(model: nn.Module, pieces: Int[Tensor, "segments length"]) -> list[list[int]]:
    """By layer and head, in how many segments the first token's importance is above 0.3."""
    counts: list[Tensor] = []
    for batch in pieces.split(16):
        over = [(layer.importance()[..., 0] > ALIKE).sum(dim=0) for layer in attention_sinks(model, batch, 1).layers]
        counts = [one + more for one, more in zip(counts, over, strict=True)] if counts else over
    return [each.tolist() for each in counts]


def perplexities(model: nn.Module, ids: Int[Tensor, "1 kv_len"], budget: int, chunk: int) -> Row:
    """By cache: perplexity of all tokens, and of those from number `budget` on, which come when it is full."""
    found = {}
    for name, made in CACHES.items():
        read = perplexity(model, made(model, budget), ids, chunk, bucket=budget)
        later = [read.buckets[index] for index in read.buckets if index > 0]
        after = sum(nll for _, nll in later) / sum(count for count, _ in later)
        found[name] = {"all": exponential(read.nll / read.tokens), "after": exponential(after)}
    return {"budget": budget, **found}


def shuffle(model: nn.Module, seed: int) -> None:
    """Permutes the entries within each weight of `model`: what is left is their distribution."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))


def control_ids(
    control: str, known: Sequence[int], tokens: int, seed: int, bos: int | None = None
) -> Int[Tensor, "1 kv_len"]:
    """Ids drawn evenly from `known`, the first of them `bos` if there is one; or one of these over and over."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(known), (1, tokens if control == RANDOM else 1), generator=generator)
    ids = torch.tensor(known)[drawn].expand(1, tokens).clone()
    if bos is not None and control == RANDOM:
        ids[0, 0] = bos
    return ids


def drawable(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a tokenizer that are no special tokens."""
    special = set(cast("list[int]", tokenizer.all_special_ids))
    return [each for each in range(len(tokenizer)) if each not in special]


def _finite(value: Any) -> Any:
    """The same, with None for what JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
