"""Layers of other kinds: budgets that differ, latent attention, ALiBi, sliding windows that are bounded on request."""

from typing import Any, cast

import pytest
import torch
import transformers as tf
from conftest import VOCABULARY, build, exact_rotary
from oracles import by_mask, by_module, kept, sinks_and_recent, steps
from torch import Tensor, nn
from transformers import DynamicCache

from sinkcache import SinkCache, stream
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

CHUNKS = [13, 1, 1, 1, 5, *[1] * 10, 9]
TOKENS = torch.randint(1, VOCABULARY, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(3))
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
LATENT: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,  # no experts, which cannot be run in float64
    "max_position_embeddings": 128,
}


def read(model: Any, cache: Any, tokens: Tensor = TOKENS, chunks: list[int] = CHUNKS) -> Tensor:
    argument = cache_argument(model)
    with torch.no_grad():
        pieces = tokens.split(chunks, dim=1)
        return torch.cat([model(input_ids=each, use_cache=True, **{argument: cache}).logits for each in pieces], dim=1)[
            0
        ]


# budgets that differ


def by_layer(model: Any, budgets: list[int], positions: str) -> Tensor:
    """Each layer's attention sees what a cache of its own budget would show it: one mask for each, in one pass."""
    assert positions == "original"
    shown = []
    for budget in budgets:
        mask = torch.zeros(TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool)
        for held, new, _ in steps(CHUNKS, budget, sinks_and_recent(2)):
            for i, position in enumerate(new):
                mask[position, held + new[: i + 1]] = True
        shown.append(torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min))
    modules = [each for each in model.modules() if type(each).__name__.endswith("Attention")]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask[None, None]}), with_kwargs=True
        )
        for module, mask in zip(modules, shown, strict=True)
    ]
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budgets", [[8, 16, 3], [3, 8, 16], [16, 3, 3]], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_budgets_that_differ_equal_a_mask_for_each_layer(family, budgets, attention):
    tiny: Any = build(family, num_hidden_layers=3)
    expected = by_layer(tiny, budgets, "original")
    tiny.set_attn_implementation(attention)
    cache = SinkCache(tiny, StreamingLLM(2), budgets, "original")
    exact = 1e-9 if attention == "sdpa" else 1e-4  # eager attention takes its softmax in float32
    torch.testing.assert_close(read(tiny, cache), expected, rtol=0, atol=exact)
    for layer, budget in enumerate(budgets):
        assert cache.kept(layer)[0, 0].tolist() == kept(CHUNKS, budget, sinks_and_recent(2))[-1]


def test_budgets_that_differ_in_the_cache_convention_equal_a_cache_for_each_layer():
    """The first layer's keys depend on no other layer: they are those of a cache of its budget alone."""
    tiny: Any = build("llama", num_hidden_layers=3)
    cache, alike = (SinkCache(tiny, StreamingLLM(2), budget, "cache") for budget in ([8, 16, 3], 8))
    read(tiny, cache)
    read(tiny, alike)
    assert torch.equal(*(cast(Any, each.layers[0]).keys for each in (cache, alike)))
    assert torch.equal(cache.kept(0), alike.kept(0))


def test_equal_budgets_in_a_list_leave_the_models_attention_as_it_is(model):
    llama = model("llama")
    before = llama.config._attn_implementation
    SinkCache(llama, budget=[9, 9])
    assert llama.config._attn_implementation == before


def test_budgets_that_differ_generate_and_report_each_layer():
    tiny: Any = build("llama", num_hidden_layers=3)
    cache = SinkCache(tiny, StreamingLLM(2), [8, 16, 3])
    tiny.generate(TOKENS, max_new_tokens=20, do_sample=False, **{cache_argument(tiny): cache})
    assert [cache.kept(layer).shape[2] for layer in range(3)] == [8, 16, 3]
    assert [line.split()[-4] for line in cache.describe().splitlines()[1:]] == ["8", "16", "3"]
    assert len(list(stream(tiny, cache, [1, 2, 3] * 60, rebase_at=80))) == 180


def test_budgets_that_differ_need_the_model():
    with pytest.raises(ValueError, match="budgets that differ between layers need the model"):
        SinkCache(build("llama").config, budget=[9, 8], positions="original")  # type: ignore[arg-type]


