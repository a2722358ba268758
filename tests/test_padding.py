"""A row of a padded batch is, at every step, what it would be alone."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import PADS_BESIDE_WINDOWS, VOCABULARY, build
from jaxtyping import Float
from oracles import by_hand, by_module, kept, sinks_and_recent
from torch import Tensor

from sinkcache import Entries, Policy, SinkCache, prefill, stream
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

BUDGET, SINKS = 9, 3
PADS = (
    0,
    1,
    5,
    14,
    22,
)  # of 30 columns: none, fewer than the sinks, more, more than the budget, and hardly a token left
CHUNKS = {
    "in one pass, then token by token": [30] + [1] * 20,
    "token by token": [1] * 50,
    "in chunks": [7, 7, 7, 7, 2, 1, 1, 5, 13],
    "in chunks as long as the budget": [9, 9, 9, 3, 9, 11],
}


@dataclass(frozen=True)
class Scattered(Policy):
    """Worth without a pattern and with many ties: evicts anywhere, new tokens included."""

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        return ((entries.positions * 7919 + 5) % 13 % 6).float()


def batch(pads: tuple[int, ...] = PADS, columns: int = 50) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (len(pads), columns), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    for row, pad in enumerate(pads):
        tokens[row, :pad], mask[row, :pad] = 0, 0
    return tokens, mask


def holed() -> tuple[Tensor, Tensor]:
    """Rows with pads in front, and holes of one token and of many, within and across chunks."""
    tokens, mask = batch((0, 3, 0, 9))
    for row, start, end in [(0, 4, 5), (1, 6, 17), (2, 0, 2), (2, 20, 28), (3, 10, 12), (3, 33, 34)]:
        tokens[row, start:end], mask[row, start:end] = 0, 0
    return tokens, mask


def read(model: Any, cache: SinkCache, tokens: Tensor, mask: Tensor, chunks: list[int], **extra: Any) -> Tensor:
    """Logits of all columns; the model is given a mask and no positions."""
    logits, start = [], 0
    cache.unfinished = True  # a chunk may end in a hole
    for q_len in chunks:
        end = start + q_len
        given = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end], cache_argument(model): cache}
        with torch.no_grad():
            logits.append(model(**given, use_cache=True, **extra).logits)
        start = end
    return torch.cat(logits, dim=1)


def alone(mask: Tensor, chunks: list[int]) -> list[int]:
    """The chunks of a row alone."""
    return [count for piece in mask.split(chunks) if (count := int(piece.sum()))]


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("given", [batch, holed], ids=["padded on the left", "with holes"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_padded_row_equals_the_row_alone(model, family, given, chunks, positions):
    tiny, (tokens, mask) = model(family), given()
    cache = SinkCache(tiny, StreamingLLM(SINKS), BUDGET, positions)
    logits = read(tiny, cache, tokens, mask, chunks)
    for row in range(len(tokens)):
        real = mask[row].bool()
        ids, own = tokens[row, real].tolist(), alone(mask[row], chunks)
        expected = by_hand(tiny, ids, own, BUDGET, sinks_and_recent(SINKS), positions)
        torch.testing.assert_close(logits[row, real], expected, rtol=0, atol=2e-5)  # frequencies are float32
        assert cache.kept(0)[row, 0].tolist()[-BUDGET:] == kept(own, BUDGET, sinks_and_recent(SINKS))[-1]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi", "glm", "olmo2", "smollm3", "cohere"])
def test_padded_rows_equal_rows_alone_in_other_families(model, family):
    if family == "gemma3" and not PADS_BESIDE_WINDOWS:
        pytest.skip(f"transformers {tf.__version__} reads all layers' masks at one offset: see the refusals below")
    tiny, (tokens, mask) = model(family), batch((0, 2, 13), 40)
    chunks = [26, 1, 1, 1, 5, 6]
    for positions in ("cache", "original"):
        logits = read(tiny, SinkCache(tiny, StreamingLLM(SINKS), BUDGET, positions), tokens, mask, chunks)
        for row in range(len(tokens)):
            real = mask[row].bool()
            own = alone(mask[row], chunks)
            expected = by_module(tiny, tokens[row, real].tolist(), own, BUDGET, sinks_and_recent(SINKS), positions)
            torch.testing.assert_close(logits[row, real], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_rows_equal_rows_alone_under_eager_attention(family):
    if family == "gemma3" and not PADS_BESIDE_WINDOWS:
        pytest.skip(f"transformers {tf.__version__} reads all layers' masks at one offset: see the refusals below")
    tiny: Any = build(family, torch.float32)  # in float64 transformers' eager attention makes NaN of a pad's own row
    tiny.set_attn_implementation("eager")
    (tokens, mask), chunks = batch((0, 2, 13), 40), [26, 1, 1, 1, 5, 6]
    logits = read(tiny, SinkCache(tiny, StreamingLLM(SINKS), BUDGET), tokens, mask, chunks)
    for row, pad in enumerate((0, 2, 13)):
        one = SinkCache(tiny, StreamingLLM(SINKS), BUDGET)
        expected = read(tiny, one, tokens[row : row + 1, pad:], mask[row : row + 1, pad:], [26 - pad, *chunks[1:]])
        torch.testing.assert_close(logits[row : row + 1, pad:], expected, rtol=1e-3, atol=2e-3)  # of units, in float32


@pytest.mark.parametrize("policy", [StreamingLLM(SINKS), Window()], ids=["sinks", "window"])
def test_generate_continues_each_padded_row_as_it_would_alone(model, policy):
    llama, (tokens, mask) = model("llama"), batch(columns=30)
    argument = cache_argument(llama)
    given = {"max_new_tokens": 40, "do_sample": False}
    together = llama.generate(tokens, attention_mask=mask, **{argument: SinkCache(llama, policy, BUDGET)}, **given)
    for row, pad in enumerate(PADS):
        one = llama.generate(tokens[row : row + 1, pad:], **{argument: SinkCache(llama, policy, BUDGET)}, **given)
        assert together[row, 30:].tolist() == one[0, 30 - pad :].tolist()


def test_a_single_padded_row_equals_the_row(model):
    llama, (tokens, mask) = model("llama"), batch((14,))
    cache, other = (SinkCache(llama, StreamingLLM(SINKS), BUDGET) for _ in range(2))
    chunks = [30, 1, 1, 1, 4, 13]
    got = read(llama, cache, tokens, mask, chunks)[:, 14:]
    expected = read(llama, other, tokens[:, 14:], mask[:, 14:], [16, *chunks[1:]])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_prefill_reads_padded_rows_in_chunks_and_stream_goes_on(model):
    llama, (tokens, mask) = model("llama"), holed()
    cache = SinkCache(llama, StreamingLLM(SINKS), BUDGET)
    last = prefill(llama, cache, tokens, chunk=8, attention_mask=mask)
    more = torch.randint(1, VOCABULARY, (70, len(tokens)))
    after = torch.stack(list(stream(llama, cache, more.unbind(), rebase_at=24)), dim=1)
    for row in range(len(tokens)):
        one = SinkCache(llama, StreamingLLM(SINKS), BUDGET)
        own = tokens[row : row + 1, mask[row].bool()]
        start = 0
        for count in alone(mask[row], [8] * 6 + [2]):
            expected = prefill(llama, one, own[:, start : start + count])
            start += count
        torch.testing.assert_close(last[row : row + 1], expected, rtol=0, atol=1e-9)
        expected = torch.stack(list(stream(llama, one, more[:, row].tolist(), rebase_at=24)), dim=1)
        torch.testing.assert_close(after[row : row + 1], expected, rtol=0, atol=1e-8)


@pytest.mark.skipif(not PADS_BESIDE_WINDOWS, reason="refused before transformers 5.14")
def test_rebasing_moves_the_keys_of_native_windows_row_by_row(model):
    gemma, (tokens, mask) = model("gemma3"), batch((0, 5), 20)
    cache = SinkCache(gemma, StreamingLLM(SINKS), BUDGET)
    prefill(gemma, cache, tokens, attention_mask=mask)
    more = torch.randint(1, VOCABULARY, (30, 2))
    after = torch.stack(list(stream(gemma, cache, more.unbind(), rebase_at=24)), dim=1)
    for row, pads in enumerate((0, 5)):
        one = SinkCache(gemma, StreamingLLM(SINKS), BUDGET)
        prefill(gemma, one, tokens[row : row + 1, pads:])
        expected = torch.stack(list(stream(gemma, one, more[:, row].tolist(), rebase_at=24)), dim=1)
        torch.testing.assert_close(after[row : row + 1], expected, rtol=0, atol=1e-8)


def test_a_share_of_the_prompt_is_of_each_rows_own_tokens(model):
    llama, (tokens, mask) = model("llama"), batch((0, 10, 20), 40)
    cache = SinkCache(llama, Window(), budget=0.25)
    prefill(llama, cache, tokens, chunk=7, attention_mask=mask)
    assert [int((row >= 0).sum()) for row in cache.kept(0)[:, 0]] == [10, 8, 5]  # ceil of a quarter of 40, 30, 20
    by_generate = SinkCache(llama, Window(), budget=0.25)
    llama.generate(tokens, attention_mask=mask, max_new_tokens=1, **{cache_argument(llama): by_generate})
    assert torch.equal(by_generate.kept(0), cache.kept(0))


@pytest.mark.parametrize(
    ("policy", "budget", "pads", "chunks"),
    [(Scattered(), BUDGET, (4, 4, 0), [17, *[1] * 33]), (StreamingLLM(1), 0.5, (0, 8), [8, 20, *[1] * 22])],
    ids=["rows padded alike share what a policy makes of them", "a row that begins later has its own share"],
)
def test_rows_of_any_policy_and_budget_equal_the_same_rows_alone(model, policy, budget, pads, chunks):
    llama, (tokens, mask) = model("llama"), batch(pads)
    logits = read(llama, SinkCache(llama, policy, budget, "cache"), tokens, mask, chunks)
    for row, real in enumerate(mask.bool()):
        own = tokens[row : row + 1, real]
        single = SinkCache(llama, policy, budget, "cache")
        expected = read(llama, single, own, torch.ones_like(own), alone(mask[row], chunks))
        torch.testing.assert_close(logits[row, real], expected[0], rtol=0, atol=1e-8)


def test_kept_is_filled_up_with_minus_one_in_front(model):
    llama, (tokens, mask) = model("llama"), batch((0, 5), 7)
    cache = SinkCache(llama, StreamingLLM(SINKS), BUDGET)
    prefill(llama, cache, tokens, attention_mask=mask)
    assert cache.kept(1)[:, 1].tolist() == [[0, 1, 2, 3, 4, 5, 6], [-1, -1, -1, -1, -1, 0, 1]]


def test_rows_follow_a_reordering(model):
    llama, (tokens, mask) = model("llama"), batch()
    cache, other = (SinkCache(llama, StreamingLLM(SINKS), BUDGET) for _ in range(2))
    order = torch.tensor([3, 3, 0, 4])
    for each in (cache, other):
        read(llama, each, tokens[:, :30], mask[:, :30], [17, 13])
    cache.reorder_cache(order)
    assert torch.equal(cache.kept(0), other.kept(0)[order])
    rest = tokens[:, 30:]
    expected = read_on(llama, other, rest, mask)[order]
    torch.testing.assert_close(read_on(llama, cache, rest[order], mask[order]), expected, rtol=0, atol=1e-9)


def read_on(model: Any, cache: SinkCache, tokens: Tensor, mask: Tensor) -> Tensor:
    logits = []
    for piece in tokens.split([1, 1, 6, 12], dim=1):
        given = {"attention_mask": mask[:, : cache.seen + piece.shape[1]], cache_argument(model): cache}
        with torch.no_grad():
            logits.append(model(input_ids=piece, use_cache=True, **given).logits)
    return torch.cat(logits, dim=1)


def test_without_a_mask_a_padded_cache_reads_on_as_with_one(model):
    llama, (tokens, mask) = model("llama"), batch()
    cache, other = (SinkCache(llama, StreamingLLM(SINKS), BUDGET) for _ in range(2))
    for each in (cache, other):
        prefill(llama, each, tokens[:, :30], attention_mask=mask[:, :30])
    got = prefill(llama, cache, tokens[:, 30:], chunk=6)
    expected = prefill(llama, other, tokens[:, 30:], chunk=6, attention_mask=mask)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shift", [0, 7], ids=["from 0", "from 7"])
def test_positions_of_each_rows_own_tokens_may_be_given(model, shift):
    llama, (tokens, mask) = model("llama"), batch((0, 4), 30)
    cache, other = (SinkCache(llama, StreamingLLM(SINKS), BUDGET) for _ in range(2))
    positions = (mask.cumsum(1) - 1).clamp(min=0) + shift
    expected = read(llama, other, tokens, mask, [12, 1, 1, 16])
    start, got = 0, []
    for q_len in [12, 1, 1, 16]:
        extra = {"position_ids": positions[:, start : start + q_len], "attention_mask": mask[:, : start + q_len]}
        with torch.no_grad():
            logits = llama(tokens[:, start : start + q_len], **extra, **{cache_argument(llama): cache}).logits
        got.append(logits)
        start += q_len
    real = mask.bool()
    torch.testing.assert_close(torch.cat(got, dim=1)[real], expected[real], rtol=0, atol=1e-9)


def test_positions_may_be_given_in_some_steps_and_not_in_others(model):
    llama, (tokens, mask) = model("llama"), batch((0, 4), 30)
    expected = read(llama, SinkCache(llama, StreamingLLM(SINKS), BUDGET), tokens, mask, [12, 1, 1, 16])
    cache, positions, got = SinkCache(llama, StreamingLLM(SINKS), BUDGET), (mask.cumsum(1) - 1).clamp(min=0), []
    for number, columns in enumerate(torch.arange(30).split([12, 1, 1, 16])):
        extra = {"position_ids": positions[:, columns]} if number % 2 else {}
        with torch.no_grad():
            given = {"attention_mask": mask[:, : columns[-1] + 1], cache_argument(llama): cache}
            got.append(llama(tokens[:, columns], **given, **extra).logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(got, dim=1)[real], expected[real], rtol=0, atol=1e-9)


# refusals


@pytest.mark.skipif(PADS_BESIDE_WINDOWS, reason="served since transformers 5.14")
def test_a_padded_batch_beside_sliding_windows_is_an_error_before_transformers_5_14(model):
    gemma, (tokens, mask) = model("gemma3"), batch((0, 2), 31)
    cache = SinkCache(gemma, StreamingLLM(SINKS), BUDGET)
    with pytest.raises(ValueError, match=r"need transformers 5\.14 or later: run rows one by one"):
        prefill(gemma, cache, tokens, attention_mask=mask)
    assert cache.seen == 0


def test_a_batch_padded_on_the_right_is_an_error(model):
    cache, (tokens, mask) = SinkCache(model("llama"), budget=BUDGET), batch((0, 0), 12)
    mask[1, 9:] = 0
    with pytest.raises(ValueError, match=r"last token of row 1: a batch padded on the right.*Pad on the left"):
        model("llama").generate(
            tokens, attention_mask=mask, max_new_tokens=3, **{cache_argument(model("llama")): cache}
        )
    assert cache.seen == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_the_cache_was_not_told_of_are_an_error(model, side):
    cache, (tokens, _) = SinkCache(model("llama"), budget=BUDGET), batch((0, 4), 12)
    tokens = tokens if side == "left" else tokens.flip(1)
    with (
        pytest.raises(ValueError, match="row 1 begins or ends with the pad token 0 and no attention_mask"),
        torch.no_grad(),
    ):
        model("llama")(tokens, **{cache_argument(model("llama")): cache})
    assert cache.seen == 0


@pytest.mark.parametrize("row", [[1] * 31, [0] * 4 + [1] * 27], ids=["shows a pad", "hides a token"])
def test_another_past_in_the_mask_is_an_error(model, row):
    llama, (tokens, mask) = model("llama"), batch((0, 2), 31)
    cache = SinkCache(llama, StreamingLLM(SINKS), BUDGET)
    prefill(llama, cache, tokens[:, :30], attention_mask=mask[:, :30])
    mask[1] = torch.tensor(row)
    with pytest.raises(ValueError, match="attention_mask of row 1 hides other tokens than when they were read"):
        prefill(llama, cache, tokens[:, 30:], attention_mask=mask)


def test_a_mask_of_four_axes_is_an_error_for_a_padded_cache(model):
    llama, (tokens, mask) = model("llama"), batch((0, 2), 31)
    cache = SinkCache(llama, StreamingLLM(SINKS), BUDGET)
    prefill(llama, cache, tokens[:, :30], attention_mask=mask[:, :30])
    four = torch.zeros(2, 1, 1, BUDGET, dtype=torch.float64)
    with pytest.raises(ValueError, match="takes an attention_mask of shape"), torch.no_grad():
        llama(tokens[:, 30:], attention_mask=four, **{cache_argument(llama): cache})


@pytest.mark.skipif(not PADS_BESIDE_WINDOWS, reason="any padding is refused there before transformers 5.14")
def test_holes_beside_sliding_windows_are_an_error(model):
    """A native window counts columns, so that pads would use it up."""
    gemma, (tokens, mask) = model("gemma3"), batch((0, 4), 30)
    cache = SinkCache(gemma, StreamingLLM(SINKS), BUDGET)
    prefill(gemma, cache, tokens[:, :12], chunk=5, attention_mask=mask[:, :12])
    mask[1, 15:18] = 0
    with pytest.raises(ValueError, match="pads behind a row's first token cannot be skipped beside sliding windows"):
        prefill(gemma, cache, tokens[:, 12:], attention_mask=mask)
    assert cache.seen == 12
    mask[1, 15:18] = 1
    prefill(gemma, cache, tokens[:, 12:], attention_mask=mask)


def test_holes_in_a_first_pass_wider_than_a_bounded_window_are_an_error():
    tiny: Any = build("mistral", sliding_window=16)
    tokens, mask = batch((0, 3), 30)
    mask[1, 10:15] = 0
    cache = SinkCache(tiny, StreamingLLM(SINKS), BUDGET, sliding="bound")
    with pytest.raises(ValueError, match="pads behind a row's first token"):
        prefill(tiny, cache, tokens, attention_mask=mask)
    got = prefill(tiny, cache, tokens, chunk=7, attention_mask=mask)
    alone = SinkCache(tiny, StreamingLLM(SINKS), BUDGET, sliding="bound")
    for piece in tokens[1:, mask[1].bool()].split([4, 3, 6, 7, 2], dim=1):
        expected = prefill(tiny, alone, piece)
    torch.testing.assert_close(got[1:], expected, rtol=0, atol=1e-9)


def test_padding_beside_sliding_windows_is_an_error_under_flash_attention(model):
    gemma, (tokens, mask) = build("gemma3"), batch((0, 4), 30)
    cache = SinkCache(gemma, StreamingLLM(SINKS), BUDGET)
    gemma.config._attn_implementation_internal = "flash_attention_2"  # type: ignore[union-attr] - no kernel is run
    with pytest.raises(ValueError, match=r"flash_attention_2 attention, which reads every mask from its end|5\.14"):
        prefill(gemma, cache, tokens, attention_mask=mask)


def test_a_step_that_fails_in_one_lane_is_not_taken_up_again(model):
    llama, (tokens, mask) = model("llama"), batch((1, 16), 20)
    cache = SinkCache(llama, StreamingLLM(SINKS), budget=0.5)  # half of 4 is less than the sinks
    with pytest.raises(ValueError, match="num_sinks must be less than the budget"), torch.no_grad():
        llama(tokens, attention_mask=mask, **{cache_argument(llama): cache})
    with pytest.raises(RuntimeError, match=r"half-way|interrupted"), torch.no_grad():
        llama(tokens, attention_mask=mask, **{cache_argument(llama): cache})
    cache.reset()
    prefill(llama, cache, tokens[:1], attention_mask=mask[:1])


def test_a_share_of_a_row_that_begins_later_makes_room_for_it(model):
    llama, (tokens, mask) = model("llama"), batch((0, 10), 40)
    cache = SinkCache(llama, Window(), budget=0.5)
    with torch.no_grad():
        for start, end in [(0, 8), (8, 40)]:  # row 1 begins in the second pass, of which its share is more
            given = {"attention_mask": mask[:, :end], cache_argument(llama): cache}
            llama(tokens[:, start:end], use_cache=True, **given)
    assert [int((row >= 0).sum()) for row in cache.kept(0)[:, 0]] == [4, 15]


def test_a_copy_of_a_model_reads_padded_rows_too(model):
    llama, (tokens, mask) = copy.deepcopy(model("llama")), batch((0, 5), 30)
    SinkCache(model("llama"), budget=BUDGET)  # the copy may have been taken of a model with a cache
    twin: Any = copy.deepcopy(model("llama"))
    caches = [SinkCache(each, StreamingLLM(SINKS), BUDGET) for each in (llama, twin)]
    one, other = (prefill(m, c, tokens, 7, attention_mask=mask) for m, c in zip((llama, twin), caches, strict=True))
    assert torch.equal(one, other)


def test_what_inference_mode_read_can_be_gone_on_with_outside_of_it(model):
    llama, (tokens, mask) = model("llama"), batch((0, 0), 30)
    mask[1, :5] = 0
    for given in ({}, {"attention_mask": mask}):
        cache, other = SinkCache(llama, StreamingLLM(SINKS), 0.3), SinkCache(llama, StreamingLLM(SINKS), 0.3)
        with torch.inference_mode():
            prefill(llama, cache, tokens, 7, **given)
            fork = cache.fork()
        prefill(llama, other, tokens, 7, **given)
        more = torch.randint(1, VOCABULARY, (12, 2))
        expected = torch.stack(list(stream(llama, other, more.unbind(), rebase_at=16)))
        for each in (cache, fork):
            assert torch.equal(torch.stack(list(stream(llama, each, more.unbind(), rebase_at=16))), expected)


def test_what_a_pass_that_came_to_nothing_would_have_hidden_is_forgotten(model):
    llama, (tokens, mask) = model("llama"), batch((0, 5), 30)
    cache, other = (SinkCache(llama, StreamingLLM(SINKS), BUDGET) for _ in range(2))
    for each in (cache, other):
        prefill(llama, each, tokens, attention_mask=mask)
    hole = torch.cat([mask, torch.tensor([[0, 1, 1], [1, 1, 1]])], dim=1)
    with pytest.raises(IndexError), torch.no_grad():
        llama(torch.full((2, 3), 10_000), attention_mask=hole, **{cache_argument(llama): cache})
    one, two = (next(stream(llama, each, [torch.tensor([1, 2])])) for each in (cache, other))
    assert torch.equal(one, two)
