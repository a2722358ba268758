"""Layers whose heads compete: kept sets and whole models against loops, rows and files against themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import score_oracle as oracle
import torch
from conftest import build
from jaxtyping import Float
from score_oracle import Array, Scorer, Stream
from test_scored import CASES, CHUNKINGS, INV_FREQ, MIXED, Noted, Reader, held, ids, read, texts
from torch import Tensor, nn

from sinkcache import SinkCache, prefill, stream
from sinkcache.lanes import Lanes
from sinkcache.observe import Kernel, attention
from sinkcache.policies import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, Knorm, Phases, Protect, SnapKV
from sinkcache.policy import Entries, Policy, Watch
from sinkcache.positions import Rotation
from sinkcache.ragged import RaggedLayer
from sinkcache.tally import Tallies, Tally

Models = Callable[..., nn.Module]

BUDGET = 12
every_case = pytest.mark.parametrize(
    ("policy", "scorer"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
both_conventions = pytest.mark.parametrize("positions", ["original", "cache"])


@dataclass(frozen=True)
class NotedAcross(Noted):
    """The same of heads that compete."""

    floor: float = 0.2
    across_heads: ClassVar[bool] = True


class RaggedReader(Reader):
    """Reads rows into a layer whose heads compete, under the mask that the layer asks for."""

    def __init__(self, policy: Policy, budget: int, rows: list[Stream], pads: list[int], every: int = 1) -> None:
        self.rows, self.pads, self.lanes, self.column = rows, pads, Lanes(), 0
        self.ledger = Tallies(Tally(policy, budget, None, every), self.lanes)
        rotation = Rotation(torch.tensor(INV_FREQ, dtype=torch.float64), "half")
        self.layer = RaggedLayer(self.ledger, rotation, False, policy, 0, in_cache=False)

    def read(self, q_len: int) -> Tensor:
        columns = torch.arange(self.column, self.column + q_len)
        self.column += q_len
        mask = torch.stack([torch.arange(self.column) >= pad for pad in self.pads])
        parents = self.lanes.announce(len(self.rows), q_len, mask, ends=False) if any(self.pads) else None
        if parents is not None:
            self.ledger.regroup(parents)
        queries, keys, values = (self._columns(name, columns) for name in "QKV")
        keys, values = self.layer.update(keys, values)
        shown = self.layer.mask()
        if shown is None and any(self.pads):
            shown = (mask[:, None, columns] & torch.ones(q_len, q_len, dtype=torch.bool).tril())[:, None]
        weights = self.layer.weights() if self.layer.watch.mass else None
        output, received = attention(
            queries, keys, values, shown, Kernel(6**-0.5), weights, group=self.layer.watch.group
        )
        self.layer.observe(queries, received, Kernel(6**-0.5))
        return output


def across(scorer: Scorer, row: Stream, chunks: list[int], every: int = 1, floor: float = 0.2) -> Any:
    return oracle.library(row, chunks, BUDGET, scorer, every, floor)


# which tokens win


@dataclass(frozen=True)
class Given(Policy):
    """Scores that are given, head by head, for the tokens at positions 0 and on."""

    worth: tuple[tuple[float, ...], ...]

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        worth = torch.tensor(self.worth)[None].expand(len(entries.positions), -1, -1)
        return worth.gather(-1, entries.positions.long().clamp_min(0))


def reduced(worth: list[list[float]], budget: int, floor: float) -> list[list[int]]:
    """Who is held of tokens with these scores, read at once."""
    policy, tokens = AdaKV(Given(tuple(map(tuple, worth))), floor), len(worth[0])
    layer = RaggedLayer(Tallies(Tally(policy, budget, None), Lanes()), None, False, policy, 0, in_cache=False)
    layer.update(torch.randn(1, len(worth), tokens, 4), torch.randn(1, len(worth), tokens, 3))
    layer.observe(torch.randn(1, len(worth), tokens, 4), None, Kernel(1.0))
    return held(layer, 0)


def test_the_worked_example() -> None:
    """`adakv_exact` of the specification, whose scores leave the newest token out of account: here it comes on top."""
    worth = [[0.50, 0.30, 0.10, 0.05, 0.03, 0.02, 9.0], [0.20, 0.19, 0.18, 0.16, 0.14, 0.13, 9.0]]
    assert reduced(worth, 4, 0.5) == [[0, 1, 6], [0, 1, 2, 3, 6]]
    assert reduced(worth, 4, 1.0) == [[0, 1, 2, 6], [0, 1, 2, 6]]
    layer_scores = [dict(enumerate(row[:6])) for row in worth]
    assert oracle.compete(layer_scores, 3, 1) == [[0, 1], [0, 1, 2, 3]]
    policy = AdaKV(H2O(), 0.34)
    layer = RaggedLayer(Tallies(Tally(policy, 3, None), Lanes()), None, False, policy, 0, in_cache=False)
    layer.num_kv_heads = 2
    layer.ledger.books[0].resolve(6)
    scores, positions = torch.tensor(worth)[None, :, :6], torch.arange(6).expand(1, 2, 6)
    kept = layer._winners(scores, positions, 3)[0]
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("worth", "floor", "expected"),
    [
        ([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]], 0.34, [[2, 3, 4], [2, 3, 4]]),  # newer before older
        ([[1, 2, 1, 2, 0], [0, 0, 0, 1, 0]], 0.34, [[1, 2, 3, 4], [3, 4]]),  # newer before older, whatever the head
        ([[0, 3, 1, 0, 0], [0, 3, 1, 3, 0]], 0.34, [[1, 2, 4], [1, 3, 4]]),  # the lower head of equals
        ([[5, 5, 5, 5, 0], [0, 1, 0, 0, 0]], 0.67, [[1, 2, 3, 4], [1, 4]]),  # two in any case
        ([[5, 5, 5, 5, 5], [0, 1, 0, 0, 0]], 0.34, [[0, 1, 2, 3, 4], [4]]),  # the newest in any case
        ([[5, 5, 5, 5, 5], [-np.inf] * 5], 0.34, [[0, 1, 2, 3, 4], [4]]),
        ([[np.inf] * 5, [5, 5, 5, 5, 0]], 0.67, [[1, 2, 3, 4], [3, 4]]),  # before what is never evicted elsewhere
    ],
)
def test_ties_floors_and_the_newest(worth: Any, floor: float, expected: list[list[int]]) -> None:
    assert reduced([list(map(float, row)) for row in worth], 3, floor) == expected


@every_case
@pytest.mark.parametrize(
    ("chunks", "evict_every"),
    [*((chunks, 1) for chunks in CHUNKINGS.values()), (CHUNKINGS["mixed"], 4)],
    ids=[*CHUNKINGS, "mixed-every-4"],
)
def test_two_rows_keep_and_score_what_loops_do(
    policy: Policy, scorer: Scorer, chunks: list[int], evict_every: int
) -> None:
    notes: list[list[Any]] = [[], []]
    reader, kept = RaggedReader(NotedAcross(policy, notes), BUDGET, texts(2), [0, 0], evict_every), []
    for chunk in chunks:
        reader.read(chunk)
        kept.append([held(reader.layer, row) for row in range(2)])
        total = BUDGET if sum(map(len, kept[-1][0])) == 2 * BUDGET else reader.ledger.books[0].held
        assert all(sum(map(len, row)) == 2 * total for row in kept[-1])
    for row, one in enumerate(texts(2)):
        expected, decisions = across(scorer, one, chunks, evict_every)
        assert [step[row] for step in kept] == expected
        assert len(notes[row]) == len(decisions)
        for mine, theirs in zip(notes[row], decisions, strict=True):
            for head in range(2):
                assert mine[head].keys() == theirs[head].keys()
                torch.testing.assert_close(
                    [mine[head][p] for p in theirs[head]], list(theirs[head].values()), rtol=1e-6, atol=1e-6
                )


@pytest.mark.parametrize("floor", [0.1, 0.5, 0.75, 1])
@pytest.mark.parametrize("budget", [11, 12])
def test_other_floors_and_budgets(floor: float, budget: int) -> None:
    for chunks in CHUNKINGS.values():
        reader, kept = RaggedReader(AdaKV(H2O(3), floor), budget, texts(1), [0]), []
        for chunk in chunks:
            reader.read(chunk)
            kept.append(held(reader.layer, 0))
        assert kept == oracle.library(texts(1)[0], chunks, budget, oracle.h2o(3), floor=floor)[0]


def test_heads_do_hold_different_numbers() -> None:
    """Or the tests here would say nothing."""
    for name, _, scorer in CASES:
        (one,) = texts(1)
        kept, _ = across(scorer, one, CHUNKINGS["sevens"])
        assert any(len(step[0]) != len(step[1]) for step in kept) == (name != "tova")  # whose heads score alike


@every_case
@pytest.mark.parametrize(
    ("evict_every", "chunks"),
    [(1, [14, 1, 1, 1, 8, 1, 1, 1, 3, 1]), (3, [14, 1, 1, 1, 8, 1, 1, 1, 3, 1]), (1, [6, 6, 13, 1, 5, 1])],
    ids=["1", "3", "pads-in-two-chunks"],
)
def test_padded_rows_keep_what_they_would_alone(
    policy: Policy, scorer: Scorer, evict_every: int, chunks: list[int]
) -> None:
    pads = [0, 9, 4]  # of 32 columns
    rows = [texts(1, 32 - pad, seed)[0] for seed, pad in enumerate(pads)]
    reader, kept = RaggedReader(AdaKV(policy, 0.2), BUDGET, rows, pads, evict_every), []
    for chunk in chunks:
        reader.read(chunk)
        kept.append([held(reader.layer, row) for row in range(3)])
    for row, pad in enumerate(pads):
        alone = [max(0, chunk - max(0, pad - sum(chunks[:index]))) for index, chunk in enumerate(chunks)]
        expected, _ = across(scorer, rows[row], [each for each in alone if each], evict_every)
        assert [step[row] for step, own in zip(kept, alone, strict=True) if own] == expected


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
def test_attends_to_what_each_head_holds_and_to_its_own_past(chunks: list[int]) -> None:
    for policy, scorer in ((H2O(3), oracle.h2o(3)), (TOVA(), oracle.tova()), (Knorm(), oracle.knorm())):
        reader, (one,) = RaggedReader(AdaKV(policy, 0.2), BUDGET, texts(1), [0]), texts(1)
        outputs = torch.cat([reader.read(chunk) for chunk in chunks], dim=2)[0]
        across(scorer, one, chunks)
        for head in range(2):
            for query, row in enumerate(one.rows[head]):
                for index, own in enumerate(one.group(head)):
                    expected = sum(weights[index] * one.V[head, position] for position, weights in row.items())
                    np.testing.assert_allclose(outputs[own, query].numpy(), expected, rtol=0, atol=1e-12)


# whole models


@dataclass
class InCache(Stream):
    """Keys and queries are as far from one another as there are tokens between them in their head's cache."""

    bare_keys: Any = None

    def attention(self, head: int, query: int) -> dict[int, Array]:
        seen = [position for position in self.held[head] if position <= query]
        if not seen:
            return {}
        keys = np.array([oracle.turn(self, place) @ self.bare_keys[head, p] for place, p in enumerate(seen)])
        queries = self.bare[self.group(head), query] @ oracle.turn(self, len(seen) - 1).T
        weights = [oracle.softmax(row) for row in queries @ keys.T * self.scale]
        return {position: np.array([row[place] for row in weights]) for place, position in enumerate(seen)}


