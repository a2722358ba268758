"""Who receives attention in a model, layer by layer and head by head: its sinks, measured without a matrix of tokens.

A model reads a text once, without a cache. Of each layer's attention, computed by blocks of queries, sums are kept for
each key, and by ranges of queries that double: so the share of any set of positions, from any such query on, is a sum
over what is kept. Beside it stand entropy, the queries whose first choice a key is, what learned sinks take, norms of
keys and values, the direction in which queries look, and the massive activations of the hidden states.

Sources: share of the first token, Xiao et al., 2023 (arXiv 2309.17453); the mean that a key receives from those who see
it, and the rate at which it exceeds a threshold, Gu et al., 2024 (arXiv 2410.10781, their Sink_k^eps, k from 1);
massive activations, Sun et al., 2024 (arXiv 2402.17762).
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinkcache.attention import expose
from sinkcache.devices import blocks, device_of
from sinkcache.guard import arguments, show_all_to
from sinkcache.observe import Kernel
from sinkcache.onlooker import Onlooker
from sinkcache.policy import Watch
from sinkcache.shares import BlockStates, LayerSinks, Ranges

FIRST_QUERY = 64  # index of the first query counted: earlier ones see few tokens, and the first among them always
_ELEMENTS = 2**22  # of a block's probabilities at most, 16 MiB: a text of any length is read in as much memory
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class AttentionSinks:
    """All layers of attention of a model that read `tokens` tokens.

    `states` is empty if its blocks were not found, or pass on several streams of hidden states.
    """

    tokens: int
    layers: list[LayerSinks]
    states: list[BlockStates]

    def rate(self, threshold: float, position: int = 0) -> float:
        """The part of rows, layers and heads in which the key at `position` is a sink: its importance is greater."""
        found = [layer.importance()[..., position] > threshold for layer in self.layers]
        return float(torch.cat([each.flatten() for each in found]).double().mean())


def attention_sinks(
    model: nn.Module, input_ids: Int[Tensor, "batch kv_len"], first_query: int = FIRST_QUERY
) -> AttentionSinks:
    """Measures a model on texts of equal length, in one pass; the model is left as it was.

    Beside that pass a layer takes a few times 16 MiB, or one query's attention if that is more; what is kept grows with
    the length: for each head about `log2(tokens / first_query) + 6` numbers a token. Raises ValueError if a text has
    `first_query` tokens or fewer, or the attention of the model cannot be shown.
    """
    tokens = input_ids.shape[1]
    if first_query < 1 or tokens <= first_query:
        raise ValueError(
            f"queries count from index {first_query} on, and the text has {tokens} tokens: give a longer one, or a "
            "first_query of 1 at least"
        )
    meter = _Meter(_ranges(first_query, tokens))
    with _watching(model, meter):
        _read(model, input_ids.to(device_of(model)))
    if not meter.layers:
        raise ValueError(f"{type(model).__name__} has no layer of attention to measure")
    return AttentionSinks(tokens, [meter.layers[index] for index in sorted(meter.layers)], meter.states)


class _Meter(Onlooker):
    """Is shown all attention of a pass, and the hidden states behind each block."""

    watch = Watch(queries=True)

    def __init__(self, ranges: Ranges) -> None:
        self.ranges, self.layers, self.states = ranges, cast(dict[int, LayerSinks], {}), cast(list[BlockStates], [])

    def look(self, module: nn.Module, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        self.seen = (module, keys, values, mask)

    def observe(self, queries: Tensor, received: Tensor | None, kernel: Kernel) -> None:
        module, keys, values, mask = self.seen
        del self.seen
        index = getattr(module, "layer_idx", None)
        index = len(self.layers) if index is None else index
        if keys.shape[2] != queries.shape[2] or index in self.layers:
            raise ValueError(
                f"{type(module).__name__} attends to more than the text's own tokens, once: it cannot be measured"
            )
        self.layers[index] = _measured(index, queries, keys, values, mask, kernel, self.ranges)
        _give_back()

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if states.ndim == 3:  # some have several streams of them
            self.states.append(_states(len(self.states), states))


def _measured(
    index: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, kernel: Kernel, ranges: Ranges
) -> LayerSinks:
    batch, heads, tokens, _ = queries.shape
    sums = _Sums((batch, heads), ranges, kernel.sinks is not None, queries.device)
    for number, start, stop in _blocks(ranges, batch * heads * tokens):
        sees = _seen(mask, start, stop, queries.device)
        shown = sees[None, None, :, start:] if mask is None else mask[..., start:stop, :]
        paid = kernel.probabilities(queries[:, :, start:stop], keys[:, :, : sees.shape[1]], shown)
        sums.add(number, paid.flatten(1, 2).float(), sees)
    lengths = torch.tensor([stop - start for start, stop in ranges], device=queries.device)
    first = ranges[1][0]
    looking = nn.functional.normalize(queries[:, :, first:].float(), dim=-1).mean(dim=2)
    directions = nn.functional.normalize(keys.float(), dim=-1)
    cosine = torch.einsum("bhgd,bhkd->bhgk", looking.unflatten(1, (keys.shape[1], -1)), directions).flatten(1, 2)
    kept = (
        sums.received.cpu(),
        (sums.entropy / lengths).cpu(),
        None if sums.learned is None else (sums.learned / lengths).cpu(),
        sums.even.cpu(),
        sums.visible.cpu(),
        (sums.chosen / (tokens - first)).cpu(),
        *(each.cpu() for each in (cosine, keys.float().norm(dim=-1), values.float().norm(dim=-1))),
    )
    return LayerSinks(index, ranges, *kept)  # type: ignore[arg-type]


class _Sums:
    """What the queries of a layer pay, added up range by range."""

    def __init__(self, rows: tuple[int, int], ranges: Ranges, sinks: bool, device: torch.device) -> None:
        tokens = ranges[-1][1]
        self.received = _zeros((*rows, len(ranges), tokens), device)
        self.chosen = _zeros((*rows, tokens), device)
        self.even, self.visible = (torch.zeros(len(ranges), tokens, device=device) for _ in range(2))
        self.entropy = torch.zeros(*rows, len(ranges), device=device)
        self.learned = torch.zeros_like(self.entropy) if sinks else None

    def add(
        self,
        number: int,
        paid: Float[Tensor, "batch num_heads q_len kv_len"],
        sees: Bool[Tensor, "q_len kv_len"],
    ) -> None:
        """Counts a block of queries of range `number`, which see the first keys."""
        upto, one = paid.shape[-1], torch.ones((), device=paid.device)
        self.received[:, :, number, :upto] += paid.sum(dim=2)
        if number > 0:
            self.chosen.scatter_add_(-1, paid.argmax(dim=-1), one.expand(paid.shape[:3]))
        places, spread = sees.sum(dim=-1), _spread(paid).sum(dim=-1)
        if self.learned is not None:
            rest = (1 - paid.sum(dim=-1)).clamp_min(0)
            self.learned[:, :, number] += rest.sum(dim=-1)
            places, spread = places + 1, spread + _spread(rest)
        self.entropy[:, :, number] += (spread / places.log().clamp_min(_TINY)).sum(dim=-1)
        self.even[number, :upto] += (sees / sees.sum(dim=-1, keepdim=True)).sum(dim=0)
        self.visible[number, :upto] += sees.sum(dim=0)


def _spread(paid: Tensor) -> Tensor:
    """The parts of an entropy; a third of the time of torch.special.entr, which takes numbers one by one."""
    return paid.clamp_min(_TINY).log_().mul_(paid).neg_()


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros; on the CPU in pages of their own, apart from what comes and goes, which take no memory while zero."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device)
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(shape)


def _give_back() -> None:
    """Has malloc give what is free back to the system, where it can: in glibc, which else holds parts of each layer's.

    Without it and pages apart 8,192 tokens take twice the memory of a plain pass, with them an eighth more.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _blocks(ranges: Ranges, width: int) -> Iterator[tuple[int, int, int]]:
    """Of each range its number, and the queries of a block; `width`: the elements of one query's attention."""
    length = max(1, _ELEMENTS // width)
    for number, (first, last) in enumerate(ranges):
        for start in range(first, last, length):
            yield number, start, min(start + length, last)


def _seen(mask: Tensor | None, start: int, stop: int, device: torch.device) -> Bool[Tensor, "q_len kv_len"]:
    """Which keys these queries see, by a boolean mask or one to add; without one, those up to their own.

    Rows and heads are alike.
    """
    if mask is None:
        return torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril(start)
    one = mask[0, 0, start:stop]
    return one if one.dtype == torch.bool else one > torch.finfo(one.dtype).min / 2


def _states(index: int, states: Float[Tensor, "batch kv_len channels"]) -> BlockStates:
    sizes = states.abs().float()
    flat = sizes.flatten(1)
    greatest, place = flat.max(dim=1)
    channels = sizes.shape[-1]
    norms = states.float().norm(dim=-1)
    found = (greatest, place // channels, place % channels, flat.median(dim=1).values, norms)
    return BlockStates(index, *(each.cpu() for each in found))


def _ranges(first: int, tokens: int) -> Ranges:
    edges = [0, first]
    while 2 * edges[-1] < tokens:
        edges.append(2 * edges[-1])
    return tuple(zip(edges, [*edges[1:], tokens], strict=True))


@contextmanager
def _watching(model: nn.Module, meter: _Meter) -> Iterator[None]:
    before, training = cast(Any, model).config._attn_implementation, [each for each in model.modules() if each.training]
    hooks: list[RemovableHandle] = []
    try:
        model.eval()
        _expose(model)
        layers = cast(Any, model).config.get_text_config(decoder=True).num_hidden_layers
        hooks += [each.register_forward_hook(meter.note) for each in blocks(model, layers) or ()]
        show_all_to(meter)
        yield
    finally:
        show_all_to(None)
        for hook in hooks:
            hook.remove()
        for each in training:
            each.training = True
        if cast(Any, model).config._attn_implementation != before:
            cast(Any, model).set_attn_implementation(before)


def _expose(model: nn.Module) -> None:
    try:
        expose(model)
    except ValueError as refusal:
        raise ValueError(f"the attention of {type(model).__name__} cannot be measured: {refusal}") from refusal


def _read(model: nn.Module, input_ids: Tensor) -> None:
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in arguments(model) else {}
    with torch.no_grad():
        model(input_ids=input_ids, use_cache=False, **more)
