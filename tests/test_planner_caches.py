"""Plans equal what caches hold, to the byte: transformers' own, and a SinkCache after and amid a prompt."""

from typing import Any

import pytest
import torch
import transformers as tf
from conftest import VOCABULARY
from transformers import DynamicCache, StaticCache

from sinkcache import SinkCache
from sinkcache.bounded import BoundedLayer
from sinkcache.guard import cache_argument
from sinkcache.layer import SinkLayer
from sinkcache.memory import held_bytes, storage, tensors_of
from sinkcache.planner import plan
from sinkcache.planner.in_sinkcache import NOTES, bounded
from sinkcache.planner.in_transformers import Dynamic, Static, Unaware
from sinkcache.planner.sources import model_of
from sinkcache.plugins import named
from sinkcache.scored import ScoredLayer

LENGTHS = (5, 15, 16, 40, 90)


def run(model: Any, cache: Any, tokens: int, chunk: int | None = None) -> None:
    ids = torch.randint(1, VOCABULARY, (1, tokens))
    with torch.no_grad():
        for piece in ids.split(chunk or tokens, dim=1):
            model(input_ids=piece, **{cache_argument(model): cache})


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "smollm3", "gpt_neox", "mistral"])
def test_a_dynamic_cache_holds_what_is_planned_while_decoding(model, family, tokens):
    tiny: Any = model(family, dtype=torch.float32)
    planned = model_of(tiny)
    cache = DynamicCache(config=tiny.config)
    run(tiny, cache, tokens)
    assert held_bytes(cache) - windows(cache) == Dynamic().peak(planned, tokens)
    run(tiny, cache, 1)
    assert held_bytes(cache) - windows(cache) == Dynamic().held(planned, tokens + 1)
    chunked = DynamicCache(config=tiny.config)
    run(tiny, chunked, tokens, 4)
    last = (tokens - 1) % 4 + 1
    assert held_bytes(chunked) - windows(chunked) == sum(
        Dynamic().stored(layer, "f32", tokens, last) for layer in planned.layers
    )


