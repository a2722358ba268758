"""A cache that was saved and loaded is the cache: bit by bit, or an error that says why not."""

import copy
import gc
import json
import os
import pickle
import random
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors
import torch
import transformers as tf
from conftest import VOCABULARY, build, recurrent
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from sinkcache import Entries, Policy, SinkCache, prefill, stream
from sinkcache import container as module
from sinkcache.guard import cache_argument
from sinkcache.layer import SinkLayer
from sinkcache.memory import storage, tensors_of
from sinkcache.policies import StreamingLLM, Window

BUDGET, SINKS = 9, 3
SINK = StreamingLLM(SINKS)


@dataclass(frozen=True)
class EveryOther(Policy):
    recent: int = 4

    def score(self, entries: Entries) -> Tensor:
        newest = entries.seen - entries.positions <= self.recent
        return (newest | (entries.positions % 2 == 0)).float()


@dataclass(frozen=True)
class Either(Policy):
    first: Policy = Window()  # noqa: RUF009 - frozen and without state
    rest: tuple[float, ...] = (0.5, float("inf"))

    def score(self, entries: Entries) -> Tensor:
        return self.first.score(entries)


def ids(rows: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def read(model: Any, cache: SinkCache, tokens: Tensor, chunks: list[int], **extra: Any) -> Tensor:
    logits = []
    for piece in tokens.split(chunks, dim=1):
        with torch.no_grad():
            logits.append(model(piece, use_cache=True, **{cache_argument(model): cache}, **extra).logits)
    return torch.cat(logits, dim=1)


def streamed(model: Any, cache: SinkCache, tokens: Tensor, rebase_at: int = 16) -> Tensor:
    return torch.stack(list(stream(model, cache, tokens.T.unbind(), rebase_at=rebase_at)), dim=1)


def again(cache: SinkCache, model: Any, path: Any, **extra: Any) -> SinkCache:
    cache.save(path)
    return SinkCache.load(path, model, **extra)


def assert_goes_on(model: Any, cache: SinkCache, other: SinkCache, rows: int, rebased: bool = False) -> None:
    """20 more tokens, one by one and in a chunk, and what the caches then hold, are the same to the last bit."""
    assert_same(cache, other)
    more = ids(rows, 20, seed=9)
    if rebased:
        assert torch.equal(streamed(model, other, more), streamed(model, cache, more))
    else:
        chunks = [1] * 13 + [5, 1, 1]
        assert torch.equal(read(model, other, more, chunks), read(model, cache, more, chunks))
    assert_same(cache, other)


def assert_same(cache: SinkCache, other: SinkCache) -> None:
    assert other.seen == cache.seen
    assert len(other.ledgers) == len(cache.ledgers)
    for ledger, twin in zip(cache.ledgers, other.ledgers, strict=True):
        assert twin.lanes is other.lanes
        assert len(twin.books) == len(ledger.books)
        for book, copied in zip(ledger.books, twin.books, strict=True):
            alike(vars(book), vars(copied), held=book.held)
    alike(vars(cache.lanes), vars(other.lanes))
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        assert type(twin) is type(layer)
        store: Any = getattr(layer, "store", None)
        alike(known(layer), known(twin))
        if store is not None:
            assert storage(tensors_of(twin)) == storage(tensors_of(layer))
            held = max(book.held for book in layer.ledger.books)  # type: ignore[union-attr]
            alike(
                {name: value[:, :, :held] for name, value in vars(store).items() if isinstance(value, Tensor)},
                {name: value[:, :, :held] for name, value in vars(twin.store).items() if isinstance(value, Tensor)},  # type: ignore[union-attr]
            )


def known(layer: Any) -> dict[str, Any]:
    """Its fields, but the device that a layer keeps the name of after a reset."""
    empty = isinstance(layer, SinkLayer) and layer.store is None
    return {name: value for name, value in vars(layer).items() if not (empty and name == "device")}


def alike(one: dict[str, Any], other: dict[str, Any], held: int | None = None) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        twin = other[name]
        if isinstance(value, Tensor):
            assert twin.dtype == value.dtype
            assert torch.equal(twin[:held] if held is not None else twin, value[:held] if held is not None else value)
            assert torch.empty_like(twin).stride() == torch.empty_like(value).stride(), name
        elif isinstance(value, dict):
            alike(value, twin)
        elif value is None or isinstance(value, (bool, int, float, str, torch.device, torch.dtype)):
            assert type(twin) is type(value)
            assert name in ("last", "real") or twin == value, name


# a loaded cache goes on as the saved one


WAYS = {
    "before any token": [],
    "below the budget": [5],
    "just full": [BUDGET],
    "mid-stream, token by token": [1] * 31,
    "mid-stream, in chunks": [30, 1, 1, 4, 11],
}


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("chunks", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_goes_on_bit_by_bit(model, tmp_path, family, chunks, positions):
    tiny = model(family)
    cache = SinkCache(tiny, SINK, BUDGET, positions)
    if chunks:
        read(tiny, cache, ids(2, sum(chunks)), chunks)
    assert_goes_on(tiny, cache, again(cache, tiny, tmp_path / "cache"), rows=2)


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("tokens", [16, 17, 40])
def test_goes_on_bit_by_bit_after_positions_were_rebased(model, tmp_path, family, positions, tokens):
    tiny = model(family)
    cache = SinkCache(tiny, SINK, BUDGET, positions)
    streamed(tiny, cache, ids(2, tokens))
    assert_goes_on(tiny, cache, again(cache, tiny, tmp_path / "cache"), rows=2, rebased=True)


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("policy", [SINK, Window(), EveryOther()], ids=["sinks", "window", "own"])
def test_goes_on_bit_by_bit_right_after_a_rebasing(model, tmp_path, positions, policy):
    llama = model("llama")
    cache = SinkCache(llama, policy, BUDGET, positions)
    read(llama, cache, ids(1, 30), [6, 24])
    cache.rebase(25)
    other = again(cache, llama, tmp_path / "cache", policy=policy)
    assert_goes_on(llama, cache, other, rows=1, rebased=True)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("rebased", [False, True], ids=["as they are", "re-based"])
def test_padded_batches_go_on_bit_by_bit(model, tmp_path, family, rebased):
    if family == "gemma3" and not hasattr(tf.DynamicCache, "get_query_offset"):
        pytest.skip(f"transformers {tf.__version__} cannot serve padded rows to sliding layers")
    tiny = model(family)
    tokens, mask = ids(4, 30), torch.ones(4, 30, dtype=torch.int64)
    hole = (3, 0, 9) if family == "gemma3" else (3, 4, 9)  # sliding windows count pads behind a row's first token
    for row, start, end in [(1, 0, 5), (2, 0, 26), hole]:
        tokens[row, start:end], mask[row, start:end] = 0, 0
    cache = SinkCache(tiny, SINK, BUDGET)
    prefill(tiny, cache, tokens, chunk=11, attention_mask=mask)
    if rebased:
        streamed(tiny, cache, ids(4, 17))
    other = again(cache, tiny, tmp_path / "cache")
    assert torch.equal(other.kept(1), cache.kept(1))
    wide = torch.cat([mask, torch.ones(4, cache.seen - 30 + 1, dtype=torch.int64)], dim=1)
    for each in (cache, other):  # it knows what was hidden: a mask that fits is taken, another is not
        wrong = wide.clone()
        wrong[1, 2] = 1
        with pytest.raises(ValueError, match="hides other tokens than when they were read"):
            prefill(tiny, each, ids(4, 1), attention_mask=wrong)
        each.lanes.real = None
    if not rebased:
        one, two = (prefill(tiny, each, ids(4, 1), attention_mask=wide) for each in (cache, other))
        assert torch.equal(one, two)
    assert_goes_on(tiny, cache, other, rows=4, rebased=rebased)


@pytest.mark.parametrize("budget", [[BUDGET, 14], [14, 0.3], [BUDGET, BUDGET]], ids=str)
def test_budgets_of_each_layer_go_on_bit_by_bit(tmp_path, budget):
    llama = build("llama")
    cache = SinkCache(llama, SINK, budget)
    prefill(llama, cache, ids(2, 40), chunk=7)
    other = again(cache, llama, tmp_path / "cache")
    assert_goes_on(llama, cache, other, rows=2)


def test_a_model_that_never_had_budgets_of_each_layer_gets_the_attention_for_them(tmp_path):
    llama, fresh = build("llama"), build("llama")
    cache = SinkCache(llama, SINK, [BUDGET, 14])
    read(llama, cache, ids(1, 30), [30])
    other = again(cache, fresh, tmp_path / "cache")
    assert torch.equal(read(fresh, other, ids(1, 9), [4, 5]), read(llama, cache, ids(1, 9), [4, 5]))


@pytest.mark.parametrize("prompt", [0, 40])
def test_a_share_of_the_prompt_stays_as_it_was_settled(model, tmp_path, prompt):
    llama = model("llama")
    cache = SinkCache(llama, SINK, 0.25)
    if prompt:
        prefill(llama, cache, ids(1, prompt), chunk=6)
    other = again(cache, llama, tmp_path / "cache")
    assert other.ledgers[0].books[0].asked == 0.25
    assert other.slots.capacity == (10 if prompt else None)
    assert_same(cache, other)
    one, two = (prefill(llama, each, ids(1, 24, seed=4), chunk=5) for each in (cache, other))
    assert torch.equal(one, two)
    assert other.slots.capacity == (10 if prompt else 6)
    assert_goes_on(llama, cache, other, rows=1)


def test_bounded_sliding_layers_go_on_bit_by_bit(model, tmp_path):
    gemma = model("gemma3")
    cache = SinkCache(gemma, SINK, BUDGET, sliding="bound")
    read(gemma, cache, ids(1, 30), [7] * 4 + [2])
    other = again(cache, gemma, tmp_path / "cache")
    assert other.sliding == "bound"
    assert other.window == 16
    assert_goes_on(gemma, cache, other, rows=1)


@pytest.mark.parametrize("tokens", [0, 1, 3, 30])
def test_linear_attention_goes_on_bit_by_bit(tmp_path, tokens):
    tiny = recurrent()
    cache = SinkCache(tiny, SINK, BUDGET)
    if tokens:
        read(tiny, cache, ids(2, tokens), [tokens])
    assert_goes_on(tiny, cache, again(cache, tiny, tmp_path / "cache"), rows=2)


def test_a_state_in_another_memory_layout_keeps_it(tmp_path):
    tiny = recurrent()
    cache = SinkCache(tiny, SINK, BUDGET)
    read(tiny, cache, ids(2, 12), [12])
    states: Any = cache.layers[0]
    states.recurrent_states[0] = states.recurrent_states[0].transpose(1, 3).contiguous().transpose(1, 3)
    assert_goes_on(tiny, cache, again(cache, tiny, tmp_path / "cache"), rows=2)


@pytest.mark.parametrize("change", ["crop", "crop all", "reorder", "repeat", "fork", "reset"])
def test_goes_on_bit_by_bit_after_rows_or_tokens_were_changed(model, tmp_path, change):
    llama, rows = model("llama"), 2
    cache = SinkCache(llama, SINK, 40 if "crop" in change else BUDGET)
    streamed(llama, cache, ids(2, 20), rebase_at=7)
    if "crop" in change:
        cache.crop(-20 if "all" in change else -6)
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        rows = 3
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        rows = 4
    elif change == "fork":
        cache = cache.fork(2)
        rows = 4
    else:
        cache.reset()
    assert_goes_on(llama, cache, again(cache, llama, tmp_path / "cache"), rows=rows, rebased=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_go_on_bit_by_bit(tmp_path, dtype):
    llama = build("llama", dtype)
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 30), [6] * 5)
    assert_goes_on(llama, cache, again(cache, llama, tmp_path / "cache"), rows=1)


def test_a_loaded_cache_can_be_saved_loaded_forked_and_reset(model, tmp_path):
    llama = model("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 30), [30])
    other = again(again(cache, llama, tmp_path / "one"), llama, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert_goes_on(llama, cache.fork(), other.fork(), rows=1)
    for each in (cache, other):
        each.reset()
    assert torch.equal(read(llama, other, ids(2, 30), [30]), read(llama, cache, ids(2, 30), [30]))


def test_the_cache_that_was_saved_stays_as_it_is_and_shares_nothing(model, tmp_path):
    llama = model("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 30), [30])
    twin = cache.fork()
    other = again(cache, llama, tmp_path / "cache")
    assert_same(cache, twin)
    read(llama, other, ids(1, 12), [12])
    assert_goes_on(llama, cache, twin, rows=1)


def test_a_cache_loaded_in_inference_mode_can_be_written_outside_of_it(model, tmp_path):
    llama = model("gemma3")
    cache = SinkCache(llama, SINK, BUDGET)
    with torch.inference_mode():
        read(llama, cache, ids(1, 30), [30])
        other = again(cache, llama, tmp_path / "cache")
    streamed(llama, other, ids(1, 20), rebase_at=30)


def test_a_cache_made_from_a_config_is_loaded_with_the_config(model, tmp_path):
    llama = model("llama")
    cache = SinkCache(llama.config, SINK, BUDGET, "original")
    read(llama, cache, ids(1, 30), [30])
    other = again(cache, llama.config, tmp_path / "cache")
    assert not other.watched
    assert_goes_on(llama, cache, other, rows=1)
    with pytest.raises(ValueError, match="was saved by a cache made for a config, got a model: load it with a config"):
        SinkCache.load(tmp_path / "cache", llama)
    SinkCache(llama, SINK, BUDGET, "original").save(tmp_path / "cache")
    with pytest.raises(ValueError, match="made for the model, got a config: load it with the model"):
        SinkCache.load(tmp_path / "cache", llama.config)
    with pytest.raises(TypeError):
        SinkCache.load(tmp_path / "cache", "llama")  # type: ignore[arg-type]


# the file


def test_the_file_is_safetensors_and_tells_what_it_is_of(model, tmp_path):
    llama = model("llama")
    cache = SinkCache(llama, SINK, [BUDGET, 0.5], "original")
    read(llama, cache, ids(2, 30), [30])
    cache.save(tmp_path / "cache")
    tensors = load_file(tmp_path / "cache")
    layer: Any = cache.layers[0]
    assert torch.equal(tensors["layers.0.store.values"], layer.values)
    with safetensors.safe_open(tmp_path / "cache", "pt") as file:
        told = file.metadata()
    assert (told["format"], told["version"], told["positions"], told["sliding"]) == (
        "sinkcache",
        "1",
        "original",
        "native",
    )
    assert json.loads(told["budgets"]) == [BUDGET, 0.5]
    policy = {"class": "sinkcache.policies.streaming.StreamingLLM", "fields": {"num_sinks": SINKS}}
    assert json.loads(told["policy"]) == policy


def test_slots_that_are_not_in_use_are_not_written(model, tmp_path):
    llama = model("llama")
    cache = SinkCache(llama, SINK, 10_000)
    streamed(llama, cache, ids(1, 20), rebase_at=7)
    other = again(cache, llama, tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_size < 60_000 < 10_000_000 < cache.nbytes
    assert other.nbytes == cache.nbytes
    assert_goes_on(llama, cache, other, rows=1, rebased=True)


def test_what_a_file_cannot_hold_is_an_error_that_names_it(model, tmp_path):
    gemma = model("gemma3")
    cache: Any = SinkCache(gemma, SINK, BUDGET)
    for target, name in [
        (cache.layers[2], r"layers\.2\.extra"),
        (cache.layers[1], r"layers\.1\.extra"),
        (cache.lanes, r"lanes\.extra"),
        (cache.slots, r"ledgers\.0\.books\.0\.extra"),
        (cache.ledgers[0], r"ledgers\.0\.extra"),
    ]:
        for value, kind in [(object(), "object"), ({1.5: 2}, "dict"), (nn.Parameter(torch.ones(1)), "Parameter")]:
            target.extra = value
            with pytest.raises(ValueError, match=f"{name} is a {kind}, which a file cannot hold"):
                cache.save(tmp_path / "cache")
        del target.extra
    cache.layers[2].extra = torch.zeros(2, dtype=torch.uint16)
    with pytest.raises(ValueError, match=r"layers\.2\.extra is a tensor of torch.uint16, which a file cannot hold"):
        cache.save(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_what_a_native_layer_is_made_of_comes_back(model, tmp_path):
    gemma = model("gemma3")
    cache: Any = SinkCache(gemma, SINK, BUDGET)
    held = {
        "a": None,
        3: [1, (2.5, True, "x")],
        "b": {"c": torch.arange(3), "d": torch.ones(2, dtype=torch.complex128)},
    }
    cache.layers[2].extra = held
    other: Any = again(cache, gemma, tmp_path / "cache")
    alike(other.layers[2].extra["b"], held["b"])
    assert {**other.layers[2].extra, "b": 0} == {**held, "b": 0}


def test_layers_of_other_versions_are_an_error(model, tmp_path, monkeypatch):
    gemma = model("gemma3")
    SinkCache(gemma, SINK, BUDGET).save(tmp_path / "cache")
    original = DynamicSlidingWindowLayer.__init__

    def newer(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.phase = 0

    monkeypatch.setattr(DynamicSlidingWindowLayer, "__init__", newer)
    with pytest.raises(
        ValueError, match=r"cache was saved by sinkcache .* without the phase of a DynamicSlidingWindow"
    ):
        SinkCache.load(tmp_path / "cache", gemma)


# damage


@pytest.fixture
def saved(model, tmp_path):
    """A path, the bytes in it, and the model."""
    llama = model("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    streamed(llama, cache, ids(1, 20))
    cache.save(tmp_path / "cache")
    return tmp_path / "cache", (tmp_path / "cache").read_bytes(), llama


def assert_refused(path: Any, data: bytes, model: Any) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"safetensors|damaged|version") as error:
        SinkCache.load(path, model)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_was_cut_short_anywhere_is_an_error(saved):
    path, data, model = saved
    length = int.from_bytes(data[:8], "little")
    for end in [*range(300), *range(300, len(data), 61), *range(length, length + 20), len(data) - 1]:
        assert_refused(path, data[:end], model)


def test_a_file_that_goes_on_is_an_error(saved):
    path, data, model = saved
    for more in (b"\0", b" ", data):
        assert_refused(path, data + more, model)


def test_a_changed_byte_anywhere_is_an_error(saved):
    path, data, model = saved
    length, chance = int.from_bytes(data[:8], "little"), random.Random(7)
    places = [*range(400), *range(400, 8 + length, 3), *range(8 + length, len(data), 37), len(data) - 1]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= chance.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
        assert_refused(path, bytes(changed), model)


def test_a_header_that_means_the_same_in_other_bytes_is_an_error(saved):
    path, data, model = saved
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    told = json.loads(text)
    swapped = text.replace(b'"sliding":"native"', b'"sliding":"bound" ')  # as long as it was
    assert swapped != text
    assert_refused(path, data[:8] + swapped + data[8 + length :], model)
    turned = dict(reversed(told.items()))
    for other in (text + b" " * 8, json.dumps(told).encode(), json.dumps(turned, separators=(",", ":")).encode()):
        assert_refused(path, len(other).to_bytes(8, "little") + other + data[8 + length :], model)


def test_swapped_tensors_are_an_error(saved):
    path, data, model = saved
    length = int.from_bytes(data[:8], "little")
    one, other = b'"layers.0.store.keys"', b'"layers.1.store.keys"'
    text = data[8 : 8 + length].replace(one, b"#").replace(other, one).replace(b"#", other)
    assert_refused(path, data[:8] + text + data[8 + length :], model)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8, b"\0" * 100, b"\xff" * 100, b"not a file of this kind at all", b"\x02" + b"\0" * 7 + b"{}"]
    + [len(text).to_bytes(8, "little") + text for text in (b"[]", b"{" * 5000, b'{"__metadata__":3}', b"\xff\xfe")],
    ids=range(10),
)
def test_another_file_is_an_error(saved, data):
    path, _, model = saved
    assert_refused(path, data, model)


def test_nonsense_in_the_header_is_an_error(saved):
    path, data, model = saved
    length = int.from_bytes(data[:8], "little")
    told = json.loads(data[8 : 8 + length])
    wrong = [None, 3, [], {}, {"dtype": "F64"}, {"dtype": "F64", "shape": [-1], "data_offsets": [0, -8]}]
    wrong += [
        {"dtype": kind, "shape": shape, "data_offsets": [0, 8]} for kind in ("F64", "X", []) for shape in (1, [1e3])
    ]
    wrong += [{"dtype": "F64", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 1 << 123]}]
    for entry in wrong:
        text = json.dumps({"__metadata__": told["__metadata__"], "x": entry}).encode()
        assert_refused(path, len(text).to_bytes(8, "little") + text + data[8 + length :], model)
    for version in (None, "", "1.5", "-1", 1):
        text = json.dumps({"__metadata__": {**told["__metadata__"], "version": version}}).encode()
        assert_refused(path, len(text).to_bytes(8, "little") + text + data[8 + length :], model)


def test_a_safetensors_file_of_something_else_is_an_error(saved):
    path, _, model = saved
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(3)}, path, metadata)
        with pytest.raises(
            ValueError, match=r"cache is a safetensors file of something else: give a file that cache\.s"
        ):
            SinkCache.load(path, model)


def test_a_newer_format_is_an_error(saved, monkeypatch):
    path, _, model = saved
    monkeypatch.setattr(module, "_VERSION", 2)
    SinkCache(model, SINK, BUDGET).save(path)
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"has version 2 of the format, and this sinkcache knows 1: install a newer one"
    ):
        SinkCache.load(path, model)


def test_a_missing_file_is_an_error(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        SinkCache.load(tmp_path / "none", model("llama"))


# another model, policy, or convention


def test_another_model_is_an_error_that_says_what_differs(model, tmp_path):
    llama: Any = build("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 12), [12])
    cache.save(tmp_path / "cache")
    edited: Any = build("llama")
    with torch.no_grad():
        edited.model.layers[1].mlp.up_proj.weight[-6:] += 1  # a part of one weight
    for other, told in [
        (build("llama", seed=1), "its weights differ. Load"),
        (edited, "its weights differ. Load"),
        (build("llama", intermediate_size=80), r"its config differs \(intermediate_size\)"),
        (
            build("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            r"its config differs \(rope_parameters\)",
        ),
        (build("llama", torch.float32), r"its dtype differs \(torch.float64 in the file, got torch.float32\)"),
        (build("gpt_neox"), r"its config differs \(.*model_type"),
    ]:
        with pytest.raises(ValueError, match=f"cache was saved for another model: {told}") as error:
            SinkCache.load(tmp_path / "cache", other)
        assert "\n" not in str(error.value)


def test_rounded_frequencies_are_another_model(tmp_path):
    llama: Any = build("llama", torch.float32)
    SinkCache(llama, SINK, BUDGET).save(tmp_path / "cache")
    for part in llama.modules():
        if hasattr(part, "inv_freq"):
            part.inv_freq = part.inv_freq.bfloat16().float()
    with pytest.raises(
        ValueError, match=r"its rotary frequencies differ \(model.rotary_emb.inv_freq; a model that was"
    ):
        SinkCache.load(tmp_path / "cache", llama)


def test_how_a_model_was_loaded_makes_no_other_model(tmp_path):
    llama: Any = build("llama", torch.float32, tie_word_embeddings=True)
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 12), [12])
    llama.save_pretrained(tmp_path / "model")
    cache.save(tmp_path / "cache")
    loaded = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", local_files_only=True
    )
    loaded.config.pad_token_id = 5
    assert loaded.config.to_dict() != llama.config.to_dict()
    assert SinkCache.load(tmp_path / "cache", loaded).seen == 12


def test_weights_that_are_offloaded_are_not_compared(model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    llama, other = build("llama", torch.float32), build("llama", torch.float32)
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 12), [12])
    cache.save(tmp_path / "cache")
    accelerate.cpu_offload(other, execution_device="cpu")
    loaded = SinkCache.load(tmp_path / "cache", other)
    assert torch.equal(read(other, loaded, ids(1, 9), [9]), read(llama, cache, ids(1, 9), [9]))


