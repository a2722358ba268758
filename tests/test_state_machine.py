"""Whatever is done to a cache, in whatever order, it is the cache of lists that `list_cache.py` writes out.

Synthetic keys and values are put into both as a model would do it: the pass is announced, each layer is updated, the
pass ends. What a query sees is read through transformers' own rule for masks. The first channel of a value is a name
that no other token has, so that it is known whose key it is whatever the slot it is in.
"""

import copy
import functools
import itertools
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from list_cache import ListCache, Row, Token, turned
from torch import Tensor

from sinkcache import Entries, Policy, SinkCache
from sinkcache.policies import StreamingLLM, Window

LAYERS, HEADS, VALUE_DIM = 2, 2, 3
INTERLEAVED = {"llama": False, "gpt_neox": False, "glm": True}  # the last two turn a part of the channels
MOST_ROWS, MOST_CACHES, MOST_TOKENS = 6, 3, 12
FIRST = 5  # the position that a row may be told to begin at
EXACTLY = 1e-12  # angles are computed once here and once there
SEARCH: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
}


@dataclass(frozen=True)
class Scattered(Policy):
    """Worth without a pattern and with many ties: evicts anywhere, new tokens included."""

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return ((entries.positions * 7919 + 5) % 13 % 6).float()


# what is done


@dataclass(frozen=True)
class Step:
    """`tokens` columns; bit c of `hidden[r]` hides column c of row r (of rows beyond the third as of those before)."""

    tokens: int
    hidden: tuple[int, int, int] = (0, 0, 0)
    masked: bool = False  # a mask is given although it hides nothing
    more: bool = False  # more of a prompt follows
    positions: str = "counted"  # "counted" by the model, "stream", "told" in the frame as it is, or "absolute"
    rows: int = 0  # of a batch that goes on from a single row; 0: as before


@dataclass(frozen=True)
class Crop:
    tokens: int


@dataclass(frozen=True)
class Rows:
    """`how`: "reorder" (as many rows as before), "select" or "mask"; `rows` are counted round and round."""

    rows: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Repeat:
    times: int


@dataclass(frozen=True)
class Twin:
    """`how`: "fork" (each row `times`), "deepcopy", "pickle" or "file"; from then on there is one cache more."""

    how: str
    times: int = 1


@dataclass(frozen=True)
class Reset:
    """A new stream."""


@dataclass(frozen=True)
class Rebase:
    """By `shift` at most; None: each row by what it has read, as `stream` does."""

    shift: int | None


@dataclass(frozen=True)
class Refused:
    """A step that goes wrong in the way `how` says, or is abandoned once announced; `rows` as in `Step`."""

    how: str
    tokens: int
    hidden: tuple[int, int, int] = (0, 0, 0)
    rows: int = 0


Op = Step | Crop | Rows | Repeat | Twin | Reset | Rebase | Refused


@dataclass(frozen=True)
class Setup:
    family: str
    policy: Policy
    budgets: tuple[int, int] | tuple[float, float]
    positions: str
    rows: int

    @property
    def uneven(self) -> bool:
        """Whether layers hold different numbers of tokens."""
        return self.budgets[0] != self.budgets[1]


