"""What users of such caches reported, as claims: where keys stand, what a query sees. See docs/user-cases.md."""

from typing import Any, cast

import oracles
import pytest
import torch
import transformers as tf
from conftest import VOCABULARY, build
from torch import Tensor
from transformers import DynamicCache

from sinkcache import SinkCache, prefill, stream
from sinkcache.guard import cache_argument
from sinkcache.layer import SinkLayer
from sinkcache.metrics import perplexity
from sinkcache.policies import StreamingLLM, Window

CONVENTIONS: list[Any] = ["cache", "original"]
TIMES: Any = pytest.mark.parametrize("convention", CONVENTIONS)


def tokens(length: int, batch: int = 1, seed: int = 11) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def read(model: Any, cache: Any, ids: Tensor, chunks: list[int]) -> Tensor:
    """Logits `[batch, tokens, vocab]` of plain passes over `ids` in `chunks`."""
    assert sum(chunks) == ids.shape[1]
    named = {cache_argument(model): cache}
    with torch.no_grad():
        return torch.cat([model(input_ids=each, use_cache=True, **named).logits for each in ids.split(chunks, 1)], 1)


def generate(model: Any, cache: Any, ids: Tensor, count: int, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(ids, max_new_tokens=count, **{cache_argument(model): cache}, **options)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)  # float64; each classic fault is off by over 0.1


# where keys stand


def distances(cache: SinkCache, chunks: list[int]) -> list[int]:
    """How far before the last query each attended key stands by its rotation, farthest first."""
    layer, seen, attended = cast(Any, cache.layers[0]), 0, torch.empty(0)

    def at(positions: Tensor) -> Tensor:
        keys = torch.ones(1, 1, len(positions), 8, dtype=torch.float64)  # un-rotated, all tokens have the same key
        layer.rotation.put(keys, layer.rotation.pick(keys) * layer.rotation.phase(positions, keys))
        return keys

    for q_len in chunks:
        keys = at(torch.arange(seen, seen + q_len))
        attended = layer.update(keys, keys)[0]
        seen += q_len
    far = torch.cdist(attended[0, 0], at(seen - 1 - torch.arange(seen))[0, 0]).min(dim=1)
    assert float(far.values.max()) < 1e-6  # cdist subtracts squares
    return far.indices.sort(descending=True).values.tolist()


_ONE: list[Any] = []


def one_layer() -> Any:
    if not _ONE:
        _ONE.append(build("llama", num_hidden_layers=1, hidden_size=32))  # heads of 8 channels
    return _ONE[0]


@pytest.mark.parametrize(("convention", "expected"), [("cache", [5, 4, 3, 2, 1, 0]), ("original", [9, 8, 3, 2, 1, 0])])
def test_the_query_stands_at_the_end_of_the_cache_or_of_the_stream(convention, expected):
    cache = SinkCache(one_layer(), StreamingLLM(num_sinks=2), budget=6, positions=convention)
    assert distances(cache, [1] * 10) == expected
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("convention", "expected"),
    [("cache", list(range(15, -1, -1))), ("original", [39, 38, 37, 36, *range(11, -1, -1)])],
)
def test_after_forty_tokens_the_newest_key_is_as_consecutive_as_the_others(convention, expected):
    cache = SinkCache(one_layer(), StreamingLLM(num_sinks=4), budget=16, positions=convention)
    assert distances(cache, [1] * 40) == expected
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 2, 3, *range(28, 40)]


def test_of_a_long_prompt_the_keys_kept_close_ranks():
    cache = SinkCache(one_layer(), StreamingLLM(num_sinks=1), budget=4)
    layer = cast(SinkLayer, cache.layers[0])
    layer.update(torch.randn(1, 1, 10, 8), torch.randn(1, 1, 10, 8))
    assert cache.kept(0)[0, 0].tolist() == [0, 7, 8, 9]
    cache.reset()
    assert distances(cache, [10, 1]) == [3, 2, 1, 0]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_one_layer_reads_as_the_kept_tokens_alone_and_three_layers_do_not(model, family):
    ids = tokens(40)
    for layers in (1, 3):
        tiny = model(family, num_hidden_layers=layers)
        cache = SinkCache(tiny, StreamingLLM(num_sinks=4), budget=16)
        streamed = read(tiny, cache, ids, [1] * 40)[0, -1]
        alone = read(tiny, None, ids[:, cache.kept(0)[0, 0]], [16])[0, -1]
        if layers == 1:
            same(streamed, alone)
        else:
            assert float((streamed - alone).abs().max()) > 1e-2  # keys in upper layers carry what was evicted


def test_three_hundred_tokens_are_scored_as_the_reference_scores_them(model):
    llama, ids = model("llama"), tokens(300)
    got = perplexity(llama, SinkCache(llama, StreamingLLM(4), budget=128), ids, chunk=1)
    expected = oracles.by_module(llama, ids[0].tolist(), [1] * 300, 128, oracles.sinks_and_recent(4), "cache")
    nll = torch.nn.functional.cross_entropy(expected[:-1], ids[0, 1:])
    assert got.nll / got.tokens == pytest.approx(float(nll), abs=1e-5)  # cross-entropy in float32
    wrong = oracles.by_module(llama, ids[0].tolist(), [1] * 300, 128, oracles.sinks_and_recent(0), "cache")
    assert abs(float(torch.nn.functional.cross_entropy(wrong[:-1], ids[0, 1:]) - nll)) > 1e-3


