"""A recording, the oracle that reads it and the recall of policies, against numpy and loops over positions."""

import math
import pickle
from typing import Any

import jaxtyping
import numpy as np
import pytest
import score_oracle as oracle
import torch
from conftest import VOCABULARY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sinkcache.attention
from sinkcache import Entries, SinkCache
from sinkcache.guard import shown_to
from sinkcache.hearing import Heard, overhear
from sinkcache.lanes import Lanes
from sinkcache.metrics import perplexity
from sinkcache.policies import H2O, TOVA, AdaKV, Protect, SnapKV, StreamingLLM, Window
from sinkcache.policies.clairvoyant import Clairvoyant
from sinkcache.policy import Policy, keep
from sinkcache.recording import Recording, recall, record
from sinkcache.shadows import _RaggedShadow, _Shadow
from sinkcache.tally import Tallies, Tally

# Six tokens, two channels, one head: the fixture F1 of tests/test_policy_formulas.py, and two queries that follow.
Q = np.array([[-1.5, 3.0], [-1.0, 0.5], [-1.0, 1.0], [0.5, -0.5], [0.0, -1.0], [-2.5, 1.0]])
K = np.array([[-2.0, -1.5], [1.0, -2.5], [-1.5, 0.5], [0.5, 0.5], [-0.5, 1.0], [0.0, 0.5]])
LATER = np.array([[1.0, 1.0], [1.5, 0.5]])
ROUNDED: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}  # recordings and transformers' eager softmax are float32


@pytest.fixture
def unchecked(monkeypatch) -> None:
    """Turns off the checking of types that tests run under and users do not, so that the library's own errors show."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def tokens(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(3))


def eager(model: Any, input_ids: Tensor) -> list[Tensor]:
    """Per layer the attention of a pass over the whole text, `[num_heads, q_len, kv_len]`, by transformers."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=input_ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return [each[0].double() for each in attentions]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def paid(queries: np.ndarray) -> list[np.ndarray]:
    """What each of `queries`, the t-th over the first t + 1 keys, pays each key."""
    return [softmax(K[: t + 1] @ query / np.sqrt(2)) for t, query in enumerate(queries)]


def of_rows(rows: list[np.ndarray], layer: int = 0) -> Recording:
    """A recording of one head in blocks of one query."""
    received = [torch.zeros(1, index + 1, dtype=torch.float64) for index in range(len(rows))]
    for block, row in zip(received, rows, strict=True):
        block[0, : len(row)] = torch.from_numpy(row)
    return Recording(1, len(rows), {layer: received})


def at(positions: list[int], seen: int | Tensor, layer: int = 0) -> Entries:
    return Entries(torch.tensor([[positions]]), seen, layer=layer)


def traced(policy: Policy, length: int, budget: int) -> list[list[int]]:
    """What is held after each token, where the newest competes as the others do."""
    held: list[int] = []
    trace = []
    for seen in range(1, length + 1):
        entries = at([*held, seen - 1], seen)
        kept = keep(policy.score(entries), entries.positions, budget)[0, 0]
        held = entries.positions[0, 0, kept].tolist()
        trace.append(held)
    return trace


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_recording_is_what_tokens_receive_in_one_pass_without_a_cache(model, family: str, chunk: int) -> None:
    text = tokens(40)
    made = record(model(family), text, chunk)
    expected = eager(model(family), text)
    full = [1] if family == "gemma3" else [0, 1]
    assert (list(made.received), made.chunk, made.tokens) == (full, chunk, 40)
    for layer in full:
        heads = made.received[layer][0].shape[0]
        by_key_head = expected[layer].unflatten(0, (heads, -1)).mean(dim=1)
        for number, block in enumerate(made.received[layer]):
            upto = min((number + 1) * chunk, 40)
            sums = by_key_head[:, number * chunk : upto, :upto].sum(dim=1)
            torch.testing.assert_close(block.double(), sums, **ROUNDED)


def test_a_recording_takes_the_bytes_it_says(model) -> None:
    single, half = (record(model("llama"), tokens(64), 8, dtype) for dtype in (torch.float32, torch.float16))
    sizes = [sum(block.nbytes for block in each.received[0]) for each in (single, half)]
    assert sizes[0] == 2 * sizes[1] == 4 * 2 * sum(range(8, 65, 8))
    assert sizes[0] == pytest.approx(4 * 2 * 64**2 / (2 * 8), rel=0.2)
    torch.testing.assert_close(half.received[1][7].float(), single.received[1][7], atol=6e-8, rtol=1e-3)  # 11 bits


def test_recording_leaves_the_model_as_it_was(model) -> None:
    network, text = model("llama"), tokens(20)
    network.set_attn_implementation("sdpa")
    before = network(input_ids=text).logits
    record(network, text, 6)
    assert network.config._attn_implementation == "sdpa"
    assert torch.equal(network(input_ids=text).logits, before)


