"""Layers that keep what a policy scores, against loops over positions, and whole models against themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import score_oracle as oracle
import torch
from conftest import VOCABULARY, build
from jaxtyping import Float
from score_oracle import Scorer, Stream
from torch import Tensor, nn

from sinkcache import SinkCache, prefill, stream
from sinkcache.lanes import Lanes
from sinkcache.observe import Kernel, attention, from_recent
from sinkcache.peers import Peers
from sinkcache.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LagKV,
    Phases,
    Protect,
    Random,
    SnapKV,
    StreamingLLM,
)
from sinkcache.policy import Entries, Policy, Watch
from sinkcache.positions import Rotation
from sinkcache.scored import ScoredLayer
from sinkcache.tally import Tallies, Tally

Models = Callable[..., nn.Module]

INV_FREQ = [1.0, 0.1]
BUDGET = 12
CASES: list[tuple[str, Policy, Scorer]] = [
    ("h2o", H2O(3), oracle.h2o(3)),
    ("h2o-decay", H2O(3, half_life=2), oracle.h2o(3, decay=0.5**0.5)),
    ("h2o-mean", H2O(2, 2, reduce="mean"), oracle.h2o(2, 2, mean=True)),
    ("h2o-decayed-mean", H2O(2, half_life=3, reduce="mean"), oracle.h2o(2, decay=0.5 ** (1 / 3), mean=True)),
    ("h2o-max", H2O(2, group="max"), oracle.h2o(2, group="max")),
    ("snapkv", SnapKV(4, 3), oracle.snapkv(4, 3)),
    ("snapkv-max", SnapKV(4, pooling="none", reduce="max"), oracle.snapkv(4, pooling="none", reduce="max")),
    ("tova", TOVA(), oracle.tova()),
    ("tova-head", TOVA("head"), oracle.tova("head")),
    ("expected", ExpectedAttention(5, 2), oracle.expected_attention(5, 2)),
    ("keydiff", KeyDiff(), oracle.keydiff()),
    ("knorm", Knorm(1, 2), oracle.knorm(1, 2)),
    ("lagkv", LagKV(2, 4), oracle.lagkv(2, 4)),
    ("rkv", RKV(3, 3), oracle.rkv(3, 3, 0.1)),
    ("protect", Protect(KeyDiff(), 2, 3), oracle.protect(oracle.keydiff(), 2, 3)),
    ("phases", Phases(SnapKV(3, 3), H2O(2)), oracle.phases(oracle.snapkv(3, 3), oracle.h2o(2))),
]
every_case = pytest.mark.parametrize(
    ("policy", "scorer"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
CHUNKINGS = {"once": [40], "tokens": [1] * 40, "sevens": [7, 7, 7, 7, 7, 5], "mixed": [20, 1, 1, 1, 6, 1, 1, 9]}


@dataclass(frozen=True)
class Noted(Policy):
    """What `policy` scores, put down by position."""

    policy: Policy
    notes: Any

    def watch(self) -> Watch:
        return self.policy.watch()

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        scores = self.policy.score(entries)
        for row in range(len(scores)):
            heads = zip(entries.positions[row].tolist(), scores[row].tolist(), strict=True)
            self.notes[row].append([{p: s for p, s in zip(*head, strict=True) if p >= 0} for head in heads])
        return scores


def texts(rows: int, tokens: int = 40, seed: int = 0) -> list[Stream]:
    """Rows that differ: 4 query heads on 2 key heads, keys and queries turned by half of their 6 channels' pairs."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        bare, keys, values = (rng.normal(size=(heads, tokens, 6)) for heads in (4, 2, 2))
        one = oracle.new_stream(bare, keys, values, bare=bare, inv_freq=INV_FREQ)
        turns = np.array([oracle.turn(one, position) for position in range(tokens)])
        one.Q, one.K = np.einsum("tij,htj->hti", turns, bare), np.einsum("tij,htj->hti", turns, keys)
        found.append(one)
    return found