WRONG = (
    *("too wide", "too narrow", "no tokens", "more rows", "more rows, masked", "mask of more rows"),
    *("another past", "far positions", "odd positions", "another model", "unannounced", "abandoned"),
)
_bits = st.just(0) | st.integers(0, MOST_TOKENS).map(lambda pads: 2**pads - 1) | st.integers(0, 2**MOST_TOKENS - 1)
_hidden = st.just((0, 0, 0)) | st.tuples(_bits, _bits, _bits)
_tokens = st.just(1) | st.integers(1, MOST_TOKENS)
_wider = st.sampled_from((0, 0, 0, 2, 3))
_positions = st.sampled_from(("counted", "counted", "stream", "told", "absolute"))
_some = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
OPS: dict[str, st.SearchStrategy[Op]] = {
    "step": st.builds(
        Step,
        tokens=_tokens,
        hidden=_hidden,
        masked=st.booleans(),
        more=st.booleans(),
        positions=_positions,
        rows=_wider,
    ),
    "plain": st.builds(Step, tokens=_tokens, positions=st.sampled_from(("counted", "stream"))),
    "crop": st.builds(Crop, tokens=st.integers(-1, 3) | st.integers(1, 14)),
    "rows": st.builds(Rows, rows=_some, how=st.sampled_from(("reorder", "select", "mask"))),
    "repeat": st.builds(Repeat, times=st.integers(1, 3)),
    "twin": st.builds(Twin, how=st.sampled_from(("fork", "deepcopy", "pickle", "file")), times=st.integers(1, 2)),
    "reset": st.just(Reset()),
    "rebase": st.builds(Rebase, shift=st.none() | st.integers(-5, 40)),
    "refused": st.builds(Refused, how=st.sampled_from(WRONG), tokens=_tokens, hidden=_hidden, rows=_wider),
}
OFTEN = ["step"] * 8 + ["plain"] * 5 + ["rows", "twin", "rebase", "refused", "crop"] * 2 + ["repeat", "reset"]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    first = draw(st.integers(1, 8) | st.just(8))  # as long as nothing was evicted, tokens can be taken back
    budgets: Any = draw(st.sampled_from(((first, first), (first, first), (first, 9 - first), (0.5, 0.5))))
    kind = draw(st.integers(0, 5))
    policy: Policy = Scattered() if kind == 5 else Window()
    if kind < 4 and budgets[0] >= 1:
        policy = StreamingLLM(min(kind, budgets[0] - 1, budgets[1] - 1))
    family, positions = draw(st.sampled_from(list(INTERLEAVED))), draw(st.sampled_from(("cache", "original")))
    return Setup(family, policy, budgets, positions, draw(st.integers(1, 3)))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Op]]:
    """Which of the caches it is done to, counted round and round, and what is done."""
    kinds = draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(OFTEN)), min_size=1, max_size=12))
    return [(which, draw(OPS[kind])) for which, kind in kinds]


@settings(max_examples=300, **SEARCH)
@given(setups(), histories())
def test_whatever_is_done_it_is_the_cache_of_lists(setup: Setup, history: list[tuple[int, Op]]) -> None:
    drive(setup, history)


@pytest.mark.slow
@pytest.mark.exhaustive
@settings(max_examples=10_000, **SEARCH)
@given(setups(), histories())
def test_ten_thousand_times_it_is_the_cache_of_lists(setup: Setup, history: list[tuple[int, Op]]) -> None:
    drive(setup, history)


# what it is done to


@functools.cache
def tiny(family: str) -> Any:
    return build(family)


@functools.cache
def frequencies(family: str) -> Tensor:
    return next(buffer for name, buffer in tiny(family).named_buffers() if name.endswith("inv_freq")).double()


@functools.cache
def head_dim(family: str) -> int:
    config = tiny(family).config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def worth(policy: Policy, number: int) -> int:
    if isinstance(policy, StreamingLLM):
        return int(number < policy.num_sinks)
    return (number * 7919 + 5) % 13 % 6 if isinstance(policy, Scattered) else 0


@dataclass
class Pair:
    """A cache and its twin of lists, to which the same is done."""

    setup: Setup
    cache: SinkCache
    lists: ListCache
    names: Iterator[int]
    noise: torch.Generator
    rebased: bool = False  # keys may have been turned for good
    unsure: bool = False  # of the frame: a pass that came to nothing may have set it back to 0
    orphan: bool = False  # comes from a pickle, and so does not know its model

    def batch(self, wider: int = 0) -> int:
        """Rows of the next step; `wider`: of a batch that may go on from a single row."""
        held = len(self.lists.rows)
        return held if held > 1 else wider or held or self.setup.rows

    def before(self, batch: int) -> list[Row]:
        """The rows as a batch of `batch` finds them."""
        rows = self.lists.rows or [self.lists.empty_row()]
        return [rows[row % len(rows)] for row in range(batch)]


def drive(setup: Setup, history: list[tuple[int, Op]]) -> None:
    """Does it all, then a few steps more, which show what keys and values every cache has come to hold."""
    budget: Any = list(setup.budgets) if setup.uneven else setup.budgets[0]
    cache = SinkCache(tiny(setup.family), setup.policy, budget, setup.positions)  # type: ignore[arg-type]
    lists = ListCache(setup.budgets, functools.partial(worth, setup.policy), setup.positions == "cache")
    pairs = [Pair(setup, cache, lists, itertools.count(1), torch.Generator().manual_seed(0))]
    for which, op in history:
        do(pairs, which % len(pairs), op)
        for pair in pairs:
            check(pair)
    for pair in pairs:
        check_stored(pair)
    for tokens in (1, 3, 1):
        for pair in pairs:
            step(pair, Step(tokens, positions="stream"))
    for pair in pairs:
        check(pair)