def test_tensors_go_to_where_their_layer_computes(model, tmp_path):
    llama: Any = build("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    read(llama, cache, ids(1, 12), [12])
    cache.save(tmp_path / "cache")

    class Hook:
        execution_device = "meta"  # the one other device that every machine has

    llama.model.layers[1]._hf_hook = Hook()
    other: Any = SinkCache.load(tmp_path / "cache", llama)
    assert [layer.keys.device.type for layer in other.layers] == ["cpu", "meta"]
    assert [layer.device.type for layer in other.layers] == ["cpu", "meta"]


def test_another_policy_is_an_error(model, tmp_path):
    llama, path = model("llama"), tmp_path / "cache"
    SinkCache(llama, SINK, BUDGET).save(path)
    assert SinkCache.load(path, llama, StreamingLLM(SINKS)).policy == SINK
    for policy in (StreamingLLM(2), Window()):
        with pytest.raises(
            ValueError, match=r"cache was saved with the policy StreamingLLM\(num_sinks=3\), got .*: give"
        ):
            SinkCache.load(path, llama, policy)


def test_a_policy_of_ones_own_must_be_given(model, tmp_path):
    llama, path = model("llama"), tmp_path / "cache"
    SinkCache(llama, EveryOther(3), BUDGET).save(path)
    with pytest.raises(ValueError, match=r"EveryOther\(recent=3\) \(.*EveryOther\), which is not one of sinkcache.pol"):
        SinkCache.load(path, llama)
    with pytest.raises(ValueError, match=r"the policy EveryOther\(recent=3\), got EveryOther\(recent=4\)"):
        SinkCache.load(path, llama, EveryOther())
    assert SinkCache.load(path, llama, EveryOther(3)).policy == EveryOther(3)


def test_a_policy_that_holds_another_is_told_from_others(model, tmp_path):
    llama, path = model("llama"), tmp_path / "cache"
    SinkCache(llama, Either(SINK), BUDGET).save(path)
    assert SinkCache.load(path, llama, Either(SINK)).policy == Either(SINK)
    for other in (Either(), Either(SINK, (0.5,))):
        with pytest.raises(ValueError, match="got Either"):
            SinkCache.load(path, llama, other)


def test_a_policy_of_another_kind_that_has_the_name_of_ours_is_another(model, tmp_path):
    llama, path = model("llama"), tmp_path / "cache"
    own = dataclass(frozen=True)(type("Window", (EveryOther,), {}))()
    SinkCache(llama, Window(), BUDGET).save(path)
    with pytest.raises(ValueError, match=r"the policy Window\(\), got Window"):
        SinkCache.load(path, llama, own)


def test_a_policy_that_a_file_cannot_name_is_an_error(model, tmp_path):
    policy = Either(Window(), (torch.ones(2),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"policy\.rest\.0 is a Tensor, which a file cannot hold"):
        SinkCache(model("llama"), policy, BUDGET).save(tmp_path / "cache")


@pytest.mark.parametrize(("one", "other"), [("cache", "original"), ("original", "cache")])
def test_another_convention_is_an_error(model, tmp_path, one, other):
    llama, path = model("llama"), tmp_path / "cache"
    SinkCache(llama, SINK, BUDGET, one).save(path)
    assert SinkCache.load(path, llama, positions=one).positions == one
    with pytest.raises(ValueError, match=f"was saved with positions='{one}', got '{other}'"):
        SinkCache.load(path, llama, positions=other)


# when it may be saved


def test_saving_in_the_middle_of_a_pass_is_an_error(model, tmp_path):
    llama: Any = build("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    raised = []

    def save(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"a forward pass is under way or was interrupted.*: save when a pass"):
            cache.save(tmp_path / "cache")
        raised.append(True)

    for place in (llama.model.embed_tokens, llama.model.layers[0], llama.model.norm):
        place.register_forward_hook(save)
    read(llama, cache, ids(1, 13), [12, 1])
    assert len(raised) == 6
    cache.save(tmp_path / "cache")


@pytest.mark.parametrize("from_config", [False, True])
def test_saving_a_torn_cache_is_an_error(tmp_path, from_config):
    llama: Any = build("llama")
    cache = SinkCache(llama.config if from_config else llama, SINK, BUDGET, "original")
    read(llama, cache, ids(1, 12), [12])

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = llama.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        read(llama, cache, ids(1, 1), [1])
    hook.remove()
    with pytest.raises(RuntimeError, match=r"was interrupted.* call cache\.reset\(\) and read the prompt again"):
        cache.save(tmp_path / "cache")
    cache.reset()
    read(llama, cache, ids(1, 12), [12])
    cache.save(tmp_path / "cache")


@pytest.mark.parametrize("part", ["book", "ledger"])
def test_saving_a_torn_book_is_an_error(model, tmp_path, part):
    cache = SinkCache(model("llama"), SINK, BUDGET)
    if part == "book":
        cache.slots._torn = True
    else:
        cache.ledgers[0].seen += 1
    with pytest.raises(RuntimeError, match="a forward pass is under way or was interrupted"):
        cache.save(tmp_path / "cache")


def test_a_cache_whose_model_is_gone_cannot_be_saved(model, tmp_path):
    llama = build("llama")
    cache = SinkCache(llama, SINK, BUDGET)
    pickled = pickle.loads(pickle.dumps(cache))
    copy.deepcopy(cache).save(tmp_path / "cache")
    with pytest.raises(ValueError, match="the model this cache was made for is gone"):
        pickled.save(tmp_path / "cache")
    del llama
    gc.collect()
    with pytest.raises(ValueError, match="the model this cache was made for is gone"):
        cache.save(tmp_path / "cache")
    config = SinkCache(model("llama").config, SINK, BUDGET, "original")
    pickle.loads(pickle.dumps(config)).save(tmp_path / "cache")


def test_a_cache_that_another_model_read_cannot_be_saved(model, tmp_path):
    llama, other = build("llama"), build("llama", seed=1)
    cache = SinkCache(llama, SINK, BUDGET)
    SinkCache(other, SINK, BUDGET)
    read(other, cache, ids(1, 12), [12])
    with pytest.raises(ValueError, match="was last read by another model than the one it was made for"):
        cache.save(tmp_path / "cache")


# all of it or nothing


class Full:
    """Fails as a full disk does, or as Ctrl-C, when it is called for the `nth` time."""

    def __init__(self, original: Any, error: BaseException, nth: int) -> None:
        self.original, self.error, self.left = original, error, nth

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.original(*args, **kwargs)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
@pytest.mark.parametrize(("place", "nth"), [("_bytes", 8), ("_write_to", 1), ("os.fsync", 1), ("os.replace", 1)])
def test_a_save_that_fails_leaves_the_old_file(saved, monkeypatch, error, place, nth):
    path, data, model = saved
    cache = SinkCache(model, SINK, BUDGET)
    read(model, cache, ids(1, 30), [30])
    owner, name = (module.os, place[3:]) if place.startswith("os.") else (module, place)
    monkeypatch.setattr(owner, name, Full(getattr(owner, name), error, nth))
    with pytest.raises(type(error)):
        cache.save(path)
    assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["cache"]
    monkeypatch.undo()
    cache.save(path)
    assert SinkCache.load(path, model).seen == 30
    assert os.listdir(path.parent) == ["cache"]


def test_a_reader_never_sees_half_a_file(saved, monkeypatch):
    path, data, model = saved
    seen = []
    original = module._bytes

    def look(tensor: Tensor) -> Any:
        seen.append(path.read_bytes())
        return original(tensor)

    monkeypatch.setattr(module, "_bytes", look)
    cache = SinkCache(model, SINK, BUDGET)
    read(model, cache, ids(1, 30), [30])
    cache.save(path)
    assert len(seen) > 4
    assert all(each == data for each in seen)
    assert path.read_bytes() != data


def test_the_file_is_on_the_disk_before_it_takes_its_place(saved, monkeypatch):
    path, _, model = saved
    done = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *given, name=name, original=original: (done.append(name), original(*given))[1]
        )
    SinkCache(model, SINK, BUDGET).save(path)
    assert done == ["fsync", "replace", "fsync"]


def test_a_link_and_permissions_outlive_a_save(saved, tmp_path):
    path, data, model = saved
    (tmp_path / "deeper").mkdir()
    link = tmp_path / "deeper" / "link"
    link.symlink_to(path)
    path.chmod(0o640)
    SinkCache(model, SINK, BUDGET).save(link)
    assert link.is_symlink()
    assert path.read_bytes() != data
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path / "deeper") == ["link"]


def test_a_folder_that_is_not_there_is_an_error(model, tmp_path):
    with pytest.raises(FileNotFoundError):
        SinkCache(model("llama"), SINK, BUDGET).save(tmp_path / "none" / "cache")
    with pytest.raises(OSError, match="directory"):
        SinkCache(model("llama"), SINK, BUDGET).save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert [each for each in os.listdir(tmp_path.parent) if each.startswith(".sinkcache")] == []


def test_paths_may_be_strings(model, tmp_path):
    llama = model("llama")
    assert again(SinkCache(llama, SINK, BUDGET), llama, str(tmp_path / "cache")).seen == 0