class Reader:
    """Reads rows, padded in front by `pads` columns, into one layer as a model's attention would."""

    def __init__(self, policy: Policy, budget: int, rows: list[Stream], pads: list[int], every: int = 1) -> None:
        self.rows, self.pads, self.lanes = rows, pads, Lanes()
        self.ledger = Tallies(Tally(policy, budget, None, every), self.lanes)
        rotation = Rotation(torch.tensor(INV_FREQ, dtype=torch.float64), "half")
        self.layer = ScoredLayer(self.ledger, rotation, False, policy, 0, in_cache=False)
        self.column = 0

    def read(self, q_len: int) -> Tensor:
        """The step's output, `[batch, num_heads, q_len, value_dim]`."""
        columns = torch.arange(self.column, self.column + q_len)
        self.column += q_len
        mask = torch.stack([torch.arange(self.column) >= pad for pad in self.pads])
        parents = self.lanes.announce(len(self.rows), q_len, mask, ends=False) if any(self.pads) else None
        if parents is not None:
            self.ledger.regroup(parents)
        shown = self.ledger.shown(q_len)[self.lanes.of] if self.lanes.padded else None
        states = [self._columns(name, columns) for name in "QKV"]
        keys, values = self.layer.update(states[1], states[2])
        causal = torch.ones(q_len, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - q_len)
        full = None if shown is None else (shown[:, None] & causal)[:, None]
        output, received = (
            attention(
                states[0],
                keys,
                values,
                full,
                Kernel(6**-0.5),
                self.layer.weights() if self.layer.watch.mass else None,
                group=self.layer.watch.group,
            )
            if self.layer.reads_attention
            else (None, None)
        )
        if self.layer.reads_attention:
            self.layer.observe(states[0], received, Kernel(6**-0.5))
        else:
            output, _ = attention(states[0], keys, values, full, Kernel(6**-0.5))
        assert output is not None
        return output

    def _columns(self, name: str, columns: Tensor) -> Tensor:
        made = []
        for row, pad in zip(self.rows, self.pads, strict=True):
            states = torch.from_numpy(getattr(row, name))
            junk = torch.full((states.shape[0], pad, states.shape[2]), 3.0, dtype=torch.float64)
            made.append(torch.cat([junk, states], dim=1)[:, columns])
        return torch.stack(made)


def held(layer: ScoredLayer, row: int) -> list[list[int]]:
    return [[position for position in head if position >= 0] for head in layer.kept()[row].tolist()]


# a layer by itself


@every_case
@pytest.mark.parametrize("evict_every", [1, 4])
@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
def test_three_rows_keep_and_score_what_loops_do(
    policy: Policy, scorer: Scorer, chunks: list[int], evict_every: int
) -> None:
    notes: list[list[Any]] = [[], [], []]
    reader = Reader(Noted(policy, notes), BUDGET, texts(3), [0, 0, 0], evict_every)
    kept = []
    for chunk in chunks:
        reader.read(chunk)
        kept.append([held(reader.layer, row) for row in range(3)])
    for row, one in enumerate(texts(3)):
        expected, decisions = oracle.library(one, chunks, BUDGET, scorer, evict_every)
        assert [step[row] for step in kept] == expected
        assert len(notes[row]) == len(decisions)
        for mine, theirs in zip(notes[row], decisions, strict=True):
            for head in range(2):
                assert mine[head].keys() == theirs[head].keys()
                torch.testing.assert_close(
                    [mine[head][p] for p in theirs[head]], list(theirs[head].values()), rtol=1e-6, atol=1e-6
                )