def test_a_pass_that_fails_leaves_no_layer_waiting_for_attention(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    network, text = model("llama"), tokens(20)
    with monkeypatch.context() as patch:
        patch.setattr(sinkcache.attention, "_cut", fail)
        with pytest.raises(KeyboardInterrupt):
            record(network, text, 6)
    assert shown_to() is None


@pytest.mark.parametrize(
    ("shape", "chunk", "said"),
    [((2, 9), 4, "one text"), ((9,), 4, "one text"), ((1, 0), 4, "one text"), ((1, 9), 0, "chunk must be at least 1")],
)
def test_a_bad_text_or_chunk_is_an_error(model, unchecked, shape: tuple[int, ...], chunk: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        record(model("llama"), torch.ones(shape, dtype=torch.int64), chunk)


def test_a_model_without_full_attention_is_an_error(model) -> None:
    with pytest.raises(ValueError, match="no layer of full attention"):
        record(model("mistral", sliding_window=8), tokens(20))


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 30), st.integers(1, 40))
def test_coming_counts_each_block_by_the_part_that_is_coming(length: int, chunk: int, seen: int, horizon: int) -> None:
    seen = min(seen, length)
    rows = np.tril(np.random.default_rng(length).random((length, length)))
    ends = [min(start + chunk, length) for start in range(0, length, chunk)]
    blocks = [torch.from_numpy(rows[end - ((end - 1) % chunk + 1) : end, :end].sum(0))[None] for end in ends]
    expected = np.zeros(length)
    for query in range(seen, min(seen + horizon, length)):
        start = query // chunk * chunk
        expected += rows[start : start + chunk].mean(axis=0)
    got = Recording(chunk, length, {5: blocks}).coming(5, seen, horizon)
    torch.testing.assert_close(got, torch.from_numpy(expected).float()[None])


def test_coming_is_exact_on_the_edges_of_blocks(model) -> None:
    text = tokens(40)
    got = record(model("llama"), text, 8).coming(1, 16, 16)
    expected = eager(model("llama"), text)[1].unflatten(0, (2, 2)).mean(dim=1)[:, 16:32].sum(dim=1)
    torch.testing.assert_close(got.double(), expected, **ROUNDED)


def test_clairvoyant_is_the_mass_oracle_of_the_worked_example() -> None:
    rows = paid(Q) + [softmax(K @ query / np.sqrt(2)) for query in LATER]
    entries = at([3, 0, 5, 1, 4, 2], 6)
    scores = Clairvoyant(of_rows(rows), horizon=2).score(entries)[0, 0]
    by_position = [round(float(scores[[3, 0, 5, 1, 4, 2].index(position)]), 4) for position in range(6)]
    assert by_position == [0.0272, 0.2741, 0.1287, 0.714, 0.3961, 0.4599]
    kept = keep(scores[None, None], entries.positions, 3)[0, 0]
    assert sorted(entries.positions[0, 0, kept].tolist()) == [3, 4, 5]


def test_clairvoyant_is_belady_of_the_worked_example() -> None:
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 2, 4], [2, 4, 5]]
    assert traced(Clairvoyant(of_rows(paid(Q)), horizon=6), 6, 3) == expected


@settings(deadline=None)
@given(st.integers(2, 20), st.integers(1, 6), st.integers(1, 25), st.integers(0, 99))
def test_clairvoyant_is_belady(length: int, budget: int, horizon: int, seed: int) -> None:
    rows = [row[: t + 1] for t, row in enumerate(np.random.default_rng(seed).random((length, length)))]
    held: list[int] = []
    expected = []
    for t in range(length):
        held = [*held, t]
        if len(held) > budget:
            coming = {i: sum(row[i] for row in rows[t + 1 : t + 1 + horizon]) for i in held}
            held.remove(min(held, key=lambda i: (coming[i], i)))
        expected.append(list(held))
    assert traced(Clairvoyant(of_rows(rows), horizon), length, budget) == expected


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("horizon", [4, 12, 100])
def test_a_cache_keeps_what_loops_over_the_full_attention_say(model, chunk: int, horizon: int) -> None:
    text, budget = tokens(48), 9
    network = model("llama")
    policy = Clairvoyant(record(network, text, chunk), horizon)
    cache = SinkCache(network, policy, budget)
    perplexity(network, cache, text, chunk)
    for layer, attention in enumerate(eager(network, text)):
        by_key_head = attention.unflatten(0, (2, 2)).mean(dim=1)
        for head in range(2):
            held: list[int] = []
            for seen in range(0, 48, chunk):
                held = worth(by_key_head[head], held, seen, horizon, budget - 1)
                newest = seen + chunk - 1
                others = [*held, *range(seen, newest)]
                held = sorted([*worth(by_key_head[head], others, seen + chunk, horizon, budget - 1), newest])
            assert cache.kept(layer)[0, head].tolist() == held