def test_one_token_and_the_whole_prompt_are_not_the_same_budget():
    tiny: Any = build("llama")
    for budgets, held in (([1, 1.0], [1, 20]), ([1.0, 1], [20, 1])):
        cache = SinkCache(tiny, Window(), budgets)
        read(tiny, cache, TOKENS[:, :20], [20])
        assert [cache.kept(layer).shape[2] for layer in range(2)] == held


def test_a_model_that_cuts_masks_itself_is_an_error_and_keeps_its_attention():
    torch.manual_seed(0)
    doge = tf.DogeForCausalLM(tf.DogeConfig(**SMALL, num_key_value_heads=2, intermediate_size=96)).eval()
    before = doge.config._attn_implementation
    with pytest.raises(ValueError, match="DogeForCausalLM cuts masks in a way of its own: give one budget"):
        SinkCache(doge, budget=[9, 8])
    assert doge.config._attn_implementation == before


def test_attention_that_is_set_back_is_an_error():
    tiny: Any = build("llama")
    cache = SinkCache(tiny, budget=[9, 8])
    tiny.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="the model's attention was set back to sdpa"):
        read(tiny, cache)


def test_padded_batches_with_budgets_that_differ_are_an_error():
    tiny: Any = build("llama")
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="padded batches with budgets that differ between layers"), torch.no_grad():
        tiny(TOKENS.expand(2, -1), attention_mask=mask, **{cache_argument(tiny): SinkCache(tiny, budget=[9, 8])})


# latent attention


def latent(version: int) -> nn.Module:
    torch.manual_seed(0)
    config, model = getattr(tf, f"DeepseekV{version}Config"), getattr(tf, f"DeepseekV{version}ForCausalLM")
    return model(config(**LATENT)).double().eval()


def stores_latents(model: Any) -> bool:
    """Whether this transformers caches the latent, as it does since 5.16, and not the keys made of it."""
    cache = DynamicCache(config=model.config)
    read(model, cache, TOKENS[:, :3], [3])
    return cast(Any, cache.layers[0]).values.shape[-1] == LATENT["qk_rope_head_dim"]


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_latent_attention_equals_its_module_with_keys_rotated_anew(positions):
    tiny = latent(3)
    exact_rotary(tiny)
    if positions == "cache" and not stores_latents(tiny):
        pytest.skip(f"transformers {tf.__version__} caches the keys made of the latents: see the refusal below")
    logits = read(tiny, SinkCache(tiny, StreamingLLM(2), 8, positions))
    expected = by_module(tiny, TOKENS[0].tolist(), CHUNKS, 8, sinks_and_recent(2), positions)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("version", [2, 3])
def test_a_latent_layer_holds_a_latent_and_what_turns_and_no_more(version):
    tiny = latent(version)
    if not stores_latents(tiny):
        pytest.skip(f"transformers {tf.__version__} caches the keys made of the latents")
    cache = SinkCache(tiny, StreamingLLM(2), 8)
    read(tiny, cache)
    turned = 2 * 8 * 8  # two sinks, as they arrived, float64
    assert cache.nbytes == 2 * (8 * (16 + 8) * 8 + turned)  # budget x (latent + rotated) x float64, per layer
    assert cast(Any, cache.layers[0]).keys.shape == (1, 1, 8, 16)


def test_interleaved_latent_attention_equals_small_positions_from_the_start():
    """Until something is evicted both conventions are alike; then the last logits show where the sinks were turned."""
    tiny: Any = latent(2)
    if not stores_latents(tiny):
        pytest.skip(f"transformers {tf.__version__} caches the keys made of the latents")
    window = SinkCache(tiny, Window(), 8, "cache")
    original = SinkCache(tiny, Window(), 8, "original")
    torch.testing.assert_close(read(tiny, window), read(tiny, original), rtol=0, atol=1e-5)  # a window never turns
    sinks, unmoved = (SinkCache(tiny, StreamingLLM(2), 8, positions) for positions in ("cache", "original"))
    assert float((read(tiny, sinks) - read(tiny, unmoved)).abs().max()) > 0.1
    shifted = SinkCache(tiny, StreamingLLM(2), 8, "cache")
    rebased = torch.stack(list(stream(tiny, shifted, TOKENS[0].tolist(), rebase_at=20)))[:, 0]
    token_by_token = SinkCache(tiny, StreamingLLM(2), 8, "cache")
    expected = read(tiny, token_by_token, TOKENS, [1] * TOKENS.shape[1])
    torch.testing.assert_close(rebased, expected, rtol=0, atol=1e-4)  # angles are float32 in the model