@every_case
@pytest.mark.parametrize("evict_every", [1, 3])
def test_padded_rows_keep_what_they_would_alone(policy: Policy, scorer: Scorer, evict_every: int) -> None:
    pads, chunks = [0, 9, 4], [14, 1, 1, 1, 8, 1, 1, 1, 3, 1]  # 32 columns
    rows = [texts(1, 32 - pad, seed)[0] for seed, pad in enumerate(pads)]
    reader = Reader(policy, BUDGET, rows, pads, evict_every)
    kept = []
    for chunk in chunks:
        reader.read(chunk)
        kept.append([held(reader.layer, row) for row in range(3)])
    for row, pad in enumerate(pads):
        alone = [max(0, chunk - max(0, pad - sum(chunks[:index]))) for index, chunk in enumerate(chunks)]
        expected, _ = oracle.library(rows[row], [each for each in alone if each], BUDGET, scorer, evict_every)
        assert [step[row] for step, own in zip(kept, alone, strict=True) if own] == expected


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
@pytest.mark.parametrize("policy", [H2O(3), TOVA(), Knorm()], ids=["h2o", "tova", "knorm"])
def test_attends_to_what_is_held_and_to_its_own_past(policy: Policy, chunks: list[int]) -> None:
    reader, (one,) = Reader(policy, BUDGET, texts(1), [0]), texts(1)
    scorer = {"H2O": oracle.h2o(3), "TOVA": oracle.tova(), "Knorm": oracle.knorm()}[type(policy).__name__]
    outputs = torch.cat([reader.read(chunk) for chunk in chunks], dim=2)[0]
    oracle.library(one, chunks, BUDGET, scorer)
    for head in range(2):
        for query, row in enumerate(one.rows[head]):
            for index, own in enumerate(one.group(head)):
                expected = sum(weights[index] * one.V[head, position] for position, weights in row.items())
                np.testing.assert_allclose(outputs[own, query].numpy(), expected, rtol=0, atol=1e-12)


# attention by blocks

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("q_len", [1, 5, 128, 300])
@pytest.mark.parametrize(
    "kernel", [Kernel(0.3), Kernel(0.3, 5.0), Kernel(0.3, None, SINKS)], ids=["plain", "cap", "sinks"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_are_softmax_over_all(kernel: Kernel, q_len: int, masked: bool, group: str) -> None:
    shapes = (2, 4, q_len, 8), (2, 2, q_len + 9, 8), (2, 2, q_len + 9, 5)
    queries, keys, values = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    shown = torch.ones(q_len, q_len + 9, dtype=torch.bool).tril(9).expand(2, 1, -1, -1).clone()
    if masked:
        shown[1, :, :, 2:6] = False
    weights = torch.rand(2, q_len)
    output, received = attention(queries, keys, values, shown if masked else None, kernel, weights, group=group)
    logits = torch.einsum("bhqd,bhkd->bhqk", queries, keys.repeat_interleave(2, 1)) * kernel.scaling
    if kernel.softcap is not None:
        logits = kernel.softcap * torch.tanh(logits / kernel.softcap)
    logits = logits.masked_fill(~shown, -torch.inf)
    if kernel.sinks is not None:
        logits = torch.cat([logits, kernel.sinks.double().reshape(1, 4, 1, 1).expand(2, 4, q_len, 1)], dim=-1)
    probabilities = logits.softmax(-1)[..., : q_len + 9]
    torch.testing.assert_close(output, probabilities @ values.repeat_interleave(2, 1), rtol=0, atol=1e-12)
    grouped = probabilities.unflatten(1, (2, 2))
    merged = grouped.mean(2) if group == "mean" else grouped.amax(2)
    torch.testing.assert_close(received, (merged * weights[:, None, :, None]).sum(2), rtol=0, atol=1e-6)


def test_a_mask_to_add_counts_as_one_to_hide() -> None:
    one, two, three = torch.randn(3, 1, 2, 4, 8).double()
    shown = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, 4, 4).double().masked_fill(~shown, torch.finfo(torch.float64).min)
    results = [attention(one, two, three, mask, Kernel(0.3)) for mask in (shown, added)]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    queries, keys = torch.randn(1, 4, 3, 8).double(), torch.randn(1, 2, 5, 8).double()
    positions = torch.tensor([[[3, 7, 4, 9, -1]] * 2])
    told = from_recent(queries, torch.tensor([[-1, 2, 9]]), keys, positions, Kernel(0.3), Watch(window=3))
    alone = from_recent(queries[:, :, 2:], torch.tensor([[9]]), keys, positions, Kernel(0.3), Watch(window=1))
    assert torch.equal(told, alone)
    torch.testing.assert_close(told.sum(-1), torch.ones(1, 2).double())


# models


@dataclass(frozen=True)
class Told(StreamingLLM):
    """Keeps what StreamingLLM keeps, and asks to be told everything."""

    def watch(self) -> Watch:
        return Watch(mass=True, decay=0.9, window=3, keys=True, values=True, queries=True)


ids = torch.randint(1, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(5))
MIXED = [17, 1, 1, 1, 9, 1, 1, 5, 1, 1, 1, 21]


def read(model: nn.Module, cache: SinkCache, tokens: Tensor, chunks: list[int], **extra: Any) -> Tensor:
    with torch.no_grad():
        passes = [model(input_ids=piece, cache=cache, **extra).logits for piece in tokens.split(chunks, dim=1)]
    return torch.cat(passes, dim=1)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "glm", "cohere", "qwen3", "smollm3"])
