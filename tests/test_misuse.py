"""What people do with a cache that would have gone wrong without a word."""

import pickle
from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest
import torch
from conftest import VOCABULARY, build
from jaxtyping import Float
from torch import Tensor

from sinkcache import Entries, Policy, SinkCache, prefill, stream
from sinkcache.attention import attend
from sinkcache.guard import cache_argument
from sinkcache.metrics import recompute, reread
from sinkcache.policies import StreamingLLM, Window


def ids(length: int, batch: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def last(model: Any, cache: SinkCache, tokens: list[int]) -> Tensor:
    return list(stream(model, cache, tokens))[-1]


def test_generate_without_use_cache_is_refused(model):
    llama = model("llama")
    cache = {cache_argument(llama): SinkCache(llama, budget=50)}
    with pytest.raises(ValueError, match="use_cache is off, so that generate would read everything anew in each step"):
        llama.generate(ids(10), attention_mask=torch.ones(1, 10), use_cache=False, max_new_tokens=6, **cache)


def test_positions_that_do_not_go_on_are_refused(model):
    llama = model("llama")
    cache = SinkCache(llama, budget=8)
    last(llama, cache, ids(12)[0].tolist())
    with pytest.raises(ValueError, match="position_ids begin at 7, but the cache has seen 12 tokens"), torch.no_grad():
        llama(input_ids=ids(1), position_ids=torch.tensor([[7]]), **{cache_argument(llama): cache})


def test_a_model_cast_there_and_back_is_probed_again():
    llama = build("llama", dtype=torch.float32)
    before = SinkCache(llama, budget=8).rotations[0]
    llama.half().float()  # its frequencies stay rounded
    after = SinkCache(llama, budget=8).rotations[0]
    assert not torch.equal(before.inv_freq, after.inv_freq)  # type: ignore[union-attr]


def test_a_pickled_cache_goes_on_as_the_cache_does(model):
    llama, tokens = model("llama"), ids(40)[0].tolist()
    cache = SinkCache(llama, StreamingLLM(2), 8)
    last(llama, cache, tokens[:30])
    other = pickle.loads(pickle.dumps(cache))
    torch.testing.assert_close(last(llama, other, tokens[30:]), last(llama, cache, tokens[30:]))


@pytest.mark.parametrize("seen", [0, 12])
def test_keys_of_a_model_it_does_not_know_are_refused(model, seen):
    cache = SinkCache(model("llama"), budget=8)
    if seen:
        last(model("llama"), cache, ids(seen)[0].tolist())
    stranger: Any = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    with pytest.raises(RuntimeError, match="pass that was not announced"), torch.no_grad():
        stranger(ids(1), **{cache_argument(stranger): cache})
    SinkCache(stranger, budget=8)  # now it announces its passes
    with pytest.raises(ValueError, match="made for a model that rotates otherwise"), torch.no_grad():
        stranger(ids(1), **{cache_argument(stranger): cache})


def test_a_pass_that_failed_before_any_bounded_layer_is_found_out(model, monkeypatch):
    gemma = build("gemma3")
    cache = SinkCache(gemma, budget=8)
    last(gemma, cache, ids(12)[0].tolist())

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    handle = gemma.model.layers[0].mlp.register_forward_pre_hook(fails)  # type: ignore[union-attr]
    with pytest.raises(MemoryError):
        last(gemma, cache, [5])
    handle.remove()
    with pytest.raises(RuntimeError, match=r"layers \[0\] have not seen 12 tokens"):
        last(gemma, cache, [5])


def test_a_pass_that_failed_in_a_layer_announces_no_other(model):
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    with pytest.raises(RuntimeError, match="SinkCache is for inference"):
        llama(ids(3), **{cache_argument(llama): cache})
    with pytest.raises(RuntimeError, match="not announced"), torch.no_grad():
        llama.model(ids(3), use_cache=True, **{cache_argument(llama): cache})


def test_lanes_of_a_pass_that_came_to_nothing_are_not_those_of_the_next(model):
    llama, cache, mask = model("llama"), SinkCache(model("llama"), budget=8), torch.ones(3, 5, dtype=torch.int64)
    mask[1, :2] = 0
    cache.begin_step(llama, ids(5, batch=3), mask, None)
    with torch.no_grad():
        llama(ids(6, batch=2), use_cache=True, **{cache_argument(llama): cache})
    assert cache.kept(0)[:, 0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_cache_under_its_old_name_is_watched_too(model):
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    with pytest.raises(ValueError, match="position_ids are not 3 positions in a row from 0"), torch.no_grad():
        llama(ids(3), past_key_values=cache, position_ids=torch.tensor([[0, 1, 5]]))


def test_queries_scaled_by_position_are_not_rebased():
    parameters = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    llama = build("llama", rope_parameters=parameters)
    with pytest.raises(ValueError, match="scales its queries by their position"):
        stream(llama, SinkCache(llama, budget=8), [1, 2])


def test_packed_attention_refuses_learned_sinks():
    heads = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="use eager attention"):
        attend(torch.nn.Module(), heads, heads, heads, None, s_aux=torch.zeros(2))


@dataclass(frozen=True)
class Scribbler(Policy):
    """Writes to what it was shown."""

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return entries.positions.mul_(0).double()


def test_a_policy_cannot_write_into_the_book(model):
    cache = SinkCache(model("llama"), Scribbler(), 6)
    last(model("llama"), cache, ids(40)[0].tolist())
    assert cache.kept(0)[0, 0].tolist() == [34, 35, 36, 37, 38, 39]


def test_a_batch_of_ids_is_not_streamed_as_rows(model):
    with pytest.raises(ValueError, match=r"tokens of shape \(1, 20\) would be read row by row: give input_ids\[0\]"):
        stream(model("llama"), SinkCache(model("llama"), budget=6), ids(20))


@pytest.mark.parametrize("read", [lambda m, t: recompute(m, t, 4), lambda m, t: reread(m, t, 4, 2)])
def test_windows_are_read_anew_for_one_text_only(model, read, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without
    with pytest.raises(ValueError, match=r"must be one text, \[1, tokens\], got shape \(2, 20\)"):
        read(model("llama"), ids(20, batch=2))


def test_a_prompt_that_failed_does_not_settle_the_share_of_the_next(model):
    llama = model("llama")
    cache = SinkCache(llama, Window(), 0.5)
    with pytest.raises(IndexError):
        prefill(llama, cache, torch.full((1, 20), VOCABULARY + 5))
    prefill(llama, cache, ids(80))
    assert cache.kept(0).shape[-1] == 40


@pytest.mark.parametrize(("share", "prompt", "budget"), [(0.07, 100, 7), (0.55, 100, 55), (0.28, 25, 7), (0.3, 11, 4)])
def test_a_share_is_rounded_up_from_its_exact_value(model, share, prompt, budget):
    cache = SinkCache(model("llama"), Window(), share)
    prefill(model("llama"), cache, ids(prompt))
    assert cache.kept(0).shape[-1] == budget


def test_prefill_after_a_rebased_stream_moves_no_key_again(model, monkeypatch):
    llama = model("llama")
    cache, plain = SinkCache(llama, budget=8), SinkCache(llama, budget=8)
    tokens = ids(60)[0].tolist()
    list(stream(llama, cache, tokens[:40], rebase_at=16))
    list(stream(llama, plain, tokens[:40]))
    shift = cache.slots.shift
    assert shift > 0
    one, other = (prefill(llama, each, torch.tensor([tokens[40:]])) for each in (cache, plain))
    assert cache.slots.shift == shift
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # norms round to float32


def test_text_under_multimodal_positions_is_read(model):
    llama = model("llama")
    cache = SinkCache(llama, budget=8)
    cache.begin_step(llama, torch.ones(1, 5, dtype=torch.int64), None, torch.arange(5).expand(3, 1, 5))
    assert cache.slots.shift == 0