# ALiBi


def alibi(family: str) -> Any:
    torch.manual_seed(0)
    if family == "mpt":
        config = tf.MptConfig(
            vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, initializer_range=0.3, max_seq_len=128
        )
        return tf.MptForCausalLM(config).double().eval()
    config = tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3)
    return tf.BloomForCausalLM(config).double().eval()


def by_rebuilding(model: Any, budget: int, num_sinks: int) -> Tensor:
    """In each step a fresh, plain cache is filled with exactly the tokens held, in their order."""
    keys: list[list[Tensor]] = [[], []]
    values: list[list[Tensor]] = [[], []]
    logits = []
    for held, new, _ in steps(CHUNKS, budget, sinks_and_recent(num_sinks)):
        cache: Any = DynamicCache()
        for layer in range(2):
            if held:
                cache.update(
                    torch.cat([keys[layer][position] for position in held], dim=2),
                    torch.cat([values[layer][position] for position in held], dim=2),
                    layer,
                )
        with torch.no_grad():
            logits.append(model(TOKENS[:, new], use_cache=True, **{cache_argument(model): cache}).logits[0])
        for layer in range(2):
            keys[layer] += cache.layers[layer].keys[:, :, len(held) :].split(1, dim=2)
            values[layer] += cache.layers[layer].values[:, :, len(held) :].split(1, dim=2)
    return torch.cat(logits)


def served(family: str) -> Any:
    tiny = alibi(family)
    try:
        SinkCache(tiny, budget=8)
    except ValueError as error:
        if "counts evicted tokens in" not in str(error):
            raise
        pytest.skip(f"transformers {tf.__version__} counts evicted tokens in for {family}")
    return tiny


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("family", ["mpt", "bloom"])
def test_alibi_counts_distance_inside_the_cache(family, num_sinks):
    tiny = served(family)
    logits = read(tiny, SinkCache(tiny, StreamingLLM(num_sinks), 8))
    torch.testing.assert_close(logits, by_rebuilding(tiny, 8, num_sinks), rtol=0, atol=1e-4)  # float32 softmax


@pytest.mark.parametrize("family", ["mpt", "bloom"])
def test_alibi_goes_on_past_the_trained_length_under_generate_and_stream(family):
    tiny = served(family)
    argument, given = cache_argument(tiny), {"max_new_tokens": 150, "do_sample": False, "use_cache": True}
    generated = tiny.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), **given, **{argument: SinkCache(tiny, budget=8)}
    )
    assert generated.shape == (1, 190)
    cache = SinkCache(tiny, budget=8)
    logits = torch.stack(list(stream(tiny, cache, generated[0, :-1].tolist())))[:, 0]
    again = SinkCache(tiny, budget=8)
    expected = read(tiny, again, generated[:, :-1], [1] * 189)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("family", ["mpt", "bloom"])
def test_alibi_takes_a_mask_of_all_columns(family):
    tiny = served(family)
    expected = read(tiny, SinkCache(tiny, StreamingLLM(2), 8), TOKENS[:, :16], [12, 1, 3])
    cache, logits = SinkCache(tiny, StreamingLLM(2), 8), []
    for piece in TOKENS[:, :16].split([12, 1, 3], dim=1):
        mask = torch.ones(1, cache.seen + piece.shape[1], dtype=torch.int64)
        with torch.no_grad():
            logits.append(tiny(piece, attention_mask=mask, use_cache=True, **{cache_argument(tiny): cache}).logits[0])
    torch.testing.assert_close(torch.cat(logits), expected)


