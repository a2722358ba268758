"""`generate` with a bounded cache says what a cache-free reference says, however generate is driven."""

from typing import Any, cast

import oracles
import pytest
import torch
from conftest import VOCABULARY, build
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from sinkcache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

CONVENTIONS: list[Any] = ["cache", "original"]
FAMILIES = ["llama", "qwen3", "mistral", "gpt_neox", "phi", "gemma3", "olmo2", "glm"]
BUDGET = 6
SINKS = oracles.sinks_and_recent(2)


def prompt(length: int, batch: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


def generate(model: nn.Module, cache: Any, ids: Tensor, count: int = 30, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, **options}
    return cast(Any, model).generate(ids, max_new_tokens=count, **{cache_argument(model): cache}, **options)


def bounded(model: nn.Module, convention: str = "cache", budget: int = BUDGET) -> SinkCache:
    return SinkCache(model, StreamingLLM(num_sinks=2), budget=budget, positions=cast(Any, convention))


def says_the_same(model: nn.Module, row: Tensor, length: int, chunks: list[int], convention: str = "cache") -> Tensor:
    """Asserts that each token of `row` from `length` on is the reference's choice; returns the logits it chose by."""
    ids = row[:-1].tolist()
    steps = [*chunks, *[1] * (len(ids) - sum(chunks))]
    if convention == "original":
        logits = oracles.by_mask(model, ids, steps, BUDGET, SINKS)
    else:
        logits = oracles.by_module(model, ids, steps, BUDGET, SINKS, convention)
    assert row[length:].tolist() == logits[length - 1 :].argmax(-1).tolist()
    return logits[length - 1 :]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_budgets_of_new_tokens_are_the_references(model, family, convention):
    out = generate(
        model(family),
        bounded(model(family), convention),
        prompt(5),
        20 * BUDGET,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape == (1, 5 + 20 * BUDGET)
    expected = says_the_same(model(family), out.sequences[0], 5, [5], convention)
    # an untrained model may repeat itself, so that tokens prove little; generate rounds logits to float32
    torch.testing.assert_close(torch.cat(out.logits).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_prompt_longer_than_the_budget_is_the_references(convention, implementation):
    tiny = build("llama")
    cast(Any, tiny).set_attn_implementation(implementation)
    out = generate(tiny, bounded(tiny, convention), prompt(29))
    says_the_same(tiny, out[0], 29, [29], convention)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_prompt_in_chunks_is_the_references(model, convention):
    out = generate(model("llama"), bounded(model("llama"), convention), prompt(29), prefill_chunk_size=8)
    says_the_same(model("llama"), out[0], 29, [8, 8, 8, 5], convention)


def test_a_batch_is_the_references_row_by_row(model):
    out = generate(model("llama"), bounded(model("llama")), prompt(11, batch=3))
    for row in out:
        says_the_same(model("llama"), row, 11, [11])


@pytest.mark.parametrize("policy", [Window(), StreamingLLM()], ids=repr)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_below_the_budget_it_is_the_full_cache(model, family, convention, policy):
    ids = prompt(7)
    full = generate(model(family), DynamicCache(config=model(family).config), ids, 24)
    cache = SinkCache(model(family), policy, budget=32, positions=convention)
    assert torch.equal(generate(model(family), cache, ids, 24), full)


def test_without_sinks_both_conventions_say_the_same(model):
    one, other = (SinkCache(model("llama"), Window(), budget=6, positions=each) for each in CONVENTIONS)
    ids = prompt(10)
    assert torch.equal(generate(model("llama"), one, ids, 60), generate(model("llama"), other, ids, 60))


@pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated:FutureWarning")  # since transformers 5.24
def test_its_old_name_still_serves(model):
    out = model("llama").generate(
        prompt(5), max_new_tokens=12, do_sample=False, past_key_values=bounded(model("llama"))
    )
    says_the_same(model("llama"), out[0], 5, [5])


# ways to generate


def test_sampling_with_a_seed_is_reproducible(model):
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(generate(model("llama"), bounded(model("llama")), prompt(9), 40, do_sample=True))
    assert torch.equal(*outs)


def test_sampled_sequences_have_the_references_logits(model):
    options = {"do_sample": True, "num_return_sequences": 3, "output_logits": True, "return_dict_in_generate": True}
    out = generate(model("llama"), bounded(model("llama")), prompt(9), 25, **options)
    assert len({tuple(row.tolist()) for row in out.sequences}) == 3
    for row, logits in zip(out.sequences, torch.stack(out.logits, dim=1), strict=True):
        expected = oracles.by_module(model("llama"), row[:-1].tolist(), [9, *[1] * 24], BUDGET, SINKS, "cache")[8:]
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)  # generate rounds logits to float32


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_beams_have_the_references_probabilities(model, convention):
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "output_scores": True}
    out = generate(
        model("llama"), bounded(model("llama"), convention), prompt(9), 25, return_dict_in_generate=True, **options
    )
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        expected = oracles.by_module(model("llama"), row[:-1].tolist(), [9, *[1] * 24], BUDGET, SINKS, convention)[8:]
        chosen = expected.log_softmax(-1).gather(1, row[9:, None]).sum()
        torch.testing.assert_close(score.double(), chosen, rtol=1e-5, atol=1e-4)  # 25 scores in float32, summed


def test_beams_below_the_budget_are_those_of_the_full_cache(model):
    full, mine = (
        generate(model("llama"), cache, prompt(6, batch=2), 20, num_beams=3)
        for cache in (DynamicCache(config=model("llama").config), bounded(model("llama"), budget=64))
    )
    assert torch.equal(mine, full)


class _Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_every_token(model):
    heard = _Heard()
    out = generate(model("llama"), bounded(model("llama")), prompt(9), 30, streamer=heard)
    assert heard.ended
    assert heard.tokens == out[0].tolist()


def test_generate_hands_the_cache_back(model):
    cache = bounded(model("llama"))
    out = generate(model("llama"), cache, prompt(9), 12, return_dict_in_generate=True)
    assert out.past_key_values is cache if cache_argument(model("llama")) == "past_key_values" else out.cache is cache
    assert cache.seen == 9 + 12 - 1  # the last token was not read


def test_a_share_of_the_prompt_serves_generate(model):
    cache = SinkCache(model("llama"), budget=0.5)
    generate(model("llama"), cache, prompt(20), 15)
    assert cache.kept(0).shape[2] == 10


# a second turn


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_second_turn_with_the_whole_history_is_the_references(model, family, convention):
    cache = bounded(model(family), convention)
    first = generate(model(family), cache, prompt(9), 20)
    history = torch.cat([first, prompt(6)], dim=1)
    out = generate(model(family), cache, history, 20)
    # the first turn's last token was not read in it: it is read together with the second prompt
    says_the_same(model(family), out[0], 35, [9, *[1] * 19, 7], convention)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_second_turn_with_the_new_ids_and_a_wide_mask_is_the_references(model, convention):
    cache = bounded(model("llama"), convention)
    first = generate(model("llama"), cache, prompt(9), 20)
    new = torch.cat([first[:, -1:], prompt(6)], dim=1)
    mask = torch.ones(1, cache.seen + 7, dtype=torch.int64)
    out = generate(model("llama"), cache, new, 20, attention_mask=mask)
    whole = torch.cat([first[0, :-1], out[0]])
    says_the_same(model("llama"), whole, 35, [9, *[1] * 19, 7], convention)


def test_a_conversation_after_reset_is_the_first_again(model):
    cache = bounded(model("llama"))
    first = generate(model("llama"), cache, prompt(9), 20)
    cache.reset()
    assert torch.equal(generate(model("llama"), cache, prompt(9), 20), first)


def test_a_shorter_prompt_without_reset_is_an_error(model):
    cache = bounded(model("llama"))
    generate(model("llama"), cache, prompt(9), 20)
    with pytest.raises(ValueError, match=r"28.*reset"):
        generate(model("llama"), cache, prompt(12), 5)


def test_new_ids_without_the_history_are_an_error(model):
    cache = bounded(model("llama"))
    model("llama").generate(prompt(9), max_new_tokens=20, do_sample=False, **{cache_argument(model("llama")): cache})
    with pytest.raises(ValueError, match=r"28.*reset"):
        model("llama").generate(prompt(4), max_new_tokens=5, do_sample=False, **{cache_argument(model("llama")): cache})


# what generate must not be asked


def test_a_cache_implementation_beside_the_cache_is_an_error(model):
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model("llama"), bounded(model("llama")), prompt(9), 5, cache_implementation="static")


def test_assisted_decoding_is_an_error_that_names_it(model):
    with pytest.raises((ValueError, NotImplementedError), match=r"[Aa]ssisted decoding"):
        generate(model("llama"), bounded(model("llama")), prompt(9), 12, assistant_model=build("llama", seed=1))


def test_prompt_lookup_is_an_error_that_names_it(model):
    with pytest.raises((ValueError, NotImplementedError), match=r"[Aa]ssisted decoding"):
        generate(model("llama"), bounded(model("llama")), prompt(9), 12, prompt_lookup_num_tokens=3)
