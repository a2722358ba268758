"""Half precision, and models or caches that are spread over devices."""

import inspect
from typing import Any, cast

import pytest
import torch
from conftest import VOCABULARY, build
from oracles import by_module, sinks_and_recent
from torch import Tensor

from sinkcache import SinkCache, prefill, stream
from sinkcache.guard import cache_argument
from sinkcache.layer import SinkLayer
from sinkcache.policies import StreamingLLM
from sinkcache.store import Store

CHUNKS = [20, 1, 1, 1, 7, *[1] * 10]
TOKENS = torch.randint(1, VOCABULARY, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(3))


def read(model: Any, cache: Any, chunks: list[int] = CHUNKS) -> Tensor:
    pieces, argument = TOKENS.split(chunks, dim=1), cache_argument(model)
    with torch.no_grad():
        return torch.cat([model(each, use_cache=True, **{argument: cache}).logits for each in pieces], dim=1)[0]


def held(model: Any, positions: str) -> Tensor:
    """The reference in the model's own precision: its modules, keys rotated anew in every step, eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return by_module(model, TOKENS[0].tolist(), CHUNKS, 8, sinks_and_recent(3), positions)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "phi", "gemma3"])
def test_half_precision_is_at_most_twice_as_far_off_as_plain_eager_code(family, dtype, positions):
    """The rule of the field: an error against float32 of at most twice that of plain code in the same dtype."""
    settings: dict[str, Any] = {"initializer_range": 0.1}  # at 0.3 the rounding of one layer is all the next one sees
    half, whole = build(family, dtype, **settings), build(family, torch.float32, **settings)
    for mine, other in zip(half.parameters(), whole.parameters(), strict=True):
        other.data.copy_(mine.data)
    exact = held(whole, positions)
    ours = read(half, SinkCache(half, StreamingLLM(3), 8, positions)).float()  # type: ignore[arg-type]
    plain = held(half, positions).float()
    assert float((ours - exact).norm()) <= 2 * float((plain - exact).norm())
    assert float((plain - exact).norm()) > 0


# layers on several devices, and weights that are not in memory

SPREAD: dict[str, dict[str, str]] = {
    "a layer on disk": {"model.layers.1": "disk"},
    "everything but a layer on disk": {"model.embed_tokens": "disk", "model.layers.0": "disk", "lm_head": "disk"},
}
ON_CPU = dict.fromkeys(
    ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
)


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # of transformers 5.4, with weights on disk
@pytest.mark.parametrize("case", SPREAD)
def test_a_model_with_weights_elsewhere_computes_what_it_does_in_memory(case, tmp_path, model):
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is not among what the oldest versions are run with"
    )
    llama: Any = build("llama", torch.float32)
    expected = read(llama, SinkCache(llama, StreamingLLM(3), 8))
    generated = llama.generate(TOKENS, max_new_tokens=20, **{cache_argument(llama): SinkCache(llama, budget=8)})
    spread: Any = accelerate.dispatch_model(llama, {**ON_CPU, **SPREAD[case]}, main_device="cpu", offload_dir=tmp_path)
    cache = SinkCache(spread, StreamingLLM(3), 8)
    assert torch.equal(read(spread, cache), expected)
    assert all(cast(Any, layer).keys.device.type == "cpu" for layer in cache.layers)
    argument = {cache_argument(spread): SinkCache(spread, budget=8)}
    assert torch.equal(spread.generate(TOKENS, max_new_tokens=20, **argument), generated)


def test_stream_and_prefill_take_a_model_whose_embeddings_are_on_disk(tmp_path):
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is not among what the oldest versions are run with"
    )
    llama: Any = build("llama", torch.float32)
    expected = torch.stack(list(stream(llama, SinkCache(llama, StreamingLLM(3), 8), TOKENS[0].tolist(), rebase_at=16)))
    last = prefill(llama, SinkCache(llama, StreamingLLM(3), 8), TOKENS, 7)
    spread: Any = accelerate.cpu_offload(llama, execution_device=torch.device("cpu"))
    cache = SinkCache(spread, StreamingLLM(3), 8)
    assert torch.equal(torch.stack(list(stream(spread, cache, TOKENS[0].tolist(), rebase_at=16))), expected)
    assert torch.equal(prefill(spread, SinkCache(spread, StreamingLLM(3), 8), TOKENS, 7), last)


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_offloaded_cache_computes_what_one_that_is_not_does(model, family, positions):
    tiny = model(family)
    one, other = (SinkCache(tiny, StreamingLLM(3), 8, positions, offload=where) for where in (None, "cpu"))  # type: ignore[arg-type]
    assert torch.equal(read(tiny, one), read(tiny, other))
    assert one.nbytes == other.nbytes


def test_an_offloaded_layer_is_away_but_while_it_computes(model, monkeypatch):
    moves: list[tuple[int, str]] = []
    llama = model("llama")
    cache = SinkCache(llama, StreamingLLM(3), 8, offload="cpu")
    for index, layer in enumerate(cache.layers):
        for name in ("prefetch", "offload", "update"):
            original = getattr(layer, name)

            def told(*args: Any, index: int = index, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                moves.append((index, name))
                return original(*args, **kwargs)

            monkeypatch.setattr(layer, name, told)
    read(llama, cache, [20, 20])
    a_pass = [(layer, name) for layer in (0, 1) for name in ("prefetch", "update", "offload")]
    assert moves == a_pass * 2


def test_an_offloaded_layers_store_goes_to_the_cpu_and_comes_back(model, monkeypatch):
    cache = SinkCache(model("llama"), StreamingLLM(3), 8)
    read(model("llama"), cache)
    layer, moves = cast(SinkLayer, cache.layers[0]), []
    layer.device = torch.device("meta")
    monkeypatch.setattr(Store, "to", lambda store, device: moves.append(device.type))
    layer.offload()
    layer.prefetch()
    assert moves == ["cpu", "meta"]


def test_a_store_moves_all_it_holds(model):
    cache = SinkCache(model("llama"), StreamingLLM(3), 8)
    read(model("llama"), cache)
    layer = cast(SinkLayer, cache.layers[0])
    assert layer.store is not None
    layer.store.to(torch.device("meta"))
    assert {each.device.type for each in layer.store.tensors()} == {"meta"}
    assert len(layer.store.tensors()) == 3


def test_another_place_to_offload_to_is_an_error(model, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match="offload must be \"cpu\" or None, got 'disk'"):
        SinkCache(model("llama"), budget=8, offload="disk")  # type: ignore[arg-type]
    assert "offload" in inspect.signature(SinkCache).parameters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_padded_batch_on_a_gpu_equals_the_same_on_the_cpu(offload):
    llama: Any = build("llama", torch.float32)
    tokens, mask = TOKENS.expand(3, -1), torch.ones(3, TOKENS.shape[1], dtype=torch.int64)
    mask[0, :7] = mask[1, :30] = 0
    expected = prefill(llama, SinkCache(llama, StreamingLLM(3), 8), tokens, 7, attention_mask=mask)
    llama.to("cuda")
    cache = SinkCache(llama, StreamingLLM(3), 8, offload=offload)
    got = prefill(llama, cache, tokens.cuda(), 7, attention_mask=mask.cuda())
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)  # other kernels
    held = {each.device.type for layer in cache.layers for each in cast(Any, layer).store.tensors()}
    assert held == {"cpu" if offload else "cuda"}
