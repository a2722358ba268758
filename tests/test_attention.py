import copy
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, build
from torch.nn import functional

from sinkcache import SinkCache, prefill, stream
from sinkcache.attention import attend, packed
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM


def _logits(model: Any, tokens: list[int], chunk: int) -> torch.Tensor:
    return torch.stack(list(stream(model, SinkCache(model, StreamingLLM(2), 12), tokens, chunk=chunk)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma3", "glm"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_packed_attention_gives_the_logits_of_sdpa(family, chunk):
    model: Any = build(family)
    tokens = torch.randint(1, VOCABULARY, (40,)).tolist()
    expected = _logits(model, tokens, chunk)
    model.set_attn_implementation(packed())
    torch.testing.assert_close(_logits(model, tokens, chunk), expected, rtol=0, atol=1e-6)  # norms round to float32


def test_a_single_query_reads_each_key_head_once(monkeypatch):
    shapes = []

    def record(query, key, value, **kwargs):
        shapes.append((tuple(query.shape), tuple(key.shape), kwargs.get("enable_gqa", False)))
        return functional.scaled_dot_product_attention(query, key, value, **kwargs)

    monkeypatch.setattr("sinkcache.attention.scaled_dot_product_attention", record)
    model: Any = build("llama")
    model.set_attn_implementation(packed())
    cache = SinkCache(model, StreamingLLM(2), 8)
    prefill(model, cache, torch.randint(1, VOCABULARY, (3, 20)))
    shapes.clear()
    prefill(model, cache, torch.randint(1, VOCABULARY, (3, 1)))
    assert shapes == [((3, 2, 2, 16), (3, 2, 8, 16), False)] * 2  # 4 query heads in 2 groups, on 2 key heads


def test_scale_mask_and_groups_are_those_of_plain_attention():
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 7)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    for mask in (None, torch.tensor([True, False, True, True, False]).expand(2, 1, 1, 5)):
        output, _ = attend(module, query, key, value, mask, scaling=0.3)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, 1)) * 0.3
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(output, expected)


def test_packed_attention_generates_what_sdpa_generates():
    model: Any = build("llama")
    prompt = torch.randint(1, VOCABULARY, (2, 9))
    other = copy.deepcopy(model)
    other.set_attn_implementation(packed())
    one = [_generate(each, prompt) for each in (model, other)]
    assert torch.equal(*one)


def _generate(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    cache = {cache_argument(model): SinkCache(model, StreamingLLM(2), 8)}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, **cache)
