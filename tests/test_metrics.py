"""Perplexity against one cross-entropy over the whole text, and the baselines against naive loops."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from sinkcache import SinkCache, predictions
from sinkcache.metrics import Perplexity, Scored, perplexity, recompute, reread, score
from sinkcache.policies import H2O, StreamingLLM, Window

Model = Callable[..., Any]  # of a causal LM, the fixture in conftest.py
few = settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
conventions = pytest.mark.parametrize("positions", ["cache", "original"])
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}  # cross-entropy is taken in float32


def _ids(count: int) -> Tensor:
    return torch.randint(1, 97, (1, count))


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


def _nll(logits: Tensor, target: int) -> float:
    return float(torch.logsumexp(logits, dim=-1) - logits[target])


def _full(model: Any, ids: Tensor) -> list[float]:
    """The negative log-likelihood of each token but the first, all before it seen."""
    logits = _logits(model, ids)
    return [_nll(logits[at], int(ids[0, at + 1])) for at in range(ids.shape[1] - 1)]


def _all(scored: Iterator[Scored]) -> Tensor:
    return torch.cat([each.nll for each in scored])


def _where(scored: Iterator[Scored]) -> list[int]:
    """The number in the text of each scored token, in the order in which they come."""
    return [each.start + at for each in scored for at in range(len(each.nll))]


def _dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


@contextmanager
def _unread(model: Any) -> Iterator[None]:
    """Fails if the model is called within the block."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield
    finally:
        handle.remove()
    assert calls == []


# score


@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 23, 24, 99])
def test_equals_one_cross_entropy_over_the_whole_text(model: Model, chunk: int) -> None:
    llama, ids = model("llama"), _ids(23)
    got = _all(score(llama, _dynamic(llama), ids, chunk))
    torch.testing.assert_close(got, torch.tensor(_full(llama, ids), dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("chunk", [1, 6, 99])
def test_a_bos_is_context_and_lets_the_first_token_be_scored(model: Model, chunk: int) -> None:
    llama, ids = model("llama"), _ids(17)
    got = _all(score(llama, _dynamic(llama), ids, chunk, bos=3))
    expected = _full(llama, torch.cat([torch.tensor([[3]]), ids], dim=1))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), **CLOSE)


@few
@given(st.integers(2, 14), st.integers(1, 16))
def test_scores_each_token_but_the_first_once(model: Model, length: int, chunk: int) -> None:
    llama = model("llama")
    assert _where(score(llama, _dynamic(llama), _ids(length), chunk)) == list(range(1, length))


@few
@given(st.integers(1, 14), st.integers(1, 16))
def test_scores_each_token_once_after_a_bos(model: Model, length: int, chunk: int) -> None:
    llama = model("llama")
    assert _where(score(llama, _dynamic(llama), _ids(length), chunk, bos=3)) == list(range(length))


def test_yields_each_chunk_as_it_is_read(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    scored = score(llama, cache, _ids(12), chunk=5)
    next(scored)
    assert cache.seen == 5


def test_a_bounded_cache_that_never_fills_scores_as_a_full_one(model: Model) -> None:
    llama, ids = model("llama"), _ids(23)
    got = _all(score(llama, SinkCache(llama, budget=23), ids, 4))
    torch.testing.assert_close(got, _all(score(llama, _dynamic(llama), ids, 4)), **CLOSE)


def test_a_window_of_one_token_at_its_place_sees_itself_alone(model: Model) -> None:
    llama, ids = model("llama"), _ids(9)
    got = _all(score(llama, SinkCache(llama, Window(), budget=1), ids, chunk=1))
    expected = [_nll(_logits(llama, ids[:, at : at + 1])[0], int(ids[0, at + 1])) for at in range(8)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), **CLOSE)


def test_a_share_is_of_the_whole_text(model: Model) -> None:
    llama = model("llama")
    cache = SinkCache(llama, Window(), budget=0.5)
    perplexity(llama, cache, _ids(20), chunk=4)
    assert cache.kept(0)[0, 0].tolist() == list(range(10, 20))


def test_a_share_counts_the_bos(model: Model) -> None:
    llama = model("llama")
    cache = SinkCache(llama, Window(), budget=0.5)
    perplexity(llama, cache, _ids(19), chunk=4, bos=3)
    assert cache.kept(0)[0, 0].tolist() == list(range(10, 20))


# attend="token"