def do(pairs: list[Pair], which: int, op: Op) -> None:
    pair = pairs[which]
    match op:
        case Step():
            step(pair, op)
        case Crop():
            crop(pair, op.tokens)
        case Rows():
            choose(pair, op)
        case Repeat(times) if len(pair.lists.rows) * times <= MOST_ROWS:
            pair.cache.batch_repeat_interleave(times)
            pair.lists.repeat(times)
        case Rebase(shift):
            rebase(pair, shift)
        case Refused():
            refused(pair, op)
        case Reset():
            pair.cache.reset()
            pair.lists.reset()
            pair.rebased = pair.unsure = False
        case Twin():
            pairs.append(twin(pair, op))
            if len(pairs) > MOST_CACHES:
                pairs.remove(pair)


# steps


def step(pair: Pair, op: Step) -> None:
    real = text(op.hidden, pair.batch(op.rows), op.tokens)
    past = pair.before(len(real))
    hides = not all(map(all, real))
    mask = masked(past, real) if op.masked or hides else None
    positions = None if op.positions == "stream" and hides else told(pair, op.positions, real)
    given = tiny(pair.setup.family), torch.ones(len(real), op.tokens, dtype=torch.int64), mask, positions
    ends_in_pads = any((row.own > 0 or any(new)) and not new[-1] for row, new in zip(past, real, strict=True))
    pair.cache.unfinished = op.more
    if hides and (pair.setup.uneven or (ends_in_pads and not op.more)):
        with pytest.raises(ValueError, match=r"hides the last token|budgets that differ"):
            pair.cache.begin_step(*given)
        pair.unsure = True
    else:
        changes = pair.cache.begin_step(*given)
        pair.lists.begin(len(real))
        places = checked_positions(pair, changes.get("position_ids", positions), real)
        attend(pair, real, changes.get("attention_mask", mask), places)
    pair.cache.unfinished = False


def text(hidden: tuple[int, int, int], rows: int, columns: int) -> list[list[bool]]:
    """Row by row, which of the new columns are text."""
    return [[not hidden[row % 3] >> column & 1 for column in range(columns)] for row in range(rows)]


def masked(past: list[Row], real: list[list[bool]]) -> Tensor:
    """The mask that transformers is given: of the columns read and the new ones."""
    return torch.tensor([row.shown + new for row, new in zip(past, real, strict=True)]).long()


def told(pair: Pair, how: str, real: list[list[bool]]) -> Tensor | None:
    """The positions that the model is called with."""
    if how == "counted":
        return None
    if how == "stream":
        return pair.cache.next_positions(len(real[0])).expand(len(real), -1)
    rows = []
    for row, new in zip(pair.before(len(real)), real, strict=True):
        frame = 0 if pair.unsure or how == "absolute" else row.frame
        first = FIRST if row.own == 0 else row.own - frame
        rows.append([max(first + count - 1, 0) for count in itertools.accumulate(new)])
    return torch.tensor(rows)


def checked_positions(pair: Pair, positions: Tensor | None, real: list[list[bool]]) -> list[list[int]]:
    """Where the model puts its new tokens; asserts that in each row they go on from what was read."""
    if positions is None:
        first = pair.cache.get_seq_length()
        positions = torch.arange(first, first + len(real[0]))[None]
    places = positions.expand(len(real), -1).tolist()
    for row, all_of_row, new in zip(pair.lists.rows, places, real, strict=True):
        own = list(itertools.compress(all_of_row, new))
        if own:
            assert own == list(range(own[0], own[0] + len(own)))
            assert row.own - own[0] in (0, row.frame) or (row.own == 0 and own[0] == FIRST)
            pair.rebased |= row.own - own[0] != row.frame
    return places


def attend(pair: Pair, real: list[list[bool]], mask: Tensor | None, positions: list[list[int]]) -> None:
    """A pass through both; what the caller's tensors become afterwards is none of the cache's business."""
    keys, values = drawn(pair, len(real), len(real[0]))
    shown = visible(pair.cache, len(real), len(real[0]), mask)
    given = [(each.clone(), other.clone()) for each, other in zip(keys, values, strict=True)]
    attended = [pair.cache.update(*each, layer) for layer, each in enumerate(given)]
    pair.cache.end_step()
    expected = pair.lists.read(real, positions, keys, values)
    for layer in range(LAYERS):
        width = attended[layer][0].shape[2]
        assert width == shown.shape[2] or (pair.setup.uneven and width < shown.shape[2])
        by_row = shown[:, :, shown.shape[2] - width :].tolist()
        check_seen(expected[layer], attended[layer][1][:, 0, :, 0].tolist(), real, by_row)
        check_keys(pair, expected[layer], *attended[layer])
    for tensor in itertools.chain(*given):
        tensor.fill_(torch.nan)
    pair.unsure = False


