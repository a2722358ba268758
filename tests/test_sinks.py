"""Attention sinks measured by blocks are those of eager attention, summed by loops in float64."""

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
import zoo
from conftest import build
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from sinkcache import sinks
from sinkcache.guard import shown_to
from sinkcache.shares import LayerSinks
from sinkcache.sinks import AttentionSinks, attention_sinks

FAMILIES = [
    *(
        "Llama",
        "Llama, yarn scaling",
        "Mistral",
        "Mistral, sliding",
        "Gemma 3n",
        "Qwen2",
        "Qwen3",
        "Qwen3-Next",
        "Gemma",
        "Gemma 2",
    ),
    *("Gemma 3", "GPT-OSS", "Phi", "StableLM", "GPT-NeoX", "Granite", "OLMo 2", "Cohere 2", "GLM", "SmolLM3"),
    *("DeepSeek-V3", "Mixtral", "GPT-2", "OPT"),
]
TOKENS, FIRST = 23, 4
CLOSE = {"rtol": 0, "atol": 1e-5}  # float32 sums against float64 ones


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Of what transformers says about its own odd families."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def alive(label: str) -> Any:
    model = zoo.build(label)
    if isinstance(model, str):
        pytest.skip(f"transformers {tf.__version__}: {model}")
    if label == "DeepSeek-V3":  # the zoo's is told of no groups, which eager attention alone would miss
        for module in zoo.attention_modules(model):
            module.num_key_value_groups = 1  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(learned := getattr(module, "sinks", None), nn.Parameter):
            learned.data.normal_(std=2)  # another in each head
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = 0.5  # type: ignore[assignment]  # where it matters
    return model