@few
@given(st.integers(2, 18), st.integers(3, 9), st.sampled_from([Window(), StreamingLLM(2)]))
def test_token_by_token_does_not_depend_on_the_chunk(model: Model, chunk: int, budget: int, policy: Any) -> None:
    llama, ids = model("llama"), _ids(17)
    one, many = (SinkCache(llama, policy, budget, positions="original") for _ in range(2))
    got = _all(score(llama, many, ids, chunk, attend="token"))
    torch.testing.assert_close(got, _all(score(llama, one, ids, 1)), **CLOSE)
    assert torch.equal(many.kept(0), one.kept(0))


@few
@given(st.integers(2, 18), st.integers(1, 9))
def test_token_by_token_serves_a_window_inside_the_cache(model: Model, chunk: int, budget: int) -> None:
    llama, ids = model("llama"), _ids(17)
    one, many = (SinkCache(llama, Window(), budget, positions="cache") for _ in range(2))
    got = _all(score(llama, many, ids, chunk, attend="token"))
    torch.testing.assert_close(got, _all(score(llama, one, ids, 1)), **CLOSE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_token_by_token_serves_attention_that_takes_masks(model: Model, attention: str) -> None:
    llama, ids = model("llama", attn_implementation=attention), _ids(25)
    one, many = (SinkCache(llama, StreamingLLM(2), 7, positions="original") for _ in range(2))
    got = _all(score(llama, many, ids, 6, attend="token"))
    torch.testing.assert_close(got, _all(score(llama, one, ids, 1)), **CLOSE)


def test_held_depends_on_the_chunk(model: Model) -> None:
    llama, ids = model("llama"), _ids(17)
    one, many = (SinkCache(llama, StreamingLLM(2), 7, positions="original") for _ in range(2))
    got, expected = _all(score(llama, many, ids, 6)), _all(score(llama, one, ids, 1))
    assert (got - expected).abs().max() > 0.1


def test_token_by_token_with_sinks_inside_the_cache_goes_one_at_a_time(model: Model) -> None:
    llama, ids = model("llama"), _ids(15)
    one, other = (SinkCache(llama, StreamingLLM(2), 7, positions="cache") for _ in range(2))
    assert torch.equal(_all(score(llama, one, ids, 1, attend="token")), _all(score(llama, other, ids, 1)))


def test_token_by_token_is_refused_where_sinks_would_move(model: Model) -> None:
    llama = model("llama")
    cache = SinkCache(llama, StreamingLLM(2), 7, positions="cache")
    with pytest.raises(ValueError, match="token by token"):
        list(score(llama, cache, _ids(25), 6, attend="token"))


def test_token_by_token_is_refused_before_anything_is_read(model: Model) -> None:
    llama = model("llama")
    cache = SinkCache(llama, StreamingLLM(2), 7, positions="cache")
    with _unread(llama), pytest.raises(ValueError, match="token by token"):
        list(score(llama, cache, _ids(25), 6, attend="token"))


def test_token_by_token_is_refused_for_a_full_cache(model: Model) -> None:
    llama = model("llama")
    with _unread(llama), pytest.raises(ValueError, match="needs a SinkCache"):
        score(llama, _dynamic(llama), _ids(9), attend="token")


def test_token_by_token_is_refused_where_some_layer_is_native(model: Model) -> None:
    gemma = model("gemma3")
    cache = SinkCache(gemma, Window(), 8)
    with _unread(gemma), pytest.raises(ValueError, match="bounds every layer"):
        score(gemma, cache, _ids(9), attend="token")


def test_token_by_token_is_refused_for_flash_attention(model: Model) -> None:
    llama: Any = copy.deepcopy(model("llama"))
    cache = SinkCache(llama, Window(), 8)
    llama.config._attn_implementation_internal = "flash_attention_2"
    with _unread(llama), pytest.raises(ValueError, match="flash_attention_2"):
        score(llama, cache, _ids(9), attend="token")


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("policy", [StreamingLLM(num_sinks=2), H2O(recent=3)], ids=["StreamingLLM", "H2O"])
def test_long_texts_are_rebased_and_nothing_else_changes(
    model: Model, monkeypatch: pytest.MonkeyPatch, policy: Any, positions: Any
) -> None:
    llama, ids, given = model("llama"), _ids(60), []
    plain = torch.cat([each.nll for each in score(llama, SinkCache(llama, policy, 8, positions), ids, 4)])
    monkeypatch.setattr(predictions, "REBASE_AT", 20)
    whole = predictions.step
    monkeypatch.setattr(predictions, "step", lambda *a, **k: given.append(k["position_ids"]) or whole(*a, **k))
    moved = torch.cat([each.nll for each in score(llama, SinkCache(llama, policy, 8, positions), ids, 4)])
    torch.testing.assert_close(moved, plain, atol=1e-9, rtol=0)
    if positions == "original":  # inside the cache positions are small anyway
        assert given[0] is None
        assert 12 < max(int(each.max()) for each in given if each is not None) < 20


def test_a_long_text_that_cannot_be_rebased_is_refused_before_it_is_read(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = model("llama")
    cache = SinkCache(llama, Window(), 8, "original")
    monkeypatch.setattr(type(cache), "check_rebase", _refuse)
    score(llama, cache, _ids(40), 4)
    monkeypatch.setattr(predictions, "REBASE_AT", 39)
    with _unread(llama), pytest.raises(ValueError, match="cannot be moved"):
        score(llama, cache, _ids(40), 4)


def _refuse(cache: SinkCache) -> None:
    raise ValueError("cannot be moved")


# refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.ones(1, 1, dtype=torch.int64)}, "at least two tokens"),
        ({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, "one text"),
        ({"input_ids": torch.ones(9, dtype=torch.int64)}, "one text"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64), "bos": 3}, "at least two tokens"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"attend": "all"}, "attend must be"),
    ],
    ids=["short", "two rows", "no rows", "bos alone", "chunk", "attend"],
)
def test_bad_input_is_refused_before_anything_is_read(model: Model, change: dict[str, Any], message: str) -> None:
    llama = model("llama")
    arguments = {"model": llama, "cache": SinkCache(llama, budget=8), "input_ids": _ids(9), **change}
    with _unread(llama), pytest.raises(ValueError, match=message):
        unwrap(predictions.cached)(**arguments)


