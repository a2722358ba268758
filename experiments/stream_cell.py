"""One cell of `compare_policies`: a text read by one method, beside the model's own cache, which evicts nothing.

Both read the text in the same chunks, side by side: of each token there is the negative log-likelihood, the divergence
KL(full cache || method) of what is predicted, in nats, and whether both would choose the same token. No logits are kept
but of the tokens at hand. A second pass, with a cache of its own, takes the time: a prompt, then single tokens.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from experiments.grid.cell import Cell, Found
from experiments.grid.networks import loaded
from experiments.memory import layer_bytes
from experiments.results import Row
from sinkcache import Policy, SinkCache, predictions
from sinkcache.bounded import BoundedLayer
from sinkcache.devices import device_of
from sinkcache.memory import held_bytes
from sinkcache.metrics import Perplexity, Scored, exponential
from sinkcache.plugins import named
from sinkcache.policies import Clairvoyant
from sinkcache.predictions import Predicted
from sinkcache.recording import Recording, recall, record
from sinkcache.streaming import step

FULL, POLICY, RECOMPUTE, REREAD = "full", "policy", "recompute", "reread"
STEPS = 32  # single tokens that are timed
_WINDOWS = 8  # that recompute reads at once
_PROMPT = 512  # tokens of the timed prompt that are read at once


def measure(cell: Cell) -> Found:
    """What a cell asks for. Raises ValueError where the model cannot be read by the method."""
    asked, model = cell.asked, loaded(cell.asked)
    ids = torch.from_numpy(np.asarray(cell.payload)).view(1, -1).to(device_of(model))
    whole = _with_bos(ids, asked["bos"])
    policy = None if asked["method"] != POLICY else policy_of(asked, lambda: record(model, whole, asked["chunk"]))
    cache = _cache(model, asked, policy)
    read = _read(model, ids, asked, cache)
    after = asked["budget"] and slice(asked["budget"] + (asked["bos"] is None), None)
    figures = {
        **_figures(read, asked, after),
        **_memory(read, asked, cache),
        **_recall(model, whole, asked, policy),
    }
    return Found(figures, read.scores, {**read.cost(), **_times(model, ids, asked, policy)})


def policy_of(asked: Row, recorded: Callable[[], Recording]) -> Policy:
    """The policy of a cell; a text is `recorded` for the one that must know it."""
    return named(asked["policy"]) if asked["horizon"] is None else Clairvoyant(recorded(), asked["horizon"])


class _Read:
    """What is noted while a text is read: scores by token of the text, bytes, and seconds by block."""

    def __init__(self, asked: Row) -> None:
        self.scores = {name: np.full(asked["tokens"], math.nan) for name in ("nll", "kl", "agree")}
        self.perplexity = Perplexity(bos=asked["bos"], bucket=asked["bucket"])
        self.most = 0  # bytes held after a step
        self.blocks: list[tuple[float, int]] = []  # seconds and tokens
        self.cpu = time.process_time()

    def note(self, own: Predicted, full: Tensor | None, seconds: float) -> None:
        """A block of tokens: what the method predicts, and what the full cache does; None if that is the method."""
        where = slice(own.start, own.start + len(own.targets))
        scored = Scored(own.start, own.nll)
        if (lost := scored.nll.isnan()).any():
            token = own.start + int(lost.int().argmax())
            raise ValueError(f"what is predicted of token {token} is no number (NaN): try another --dtype")
        self.perplexity.add(scored)
        self.scores["nll"][where] = scored.nll.numpy()
        self.scores["kl"][where] = 0 if full is None else divergence(full, own.logits)
        same = 1 if full is None else full.argmax(dim=-1).eq(own.logits.argmax(dim=-1)).double().cpu().numpy()
        self.scores["agree"][where] = same
        self.blocks.append((seconds, len(own.targets)))

    def cost(self) -> Row:
        """Time of the method's own passes over the text, the first of them aside; CPU time is of all that was done."""
        seconds, tokens = (sum(each) for each in zip(*(self.blocks[1:] or self.blocks), strict=True))
        return {"stream_tokens_per_second": tokens / seconds, "cpu_seconds": time.process_time() - self.cpu}


def _read(model: PreTrainedModel, ids: Tensor, asked: Row, cache: Cache | None) -> _Read:
    read = _Read(asked)
    full = None if asked["method"] == FULL else _Reference(model, ids, asked)
    blocks = _predictions(model, ids, asked, cache)
    while True:
        start = _now(ids)
        own = next(blocks, None)
        if own is None:
            return read
        seconds = _now(ids) - start
        read.note(own, full and full.of(own.start, len(own.targets)), seconds)
        read.most = max(read.most, held_bytes(cache) if cache is not None else 0)


def divergence(full: Float[Tensor, "tokens vocab"], own: Float[Tensor, "tokens vocab"]) -> np.ndarray:
    """KL(full || own) of each token in nats, computed in float64 from float32 logits at least."""
    found = []
    for one, other in zip(full.split(16), own.split(16), strict=True):  # a float64 copy of all would be large
        theirs, mine = (each.double().log_softmax(dim=-1) for each in (one, other))
        terms = theirs.exp() * (theirs - mine)
        found.append(terms.masked_fill(theirs == -math.inf, 0).sum(dim=-1))  # what never comes diverges from nothing
    return torch.cat(found).clamp(min=0).cpu().numpy()


