"""What a FixedSinkCache computes is what references and SinkCache do, and decoding with it compiles to one graph."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import jaxtyping
import oracles
import pytest
import torch
from conftest import VOCABULARY, build
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig

from sinkcache import Policy, SinkCache
from sinkcache.fixed import FixedSinkCache
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window

CONVENTIONS: list[Any] = ["cache", "original"]
FULL = ["llama", "qwen3", "gpt_neox", "phi"]
BUDGET, SINKS = 8, 3
EXTRAS: list[dict[str, Any]] = [{"num_beams": 3}, {"prefill_chunk_size": 4}]
PATTERNS = {
    "tokens alone": [1] * 30,
    "a prompt shorter than the sinks": [2, *[1] * 28],
    "a prompt shorter than the budget": [5, *[1] * 25],
    "a prompt that fills the budget": [8, *[1] * 20],
    "a prompt longer than the budget": [33, *[1] * 25],
    "chunks": [2, 3, 1, 1, 5, 1, 20, 4, 8, 7, *[1] * 9, 9, 1, 1],
}


@pytest.fixture
def unchecked(monkeypatch) -> None:
    """Turns off the checking of types, which users do not run under, and which breaks graphs."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def plain() -> Callable[..., nn.Module]:
    """Models with transformers' own rotary module, which compiles; `conftest`'s exact one does not."""
    built: dict[str, nn.Module] = {}

    def get(family: str) -> nn.Module:
        if family not in built:
            built[family] = build(family)
            for module in built[family].modules():
                vars(module).pop("forward", None)
        return built[family]

    return get


def tokens(length: int, batch: int = 1, seed: int = 5) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def read(model: Any, cache: Any, ids: Tensor, chunks: list[int], decode: Any = None, **extra: Any) -> Tensor:
    """Logits of plain passes over `ids`; all but the first by `decode`, if there is one."""
    assert sum(chunks) == ids.shape[1]
    logits = []
    with torch.no_grad():
        for piece in ids.split(chunks, dim=1):
            forward = decode if decode is not None and logits else model
            logits.append(forward(input_ids=piece, use_cache=True, **{cache_argument(model): cache}, **extra).logits)
    return torch.cat(logits, dim=1)