def test_a_cache_in_use_is_refused_before_anything_is_read(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    perplexity(llama, cache, _ids(5))
    with _unread(llama), pytest.raises(ValueError, match="has seen 5 tokens"):
        score(llama, cache, _ids(9))


@pytest.mark.parametrize("name", ["budget", "every", "batch"])
def test_recompute_refuses_counts_below_one(model: Model, name: str) -> None:
    llama = model("llama")
    with _unread(llama), pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        recompute(llama, _ids(9), **{"budget": 4, name: 0})


@pytest.mark.parametrize("name", ["budget", "every"])
def test_reread_refuses_counts_below_one(model: Model, name: str) -> None:
    llama = model("llama")
    with _unread(llama), pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        reread(llama, _ids(9), **{"budget": 4, "every": 2, name: 0})


def test_baselines_refuse_a_text_of_one_token(model: Model) -> None:
    llama = model("llama")
    for read in (recompute, reread):
        with _unread(llama), pytest.raises(ValueError, match="at least two tokens"):
            read(llama, _ids(1), 4, 1)


# baselines


def _naive_recompute(model: Any, ids: Tensor, budget: int) -> dict[int, float]:
    """Token by token: the newest `budget` tokens before it, read alone."""
    targets = range(1, ids.shape[1])
    return {t: _nll(_logits(model, ids[:, max(0, t - budget) : t])[-1], int(ids[0, t])) for t in targets}


def _by_token(scored: Iterator[Scored]) -> dict[int, float]:
    return {each.start + at: float(nll) for each in scored for at, nll in enumerate(each.nll)}


@pytest.mark.parametrize(("budget", "batch"), [(1, 8), (4, 3), (4, 1), (13, 8), (14, 8), (15, 8), (40, 8)])
def test_recompute_reads_the_window_anew_for_each_token(model: Model, budget: int, batch: int) -> None:
    llama, ids = model("llama"), _ids(15)
    got = _by_token(recompute(llama, ids, budget, batch=batch))
    assert got == pytest.approx(_naive_recompute(llama, ids, budget), rel=1e-5, abs=1e-5)  # float32 cross-entropy


def test_recompute_scores_every_nth_of_the_later_tokens(model: Model) -> None:
    llama, ids = model("llama"), _ids(21)
    got = _by_token(recompute(llama, ids, 5, every=4))
    naive = _naive_recompute(llama, ids, 5)
    expected = {t: naive[t] for t in (1, 2, 3, 4, 5, 6, 10, 14, 18)}
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)  # float32 cross-entropy