@TIMES
def test_the_last_token_alone_and_the_whole_history_go_on_alike(model, convention):
    llama, ids = model("llama"), tokens(50)
    outs = []
    for given in (ids[:, 49:], ids):
        cache = SinkCache(llama, StreamingLLM(4), budget=16, positions=convention)
        read(llama, cache, ids[:, :49], [1] * 49)
        outs.append(generate(llama, cache, given, 5, attention_mask=torch.ones(1, 50))[0, -5:].tolist())
    whole = [*ids[0].tolist(), *outs[0][:-1]]
    logits = oracles.by_module(llama, whole, [1] * 54, 16, oracles.sinks_and_recent(4), convention)
    assert outs[0] == outs[1] == logits[49:].argmax(-1).tolist()


@pytest.mark.parametrize("config", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_is_read_where_it_stands(config):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2, "initializer_range": 0.3}
    sizes |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

    def latent(**changes: int) -> Any:
        made = getattr(tf, f"{config}Config")(**{**sizes, **changes})
        torch.manual_seed(0)
        return getattr(tf, f"{config}ForCausalLM")(made).double().eval()

    two, ids, chunks = latent(), tokens(30), [11, *[1] * 12, 7]
    cache = SinkCache(two, StreamingLLM(2), budget=8, positions="original")
    expected = oracles.by_mask(two, ids[0].tolist(), chunks, 8, oracles.sinks_and_recent(2))
    torch.testing.assert_close(read(two, cache, ids, chunks)[0], expected, rtol=1e-4, atol=1e-4)  # rotates in float32
    if cast(Any, cache.layers[0]).values.shape[-1] != 8:
        pytest.skip(f"transformers {tf.__version__} caches the keys made of the latents, which are not moved")
    one = latent(num_hidden_layers=1)
    cache = SinkCache(one, StreamingLLM(2), budget=8, positions="cache")
    streamed = read(one, cache, ids, [1] * 30)[0, -1]
    alone = read(one, None, ids[:, cache.kept(0)[0, 0]], [8])[0, -1]
    torch.testing.assert_close(streamed, alone, rtol=1e-4, atol=1e-4)  # as above


@TIMES
def test_learned_sinks_of_gpt_oss_are_beside_the_tokens_kept(convention):
    config = tf.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    oss: Any = tf.GptOssForCausalLM(config).eval()
    ids, chunks = tokens(30), [11, *[1] * 12, 7]
    cache = SinkCache(oss, StreamingLLM(2), budget=8, positions=convention)
    expected = oracles.by_module(oss, ids[0].tolist(), chunks, 8, oracles.sinks_and_recent(2), convention)
    torch.testing.assert_close(read(oss, cache, ids, chunks)[0], expected.float(), rtol=1e-3, atol=1e-3)  # float32


# what a query sees


def test_a_prompt_read_in_one_step_attends_to_itself_in_full(model):
    llama, ids = model("llama"), tokens(51)
    cache = SinkCache(llama, StreamingLLM(4), budget=16)
    same(read(llama, cache, ids[:, :50], [50]), read(llama, None, ids[:, :50], [50]))
    read(llama, cache, ids[:, 50:], [1])
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 2, 3, *range(39, 51)]


@pytest.mark.parametrize("seen", [0, 40])
def test_no_token_of_a_step_moves_the_logits_before_it(model, seen):
    llama, step = model("llama"), tokens(24, seed=12)
    altered = step.repeat(24, 1)
    altered.diagonal().copy_((step[0] + 1) % VOCABULARY)
    with_one_changed = torch.cat([tokens(seen).expand(24, -1), altered], dim=1)
    unchanged = torch.cat([tokens(seen), step], dim=1)
    chunks = [*[1] * seen, 24]
    changed = read(llama, SinkCache(llama, budget=16), with_one_changed, chunks)[:, seen:]
    plain = read(llama, SinkCache(llama, budget=16), unchanged, chunks)[0, seen:]
    for at in range(24):
        same(changed[at, :at], plain[:at])
        assert float((changed[at, at] - plain[at]).abs().max()) > 1e-2


@pytest.mark.parametrize("seen", [0, 3, 15, 16, 40])
def test_a_step_returns_the_keys_it_announced(seen):
    for q_len in (1, 2, 5, 17):
        cache = SinkCache(one_layer(), StreamingLLM(4), budget=16)
        layer = cast(SinkLayer, cache.layers[0])
        for _ in range(seen):
            layer.update(torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8))
        width, offset = cache.get_mask_sizes(q_len, 0)
        keys, values = layer.update(torch.randn(1, 1, q_len, 8), torch.randn(1, 1, q_len, 8))
        assert keys.shape[2] == values.shape[2] == width == min(seen, 15) + q_len
        assert offset == seen - min(seen, 15)