@torch.no_grad()
def by_loops(
    model: Any, tokens: Tensor, chunks: list[int], scorer: Scorer, floor: float, in_cache: bool
) -> tuple[Tensor, list[list[list[int]]]]:
    """The logits of a llama, and who is held at the end in each layer, with attention by loops over positions."""
    hidden, ends = model.model.embed_tokens(tokens), []
    inv_freq = model.model.rotary_emb.inv_freq.double().numpy()
    for block in model.model.layers:
        normed = block.input_layernorm(hidden)
        projections = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        bare, bare_keys, values = (each(normed).unflatten(-1, (-1, 16)).transpose(0, 1).numpy() for each in projections)
        one = oracle.new_stream(bare, bare_keys, values, bare=bare, inv_freq=inv_freq)
        if in_cache:
            one = InCache(**vars(one), bare_keys=bare_keys)
        else:
            turns = np.array([oracle.turn(one, position) for position in range(len(tokens))])
            one.Q, one.K = np.einsum("tij,htj->hti", turns, bare), np.einsum("tij,htj->hti", turns, bare_keys)
        kept, _ = across(scorer, one, chunks, floor=floor)
        ends.append(kept[-1])
        mixed = np.zeros_like(bare)
        for head, rows in enumerate(one.rows):
            for query, row in enumerate(rows):
                for index, own in enumerate(one.group(head)):
                    mixed[own, query] = sum(weights[index] * values[head, p] for p, weights in row.items())
        hidden = hidden + block.self_attn.o_proj(torch.from_numpy(mixed).transpose(0, 1).flatten(1))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden)), ends


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@both_conventions
@pytest.mark.parametrize("chunks", [[17] + [1] * 43, MIXED], ids=["tokens", "mixed"])
def test_a_model_computes_what_loops_do(chunks: list[int], positions: Any, attention: str) -> None:
    tiny: Any = build("llama")
    tiny.set_attn_implementation(attention)
    cache = SinkCache(tiny, AdaKV(H2O(3), 0.2), BUDGET, positions)
    logits, differ = read(tiny, cache, ids, chunks), 0
    for row in range(2):
        expected, ends = by_loops(tiny, ids[row], chunks, oracle.h2o(3), 0.2, positions == "cache")
        torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)
        for index, end in enumerate(ends):
            assert held(cast(Any, cache.layers[index]), row) == end
            differ += len(end[0]) != len(end[1])
    assert differ > 0