@pytest.mark.parametrize("length", [2, 6, 7])
def test_recompute_scores_texts_of_about_a_window(model: Model, length: int) -> None:
    assert _where(recompute(model("llama"), _ids(length), 6)) == list(range(1, length))


@pytest.mark.parametrize("budget", [1, 4, 40])
def test_rereading_for_every_token_is_recomputing(model: Model, budget: int) -> None:
    llama, ids = model("llama"), _ids(15)
    got, expected = _by_token(reread(llama, ids, budget, every=1)), _by_token(recompute(llama, ids, budget))
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)  # float32 cross-entropy


@pytest.mark.parametrize("budget", [1, 4, 9])
@pytest.mark.parametrize("every", [2, 5, 14, 30])
def test_rereading_reads_a_stretch_behind_the_tokens_before_it(model: Model, budget: int, every: int) -> None:
    llama, ids = model("llama"), _ids(15)
    expected = {}
    for target in range(1, 15):
        stretch = (target - 1) // every * every  # its query is token target - 1
        first = max(0, stretch - budget + 1)
        expected[target] = _nll(_logits(llama, ids[:, first:target])[-1], int(ids[0, target]))
    got = _by_token(reread(llama, ids, budget, every))
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)  # float32 cross-entropy


# Perplexity


def test_perplexity_weighs_tokens_and_not_chunks() -> None:
    result = Perplexity()
    result.add(Scored(1, torch.tensor([1.0, 1.0, 1.0])))
    result.add(Scored(4, torch.tensor([5.0])))
    assert result.value == pytest.approx(math.exp(2.0))
    assert result.tokens == 4


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_perplexity_is_exp_of_the_mean(model: Model, chunk: int) -> None:
    llama, ids = model("llama"), _ids(20)
    result = perplexity(llama, _dynamic(llama), ids, chunk)
    nll = _full(llama, ids)
    assert result.value == pytest.approx(math.exp(sum(nll) / 19), rel=1e-5)  # float32 cross-entropy
    assert result.tokens == 19


def test_perplexity_of_nothing_is_nan() -> None:
    assert math.isnan(Perplexity().value)


def test_perplexity_beyond_all_floats_is_infinite() -> None:
    result = Perplexity()
    result.add(Scored(0, torch.tensor([710.0])))
    assert (result.value, result.curve()) == (math.inf, [(256, math.inf)])


def test_perplexity_records_the_bos(model: Model) -> None:
    llama = model("llama")
    assert [perplexity(llama, _dynamic(llama), _ids(5), bos=bos).bos for bos in (None, 3)] == [None, 3]


def test_perplexity_passes_on_how_tokens_attend(model: Model) -> None:
    llama, ids = model("llama"), _ids(25)
    caches = [SinkCache(llama, Window(), 7) for _ in range(2)]
    got = perplexity(llama, caches[0], ids, 6, attend="token").value
    assert got == pytest.approx(perplexity(llama, caches[1], ids, 1).value, rel=1e-5)  # float32 cross-entropy


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 1))
def test_buckets_hold_the_tokens_of_their_stretch(chunks: list[int], bucket: int, start: int) -> None:
    result, expected, at = Perplexity(bucket=bucket), {}, start
    for count in chunks:
        result.add(Scored(at, torch.arange(at, at + count).double() / 8))
        for token in range(at, at + count):
            count_before, total = expected.get(token // bucket, (0, 0.0))
            expected[token // bucket] = (count_before + 1, total + token / 8)
        at += count
    assert result.buckets == expected
    assert (result.tokens, result.nll) == (sum(chunks), sum(range(start, at)) / 8)


def test_the_curve_is_the_perplexity_of_each_stretch_up_to_its_end() -> None:
    result = Perplexity(bucket=3)
    result.add(Scored(4, torch.tensor([2.0, 4.0, 1.0])))
    result.add(Scored(1, torch.tensor([0.5, 1.5])))
    assert result.curve() == [
        (3, pytest.approx(math.exp(1.0))),
        (6, pytest.approx(math.exp(3.0))),
        (9, pytest.approx(math.e)),
    ]


def test_perplexity_uses_the_buckets_it_is_given(model: Model) -> None:
    llama = model("llama")
    result = perplexity(llama, _dynamic(llama), _ids(10), chunk=4, bucket=4)
    assert {index: count for index, (count, _) in result.buckets.items()} == {0: 3, 1: 4, 2: 2}
