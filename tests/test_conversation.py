"""Turns, forks, tokens taken back, searches: what people do with a cache between passes."""

import copy
from typing import Any, cast

import pytest
import torch
import transformers as tf
from conftest import VOCABULARY, build
from oracles import by_hand, kept, sinks_and_recent
from torch import Tensor
from transformers import DynamicCache

from sinkcache import SinkCache, prefill, stream, turn
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

BUDGET, SINKS = 9, 3


def ids(length: int, batch: int = 1, seed: int = 7) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def bounded(model: Any, budget: int = BUDGET, positions: Any = "cache") -> SinkCache:
    return SinkCache(model, StreamingLLM(SINKS), budget, positions)


def generate(model: Any, cache: Any, tokens: Tensor, new: int, **given: Any) -> Tensor:
    return model.generate(tokens, max_new_tokens=new, do_sample=False, **{cache_argument(model): cache}, **given)


def read_on(model: Any, cache: SinkCache, tokens: Tensor) -> Tensor:
    """Logits of each token, read one by one."""
    with torch.no_grad():
        steps = tokens.split(1, dim=1)
        return torch.cat(
            [model(each, use_cache=True, **{cache_argument(model): cache}).logits for each in steps], dim=1
        )


# turns


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_turns_of_new_tokens_alone_equal_the_oracle_fed_with_the_same_steps(model, positions):
    llama, cache = model("llama"), bounded(model("llama"), positions=positions)
    said = generate(llama, cache, ids(17), 6)
    conversation, chunks = said[0].tolist(), [17] + [1] * 5
    for number, length in enumerate((4, 13, 1)):
        new = ids(length, seed=number)
        given = turn(llama, cache, new, output=said)
        assert given["input_ids"].tolist() == [[conversation[-1], *new[0].tolist()]]
        said = llama.generate(**given, max_new_tokens=6, do_sample=False)
        conversation += new[0].tolist() + said[0, length + 1 :].tolist()
        chunks += [length + 1] + [1] * 5
    logits = by_hand(llama, conversation[:-1], chunks, BUDGET, sinks_and_recent(SINKS), positions)
    answers = (
        [17 + i for i in range(6)]
        + [27 + i for i in range(6)]
        + [46 + i for i in range(6)]
        + [53 + i for i in range(6)]
    )
    assert [conversation[at] for at in answers] == [int(logits[at - 1].argmax()) for at in answers]
    assert cache.seen == len(conversation) - 1


def test_turns_with_the_full_history_equal_turns_of_new_tokens_alone(model):
    llama, one, other = model("llama"), bounded(model("llama")), bounded(model("llama"))
    full = said = generate(llama, one, ids(17), 6)
    generate(llama, other, ids(17), 6)
    for number in range(4):
        new = ids(5, seed=number)
        full = generate(llama, one, torch.cat([full, new], dim=1), 6)
        said = llama.generate(**turn(llama, other, new, output=said), max_new_tokens=6, do_sample=False)
        assert full[:, -6:].tolist() == said[:, -6:].tolist()
        assert one.seen == other.seen == full.shape[1] - 1


def test_turns_of_a_padded_batch_continue_each_row_as_if_alone(model):
    llama, cache = model("llama"), bounded(model("llama"))
    tokens, mask = ids(15, 2), torch.ones(2, 15, dtype=torch.int64)
    mask[0, :6] = tokens[0, :6] = 0
    new, new_mask = ids(7, 2, seed=1), torch.ones(2, 7, dtype=torch.int64)
    new_mask[1, :3] = new[1, :3] = 0
    said = generate(llama, cache, tokens, 5, attention_mask=mask)
    given = turn(llama, cache, new, output=said, attention_mask=new_mask)
    answer = llama.generate(**given, max_new_tokens=5, do_sample=False)[:, -5:]
    for row in range(2):
        alone = bounded(llama)
        own = generate(llama, alone, tokens[row : row + 1, mask[row].bool()], 5)
        following = turn(llama, alone, new[row : row + 1, new_mask[row].bool()], output=own)
        assert llama.generate(**following, max_new_tokens=5, do_sample=False)[0, -5:].tolist() == answer[row].tolist()


def test_a_turn_without_an_output_adds_nothing(model):
    llama, cache = model("llama"), bounded(model("llama"))
    prefill(llama, cache, ids(12))
    given = turn(llama, cache, ids(3, seed=2))
    assert given["input_ids"].tolist() == ids(3, seed=2).tolist()
    assert given["attention_mask"].shape == (1, 15)