@both_conventions
def test_a_model_computes_what_loops_do_by_its_newest_queries(positions: Any) -> None:
    tiny, policy = build("llama"), AdaKV(SnapKV(4, 3), 0.2)
    cache = SinkCache(tiny, policy, BUDGET, positions)
    logits = read(tiny, cache, ids[:1], MIXED)[0]
    expected, ends = by_loops(tiny, ids[0], MIXED, oracle.snapkv(4, 3), 0.2, positions == "cache")
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert [held(cast(Any, layer), 0) for layer in cache.layers] == ends


@both_conventions
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "glm", "cohere", "qwen3", "smollm3"])
def test_with_all_of_it_guaranteed_heads_are_as_they_were(model: Models, family: str, positions: Any) -> None:
    tiny = model(family)
    for policy in (H2O(4), SnapKV(4, 3), KeyDiff()):
        caches = [SinkCache(tiny, each, BUDGET, positions) for each in (policy, AdaKV(policy, 1.0))]
        one, other = (read(tiny, cache, ids, MIXED) for cache in caches)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        bounded = [index for index, layer in enumerate(caches[1].layers) if isinstance(layer, RaggedLayer)]
        assert bounded
        for index in bounded:
            assert torch.equal(*(cache.kept(index) for cache in caches))
            keys = [cache.layers[index].stored_keys() for cache in caches]  # type: ignore[union-attr]
            torch.testing.assert_close(keys[0], keys[1], rtol=1e-9, atol=1e-9)