def worth(attention: Tensor, held: list[int], seen: int, horizon: int, room: int) -> list[int]:
    """The `room` of `held` that the queries from `seen` on attend to most; of equals the newer."""
    coming = attention[seen : seen + horizon].sum(dim=0).tolist()
    return sorted(sorted(held, key=lambda position: (coming[position], position))[-room:])


def test_what_receives_nothing_any_more_is_equal_and_the_newer_stays() -> None:
    policy = Clairvoyant(of_rows(paid(Q)), horizon=2)
    assert policy.score(at([0, 1, 5], 6)).tolist() == [[[0.0, 0.0, 0.0]]]
    assert policy.score(Entries(torch.tensor([[[0, -1]]]), 5))[0, 0, 1] == -torch.inf


def test_rows_may_say_how_many_tokens_each_has_seen() -> None:
    policy = Clairvoyant(of_rows(paid(Q)), horizon=2)
    assert torch.equal(policy.score(at([0, 3], torch.tensor([[[4]]]))), policy.score(at([0, 3], 4)))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (at([2, 6], 6), "ends after 6 tokens, got position 6"),
        (at([2, 5], 7), "ends after 6 tokens, got 7"),
        (at([2, 5], 6, layer=1), "layer 1 was not recorded, .* layers 0 were"),
        (Entries(torch.zeros(2, 1, 3, dtype=torch.int64), 3), "a batch of 2"),
        (Entries(torch.zeros(1, 2, 3, dtype=torch.int64), 3), "1 key heads, got 2"),
    ],
)
def test_what_was_not_recorded_is_an_error(entries: Entries, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Clairvoyant(of_rows(paid(Q))).score(entries)


def test_reading_on_past_the_recording_is_an_error(model) -> None:
    text, network = tokens(30), model("llama")
    cache = SinkCache(network, Clairvoyant(record(network, text[:, :20], 5)), budget=8)
    with pytest.raises(ValueError, match="record the whole text"):
        perplexity(network, cache, text, chunk=5)


@pytest.mark.parametrize(
    ("arguments", "said"), [((None,), "what .*record returns"), ((of_rows([]), 0), "horizon must")]
)
def test_a_policy_that_makes_no_sense_is_an_error(arguments: tuple, said: str) -> None:
    unchecked = object.__new__(Clairvoyant)
    for name, value in zip(("recording", "horizon"), (*arguments, 4), strict=False):
        object.__setattr__(unchecked, name, value)
    with pytest.raises(ValueError, match=said):
        unchecked.__post_init__()


def test_is_compared_by_the_recording_it_holds() -> None:
    one, other = of_rows(paid(Q)), of_rows(paid(Q))
    assert Clairvoyant(one) == Clairvoyant(one)
    assert hash(Clairvoyant(one)) == hash(Clairvoyant(one))
    assert Clairvoyant(one) != Clairvoyant(other)
    assert Clairvoyant(one, 4) != Clairvoyant(one, 8)
    assert pickle.loads(pickle.dumps(Clairvoyant(one))) != Clairvoyant(one)
    assert repr(Clairvoyant(one)) == "Clairvoyant(recording=Recording(chunk=1, tokens=6), horizon=256)"


def test_a_fork_shares_the_recording_and_a_file_cannot_hold_it(model, tmp_path) -> None:
    network, text = model("llama"), tokens(20)
    cache = SinkCache(network, Clairvoyant(record(network, text, 5)), budget=8)
    perplexity(network, cache, text, chunk=5)
    assert cache.fork().policy == cache.policy
    for each in (cache, SinkCache(network, Protect(cache.policy, 1, 2), budget=8)):
        with pytest.raises(ValueError, match="is a Recording, which a file cannot hold"):
            each.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


# recall

SCORERS: dict[str, tuple[Policy, oracle.Scorer]] = {
    "window": (Window(), oracle.recency()),
    "streaming": (StreamingLLM(2), oracle.recency(2)),
    "h2o": (H2O(recent=3, half_life=6), oracle.h2o(3, decay=0.5 ** (1 / 6))),
    "tova": (TOVA(), oracle.tova()),
    "snapkv": (SnapKV(4, pooling="none", recent=2), oracle.snapkv(4, pooling="none", recent=2)),
}


def recalled(model: Any, text: Tensor, scorer: oracle.Scorer, budgets: list[int], chunk: int) -> tuple[float, float]:
    """Recall by loops: transformers' own attention over what numpy has each query see; and over each query's best."""
    mean = sum(budgets) / len(budgets)
    heard: dict[int, Heard] = {}
    overhear(model, text, text.shape[1], lambda each: heard.update({each.layer: each}))
    shares, bests = [], []
    for layer, attention in enumerate(eager(model, text)):
        stream = oracle.new_stream(*(getattr(heard[layer], name)[0] for name in ("queries", "keys", "values")))
        oracle.library(stream, [len(each) for each in text[0].split(chunk)], budgets[layer], scorer)
        for head, rows in enumerate(attention.tolist()):
            for query in range(math.ceil(mean / chunk) * chunk, text.shape[1]):  # from the first step that trims
                visible = stream.rows[head // 2][query]
                shares.append(sum(rows[query][position] for position in visible))
                bests.append(sum(sorted(rows[query])[-len(visible) :]))
    return sum(shares) / len(shares), sum(bests) / len(bests)


@pytest.mark.parametrize(("budget", "chunk"), [(12, 5), (9, 1), (16, 8)])
def test_recall_is_what_loops_over_the_full_attention_say(model, budget: int, chunk: int) -> None:
    network, text = model("llama"), tokens(43)
    *shares, best = recall(network, text, [policy for policy, _ in SCORERS.values()], budget, chunk)
    for share, (_, scorer) in zip(shares, SCORERS.values(), strict=True):
        expected = recalled(network, text, scorer, [budget, budget], chunk)
        assert (share, best) == pytest.approx(expected, abs=1e-5)  # eager attention's softmax is float32
        assert share < best - 1e-3


def test_recall_under_budgets_of_each_layer_is_over_the_same_queries(model) -> None:
    network, text = model("llama"), tokens(43)
    *shares, best = recall(network, text, [policy for policy, _ in SCORERS.values()], [8, 17], 5)
    for share, (_, scorer) in zip(shares, SCORERS.values(), strict=True):
        assert (share, best) == pytest.approx(recalled(network, text, scorer, [8, 17], 5), abs=1e-5)  # as above
    with pytest.raises(ValueError, match="3 entries for 2 bounded layers"):
        recall(network, text, [Window()], [8, 8, 8], 5)


def test_the_oracle_recalls_more_than_what_it_is_compared_with(model) -> None:
    network, text = model("llama"), tokens(96)
    clairvoyant = Clairvoyant(record(network, text, 8), horizon=24)
    known, *others, best = recall(network, text, [clairvoyant, *(policy for policy, _ in SCORERS.values())], 16, 8)
    assert max(others) < known < best < 1


def test_heads_that_compete_recall_what_they_hold(model) -> None:
    network, text = model("llama"), tokens(43)
    shares = []
    for layer, attention in enumerate(eager(network, text)):
        shadow = _RaggedShadow(
            Tallies(Tally(AdaKV(TOVA("head")), 9, None), Lanes()), None, False, AdaKV(TOVA("head")), layer, False
        )
        seen: list[Tensor] = []

        def follow(heard: Heard, layer: int = layer, shadow: Any = shadow, seen: list[Tensor] = seen) -> None:
            if heard.layer == layer:
                shadow.follow(heard)
                seen.append(shadow.attended[0])

        overhear(network, text, 1, follow)
        for query in range(9, 43):
            for head in range(4):
                shown = [position for position in seen[query][head // 2].tolist() if position >= 0]
                shares.append(float(attention[head, query, shown].sum()))
            assert sum(len(set(each.tolist()) - {-1}) for each in seen[query]) == 2 * 9
    got = recall(network, text, [AdaKV(TOVA("head"))], 9, 1)[0]
    assert got == pytest.approx(sum(shares) / len(shares), abs=1e-5)  # eager attention's softmax is float32


def test_recall_of_a_text_that_fits_is_no_number(model) -> None:
    assert all(np.isnan(recall(model("llama"), tokens(16), [Window()], 16, 8)))


def test_a_shadow_holds_what_a_cache_would_where_the_hidden_states_are_the_same(model) -> None:
    network, text = model("llama"), tokens(43)
    for policy in (AdaKV(H2O(recent=3)), *(policy for policy, _ in SCORERS.values())):
        cache = SinkCache(network, policy, 12, positions="original")
        perplexity(network, cache, text, chunk=5)
        shadow = _shadow_of_first_layer(network, text, policy, 12, 5)
        assert torch.equal(cache.kept(0), shadow)


def _shadow_of_first_layer(model: Any, text: Tensor, policy: Policy, budget: int, chunk: int) -> Tensor:
    kind = _RaggedShadow if policy.across_heads else _Shadow
    shadow = kind(Tallies(Tally(policy, budget, None), Lanes()), None, False, policy, 0, False)
    overhear(model, text, chunk, lambda heard: shadow.follow(heard) if heard.layer == 0 else None)
    return shadow.kept()