def eagerly(model: Any, ids: Tensor) -> list[Tensor]:
    """The probabilities of each layer of attention, as transformers gives them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return [each.double() for each in told if each is not None]


def agrees(layer: LayerSinks, paid: Tensor, first: int) -> None:
    """Compares all that is kept with `paid`, `[batch, heads, tokens, tokens]`, looked at query by query."""
    tokens = paid.shape[-1]
    sees = (paid > 0).any(dim=0).any(dim=0)  # of finite logits no probability is zero, if not masked
    counts = [int(row.sum()) for row in sees]
    queries = range(first, tokens)
    for places in ([0], [0, 1, 2, 3], [2, tokens - 1]):
        expected = sum(paid[:, :, i, k] for i in queries for k in places) / len(queries)
        torch.testing.assert_close(layer.share(places).double(), expected, **CLOSE)
        even = math.fsum(float(sees[i, k]) / counts[i] for i in queries for k in places) / len(queries)
        assert layer.uniform(places) == pytest.approx(even, abs=1e-6)
    columns = sum(paid[:, :, i] for i in queries) / len(queries)
    torch.testing.assert_close(layer.columns().double(), columns, **CLOSE)
    choices = torch.zeros(*paid.shape[:2], tokens)
    for i in queries:
        for row, head in itertools.product(range(paid.shape[0]), range(paid.shape[1])):
            choices[row, head, int(paid[row, head, i].float().argmax())] += 1 / len(queries)
    torch.testing.assert_close(layer.first_choice, choices, **CLOSE)
    for k in range(tokens):
        seeing = [i for i in range(tokens) if sees[i, k]]
        expected = sum(paid[:, :, i, k] for i in seeing) / len(seeing)
        torch.testing.assert_close(layer.importance()[..., k].double(), expected, **CLOSE)
    for number, (start, stop) in enumerate(layer.ranges):
        by_ranges(layer, number, paid[:, :, start:stop], counts[start:stop])
        torch.testing.assert_close(layer.visible[number], sees[start:stop].float().sum(0), **CLOSE)


def by_ranges(layer: LayerSinks, number: int, paid: Tensor, counts: list[int]) -> None:
    rest = (1 - paid.sum(-1)).clamp_min(0)
    parts, sinks_too = torch.zeros(paid.shape[:2], dtype=torch.float64), layer.learned is not None
    for i, count in enumerate(counts):
        rows = torch.cat([paid[:, :, i], rest[:, :, i : i + 1]], -1) if sinks_too else paid[:, :, i]
        entropy = -(rows * rows.clamp_min(1e-300).log()).sum(-1)
        places = count + sinks_too
        parts += entropy / math.log(places) if places > 1 else torch.zeros_like(entropy)
    torch.testing.assert_close(layer.entropy[..., number].double(), parts / len(counts), **CLOSE)
    if layer.learned is not None:
        torch.testing.assert_close(layer.learned[..., number].double(), rest.mean(-1), **CLOSE)


@pytest.mark.parametrize("label", FAMILIES)
def test_what_is_kept_is_that_of_eager_attention(label: str) -> None:
    model, ids = alive(label), zoo.tokens(TOKENS, 2)
    paid = eagerly(model, ids)
    found = attention_sinks(model, ids, FIRST)
    assert found.tokens == TOKENS
    assert len(found.layers) == len(paid)
    assert (label == "GPT-OSS") == any(layer.learned is not None for layer in found.layers)
    for layer, probabilities in zip(found.layers, paid, strict=True):
        agrees(layer, probabilities, FIRST)


@pytest.mark.parametrize("elements", [1, 2 * 4 * TOKENS * 3, 2 * 4 * TOKENS * 5 + 1])
@pytest.mark.parametrize("label", ["Llama", "Gemma 3", "GPT-OSS"])
def test_blocks_add_up(label: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_ELEMENTS", elements)
    model, ids = alive(label), zoo.tokens(TOKENS, 2)
    found = attention_sinks(model, ids, FIRST)
    for layer, probabilities in zip(found.layers, eagerly(model, ids), strict=True):
        agrees(layer, probabilities, FIRST)


@pytest.mark.parametrize(("tokens", "first"), [(4, 1), (5, 4), (8, 4), (9, 4), (17, 2), (31, 1)])
def test_texts_of_any_length_are_covered_by_ranges_that_double(tokens: int, first: int) -> None:
    model, ids = build("llama"), zoo.tokens(tokens)
    found = attention_sinks(model, ids, first)
    ranges = found.layers[0].ranges
    assert [start for start, _ in ranges] == [0, *(first * 2**n for n in range(9) if n == 0 or first * 2**n < tokens)]
    assert [stop for _, stop in ranges] == [*(start for start, _ in ranges[1:]), tokens]
    for layer, probabilities in zip(found.layers, eagerly(model, ids), strict=True):
        agrees(layer, probabilities, first)


def test_any_range_can_be_the_first_counted() -> None:
    model, ids = build("llama"), zoo.tokens(TOKENS)
    paid, layer = eagerly(model, ids)[0], attention_sinks(model, ids, FIRST).layers[0]
    for first in (0, 4, 8, 16):
        torch.testing.assert_close(layer.columns(first).double(), paid[:, :, first:].mean(2), **CLOSE)
        even = sum(1 / (i + 1) for i in range(first, TOKENS)) / (TOKENS - first)
        assert layer.uniform(first=first) == pytest.approx(even)
    with pytest.raises(ValueError, match="from queries 0, 4, 8, 16 on, got 5"):
        layer.share(first=5)
    for wrong in ([], [-1], [TOKENS]):
        with pytest.raises(ValueError, match="positions must be of the text"):
            layer.share(wrong)


def test_the_rate_counts_rows_layers_and_heads() -> None:
    model, ids = build("llama"), zoo.tokens(TOKENS, 3)
    found = attention_sinks(model, ids, 1)
    paid = torch.stack(eagerly(model, ids))
    importance = torch.stack([paid[..., k:, k].mean(-1) for k in range(TOKENS)], -1)
    for threshold, position in ((0.1, 0), (0.2, 0), (0.05, 3)):
        expected = (importance[..., position] > threshold).double().mean()
        assert found.rate(threshold, position) == pytest.approx(float(expected))
        assert 0 < expected < 1


@pytest.mark.parametrize("label", ["Llama", "Gemma 3", "GPT-NeoX", "Cohere 2"])
def test_norms_and_directions_are_of_keys_as_they_are_read(label: str) -> None:
    model, ids = alive(label), zoo.tokens(TOKENS, 2)
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, **{zoo.cache_argument(model): cache})
    for layer in attention_sinks(model, ids, FIRST).layers:
        held: Any = cache.layers[layer.index]
        for got, tensor in ((layer.key_norms, held.keys), (layer.value_norms, held.values)):
            torch.testing.assert_close(got.double(), tensor.double().norm(dim=-1), rtol=1e-5, atol=1e-5)
        assert layer.cosine.abs().max() <= 1
        assert layer.cosine.shape == (2, 4, TOKENS)


def test_cosine_is_that_of_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[int, tuple[Tensor, Tensor]] = {}
    real = sinks._measured

    def noted(index: int, queries: Tensor, keys: Tensor, *more: Any) -> LayerSinks:
        shown[index] = (queries.double(), keys.double())
        return real(index, queries, keys, *more)

    monkeypatch.setattr(sinks, "_measured", noted)
    for layer in attention_sinks(build("llama"), zoo.tokens(TOKENS, 2), FIRST).layers:
        queries, keys = shown[layer.index]
        for head in range(4):
            cosine = torch.cosine_similarity(queries[:, head, FIRST:, None], keys[:, None, head // 2], dim=-1)
            torch.testing.assert_close(layer.cosine[:, head].double(), cosine.mean(1), **CLOSE)


def test_massive_activations_are_those_behind_each_block() -> None:
    model, ids = build("llama"), zoo.tokens(TOKENS, 2)
    found = attention_sinks(model, ids, FIRST)
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    assert [state.index for state in found.states] == [0, 1]
    for row in range(2):
        state, expected = found.states[0], told[1][row].abs()  # the last of `told` is behind the final norm
        assert float(state.greatest[row]) == pytest.approx(float(expected.max()))
        assert divmod(int(expected.argmax()), expected.shape[-1]) == (int(state.position[row]), int(state.channel[row]))
        assert float(state.massive[row]) == pytest.approx(float(expected.max() / expected.flatten().median()))
        torch.testing.assert_close(state.norms[row].double(), expected.norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert not torch.equal(found.states[1].norms.double(), told[2].norm(dim=-1))


def test_a_model_in_half_precision_is_within_its_rounding() -> None:
    exact, half = build("llama", torch.float32), build("llama", torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    found, ids = attention_sinks(half, zoo.tokens(TOKENS), FIRST), zoo.tokens(TOKENS)
    eager = eagerly(half, ids)
    for layer, probabilities in zip(found.layers, eager, strict=True):
        assert layer.received.dtype == torch.float32
        mine = layer.share().double()
        torch.testing.assert_close(mine, probabilities[:, :, FIRST:, 0].mean(2), rtol=0, atol=0.02)  # bfloat16 logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(attention: str, training: bool) -> None:
    model: Any = build("llama", attention_dropout=0.5)
    model.train(training).set_attn_implementation(attention)
    model.get_submodule("model.layers.1").eval()
    before = [(name, each.training, len(each._forward_hooks)) for name, each in model.named_modules()]
    ids = zoo.tokens(TOKENS)
    first, second = (attention_sinks(model, ids, FIRST).layers[0].received for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    assert before == [(name, each.training, len(each._forward_hooks)) for name, each in model.named_modules()]
    assert model.config._attn_implementation == attention
    assert shown_to() is None


def test_a_model_is_left_as_it_was_by_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("llama")

    def fails(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sinks, "_measured", fails)
    with pytest.raises(KeyboardInterrupt):
        attention_sinks(model.train(), zoo.tokens(TOKENS), FIRST)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(not each._forward_hooks for each in model.modules())
    assert shown_to() is None
    monkeypatch.undo()
    model(input_ids=zoo.tokens(3), use_cache=False)
    assert len(attention_sinks(model, zoo.tokens(TOKENS), FIRST).layers) == 2


@pytest.mark.parametrize(("tokens", "first"), [(4, 4), (3, 4), (9, 0), (9, -1)])
def test_a_text_that_is_too_short_is_refused(tokens: int, first: int) -> None:
    with pytest.raises(ValueError, match=f"from index {first} on, and the text has {tokens} tokens"):
        attention_sinks(build("llama"), zoo.tokens(tokens), first)


@pytest.mark.parametrize("label", ["BLOOM", "MPT", "Falcon, ALiBi", "Gemma 4", "Mamba"])
def test_a_model_whose_attention_is_not_shown_is_refused(label: str) -> None:
    model = alive(label)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"cannot be (measured|shown)|no layer of attention"):
        attention_sinks(model, zoo.tokens(TOKENS), FIRST)
    assert model.config._attn_implementation == before


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return made


def test_no_matrix_of_tokens_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, model = 1024, build("llama", torch.float32, max_position_embeddings=1024)
    monkeypatch.setattr(sinks, "_ELEMENTS", 2**16)
    with torch.no_grad(), _Largest() as plain:
        model(input_ids=zoo.tokens(tokens), use_cache=False, logits_to_keep=1)
    with _Largest() as noted:
        found = attention_sinks(model, zoo.tokens(tokens))
    assert isinstance(found, AttentionSinks)
    assert noted.elements <= max(plain.elements, 2**17)  # a layer's sums by range are the largest but the states
    assert noted.elements < tokens**2 / 4