class _Reference:
    """The full cache's logits for any stretch of the text; stretches must be asked for in order."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, asked: Row) -> None:
        chunk = asked["chunk"] or asked["reference_chunk"]
        cache = DynamicCache(config=model.config)
        self.blocks = predictions.cached(model, cache, ids, chunk, asked["bos"])
        self.start, self.logits = 0, None

    def of(self, start: int, count: int) -> Float[Tensor, "tokens vocab"]:
        """The logits before tokens `start` to `start + count - 1`."""
        while self.logits is None or self.start + len(self.logits) < start + count:
            block = next(self.blocks)
            if self.logits is None or self.start + len(self.logits) <= start:
                self.start, self.logits = block.start, block.logits
            else:
                self.logits = torch.cat([self.logits, block.logits])
        kept = self.logits[start - self.start :]
        self.start, self.logits = start, kept
        return kept[:count]


def _cache(model: PreTrainedModel, asked: Row, policy: Policy | None) -> Cache | None:
    if asked["method"] == FULL:
        return DynamicCache(config=model.config)
    if policy is None:
        return None
    return SinkCache(model, policy, asked["budgets"] or asked["budget"], asked["positions"])


def _predictions(model: PreTrainedModel, ids: Tensor, asked: Row, cache: Cache | None) -> Iterator[Predicted]:
    if cache is not None:
        return iter(predictions.cached(model, cache, ids, asked["chunk"], asked["bos"]))
    read = _with_bos(ids, asked["bos"])
    if asked["method"] == REREAD:
        found = predictions.reread(model, read, asked["budget"], asked["every"])
    else:
        found = predictions.recomputed(model, read, asked["budget"], asked["every"], _WINDOWS)
    shift = read.shape[1] - ids.shape[1]
    return (Predicted(each.start - shift, each.logits, each.targets) for each in found)


def _with_bos(ids: Tensor, bos: int | None) -> Tensor:
    return ids if bos is None else torch.cat([ids.new_full((1, 1), bos), ids], dim=1)


def _figures(read: _Read, asked: Row, after: slice | None) -> Row:
    nll = read.scores["nll"]
    scored = nll[~np.isnan(nll)]
    figures: Row = {
        "perplexity": _finite(read.perplexity.value),
        "scored": len(scored),
        "curve": [[min(end, asked["tokens"]), _finite(value)] for end, value in read.perplexity.curve()],
        "first_after": after and after.start,
    }
    for name, values in read.scores.items():
        mine = values[after] if after else values
        mine = mine[~np.isnan(mine)]
        mean = float(mine.mean()) if len(mine) else None
        figures["after"] = len(mine)
        if name == "nll":
            figures["perplexity_after"] = None if mean is None or after is None else _finite(exponential(mean))
        else:
            figures[{"kl": "kl", "agree": "top1"}[name]] = None if mean is None else _finite(mean)
    return figures


def _memory(read: _Read, asked: Row, cache: Cache | None) -> Row:
    """Bytes of keys and values: held after a step at most, at the highest within one, and entries by layer and head."""
    if cache is None:
        return {"bytes": None, "bytes_peak": None, "held": None}
    attended = max(asked["budgets"] or [asked["budget"]]) - 1 + asked["chunk"] if asked["budget"] else asked["tokens"]
    bounded = [layer for layer in cache.layers if isinstance(layer, BoundedLayer)]
    held = sum(float((layer.kept() >= 0).sum(dim=-1).double().mean()) for layer in bounded)
    if asked["budget"] is not None and abs(held - asked["budget"] * len(bounded)) > 1e-6:
        raise AssertionError(f"{held} entries held where {asked['budget']} in each of {len(bounded)} layers are asked")
    return {
        "bytes": read.most,
        "bytes_peak": read.most + (layer_bytes(cache, attended) or 0),
        "held": held if bounded else None,
    }


def _recall(model: PreTrainedModel, ids: Tensor, asked: Row, policy: Policy | None) -> Row:
    """Attention recall, `sinkcache.recording.recall`; None, and a reason, where a model's attention cannot be heard."""
    if policy is None:
        return {"recall": 1.0 if asked["method"] == FULL else None, "recall_best": None}
    try:
        own, best = recall(model, ids, [policy], asked["budgets"] or asked["budget"], asked["chunk"])
    except ValueError as error:
        return {"recall": None, "recall_best": None, "recall_lacks": " ".join(str(error).split())}
    return {"recall": _finite(own), "recall_best": _finite(best)}


def _times(model: PreTrainedModel, ids: Tensor, asked: Row, policy: Policy | None) -> Row:
    """Seconds for a prompt, the text but for its end, and the median for each of the tokens at the end."""
    cache = _cache(model, asked, policy)
    if cache is None:
        return {}
    steps = min(STEPS, ids.shape[1] // 2)
    start = _now(ids)
    for piece in ids[:, :-steps].split(_PROMPT, dim=1):
        step(model, cache, piece, last_only=True)
    prompt, taken = _now(ids) - start, []
    for token in ids[:, -steps:].split(1, dim=1):
        start = _now(ids)
        step(model, cache, token)
        taken.append(_now(ids) - start)
    each = statistics.median(taken)
    return {
        "prefill_seconds": prompt,
        "prefill_tokens": ids.shape[1] - steps,
        "ms_per_token": 1000 * each,
        "tokens_per_second": 1 / each,
    }


def _now(ids: Tensor) -> float:
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