@pytest.mark.parametrize("path", ["one by one", "one shot", "chunks", "prefill", "stream"])
def test_the_newest_query_sees_exactly_the_budget(path):
    tiny: Any = build("llama", attn_implementation="eager")
    ids, widths = tokens(40), []
    tiny.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: widths.append(output[1].shape[-1])
    )
    cache = SinkCache(tiny, StreamingLLM(4), budget=16)
    if path == "prefill":
        prefill(tiny, cache, ids[:, :39], chunk=10)
    elif path == "stream":
        list(stream(tiny, cache, ids[0, :39].tolist(), chunk=4, rebase_at=20))
    else:
        read(tiny, cache, ids[:, :39], {"one by one": [1] * 39, "one shot": [39], "chunks": [13] * 3}[path])
    read(tiny, cache, ids[:, 39:], [1])
    assert widths[-1] == 16


def test_two_chunks_below_the_budget_are_one(model):
    llama, ids = model("llama"), tokens(16)
    one, two = (SinkCache(llama, budget=16) for _ in range(2))
    same(read(llama, two, ids, [7, 9]), read(llama, one, ids, [16]))


def test_no_row_of_a_chunk_is_masked_in_full(model):
    llama, ids, chunks = model("llama"), tokens(112), [24, 24, 24, *[1] * 40]
    logits = read(llama, SinkCache(llama, StreamingLLM(4), budget=16), ids, chunks)[0]
    assert bool(logits.isfinite().all())
    same(logits, oracles.by_module(llama, ids[0].tolist(), chunks, 16, oracles.sinks_and_recent(4), "cache"))


def test_prefill_attends_to_no_more_than_the_budget_and_a_chunk(model, monkeypatch):
    llama, widths, update = model("llama"), [], SinkLayer.update

    def noted(self: SinkLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        attended = update(self, *args, **kwargs)
        widths.append(attended[0].shape[2])
        return attended

    cache = SinkCache(llama, StreamingLLM(4), budget=16)
    monkeypatch.setattr(SinkLayer, "update", noted)
    prefill(llama, cache, tokens(400), chunk=32)
    assert max(widths) == 15 + 32


# dtypes and devices


def test_positions_are_whole_numbers_of_64_bits(model):
    cache = SinkCache(model("llama", dtype=torch.bfloat16), budget=300)
    read(model("llama", dtype=torch.bfloat16), cache, tokens(310), [310])
    assert cache.kept(0).dtype == cache.slots.positions.dtype == torch.int64
    assert cache.kept(0)[0, 0].tolist() == [0, 1, 2, 3, *range(14, 310)]  # bfloat16 counts to 256


def test_a_bfloat16_models_rotation_is_known_in_float64(model):
    rotation = cast(Any, SinkCache(model("llama", dtype=torch.bfloat16), budget=8).rotations[0])
    assert rotation.inv_freq.dtype == torch.float64
    held = model("llama", dtype=torch.bfloat16).model.rotary_emb.inv_freq.double()
    phase = rotation.phase(torch.tensor([1857]), torch.zeros(1))[0]
    torch.testing.assert_close(phase.real.double(), (1857 * held).cos(), rtol=0, atol=1e-6)


def test_a_bfloat16_stream_is_no_further_off_than_a_full_cache():
    exact, rounded = build("llama", initializer_range=0.1), build("llama", torch.bfloat16, initializer_range=0.1)
    ids, chunks = tokens(60), [1] * 60
    off = []
    for budget in (16, 60):
        caches = (SinkCache(each, StreamingLLM(4), budget=budget) for each in (exact, rounded))
        one, other = (
            read(each, cache, ids, chunks)[0, 16:] for each, cache in zip((exact, rounded), caches, strict=True)
        )
        off.append(float((one - other.double()).abs().mean()))
    assert off[0] <= 2 * off[1]  # as flash-attention is judged


@pytest.mark.parametrize("policy", [StreamingLLM(2), Window()], ids=repr)
def test_no_tensor_of_one_layer_meets_the_device_of_another(policy):
    layers = cast(list[Any], SinkCache(build("llama", hidden_size=32), policy, budget=6).layers)
    for q_len in (3, *[1] * 12, 9, 1, 1, 4):
        here = torch.randn(1, 2, q_len, 8)
        layers[0].update(here, here)
        there = torch.empty(1, 2, q_len, 8, device="meta")  # which no operation lets meet a tensor of the CPU
        assert {each.device.type for each in layers[1].update(there, there)} == {"meta"}


def test_a_full_cache_of_the_same_model_is_not_touched(model):
    llama, ids = model("llama"), tokens(30)
    whole = DynamicCache(config=llama.config)
    SinkCache(llama, budget=8)
    same(read(llama, whole, ids, [10, *[1] * 20]), read(llama, None, ids, [30]))
    assert whole.get_seq_length() == 30