@pytest.mark.parametrize("family", ["mpt", "bloom"])
def test_alibi_refuses_original_positions_and_padding(family):
    tiny = served(family)
    with pytest.raises(ValueError, match=r'positions="original" cannot be had: this model goes by the order'):
        SinkCache(tiny, budget=8, positions="original")
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :3] = 0
    cache = SinkCache(tiny, budget=8)
    with (
        pytest.raises(ValueError, match=r"padded batches are not supported for a model that goes by the order"),
        torch.no_grad(),
    ):
        tiny(TOKENS.expand(2, -1), attention_mask=mask, **{cache_argument(tiny): cache})
    assert cache.seen == 0


# sliding windows


def test_sliding_layers_are_bounded_on_request_inside_their_window():
    tiny: Any = build("mistral", sliding_window=16)
    chunks = [7, 1, 1, 1, 5, *[1] * 10, 9, 6]  # one pass of more than the window would see less than the cache shows
    for positions in ("cache", "original"):
        cache = SinkCache(tiny, StreamingLLM(2), 7, positions, sliding="bound")
        full = build("mistral", sliding_window=None)
        expected = by_module(full, TOKENS[0].tolist(), chunks, 7, sinks_and_recent(2), positions)
        torch.testing.assert_close(read(tiny, cache, chunks=chunks), expected, rtol=0, atol=1e-9)
        assert "sliding" in cache.describe()


def test_a_prompt_longer_than_the_window_is_read_as_the_model_reads_it():
    tiny: Any = build("mistral", sliding_window=16)
    cache, native = SinkCache(tiny, StreamingLLM(2), 7, sliding="bound"), DynamicCache(config=tiny.config)
    assert torch.equal(read(tiny, cache, chunks=[40]), read(tiny, native, chunks=[40]))
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 35, 36, 37, 38, 39]


def test_what_does_not_fit_into_the_window_is_an_error():
    tiny: Any = build("mistral", sliding_window=16)
    with pytest.raises(ValueError, match="no full-attention layer to bound"):
        SinkCache(tiny, budget=8)
    with pytest.raises(ValueError, match=r"sliding window of 16 cannot hold a budget of 17.*Use at most 16 tokens"):
        SinkCache(tiny, budget=17, sliding="bound")
    with pytest.raises(ValueError, match=r"cannot hold a budget of 0\.5"):
        SinkCache(tiny, budget=0.5, sliding="bound")
    cache = SinkCache(tiny, budget=8, sliding="bound")
    read(tiny, cache, TOKENS[:, :20], [20])
    with pytest.raises(
        ValueError, match=r"a step of 10 tokens behind the 7 held is wider than the sliding window of 16.*9"
    ):
        read(tiny, cache, TOKENS[:, :10], [10])
    read(tiny, cache, TOKENS[:, :9], [9])


def test_chunked_attention_is_not_bounded_as_if_it_slid():
    config = tf.Llama4TextConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=16,
        pad_token_id=0,
        moe_layers=[],
        layer_types=["chunked_attention", "full_attention"],
    )
    with pytest.raises(ValueError, match="attends in chunks, which jump and do not slide"):
        SinkCache(tf.Llama4ForCausalLM(config).eval(), budget=8, sliding="bound")


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_gemma3_with_all_layers_bounded_holds_the_budget_in_each(positions):
    tiny: Any = build("gemma3")
    cache = SinkCache(tiny, StreamingLLM(2), 7, positions, sliding="bound")
    chunks = [9, 1, 1, 1, 5, *[1] * 10, 9, 4]
    read(tiny, cache, chunks=chunks)
    assert [cache.kept(layer).shape for layer in range(3)] == [(1, 2, 7)] * 3
    if positions == "original":
        wide: Any = build("gemma3", sliding_window=64)  # the window that hides nothing
        fresh = SinkCache(tiny, StreamingLLM(2), 7, positions, sliding="bound")
        tokens = TOKENS[0].tolist()
        for module in wide.modules():
            if hasattr(module, "is_sliding"):
                module.is_sliding = False  # so that the reference bounds it too
        expected = by_mask(wide, tokens, chunks, 7, sinks_and_recent(2))
        torch.testing.assert_close(read(tiny, fresh, chunks=chunks), expected, rtol=0, atol=1e-9)