def windows(cache: Any) -> int:
    """Bytes of the scalars in which sliding layers keep the size of their window."""
    return storage([each for layer in cache.layers for each in tensors_of(layer) if each.ndim == 0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_static_cache_and_one_without_config_hold_what_is_planned(model, family):
    tiny: Any = model(family, dtype=torch.float32)
    planned = model_of(tiny)
    static = StaticCache(config=tiny.config, max_cache_len=40)
    run(tiny, static, 7)
    held = [each for layer in static.layers for each in tensors_of(layer) if each.ndim == 4]
    assert storage(held) == Static().held(planned, 40)
    unaware = DynamicCache()
    run(tiny, unaware, 30)
    assert held_bytes(unaware) == Unaware().held(planned, 30)


POLICIES = ["Window()", "StreamingLLM(num_sinks=3)", "StreamingLLM(num_sinks=0)", "H2O(recent=4)", "TOVA()",
            "KeyDiff()", "Knorm()", "Random()", "SnapKV(observation_window=5)", "RKV()", "ExpectedAttention()",
            "LagKV(num_sinks=2, lag=4)"]  # fmt: skip


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sinkcache_holds_what_is_planned_while_decoding(model, policy, tokens):
    for family in ("llama", "gpt_neox"):
        tiny: Any = model(family, dtype=torch.float32)
        cache = SinkCache(tiny, named(policy), 16)
        run(tiny, cache, tokens)
        run(tiny, cache, 1)
        assert cache.nbytes == bounded(policy, 16).held(model_of(tiny), tokens + 1)
        assert cache.nbytes == bounded(named(policy), 16).held(model_of(tiny), tokens + 1)


@pytest.mark.parametrize("family", ["gemma3", "smollm3"])
@pytest.mark.parametrize("policy", ["StreamingLLM(num_sinks=3)", "H2O(recent=4)"])
def test_windows_beside_bounded_layers_and_layers_without_positions_are_planned_too(model, family, policy):
    tiny: Any = model(family, dtype=torch.float32)
    for positions in ("cache", "original"):
        cache = SinkCache(tiny, named(policy), 12, positions)
        run(tiny, cache, 70)
        run(tiny, cache, 1)
        planned = bounded(policy, 12, positions=positions).held(model_of(tiny), 71)
        assert cache.nbytes - windows(cache) == planned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("policy", ["StreamingLLM(num_sinks=3)", "H2O(recent=4)"])
def test_other_dtypes_are_planned(model, policy, dtype):
    tiny: Any = model("llama", dtype=dtype)
    cache = SinkCache(tiny, named(policy), 16)
    run(tiny, cache, 30)
    run(tiny, cache, 1)
    assert cache.nbytes == bounded(policy, 16).held(model_of(tiny), 31)


def watched(cache: SinkCache) -> list[int]:
    """Notes, at each update of a bounded layer, the bytes that the cache holds and hands to attention."""
    seen: list[int] = []

    def watch(layer: Any) -> None:
        update = layer.update

        def noting(*args: Any, **named: Any) -> Any:
            keys, values = update(*args, **named)
            own = [each for layer in cache.layers for each in tensors_of(layer) if each.ndim > 0]
            joined = layer._under_way[1] if isinstance(layer, ScoredLayer) and layer._under_way else None
            noted = list(joined.fields.values()) if joined is not None else []
            seen.append(storage([*own, keys, values, *noted]))
            return keys, values

        layer.update = noting

    for layer in cache.layers:
        watch(layer)
    return seen


@pytest.mark.parametrize("chunk", [None, 4, 16, 23])
@pytest.mark.parametrize("tokens", [6, 16, 40, 91])
@pytest.mark.parametrize("policy", ["StreamingLLM(num_sinks=3)", "H2O(recent=4)", "Window()"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_worst_moment_of_a_prompt_is_the_planned_peak(model, family, policy, tokens, chunk):
    tiny: Any = model(family, dtype=torch.float32)
    cache = SinkCache(tiny, named(policy), 16)
    seen = watched(cache)
    run(tiny, cache, tokens, chunk)
    planned = bounded(policy, 16, chunk)
    steady = planned.held(model_of(tiny), tokens)
    assert max(*seen, steady) == planned.peak(model_of(tiny), tokens)


def test_a_plan_is_known_for_each_policy_that_is_none_of_others():
    from sinkcache import policies

    assert set(NOTES) == set(policies.__all__) - {"AdaKV", "Phases", "Protect"}


def latent(**changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 24,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "max_position_embeddings": 256}  # fmt: skip
    config = tf.DeepseekV3Config(**{**sizes, **changes})
    torch.manual_seed(0)
    return tf.DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("policy", ["StreamingLLM(num_sinks=3)", "H2O(recent=4)"])
def test_latents_are_planned(policy):
    model = latent()
    planned = model_of(model)
    assert {layer.kind for layer in planned.layers} == {"mla"}
    native = DynamicCache(config=model.config)
    run(model, native, 30)
    keys: Any = native.layers[0]
    if keys.keys.shape[1] != 1:
        pytest.skip(f"transformers {tf.__version__} stores each head's keys and values")
    assert held_bytes(native) == Dynamic().held(planned, 30)
    cache = SinkCache(model, named(policy), 16)
    run(model, cache, 30)
    run(model, cache, 1)
    assert cache.nbytes == bounded(policy, 16).held(planned, 31)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_live_cache_tells_what_its_config_does(model, family):
    tiny: Any = model(family, dtype=torch.float32)
    for cache in (DynamicCache(config=tiny.config), SinkCache(tiny, named("StreamingLLM(num_sinks=3)"), 12)):
        run(tiny, cache, 20)
        live, said = plan(cache, [50]), plan(tiny, [50])
        assert [row.totals for row in live.kinds] == [row.totals for row in said.kinds]
        assert live.per_token == said.per_token
        if isinstance(cache, SinkCache):
            assert bounded("StreamingLLM(num_sinks=3)", 12).held(live.model, 21) == bounded(
                "StreamingLLM(num_sinks=3)", 12).held(said.model, 21)  # fmt: skip


def test_a_cache_that_holds_nothing_is_refused(model):
    tiny: Any = model("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match="layer 0 of the cache, a DynamicLayer, holds nothing yet"):
        plan(DynamicCache(config=tiny.config))


def test_bounded_layers_are_those_that_the_plan_bounds(model):
    tiny: Any = model("gemma3", dtype=torch.float32)
    cache = SinkCache(tiny, named("StreamingLLM(num_sinks=3)"), 12)
    assert [isinstance(layer, (BoundedLayer, SinkLayer)) for layer in cache.layers] == [
        layer.grows for layer in model_of(tiny).layers
    ]