def generate(model: Any, cache: Any, ids: Tensor, **extra: Any) -> Tensor:
    return model.generate(ids, **{cache_argument(model): cache}, do_sample=False, **extra)


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:  # another convention is off by over 0.2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def counted() -> Iterator[tuple[list[Any], Callable[..., Any]]]:
    """Graphs traced, and the backend that notes them."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    yield graphs, backend
    torch._dynamo.reset()


# logits


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("family", FULL)
def test_logits_equal_the_reference(model, family, pattern, convention):
    chunks = PATTERNS[pattern]
    ids = tokens(sum(chunks))
    cache = FixedSinkCache(model(family), StreamingLLM(SINKS), BUDGET, convention)
    select = oracles.sinks_and_recent(SINKS)
    expected = oracles.by_module(model(family), ids[0].tolist(), chunks, BUDGET, select, convention)
    same(read(model(family), cache, ids, chunks)[0], expected)


@pytest.mark.parametrize("policy", [Window(), StreamingLLM(0), StreamingLLM(1), StreamingLLM(7)], ids=repr)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_equal_those_of_a_sink_cache(policy, attention):
    model = build("llama", attn_implementation=attention)
    chunks = [*PATTERNS["chunks"], *[1] * 12]
    ids = tokens(sum(chunks), batch=2)
    actual, expected = (read(model, kind(model, policy, BUDGET), ids, chunks) for kind in (FixedSinkCache, SinkCache))
    same(actual, expected, 1e-9 if attention == "sdpa" else 1e-4)  # eager attention has its softmax in float32


def test_a_budget_of_one_attends_to_the_newest_alone(model):
    ids = tokens(10)
    each_alone = [model("llama")(input_ids=ids[:, [i]], use_cache=False).logits[0, 0] for i in range(2, 10)]
    logits = read(model("llama"), FixedSinkCache(model("llama"), Window(), 1), ids, [2, *[1] * 8])[0, 2:]
    same(logits, torch.stack(each_alone))


def test_a_mask_of_ones_changes_nothing(model):
    ids = tokens(30)
    one, other = (FixedSinkCache(model("llama"), budget=BUDGET) for _ in range(2))
    for start, end in [(0, 5), *((i, i + 1) for i in range(5, 20)), (20, 30)]:
        logits = read(model("llama"), one, ids[:, start:end], [end - start], attention_mask=torch.ones(1, end))
        same(logits, read(model("llama"), other, ids[:, start:end], [end - start]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_that_moved_often_is_rounded_once(dtype):
    model = build("llama", dtype)
    cache = FixedSinkCache(model, StreamingLLM(SINKS), BUDGET)
    layer = cast(Any, cache.layers[0])
    keys = torch.randn(1, 2, 200, 16, dtype=dtype)
    for piece in keys.split(1, dim=2):
        attended, _ = layer.update(piece, piece)
    exact = keys[:, :, :SINKS].double()
    rotation = layer.rotation
    rotation.put(exact, rotation.pick(exact) * rotation.phase(torch.tensor([200 - BUDGET]), exact))
    error = float((attended[:, :, :SINKS] - exact).abs().max())
    assert error <= torch.finfo(dtype).eps * float(exact.abs().max())  # half a unit is one rounding


# beginning again, and several rows


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("first", [1, 2, 20])
def test_after_reset_it_is_as_new(model, convention, first):
    cache = FixedSinkCache(model("llama"), StreamingLLM(SINKS), BUDGET, convention)
    read(model("llama"), cache, tokens(40), [30, *[1] * 10])
    cache.reset()
    ids, chunks = tokens(first + 15, seed=6), [first, *[1] * 15]
    assert cache.seen == 0
    again = FixedSinkCache(model("llama"), StreamingLLM(SINKS), BUDGET, convention)
    assert torch.equal(read(model("llama"), cache, ids, chunks), read(model("llama"), again, ids, chunks))


def test_buffers_are_never_replaced(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    read(model("llama"), cache, tokens(5, batch=2), [4, 1])
    held = [each.data_ptr() for layer in cache.layers for each in cast(Any, layer).tensors()]
    read(model("llama"), cache, tokens(30, batch=2), [1] * 20 + [10])
    cache.reorder_cache(cast(Any, torch.tensor([1, 0])))
    cache.reset()
    read(model("llama"), cache, tokens(20, batch=2), [20])
    assert held == [each.data_ptr() for layer in cache.layers for each in cast(Any, layer).tensors()]


def test_a_deep_copy_goes_on_by_itself(model):
    ids, chunks = tokens(30), [12, *[1] * 18]
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    whole = read(model("llama"), FixedSinkCache(model("llama"), budget=BUDGET), ids, chunks)
    read(model("llama"), cache, ids[:, :20], chunks[:9])
    fork = copy.deepcopy(cache)
    read(model("llama"), cache, tokens(20, seed=7), [1] * 20)
    assert torch.equal(read(model("llama"), fork, ids[:, 20:], [1] * 10), whole[:, 20:])


def test_rows_reordered_go_on_as_if_alone(model):
    ids, more = tokens(20, batch=3), tokens(10, batch=3, seed=6)
    cache = FixedSinkCache(model("llama"), StreamingLLM(SINKS), BUDGET)
    read(model("llama"), cache, ids, [15, *[1] * 5])
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(cast(Any, rows))
    again = FixedSinkCache(model("llama"), StreamingLLM(SINKS), BUDGET)
    expected = read(model("llama"), again, torch.cat([ids[rows], more], 1), [15, *[1] * 15])
    same(read(model("llama"), cache, more, [1] * 10), expected[:, 20:])


def test_what_was_read_in_inference_mode_goes_on_outside_of_it(model):
    ids = tokens(30)
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    whole = read(model("llama"), FixedSinkCache(model("llama"), budget=BUDGET), ids, [15, *[1] * 15])
    with torch.inference_mode():
        read(model("llama"), cache, ids[:, :20], [15, *[1] * 5])
    assert torch.equal(read(model("llama"), cache, ids[:, 20:], [1] * 10), whole[:, 20:])


def test_bytes_are_the_budget_the_sinks_as_they_arrived_and_a_counter(model):
    cache = FixedSinkCache(model("llama"), StreamingLLM(SINKS), BUDGET)
    assert cache.nbytes == 0
    read(model("llama"), cache, tokens(40), [30, *[1] * 10])
    per_token, frequencies = 2 * 16 * 8, 8 * 8
    assert cache.nbytes == 2 * ((2 * BUDGET + SINKS) * per_token + 8) + frequencies


# generate


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("family", "extra"), [*((family, {}) for family in FULL), *(("llama", each) for each in EXTRAS)]
)
@pytest.mark.parametrize("prompt", [3, 21])
def test_generate_equals_a_sink_cache(model, family, convention, prompt, extra):
    tiny, ids = model(family), tokens(prompt, batch=2)
    caches = (kind(tiny, budget=BUDGET, positions=convention) for kind in (FixedSinkCache, SinkCache))
    actual, expected = (generate(tiny, cache, ids, max_new_tokens=30, **extra) for cache in caches)
    assert torch.equal(actual, expected)


# compiled


@pytest.mark.parametrize(
    ("family", "convention", "prompt"),
    [
        *((family, "cache", 5) for family in FULL),
        ("llama", "original", 5),
        ("llama", "cache", 1),
        ("llama", "cache", 20),
    ],
)
def test_decoding_is_one_graph_from_the_first_token_to_far_past_the_budget(
    plain, unchecked, family, convention, prompt
):
    tiny, ids, chunks = plain(family), tokens(prompt + 110, batch=2), [prompt, *[1] * 110]
    expected = read(tiny, FixedSinkCache(tiny, StreamingLLM(SINKS), BUDGET, convention), ids, chunks)
    cache = FixedSinkCache(tiny, StreamingLLM(SINKS), BUDGET, convention)
    with counted() as (graphs, backend):
        compiled = torch.compile(tiny, backend=backend, fullgraph=True)
        same(read(tiny, cache, ids, chunks, compiled), expected)
        assert (len(graphs), sum(counters["graph_break"].values())) == (1, 0)


def test_a_stream_is_one_graph_from_its_very_first_token_if_initialized_early(plain, unchecked):
    tiny, ids = plain("llama"), tokens(30)
    expected = read(tiny, FixedSinkCache(tiny, budget=BUDGET), ids, [1] * 30)
    cache = FixedSinkCache(tiny, budget=BUDGET)
    cache.early_initialization(1, 2, 16, torch.float64, torch.device("cpu"))
    with counted() as (graphs, backend):
        compiled = torch.compile(tiny, backend=backend, fullgraph=True)
        same(read(compiled, cache, ids, [1] * 30), expected)
        assert len(graphs) == 1


def test_reset_a_copy_and_a_new_cache_are_not_traced_anew(plain, unchecked):
    tiny, ids, chunks = plain("llama"), tokens(40), [5, *[1] * 35]
    cache = FixedSinkCache(tiny, budget=BUDGET)
    with counted() as (graphs, backend):
        compiled = torch.compile(tiny, backend=backend, fullgraph=True)
        first = read(tiny, cache, ids, chunks, compiled)
        fork = copy.deepcopy(cache)
        fork.reset()
        cache.reset()
        for each in (cache, fork, FixedSinkCache(tiny, budget=BUDGET)):
            assert torch.equal(read(tiny, each, ids, chunks, compiled), first)
        assert len(graphs) == 1


@pytest.mark.parametrize(("family", "prompt"), [*((family, 3) for family in FULL), ("llama", 21)])
def test_generate_compiles_one_graph(plain, unchecked, family, prompt):
    tiny, ids = plain(family), tokens(prompt, batch=2)
    expected = generate(tiny, SinkCache(tiny, budget=BUDGET), ids, max_new_tokens=110)
    with counted() as (graphs, backend):
        config = CompileConfig(fullgraph=True, backend=backend, mode=cast(Any, None))
        config._compile_all_devices = cast(Any, True)
        cache = FixedSinkCache(tiny, budget=BUDGET)
        actual = generate(tiny, cache, ids, max_new_tokens=110, compile_config=config)
        assert (len(graphs), sum(counters["graph_break"].values())) == (1, 0)
    assert torch.equal(actual, expected)


# refusals


def test_other_policies_are_sent_to_sink_cache(model):
    class Other(Policy):
        def score(self, entries: Any) -> Any: ...

    with pytest.raises(ValueError, match=r"policy must be Window or StreamingLLM, got .*: for any other use SinkCache"):
        FixedSinkCache(model("llama"), Other(), 8)


@pytest.mark.parametrize("budget", [0, -1, 0.5, True, None, [8, 8]])
def test_a_bad_budget_is_an_error(model, unchecked, budget):
    with pytest.raises(ValueError, match="budget must be a number of tokens, at least 1, got"):
        FixedSinkCache(model("llama"), Window(), budget)


def test_as_many_sinks_as_budget_are_an_error(model):
    with pytest.raises(ValueError, match="num_sinks=4 with budget=4"):
        FixedSinkCache(model("llama"), StreamingLLM(4), 4)


def test_hybrid_models_are_sent_to_sink_cache(model):
    with pytest.raises(ValueError, match=r"has layers other than full attention \(.*Sliding.*\): use SinkCache"):
        FixedSinkCache(model("gemma3"), budget=8)


def test_dynamic_frequencies_are_sent_to_sink_cache():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match=r"rope_type is dynamic.* use SinkCache"):
        FixedSinkCache(build("llama", rope_parameters=parameters), budget=8)


def test_a_policy_of_positions_elsewhere_is_an_error(model, unchecked):
    with pytest.raises(ValueError, match='positions must be "cache" or "original"'):
        FixedSinkCache(model("llama"), budget=8, positions=cast(Any, "rope"))


@pytest.mark.parametrize("extra", [{}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize(("family", "compiling"), [*((family, False) for family in FULL), ("llama", True)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_refused_before_the_first_token(plain, unchecked, family, extra, side, compiling):
    tiny, mask = plain(family), torch.ones(2, 12, dtype=torch.int64)
    mask[1, slice(0, 3) if side == "left" else slice(9, 12)] = 0
    cache = FixedSinkCache(tiny, budget=BUDGET)
    if compiling:
        extra = {**extra, "compile_config": CompileConfig(backend="eager", mode=cast(Any, None))}
        extra["compile_config"]._compile_all_devices = True
    with counted(), pytest.raises(ValueError, match="padded batches are not supported by FixedSinkCache"):
        generate(tiny, cache, tokens(12, batch=2), attention_mask=mask, max_new_tokens=5, **extra)
    assert cache.seen == (8 if side == "right" and extra.get("prefill_chunk_size") else 0)


@pytest.mark.parametrize("kind", ["2D", "4D", "float"])
def test_a_mask_that_hides_tokens_is_an_error(model, kind):
    mask = torch.ones(1, 6, dtype=torch.int64)
    if kind != "2D":
        mask = torch.ones(6, 6).tril().bool()[None, None]
    mask[..., -1, 1] = 0
    if kind == "float":
        mask = torch.zeros(mask.shape).double().masked_fill(~mask, -1e9)
    with pytest.raises(ValueError, match="padded batches are not supported"):
        read(model("llama"), FixedSinkCache(model("llama"), budget=BUDGET), tokens(6), [6], attention_mask=mask)


def test_positions_that_do_not_go_on_are_an_error(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    read(model("llama"), cache, tokens(6), [6])
    with pytest.raises(ValueError, match="position_ids are not 1 in a row from 6"):
        read(model("llama"), cache, tokens(1), [1], position_ids=torch.tensor([[5]]))


def test_a_model_that_rotates_otherwise_is_an_error(model):
    FixedSinkCache(model("qwen3"), budget=BUDGET)  # so that it announces its passes
    with pytest.raises(ValueError, match="made for a model that rotates otherwise than this Qwen3ForCausalLM"):
        read(model("qwen3"), FixedSinkCache(model("llama"), budget=BUDGET), tokens(6), [6])


def test_a_part_of_the_model_is_an_error(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    with pytest.raises(RuntimeError, match="not announced"):
        model("llama").model(input_ids=tokens(6), **{cache_argument(model("llama").model): cache})


def test_an_interrupted_pass_is_an_error(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    read(model("llama"), cache, tokens(6), [6])
    cast(Any, cache.layers[0]).seen.add_(1)
    with pytest.raises(RuntimeError, match=r"layers have seen \[6, 7\] tokens, a pass was interrupted"):
        read(model("llama"), cache, tokens(1), [1])


def test_another_number_of_rows_is_an_error(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    read(model("llama"), cache, tokens(6), [6])
    with pytest.raises(ValueError, match="the cache holds 1 rows and was given 2"):
        read(model("llama"), cache, tokens(1, batch=2), [1])


def test_taking_back_tokens_is_an_error(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="cannot take back tokens"):
        cache.crop(-1)


def test_gradients_are_an_error(model):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    with pytest.raises(RuntimeError, match="for inference"):
        model("llama")(input_ids=tokens(6), **{cache_argument(model("llama")): cache})


def test_flash_attention_without_a_mask_is_an_error_while_slots_are_empty(model, monkeypatch):
    cache = FixedSinkCache(model("llama"), budget=BUDGET)
    read(model("llama"), cache, tokens(5), [5])
    monkeypatch.setattr(model("llama").config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(
        ValueError, match=r"flash attention reads empty slots without attention_mask=torch.ones\(_, 6\)"
    ):
        read(model("llama"), cache, tokens(1), [1])