def test_a_policy_of_positions_alone_may_compete(model: Models) -> None:
    tiny = model("llama")
    cache = SinkCache(tiny, AdaKV(Given(((1.0,) * 60, (0.0,) * 60)), 0.25), BUDGET)
    read(tiny, cache, ids, MIXED)
    assert (cache.kept(0) >= 0).sum(2).tolist() == [[21, 3]] * 2


def test_one_head_has_none_to_compete_with() -> None:
    for policy in (H2O(4), TOVA(), Knorm()):
        tiny = build("llama", num_key_value_heads=1)
        caches = [SinkCache(tiny, each, BUDGET) for each in (policy, AdaKV(policy))]
        one, other = (read(tiny, cache, ids, MIXED) for cache in caches)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        assert torch.equal(*(cache.kept(1) for cache in caches))


POLICIES = [H2O(4, half_life=9), TOVA("head"), SnapKV(4, 3), ExpectedAttention(6, 2)]


@both_conventions
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("floor", [0.2, 1.0])
def test_padded_rows_compute_what_they_would_alone(model: Models, policy: Policy, positions: Any, floor: float) -> None:
    tiny, pad = model("llama"), 9
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :pad] = mask[1, :pad] = 0
    cache, alone = (SinkCache(tiny, AdaKV(policy, floor), BUDGET, positions) for _ in range(2))
    start, logits = 0, []
    for chunk in MIXED:
        piece = padded[:, start : start + chunk]
        logits.append(read(tiny, cache, piece, [chunk], attention_mask=mask[:, : start + chunk]))
        start += chunk
        assert (cache.kept(1) >= 0).sum((1, 2)).tolist() == [min(24, 2 * start), min(24, 2 * (start - pad))]
    expected = read(tiny, alone, ids[1:, pad:], [MIXED[0] - pad, *MIXED[1:]])
    torch.testing.assert_close(torch.cat(logits, 1)[1:, pad:], expected, rtol=1e-9, atol=1e-9)
    assert held(cast(Any, cache.layers[1]), 1) == held(cast(Any, alone.layers[1]), 0)