def drawn(pair: Pair, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """New keys and values, `[layers, rows, heads, columns, channels]`."""
    channels = head_dim(pair.setup.family)
    shape = (LAYERS, rows, HEADS, columns, channels + VALUE_DIM)
    both = torch.randn(shape, generator=pair.noise, dtype=torch.float64)
    names = torch.tensor([next(pair.names) for _ in range(rows * columns)])
    both[..., channels] = names.reshape(1, rows, 1, columns)
    return both[..., :channels], both[..., channels:]


def visible(cache: SinkCache, batch: int, q_len: int, mask: Tensor | None) -> Tensor:
    """`[batch, q_len, keys]`: which keys each query may see, by transformers' rule."""
    width, first = cache.get_mask_sizes(q_len, 0)
    keys = torch.arange(first, first + width)
    causal = keys <= (torch.arange(q_len) + cache.get_query_offset(0))[:, None]
    if mask is None:
        return causal.expand(batch, -1, -1)
    assert mask.shape == (batch, first + width)
    return causal & mask.bool()[:, None, keys]


# comparisons

Expected = list[list[tuple[Token, int]]]  # row by row, the tokens that the last query sees and how far each key moved


def check_seen(
    expected: Expected, names: list[list[float]], real: list[list[bool]], shown: list[list[list[bool]]]
) -> None:
    """Each query that is text sees what was held and its own past, and each of these once."""
    for tokens, columns, new, queries in zip(expected, names, real, shown, strict=True):
        wanted = [float(token.value[0, 0]) for token, _ in tokens]
        more = len(wanted) - sum(new)
        for sees in itertools.compress(queries, new):
            more += 1
            assert sorted(itertools.compress(columns, sees)) == sorted(wanted[:more])


def check_keys(pair: Pair, expected: Expected, keys: Tensor, values: Tensor) -> None:
    """Each key is turned to where it is to be read; nothing else of it, and of its value, has changed."""
    assert bool(keys.isfinite().all() and values.isfinite().all())  # a hidden NaN would be seen in the sum
    names = values[:, 0, :, 0].tolist()
    places = [(row, names[row].index(float(t.value[0, 0])), t, move) for row, e in enumerate(expected) for t, move in e]
    if not places:
        return  # the step was padding in every row
    rows, slots, tokens, moves = (list(each) for each in zip(*places, strict=True))
    family = pair.setup.family
    wanted = turned(torch.stack([token.key for token in tokens]), moves, frequencies(family), INTERLEAVED[family])
    errors = (keys[rows, :, slots] - wanted).abs().amax(dim=(1, 2)).tolist()
    for move, error in zip(moves, errors, strict=True):
        assert error <= (EXACTLY if move != 0 or pair.rebased else 0), f"a key to be moved by {move} is elsewhere"
    assert torch.equal(values[rows, :, slots], torch.stack([token.value for token in tokens]))


def check(pair: Pair) -> None:
    """What can be asked of a cache between steps; `kept` is a copy."""
    cache, lists = pair.cache, pair.lists
    assert cache.seen == lists.seen
    for layer in range(LAYERS):
        assert cache.get_seq_length(layer) == lists.seen
        kept, expected = cache.kept(layer), [[row] * HEADS for row in lists.kept(layer)]
        if not lists.rows:
            assert kept.numel() == 0
            continue
        assert kept.tolist() == expected
        kept.fill_(-99)
        assert cache.kept(layer).tolist() == expected


def check_stored(pair: Pair) -> None:
    """Keys can be had as they arrived, unless they were turned for good."""
    if pair.rebased or not pair.lists.rows:
        return
    for index in range(LAYERS):
        layer: Any = pair.cache.layers[index]
        for row, stored in zip(pair.lists.rows, layer.stored_keys(), strict=True):
            if held := [token.key for token in row.held[index]]:
                assert torch.equal(stored[:, stored.shape[1] - len(held) :], torch.stack(held, dim=1))


# what is not a step


def crop(pair: Pair, tokens: int) -> None:
    if not 0 <= tokens <= pair.lists.seen or (tokens > 0 and not pair.lists.whole()):
        with pytest.raises(ValueError, match=r"cannot take back|as a negative number"):
            pair.cache.crop(-tokens)
        return
    pair.cache.crop(-tokens)
    if tokens and any(row.own - tokens < row.frame for row in pair.lists.rows):
        pair.rebased = True
        for row in pair.lists.rows:
            row.frame = 0  # positions would be negative
    pair.lists.crop(tokens)


def choose(pair: Pair, op: Rows) -> None:
    held = len(pair.lists.rows)
    if not held:
        return
    rows = [row % held for row in op.rows]
    if op.how == "reorder":
        rows = [rows[place % len(rows)] for place in range(held)]
        pair.cache.reorder_cache(torch.tensor(rows))
    elif op.how == "select":
        pair.cache.batch_select_indices(torch.tensor(rows))
    else:
        rows = sorted(set(rows))
        pair.cache.batch_select_indices(torch.tensor([row in rows for row in range(held)]))
    pair.lists.select(rows)


def rebase(pair: Pair, shift: int | None) -> None:
    rows = pair.lists.rows
    if not rows:
        return
    if shift is None:
        pair.cache.rebase([book.seen for book in pair.cache.ledgers[0].books])
    else:
        shift = min(shift, *(row.own for row in rows))  # or positions would be negative
        pair.cache.rebase(shift)
    for row in rows:
        row.frame = row.own if shift is None else shift
    pair.rebased, pair.unsure = True, False


def twin(pair: Pair, op: Twin) -> Pair:
    times = op.times if op.how == "fork" and len(pair.lists.rows) * op.times <= MOST_ROWS else 1
    cache = pair.cache
    if op.how == "fork":
        cache = cache.fork(times)
    elif op.how == "pickle":
        cache = pickle.loads(pickle.dumps(cache))
    elif op.how == "deepcopy" or pair.unsure or pair.orphan:  # these cannot be saved
        cache = copy.deepcopy(cache)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            cache.save(path)
            cache = SinkCache.load(path, tiny(pair.setup.family), pair.setup.policy)
    orphan = pair.orphan or op.how == "pickle"
    lists = pair.lists.fork()
    lists.repeat(times)
    return Pair(pair.setup, cache, lists, pair.names, pair.noise, pair.rebased, pair.unsure, orphan)


# steps that go wrong


def refused(pair: Pair, op: Refused) -> None:
    """The step is refused, or abandoned once it was announced; `drive` sees to it that nothing has changed."""
    if op.how == "unannounced":
        if pair.unsure:
            return  # a pass was announced that came to nothing
        with pytest.raises(RuntimeError, match="not announced"):
            update_first(pair, pair.batch(), op.tokens)
        return
    given = wrong(pair, op)
    if given is None:
        return
    rows, q_len = given[1].shape
    if op.how == "abandoned":
        pair.cache.begin_step(*given)
        if pair.lists.rows:
            pair.lists.begin(rows)
    else:
        with pytest.raises(ValueError):  # noqa: PT011, PT012 - of many kinds, at the door or by the first layer
            pair.cache.begin_step(*given)
            update_first(pair, rows, q_len)
    pair.unsure = True


def update_first(pair: Pair, rows: int, columns: int) -> None:
    keys, values = drawn(pair, rows, columns)
    pair.cache.update(keys[0], values[0], 0)


def wrong(pair: Pair, op: Refused) -> tuple[Any, Tensor, Tensor | None, Tensor | None] | None:
    """Model, tokens, mask and positions of a step that is wrong in one way; None where that way is not there."""
    rows, q_len, seen = pair.batch(op.rows), op.tokens, pair.lists.seen
    real, past = text(op.hidden, rows, q_len), pair.before(rows)
    family, mask, positions = pair.setup.family, masked(past, real), None
    begun = min(row.own for row in past) > 0
    if op.how in ("too wide", "too narrow"):
        mask = torch.ones(rows, seen + q_len + (1 if op.how == "too wide" else -1), dtype=torch.int64)
    elif op.how == "no tokens":
        q_len = 0
    elif "more rows" in op.how and len(pair.lists.rows) > 1:
        mask = None if op.how == "more rows" else torch.cat([mask, mask[:1]])
        rows += op.how != "mask of more rows"
    elif op.how == "another past" and seen > 0:
        mask[-1, 0] = 1 - mask[-1, 0]
    elif op.how in ("far positions", "odd positions") and begun:
        positions = told(pair, "absolute", real)
        assert positions is not None
        positions[0, int(op.how == "odd positions") * (q_len - 1) :] += 50
        if not any(real[0]) or (op.how == "odd positions" and sum(real[0]) < 2) or not real[0][-1]:
            return None
    elif op.how == "another model":
        family = "llama" if family != "llama" else "glm"
    elif op.how != "abandoned" or pair.setup.uneven or not all(new[-1] for new in real):
        return None
    return tiny(family), torch.ones(rows, q_len, dtype=torch.int64), mask, positions
