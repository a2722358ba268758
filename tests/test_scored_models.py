"""What layers of many architectures are told of attention is what eager attention gives; the rest is refused."""

import re
import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import transformers as tf
import zoo
from conftest import VOCABULARY, build

from sinkcache import SinkCache
from sinkcache.policies import H2O, TOVA, ExpectedAttention, Knorm, SnapKV
from sinkcache.scored import ScoredLayer

FAMILIES = [
    *("Llama", "Llama, yarn scaling", "Mistral", "Qwen2", "Qwen3", "Qwen3-Next", "Gemma", "Gemma 3", "GPT-OSS", "Phi"),
    *("Phi-3", "StableLM", "GPT-NeoX", "StarCoder2", "Granite", "OLMo 2", "Cohere", "Cohere 2", "GLM", "GLM-4"),
    *("SmolLM3", "ERNIE 4.5", "DeepSeek-V3", "Mixtral", "OLMoE"),
]
TOKENS = 24


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
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("label", FAMILIES)
def test_mass_is_that_of_eager_attention(label: str, attention: str) -> None:
    model, ids = alive(label), zoo.tokens(TOKENS, 2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=False, output_attentions=True)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"transformers has no sdpa attention for {label}")
    model.set_attn_implementation(attention)
    cache = SinkCache(model, H2O(4), TOKENS + 1)
    with torch.no_grad():
        for piece in ids.split([15, 1, 1, 7], dim=1):
            logits = model(input_ids=piece, cache=cache).logits
    torch.testing.assert_close(logits[:, -1], told.logits[:, -1], rtol=1e-3, atol=1e-3)
    layers = [layer for layer in cache.layers if isinstance(layer, ScoredLayer)]
    full = [each for each in told.attentions if each is not None]
    assert layers
    for layer in layers:
        probabilities = full[layer.index] if len(full) == len(cache.layers) else full[layers.index(layer)]
        fields = layer.fields
        expected = probabilities.unflatten(1, (fields["mass"].shape[1], -1)).mean(2).sum(2)
        order = fields["positions"][..., :TOKENS].argsort(-1)
        mass = fields["mass"][..., :TOKENS].gather(-1, order)
        torch.testing.assert_close(mass.double(), expected.double(), rtol=2e-6, atol=2e-6)