@both_conventions
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_that_is_rebased_computes_the_same(model: Models, policy: Policy, positions: Any) -> None:
    tiny, logits = model("llama"), []
    for rebase_at in (16, 1000):
        cache = SinkCache(tiny, AdaKV(policy), 8, positions)
        logits.append(torch.stack(list(stream(tiny, cache, ids[0, :36].tolist(), rebase_at=rebase_at))))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


@both_conventions
def test_positions_that_begin_late_are_a_frame_like_others(model: Models, positions: Any) -> None:
    """The model is told 5, 6, ... for the first chunk, and counts for itself from then on."""
    tiny, logits = model("llama"), []
    for first in (0, 5):
        cache = SinkCache(tiny, AdaKV(H2O(4)), BUDGET, positions)
        told = torch.arange(first, first + 20)[None].expand(2, -1)
        start = read(tiny, cache, ids[:, :20], [20], position_ids=told)
        logits.append(torch.cat([start, read(tiny, cache, ids[:, 20:], [1, 1, 9, 1, 28])], dim=1))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


@every_case
def test_nothing_evicted_is_the_model_itself(model: Models, policy: Policy, scorer: Scorer) -> None:
    tiny = model("llama")
    with torch.no_grad():
        expected = tiny(input_ids=ids, use_cache=False).logits
    cache = SinkCache(tiny, AdaKV(policy), 70)
    torch.testing.assert_close(read(tiny, cache, ids, MIXED), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(cache.kept(0), torch.arange(60).expand(2, 2, 60))


# the rest of what a cache does


@both_conventions
@pytest.mark.parametrize("policy", [*POLICIES, Phases(SnapKV(3, 3), H2O(2))])
def test_copies_files_and_chosen_rows_go_on_as_the_cache_does(
    model: Models, policy: Policy, positions: Any, tmp_path: Any
) -> None:
    tiny, path = model("llama"), tmp_path / "cache.safetensors"
    for start in ([6], [20, 1, 1, 8]):  # before the budget is full, and after
        cache, seen = SinkCache(tiny, AdaKV(policy), BUDGET, positions), sum(start)
        read(tiny, cache, ids[:, :seen], start)
        cache.save(path)
        loaded, fork, swapped = SinkCache.load(path, tiny), cache.fork(2), cache.fork()
        assert loaded.policy == cache.policy
        assert torch.equal(loaded.kept(1), cache.kept(1))
        swapped.reorder_cache(torch.tensor([1, 0]))
        rest = [1, 1, 10, 1, 1, 46 - seen]
        expected = read(tiny, cache, ids[:, seen:], rest)
        assert torch.equal(read(tiny, loaded, ids[:, seen:], rest), expected)
        assert torch.equal(read(tiny, swapped, ids[:, seen:].flip(0), rest), expected.flip(0))
        doubled = read(tiny, fork, ids[:, seen:].repeat_interleave(2, 0), rest)
        torch.testing.assert_close(doubled, expected.repeat_interleave(2, 0), rtol=1e-9, atol=1e-9)


def test_prefill_and_generate_go_on_from_one_another(model: Models) -> None:
    tiny = model("llama")
    for policy in (H2O(4), SnapKV(4, 3), Knorm()):
        cache = SinkCache(tiny, AdaKV(policy), BUDGET)
        prefill(tiny, cache, ids[:1, :40], chunk=16)
        tiny.generate(ids[:1], cache=cache, max_new_tokens=30, do_sample=False)  # type: ignore[operator]
        assert (cache.kept(0) >= 0).sum() == 2 * BUDGET
        assert cache.seen == 89


def test_beams_keep_the_scores_of_their_own_past(model: Models) -> None:
    tiny = model("llama")
    alone, cache = SinkCache(tiny, AdaKV(H2O(3)), 10), SinkCache(tiny, AdaKV(H2O(3)), 10)
    expected = read(tiny, alone, ids[1:, :40], [20] + [1] * 20)[:, 22:]
    read(tiny, cache, ids[:, :22], [20, 1, 1])
    cache.reorder_cache(torch.tensor([1, 1]))
    logits = read(tiny, cache, ids[1:, 22:40].expand(2, -1), [1] * 18)
    torch.testing.assert_close(logits, expected.expand(2, -1, -1), rtol=1e-9, atol=1e-9)


def test_layers_and_rows_with_budgets_of_their_own_stay_within_them() -> None:
    tiny, mask = build("llama"), torch.ones_like(ids)
    cache = SinkCache(tiny, AdaKV(H2O(2)), [10, 15])
    for chunk in (20, 1, 1, 7):
        read(tiny, cache, ids[:, :chunk], [chunk])
        assert [(cache.kept(layer) >= 0).sum((1, 2)).tolist() for layer in (0, 1)] == [[20, 20], [30, 30]]
    mask[1, :10] = 0
    for policy in (H2O(2), Knorm(), SnapKV(2, 3)):
        cache = SinkCache(tiny, AdaKV(policy), 0.5)
        for end in range(20, 32):
            piece = ids[:, :20] if end == 20 else ids[:, end - 1 : end]
            read(tiny, cache, piece, [piece.shape[1]], attention_mask=mask[:, :end])
            assert (cache.kept(0) >= 0).sum((1, 2)).tolist() == [20, 10]
            assert (cache.kept(0) >= 0).sum(2).amin(1).ge(torch.tensor([2, 1])).all()


def test_offloaded_and_sliding_layers_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, away = build("gemma3"), []
    monkeypatch.setattr(RaggedLayer, "offload", lambda layer: away.append(layer.index))
    caches = [
        SinkCache(tiny, AdaKV(H2O(3)), BUDGET, sliding="bound", offload=offload)  # type: ignore[arg-type]
        for offload in (None, "cpu")
    ]
    one, other = (read(tiny, cache, ids[:, :30], [14, 1, 1, 4, 4, 1, 5]) for cache in caches)
    assert torch.equal(one, other)
    assert all(isinstance(layer, RaggedLayer) for layer in caches[0].layers)
    assert away == [0, 1, 2] * 7  # once a step, of the second cache alone
    assert (caches[0].kept(0) >= 0).sum((1, 2)).tolist() == [24, 24]


def test_reset_begins_anew(model: Models) -> None:
    tiny, cache = model("llama"), SinkCache(model("llama"), AdaKV(SnapKV(4, 3)), BUDGET)
    expected = read(tiny, cache, ids, MIXED)
    cache.reset()
    assert cache.nbytes == 0
    assert cache.kept(0).shape[-1] == 0
    torch.testing.assert_close(read(tiny, cache, ids[:1], MIXED), expected[:1], rtol=1e-9, atol=1e-9)


def test_tokens_can_be_taken_back_while_none_is_evicted(model: Models) -> None:
    tiny, cache = model("llama"), SinkCache(model("llama"), AdaKV(Knorm()), 30)
    read(tiny, cache, ids[:, :20], [12, 8])
    cache.crop(-5)
    assert torch.equal(cache.kept(0), torch.arange(15).expand(2, 2, 15))
    with torch.no_grad():
        expected = tiny(input_ids=ids[:, :28], use_cache=False).logits[:, 15:]
    torch.testing.assert_close(read(tiny, cache, ids[:, 15:28], [1, 12]), expected, rtol=1e-9, atol=1e-9)


def test_bytes_are_those_of_equal_heads_and_a_number_a_slot() -> None:
    tiny, sizes = build("llama", torch.float32), []
    for policy in (H2O(4), AdaKV(H2O(4))):
        cache = SinkCache(tiny, policy, 16)
        read(tiny, cache, ids, [30, 1, 1, 28])
        sizes.append(cache.nbytes)
    slots = 2 * 2 * 2 * 16  # layers, rows, key heads, slots
    assert sizes == [slots * (2 * 16 * 4 + 4 + 4), slots * (2 * 16 * 4 + 4 + 4 + 2)]
    assert "AdaKV(policy=H2O(recent=4" in cache.describe()
    assert cache.describe().splitlines()[1].split()[-3:] == ["16", "44", str(sizes[1] // 2)]


def test_what_a_step_hands_out_is_as_long_as_the_longest_head(model: Models) -> None:
    reader = RaggedReader(AdaKV(H2O(3)), BUDGET, texts(1), [0])
    reader.read(20)
    longest = max(map(len, held(reader.layer, 0)))
    assert longest > BUDGET
    keys, _ = reader.layer.update(torch.randn(1, 2, 5, 6).double(), torch.randn(1, 2, 5, 6).double())
    assert keys.shape == (1, 2, longest + 5, 6)
    assert reader.layer.store is not None
    assert reader.layer.store.keys.shape == (1, 1, 2 * BUDGET, 6)


# refusals


@pytest.mark.parametrize("floor", [0, -0.1, 1.1, True, "1", None])
def test_floors_that_are_no_shares_are_refused(floor: Any) -> None:
    policy = object.__new__(AdaKV)
    for name, value in (("policy", H2O()), ("floor", floor)):
        object.__setattr__(policy, name, value)
    with pytest.raises(ValueError, match="floor must be a share"):
        policy.__post_init__()


def test_what_cannot_compete_is_refused(model: Models) -> None:
    tiny = model("llama")
    with pytest.raises(ValueError, match=r"floor must leave each head one token.*budget=4: raise it to 0.25"):
        SinkCache(tiny, AdaKV(Knorm(), 0.2), 4)
    with pytest.raises(ValueError, match="num_sinks \\+ recent must be less than the budget"):
        SinkCache(tiny, AdaKV(H2O(32)), 32)
    for nested in (Protect(AdaKV(H2O()), 1, 1), AdaKV(AdaKV(H2O())), Phases(H2O(), Protect(AdaKV(H2O())))):
        with pytest.raises(ValueError, match="put AdaKV outermost"):
            SinkCache(tiny, nested, 64)
    with pytest.raises(ValueError, match="lets heads compete, needs the model"):
        SinkCache(tiny.config, AdaKV(Knorm()), 16)  # type: ignore[arg-type]
    mask = torch.zeros(2, 1, 4, 4).double()
    with pytest.raises(ValueError, match="4 axes says nothing of heads"):
        read(tiny, SinkCache(tiny, AdaKV(H2O(3)), BUDGET), ids[:, :4], [4], attention_mask=mask)


def test_attention_that_was_set_back_is_an_error() -> None:
    tiny: Any = build("llama")
    cache = SinkCache(tiny, AdaKV(Knorm()), 16)
    tiny.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="set back to sdpa"):
        read(tiny, cache, ids[:, :4], [4])


def test_a_score_of_an_empty_slot_may_be_anything(model: Models) -> None:
    @dataclass(frozen=True)
    class Careless(Policy):
        def watch(self) -> Watch:
            return Watch(mass=True)

        def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
            return entries.mass.masked_fill(~entries.valid, torch.nan)

    tiny = model("llama")
    cache = SinkCache(tiny, AdaKV(Careless()), BUDGET)
    read(tiny, cache, ids, MIXED)
    assert (cache.kept(0) >= 0).sum((1, 2)).tolist() == [2 * BUDGET] * 2
    with pytest.raises(ValueError, match="scored NaN"):
        read(tiny, SinkCache(tiny, AdaKV(Broken()), BUDGET), ids, MIXED)


@dataclass(frozen=True)
class Broken(Policy):
    def watch(self) -> Watch:
        return Watch(mass=True)

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return entries.mass * torch.nan