def test_scored_layers_compute_what_positional_ones_do(model: Models, family: str, positions: Any) -> None:
    tiny, caches = model(family), []
    for policy in (StreamingLLM(2), Told(2)):
        caches.append(SinkCache(tiny, policy, 12, positions))
    logits = [read(tiny, cache, ids, MIXED) for cache in caches]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)
    bounded = [index for index, layer in enumerate(caches[1].layers) if isinstance(layer, ScoredLayer)]
    assert bounded
    for index in bounded:
        assert torch.equal(*(cache.kept(index) for cache in caches))
        keys = [cache.layers[index].stored_keys() for cache in caches]  # type: ignore[union-attr]
        torch.testing.assert_close(keys[0], keys[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("policy", [H2O(4), SnapKV(4, 3), ExpectedAttention(6, 2), KeyDiff(), Random()])
def test_a_stream_that_is_rebased_computes_the_same(model: Models, policy: Policy, positions: Any) -> None:
    tiny, logits = model("llama"), []
    for rebase_at in (20, 1000):
        cache = SinkCache(tiny, policy, 12, positions)
        logits.append(torch.stack(list(stream(tiny, cache, ids[0].tolist(), rebase_at=rebase_at))))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("policy", [H2O(4, half_life=9), TOVA(), SnapKV(4, 3), ExpectedAttention(6, 2)])
def test_padded_rows_compute_what_they_would_alone(model: Models, policy: Policy, positions: Any) -> None:
    tiny, pad = model("llama"), 9
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :pad] = mask[1, :pad] = 0
    cache, alone, start, logits = SinkCache(tiny, policy, 12, positions), SinkCache(tiny, policy, 12, positions), 0, []
    for chunk in MIXED:
        piece = padded[:, start : start + chunk]
        logits.append(read(tiny, cache, piece, [chunk], attention_mask=mask[:, : start + chunk]))
        start += chunk
    expected = read(tiny, alone, ids[1:, pad:], [MIXED[0] - pad, *MIXED[1:]])
    torch.testing.assert_close(torch.cat(logits, 1)[1:, pad:], expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(cache.kept(1)[1], alone.kept(1)[0])


@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("policy", [H2O(2, half_life=2), H2O(2, reduce="mean"), TOVA(), SnapKV(4, 3), Knorm()])
def test_a_row_with_a_hole_computes_what_it_would_without(model: Models, policy: Policy, evict_every: int) -> None:
    """The hole is longer than a chunk: the row, which is full, sits one out, in which the other has room."""
    tiny, mask = model("llama"), torch.ones_like(ids)
    mask[0, :16] = mask[1, 20:37] = 0
    cache, alone = (SinkCache(tiny, policy, 12, evict_every=evict_every) for _ in range(2))
    got = [prefill(tiny, cache, ids[:, :40], 8, mask[:, :40])[1]]
    for end in range(41, 61):
        got.append(read(tiny, cache, ids[:, end - 1 : end], [1], attention_mask=mask[:, :end])[1, 0])
    expected = read(tiny, alone, torch.cat([ids[1:, :20], ids[1:, 37:]], 1), [8, 8, 4, 3, *[1] * 20])[0, 22:]
    torch.testing.assert_close(torch.stack(got), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(cache.kept(1)[1], alone.kept(1)[0])


def test_layers_without_a_rotation_decide_by_themselves(model: Models) -> None:
    """SmolLM3's fourth layer has none: its keys do not move, those of the others do."""
    tiny = model("smollm3")
    cache, twin = SinkCache(tiny, H2O(3), 12, "cache"), SinkCache(tiny, Protect(H2O(3), 0, 3), 12, "cache")
    for layer in twin.layers:
        layer.peers = Peers([layer])  # type: ignore[union-attr]
    logits = [read(tiny, each, ids, MIXED) for each in (cache, twin)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


def test_positions_may_begin_where_they_like(model: Models) -> None:
    tiny, logits = model("llama"), []
    for first in (0, 5):
        cache = SinkCache(tiny, H2O(3), 12, "original")
        places = torch.arange(first, first + 20).expand(2, -1)
        logits.append(read(tiny, cache, ids[:, :20], [20], position_ids=places))
        logits[-1] = torch.cat([logits[-1], read(tiny, cache, ids[:, 20:40], [1] * 20)], dim=1)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


@every_case
def test_nothing_evicted_is_the_model_itself(model: Models, policy: Policy, scorer: Scorer) -> None:
    tiny = model("llama")
    with torch.no_grad():
        expected = tiny(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(read(tiny, SinkCache(tiny, policy, 70), ids, MIXED), expected, rtol=1e-9, atol=1e-9)


@every_case
def test_copies_files_and_chosen_rows_go_on_as_the_cache_does(
    model: Models, policy: Policy, scorer: Scorer, tmp_path: Any
) -> None:
    tiny, cache = model("llama"), SinkCache(model("llama"), policy, BUDGET)
    read(tiny, cache, ids[:, :30], [20, 1, 1, 8])
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded, fork, swapped = SinkCache.load(path, tiny, policy), cache.fork(2), cache.fork()
    swapped.reorder_cache(torch.tensor([1, 0]))
    rest = [1, 1, 10, 1, 1, 16]
    expected = read(tiny, cache, ids[:, 30:], rest)
    assert torch.equal(read(tiny, loaded, ids[:, 30:], rest), expected)
    assert torch.equal(read(tiny, swapped, ids[:, 30:].flip(0), rest), expected.flip(0))
    doubled = read(tiny, fork, ids[:, 30:].repeat_interleave(2, 0), rest)
    torch.testing.assert_close(doubled, expected.repeat_interleave(2, 0), rtol=1e-9, atol=1e-9)
    assert torch.equal(loaded.kept(1), cache.kept(1))


def test_prefill_and_generate_go_on_from_one_another(model: Models) -> None:
    tiny, outputs = model("llama"), []
    for policy in (H2O(4), SnapKV(4, 3), TOVA()):
        cache = SinkCache(tiny, policy, 12)
        prefill(tiny, cache, ids[:1, :40], chunk=16)
        outputs.append(tiny.generate(ids[:1], cache=cache, max_new_tokens=30, do_sample=False))  # type: ignore[operator]
        assert cache.kept(0).shape[-1] == 12
        assert cache.seen == 89
    assert len({tuple(output[0].tolist()) for output in outputs}) > 1


def test_beams_keep_the_scores_of_their_own_past(model: Models) -> None:
    tiny = model("llama")
    alone = SinkCache(tiny, H2O(3), 10)
    expected = read(tiny, alone, ids[1:, :40], [20] + [1] * 20)[:, 22:]
    cache = SinkCache(tiny, H2O(3), 10)
    read(tiny, cache, ids[:, :22], [20, 1, 1])
    cache.reorder_cache(torch.tensor([1, 1]))
    logits = read(tiny, cache, ids[1:, 22:40].expand(2, -1), [1] * 18)
    torch.testing.assert_close(logits, expected.expand(2, -1, -1), rtol=1e-9, atol=1e-9)


def test_rows_with_budgets_of_their_own_stay_within_them(model: Models) -> None:
    """A share of the prompt is another number of tokens in each row of a padded batch."""
    tiny, mask = model("llama"), torch.ones_like(ids)
    mask[1, :10] = 0
    for policy in (H2O(2), Knorm(), TOVA(), SnapKV(2, 3)):
        cache = SinkCache(tiny, policy, 0.5)
        for end in range(20, 32):
            piece = ids[:, :20] if end == 20 else ids[:, end - 1 : end]
            read(tiny, cache, piece, [piece.shape[1]], attention_mask=mask[:, :end])
        assert (cache.kept(0) >= 0).sum(-1).tolist() == [[10, 10], [5, 5]]


def test_a_row_that_begins_later_makes_room_for_its_share(model: Models) -> None:
    tiny, mask = model("llama"), torch.ones_like(ids)
    mask[1, :8] = 0
    for policy in (H2O(2), Knorm(), SnapKV(2, 3)):
        cache = SinkCache(tiny, policy, 0.5)
        for start, end in [(0, 8), (8, 38), (38, 39), (39, 60)]:
            read(tiny, cache, ids[:, start:end], [end - start], attention_mask=mask[:, :end])
        assert (cache.kept(0) >= 0).sum(-1).tolist() == [[4, 4], [15, 15]]


def test_bytes_are_keys_values_positions_and_mass() -> None:
    tiny = build("llama", torch.float32)
    cache = SinkCache(tiny, H2O(4), 16)
    read(tiny, cache, ids[:, :32], [30, 1, 1])
    slots = 2 * 2 * 2 * 16  # layers, rows, key heads, slots
    assert cache.nbytes == slots * (2 * 16 * 4 + 4 + 4)


def test_the_newest_token_of_a_step_stays_whatever_the_policy_says(model: Models) -> None:
    @dataclass(frozen=True)
    class Oldest(Policy):
        def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
            return -entries.positions.float()

    for every in (1, 3):
        cache, tiny = SinkCache(model("llama"), Oldest(), 8, evict_every=every), model("llama")
        for chunk in (20, 1, 1, 7, 1):
            read(tiny, cache, ids[:, :chunk], [chunk])
            assert (cache.kept(0)[..., -1] == cache.seen - 1).all()


@pytest.mark.parametrize("first", [1, 2, 20])
@pytest.mark.parametrize("policy", [H2O(3), H2O(3, half_life=4), TOVA(), Knorm()], ids=repr)
def test_layers_together_decide_as_they_do_alone(model: Models, policy: Policy, first: int) -> None:
    tiny = model("smollm3")  # four layers
    caches = [SinkCache(tiny, policy, 12, "original") for _ in range(2)]
    for layer in caches[1].layers:
        layer.peers = Peers([layer])  # type: ignore[union-attr]
    for text in (ids, ids.flip(1)):
        logits = [read(tiny, each, text[:, :40], [first] + [1] * (40 - first)) for each in caches]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)
        for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(one.fields, other.fields, rtol=1e-6, atol=1e-9)  # type: ignore[union-attr]
        for each in caches:
            each.reset()


def test_bytes_of_the_layers_add_up(model: Models) -> None:
    """Layers that decide together share the storage of what they know of their tokens."""
    tiny = model("llama")
    for policy in (H2O(3), AdaKV(H2O(3)), SnapKV(4, 3)):
        cache = SinkCache(tiny, policy, 12)
        read(tiny, cache, ids[:, :22], [20, 1, 1])
        told = [int(row.split()[-1]) for row in cache.describe().splitlines()[1:]]
        assert sum(told) == cache.nbytes