def test_a_softcap_of_the_models_own_is_heard() -> None:
    model, ids = alive("Gemma 2"), zoo.tokens(TOKENS)
    model.set_attn_implementation("eager")
    for module in zoo.attention_modules(model):
        module.attn_logit_softcapping = 0.02  # type: ignore[assignment]
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        cache = SinkCache(model, H2O(4), TOKENS)
        for piece in ids.split([15, 9], dim=1):
            model(input_ids=piece, cache=cache)
    layers = [each for each in cache.layers if isinstance(each, ScoredLayer)]
    assert layers
    for layer in layers:
        expected = told[layer.index].unflatten(1, (layer.fields["mass"].shape[1], -1)).mean(2).sum(2)
        torch.testing.assert_close(layer.fields["mass"].double(), expected.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_last_query_of_a_chunk_is_that_of_eager_attention(attention: str) -> None:
    model, ids = alive("Llama"), zoo.tokens(TOKENS, 2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        model.set_attn_implementation(attention)
        cache = SinkCache(model, TOVA(), TOKENS)
        for piece in ids.split([15, 9], dim=1):
            model(input_ids=piece, cache=cache)
    for layer in (each for each in cache.layers if isinstance(each, ScoredLayer)):
        expected = told[layer.index].unflatten(1, (layer.fields["mass"].shape[1], -1)).mean(2)[:, :, -1]
        torch.testing.assert_close(layer.fields["mass"].double(), expected.double(), rtol=2e-6, atol=2e-6)


def test_the_newest_queries_are_those_of_eager_attention() -> None:
    for label in ("Qwen3", "GPT-OSS", "Gemma 3", "GLM"):
        model, ids = alive(label), zoo.tokens(TOKENS)
        model.set_attn_implementation("eager")
        for module in zoo.attention_modules(model):
            if isinstance(sinks := getattr(module, "sinks", None), torch.nn.Parameter):
                sinks.data.normal_(std=3)  # another in each head
        with torch.no_grad():
            told = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
            cache = SinkCache(model, SnapKV(4, pooling="none"), TOKENS)
            model(input_ids=ids, cache=cache)
        for layer in (each for each in cache.layers if isinstance(each, ScoredLayer)):
            assert layer.store is not None
            assert layer.recent is not None
            step: Any = cache.ledgers[0].last[2]
            window = layer._told(*layer.store.read(TOKENS), layer._slots(TOKENS), step, TOKENS)["window"]
            expected = told[layer.index].unflatten(1, (window.shape[1], -1)).mean(2)[:, :, -4:].sum(2)
            torch.testing.assert_close(window.double(), expected.double(), rtol=1e-5, atol=1e-5)


# refusals


def refusal(model: Any, policy: Any, **arguments: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        SinkCache(model, policy, 16, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("label", ["Falcon", "MPT", "BLOOM"])
def test_models_outside_the_attention_interface_are_refused(label: str) -> None:
    model = alive(label)
    assert re.search("cannot be shown|goes by the order", refusal(model, H2O(4)))
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("label", ["MPT", "BLOOM"])
def test_models_that_go_by_the_order_of_their_cache_are_refused(label: str) -> None:
    assert "goes by the order" in refusal(alive(label), Knorm(), positions="cache")


def test_a_config_is_not_shown_attention_but_has_keys(model) -> None:
    config = model("llama").config
    assert "got its config" in refusal(config, H2O(4))
    SinkCache(config, Knorm(), 16)


def test_latent_attention_tells_sums_alone() -> None:
    model = alive("DeepSeek-V3")
    for policy in (SnapKV(4, 3), ExpectedAttention(4, 2), Knorm()):
        assert "latent attention" in refusal(model, policy)
    for policy in (H2O(4), TOVA()):
        SinkCache(model, policy, 16)


def test_layers_that_share_keys_are_refused() -> None:
    assert "share keys" in refusal(alive("Gemma 4"), H2O(4))


def test_attention_that_was_set_back_is_an_error() -> None:
    tiny = build("llama")
    cache = SinkCache(tiny, H2O(4), 16)
    cast(Any, tiny).set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(ValueError, match="set back to sdpa"):
        tiny(input_ids=torch.tensor([[1, 2]]), cache=cache)


def test_attention_over_other_keys_than_were_handed_out_is_an_error() -> None:
    tiny = build("llama")
    cache = SinkCache(tiny, H2O(4), 16)
    original = cache.update

    def shortened(*args: Any, **kwargs: Any) -> Any:
        keys, values = original(*args, **kwargs)
        return keys[:, :, 1:], values[:, :, 1:]

    cache.update = shortened  # type: ignore[method-assign]
    with torch.no_grad(), pytest.raises(RuntimeError, match="attends to 8 keys where its layer handed out 9"):
        tiny(input_ids=torch.randint(1, VOCABULARY, (1, 9)), cache=cache)


def test_attentions_cannot_be_had_too() -> None:
    tiny = build("llama")
    cache = SinkCache(tiny, H2O(4), 16)
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions"):
        tiny(input_ids=torch.tensor([[1, 2]]), cache=cache, output_attentions=True)
    tiny(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_tokens_whose_attention_is_counted_cannot_be_taken_back() -> None:
    tiny, ids = build("llama"), torch.randint(1, VOCABULARY, (1, 9))
    cache = SinkCache(tiny, H2O(4), 16)
    with torch.no_grad():
        tiny(input_ids=ids, cache=cache)
    with pytest.raises(ValueError, match="cannot take back 2 tokens"):
        cache.crop(-2)
    assert not cache.layers[0].is_croppable  # which transformers asks before assisted decoding
    plain = SinkCache(tiny, Knorm(), 16)
    with torch.no_grad():
        tiny(input_ids=ids, cache=plain)
        plain.crop(-2)
        again = tiny(input_ids=ids[:, 7:], cache=plain).logits
        expected = tiny(input_ids=ids, use_cache=False).logits[:, 7:]
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("every", [0, True, 2.0, 16, 14])
def test_how_many_go_at_a_time_is_checked(model, every: Any) -> None:
    assert "evict_every" in refusal(model("llama"), H2O(4), evict_every=every)


def test_a_layer_is_not_emptied_at_once(model) -> None:
    assert "evict_every must be less than the budget" in refusal(model("llama"), Knorm(), evict_every=16)


def test_a_pass_that_died_is_not_shown_what_another_attends_to() -> None:
    tiny, ids = build("llama"), torch.randint(1, VOCABULARY, (1, 9))
    cache = SinkCache(tiny, H2O(4), 16)
    attention: Any = tiny.get_submodule("model.layers.0.self_attn")
    original = cache.update

    def dies(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with torch.no_grad():
        cache.update = dies  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            tiny(input_ids=ids, cache=cache)
        tiny(input_ids=ids[:, :5], use_cache=False)
        assert attention.config._attn_implementation == "sinkcache_packed"
        del cache.update
        with pytest.raises(RuntimeError, match=re.escape("cache.reset()")):
            tiny(input_ids=ids, cache=cache)
        cache.reset()
        again = tiny(input_ids=ids, cache=cache).logits
    torch.testing.assert_close(again, tiny(input_ids=ids, use_cache=False).logits, rtol=1e-9, atol=1e-9)