@pytest.mark.parametrize(
    ("new", "output", "message"),
    [
        (ids(0), None, r"input_ids must be \[batch, tokens\], one token at least"),
        (ids(3), ids(18, 2), "not what generate returned for a batch of 1"),
        (ids(3), ids(12), "output has 12 tokens and the cache has seen 12, but generate leaves exactly one unread"),
        (ids(3), ids(15), "output has 15 tokens and the cache has seen 12"),
    ],
)
def test_a_turn_that_does_not_fit_is_an_error(model, new, output, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    cache = bounded(model("llama"))
    prefill(model("llama"), cache, ids(12))
    with pytest.raises(ValueError, match=message):
        turn(model("llama"), cache, new, output=output)


def test_new_tokens_alone_without_a_mask_are_an_error_that_says_how(model):
    cache = bounded(model("llama"))
    generate(model("llama"), cache, ids(12), 4)
    with pytest.raises(ValueError, match=r"no new tokens: .*sinkcache\.turn makes them"):
        generate(model("llama"), cache, ids(3), 4)


def test_a_turn_behind_a_row_that_ended_early_is_an_error(model):
    llama: Any = build("llama")
    llama.generation_config.eos_token_id, llama.generation_config.pad_token_id = 5, 0
    cache = bounded(llama)
    prefill(llama, cache, ids(12, 2))
    with pytest.raises(ValueError, match="row 1 of output ended before the others"):
        turn(llama, cache, ids(3, 2), output=torch.tensor([[9, 8, 7], [9, 5, 0]]))
    turn(llama, cache, ids(3, 2), output=torch.tensor([[9, 8, 7], [9, 8, 5]]))  # both ended here


def test_a_turn_of_many_rows_needs_a_history_for_each(model):
    llama, cache = model("llama"), bounded(model("llama"))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    prefill(llama, cache, ids(6), attention_mask=mask)
    with pytest.raises(
        ValueError, match=r"holds a batch of 1 and was given 3 rows: cache\.fork\(n\) repeats each row n"
    ):
        turn(llama, cache, ids(3, 3, seed=2))
    cache = cache.fork(3)
    given = turn(llama, cache, ids(3, 3, seed=2))
    assert given["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 1]] * 3
    llama.generate(**given, max_new_tokens=3)
    assert cache.kept(0).shape[0] == 3


@pytest.mark.parametrize("call", [turn, prefill])
def test_what_a_tokenizer_returns_whole_is_an_error(model, call, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(TypeError, match=r"must be a tensor .*, got BatchEncoding: pass its input_ids"):
        call(model("llama"), bounded(model("llama")), tf.BatchEncoding({"input_ids": ids(3)}))


@pytest.mark.parametrize("call", [turn, prefill])
def test_another_cache_is_an_error(model, call, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(TypeError, match="SinkCache, got DynamicCache"):
        call(model("llama"), DynamicCache(), ids(3))


# forks and copies


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_a_fork_goes_its_own_way(model, positions):
    llama, cache = model("llama"), bounded(model("llama"), positions=positions)
    prefill(llama, cache, ids(30))
    fork, twin = cache.fork(), copy.deepcopy(cache)
    first = read_on(llama, fork, ids(20, seed=1))
    assert cache.seen == 30
    assert torch.equal(read_on(llama, cache, ids(20, seed=1)), first)
    read_on(llama, fork, ids(3, seed=2))
    assert torch.equal(read_on(llama, twin, ids(20, seed=1)), first)


def test_a_fork_of_many_rows_serves_parallel_samples_of_one_prompt(model):
    llama, cache = model("llama"), bounded(model("llama"))
    prefill(llama, cache, ids(30))
    tokens = ids(12, 3, seed=1)
    together = read_on(llama, cache.fork(3), tokens)
    for row in range(3):
        torch.testing.assert_close(together[row], read_on(llama, cache.fork(), tokens[row : row + 1])[0])


def test_a_forks_storage_is_its_own(model):
    cache = bounded(model("llama"))
    prefill(model("llama"), cache, ids(30))
    fork = cache.fork()
    assert fork.nbytes == cache.nbytes
    cast(Any, fork.layers[0]).keys.zero_()
    assert float(cast(Any, cache.layers[0]).keys.abs().sum()) > 0


@pytest.mark.parametrize("batch", [0, -1, 1.5, True])
def test_a_fork_of_no_rows_is_an_error(model, batch, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match="batch must be 1 or more rows"):
        bounded(model("llama")).fork(batch)


# taken back


def test_tokens_taken_back_before_an_eviction_leave_no_trace(model):
    llama = model("llama")
    for positions in ("cache", "original"):
        cache, other = bounded(llama, 20, positions), bounded(llama, 20, positions)
        prefill(llama, cache, ids(12))
        prefill(llama, other, ids(12))
        read_on(llama, cache, ids(6, seed=1))
        cache.crop(-6)
        assert cache.seen == 12
        assert cache.layers[0].is_croppable
        assert torch.equal(read_on(llama, cache, ids(30, seed=2)), read_on(llama, other, ids(30, seed=2)))
        assert not cache.layers[0].is_croppable


def test_tokens_of_a_padded_batch_taken_back_leave_no_trace(model):
    llama, tokens, mask = model("llama"), ids(14, 2), torch.ones(2, 14, dtype=torch.int64)
    mask[0, :5] = mask[1, 7:10] = 0
    cache, other = bounded(llama, 20), bounded(llama, 20)
    prefill(llama, cache, tokens, attention_mask=mask)
    cache.crop(-6)
    prefill(llama, other, tokens[:, :8], attention_mask=mask[:, :8].clone().index_fill_(1, torch.tensor([7]), 1))
    assert cache.seen == 8
    assert cache.kept(0)[:, 0].tolist() == [[-1, -1, -1, -1, 0, 1, 2], list(range(7))]
    after = torch.cat([mask[:, :8], torch.ones(2, 3, dtype=torch.int64)], dim=1)
    last = prefill(llama, cache, ids(3, 2, seed=3), attention_mask=after)
    alone = bounded(llama, 20)
    own = torch.cat([tokens[1:, :7], ids(3, 2, seed=3)[1:]], dim=1)
    torch.testing.assert_close(last[1:], prefill(llama, alone, own))


def test_tokens_taken_back_across_a_rebase_leave_no_negative_position(model):
    llama, cache, other = model("llama"), bounded(model("llama"), 40), bounded(model("llama"), 40)
    for each in (cache, other):
        list(stream(llama, each, ids(20)[0].tolist(), rebase_at=16))  # re-based at 16
    cache.crop(-8)
    assert cache.next_positions(3).tolist() == [[12, 13, 14]]
    expected = read_on(llama, bounded(llama, 40), torch.cat([ids(20)[:, :12], ids(9, seed=1)], dim=1))[:, 12:]
    torch.testing.assert_close(read_on(llama, cache, ids(9, seed=1)), expected, rtol=0, atol=1e-9)
    other.crop(-3)
    assert other.next_positions(1).tolist() == [[1]]


def test_gemma3_takes_tokens_back_inside_its_windows(model):
    gemma = model("gemma3")
    cache, other = bounded(gemma, 30), bounded(gemma, 30)
    prefill(gemma, cache, ids(9))
    prefill(gemma, other, ids(9))
    read_on(gemma, cache, ids(4, seed=1))
    cache.crop(-4)
    assert torch.equal(read_on(gemma, cache, ids(9, seed=2)), read_on(gemma, other, ids(9, seed=2)))
    with pytest.raises(ValueError, match="layer 0 is a DynamicSlidingWindowLayer that no longer holds"):
        cache.crop(-3)  # 18 tokens are more than its window of 16
    assert cache.seen == 18
    full = bounded(gemma, 30)
    prefill(gemma, full, ids(16))
    with pytest.raises(ValueError, match="layer 0 is a DynamicSlidingWindowLayer that no longer holds"):
        full.crop(-1)  # of 16 tokens a window of 16 holds the newest 15


# searches


@pytest.mark.parametrize("search", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prefix_read_once_serves_a_search(family, search):
    tiny: Any = build(family)
    cache, other = bounded(tiny), bounded(tiny)
    prefill(tiny, cache, ids(20)[:, :-1])
    rows = ids(20).repeat_interleave(search["num_beams"], dim=0)
    whole = SinkCache(tiny, StreamingLLM(SINKS), BUDGET)
    prefill(tiny, whole, rows[:, :-1])
    got = generate(tiny, cache, ids(20), 12, **search)
    with torch.no_grad():
        expected = generate(tiny, whole, ids(20), 12, **search)
    assert got.tolist() == expected.tolist()
    assert other.seen == 0


def test_a_prefix_read_once_serves_samples(model):
    llama, cache = model("llama"), bounded(model("llama"))
    prefill(llama, cache, ids(20)[:, :-1])
    given = {"max_new_tokens": 15, "do_sample": True, "num_return_sequences": 3, cache_argument(llama): cache}
    torch.manual_seed(0)
    samples = llama.generate(ids(20), **given)
    torch.manual_seed(0)
    expected = llama.generate(ids(20), **{**given, cache_argument(llama): bounded(llama)})
    assert samples.shape == (3, 35)
    assert samples.tolist()[0][:20] == expected.tolist()[0][:20]


def test_beams_of_a_padded_batch_equal_the_beams_of_each_row(model):
    llama, tokens, mask = model("llama"), ids(15, 2), torch.ones(2, 15, dtype=torch.int64)
    mask[0, :11] = tokens[0, :11] = 0
    together = generate(llama, bounded(llama), tokens, 20, num_beams=3, attention_mask=mask)
    for row in range(2):
        alone = generate(llama, bounded(llama), tokens[row : row + 1, mask[row].bool()], 20, num_beams=3)
        assert together[row, 15:].tolist() == alone[0, -20:].tolist()


@pytest.mark.parametrize("assisted", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_decoding_within_the_budget_equals_greedy(model, assisted):
    llama, cache = model("llama"), bounded(model("llama"), 64)
    helper = {assisted: build("llama", seed=1) if assisted == "assistant_model" else 3}
    try:
        got = generate(llama, cache, ids(12), 30, **helper)
    except ValueError as error:
        if "assisted" not in str(error).lower():
            raise
        pytest.skip("this transformers takes tokens back in a way that is refused")
    assert got.tolist() == generate(llama, bounded(llama, 64), ids(12), 30).tolist()
    assert cache.seen == got.shape[1] - 1


def test_assisted_decoding_that_would_evict_is_an_error_before_it_does(model):
    cache = bounded(model("llama"), 20)
    with pytest.raises(ValueError, match=r"[Aa]ssisted decoding|as a negative number"):
        generate(model("llama"), cache, ids(12), 30, assistant_model=build("llama", seed=1))
    assert cache.kept(0).shape[2] == cache.seen


def test_assisted_decoding_with_a_cache_that_has_evicted_is_an_error(model):
    cache = bounded(model("llama"))
    prefill(model("llama"), cache, ids(20))
    with pytest.raises(ValueError, match=r"[Aa]ssisted|crop|attention_mask covers"):
        generate(model("llama"), cache, ids(22), 5, assistant_model=build("llama", seed=1))


def test_after_assisted_decoding_a_fork_evicts_again(model):
    llama, cache = model("llama"), bounded(model("llama"), 40)
    try:
        said = generate(llama, cache, ids(12), 10, prompt_lookup_num_tokens=3)
    except ValueError as error:
        if "as a negative number" not in str(error):
            raise
        pytest.skip("this transformers takes tokens back in a way that is refused")
    fork = cache.fork()
    list(stream(llama, fork, [*said[0, -1:].tolist(), *range(1, 60)]))
    assert fork.kept(0).shape[2] == 40


def test_after_a_reset_the_cache_evicts_again(model):
    llama, cache = model("llama"), bounded(model("llama"), 40)
    for layer in cast(list[Any], cache.layers):
        layer.activate_past_recording()
    cache.reset()
    prefill(llama, cache, ids(60))
    assert cache.kept(0).shape[2] == 40


def test_rows_of_a_linear_hybrid_can_be_repeated_and_chosen():
    config = tf.Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], initializer_range=0.3,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    lfm: Any = tf.Lfm2ForCausalLM(config).eval()
    try:
        read_on(lfm, DynamicCache(config=config), ids(3))  # type: ignore[arg-type]
    except AttributeError:
        pytest.skip(f"transformers {tf.__version__} cannot serve LFM2 with a cache of its own")
    cache = bounded(lfm)
    prefill(lfm, cache, ids(20))
    three = cache.fork(3)
    tokens = ids(8, 3, seed=1)
    together = read_on(lfm, three, tokens)
    for row in range(3):
        alone = read_on(lfm, cache.fork(), tokens[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-3, atol=1e-3)  # of units, in float32
    three.batch_select_indices(torch.tensor([2, 0]))
    assert three.kept(1).shape[0] == 2
    read_on(lfm, three, ids(3, 2))


# the slots are in order until something goes


def test_kept_follows_reordered_rows_of_one_history(model):
    llama, cache = model("llama"), SinkCache(model("llama"), Window(), BUDGET)
    prefill(llama, cache, ids(20, 3))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert cache.kept(0).shape[0] == 2
    assert cache.kept(0)[0, 0].tolist() == kept([20], BUDGET, sinks_and_recent(0))[-1]
    cache.batch_repeat_interleave(2)
    assert cache.kept(0).shape[0] == 4
