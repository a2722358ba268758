"""Prompts and streams: the same numbers in any chunk, frame or thread, in constant memory, whole after Ctrl-C."""

import copy
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sinkcache import SinkCache, prefill, stream
from sinkcache.guard import cache_argument
from sinkcache.layer import SinkLayer
from sinkcache.policies import StreamingLLM, Window

FAR = 4_000_000
NEVER = 10**9

Model = Callable[..., Any]  # of a causal LM, the fixture in conftest.py
conventions = pytest.mark.parametrize("positions", ["cache", "original"])


def _ids(count: int, batch: int = 1) -> Tensor:
    return torch.randint(1, 97, (batch, count))


def _stream(model: Any, cache: SinkCache, ids: Tensor, **arguments: Any) -> Tensor:
    """The logits after each of `ids`, [batch, tokens, vocab]."""
    return torch.stack(list(stream(model, cache, ids.unbind(dim=1), **arguments)), dim=1)


def _forward(model: Any, cache: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits


def _generate(model: Any, cache: Any, ids: Tensor) -> list[int]:
    out = model.generate(input_ids=ids, max_new_tokens=9, do_sample=False, **{cache_argument(model): cache})
    return out[0, ids.shape[1] :].tolist()


def _stored(cache: SinkCache, layer: int) -> Tensor:
    bounded = cache.layers[layer]
    assert isinstance(bounded, SinkLayer)
    return bounded.stored_keys()


# prefill


@conventions
@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_prefill_is_one_pass_per_chunk(model: Model, positions: Any, chunk: int) -> None:
    llama, ids = model("llama"), _ids(31, batch=2)
    cache, by_hand = (SinkCache(llama, StreamingLLM(2), budget=8, positions=positions) for _ in range(2))
    got = prefill(llama, cache, ids, chunk=chunk)
    for piece in ids.split(chunk, dim=1):
        expected = _forward(llama, by_hand, piece)[:, -1]
    torch.testing.assert_close(got, expected)
    assert torch.equal(cache.kept(1), by_hand.kept(1))


def test_prefill_returns_the_last_logits_of_each_row(model: Model) -> None:
    llama, ids = model("llama"), _ids(11, batch=2)
    got = prefill(llama, SinkCache(llama, budget=64), ids, chunk=4)
    torch.testing.assert_close(got, _forward(llama, DynamicCache(config=llama.config), ids)[:, -1])


def test_prefill_serves_a_model_that_gives_the_logits_of_every_token(model: Model) -> None:
    llama: Any = copy.deepcopy(model("llama", seed=5))
    inner, name, ids = llama.forward, cache_argument(llama), _ids(11)

    def forward(input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        return inner(input_ids, **given, **{name: past_key_values})

    llama.forward = forward  # no logits_to_keep
    got = prefill(llama, SinkCache(llama, budget=64), ids, chunk=4)
    torch.testing.assert_close(got, _forward(llama, DynamicCache(config=llama.config), ids)[:, -1])


@conventions
def test_generate_goes_on_after_a_prefill(model: Model, positions: Any) -> None:
    llama, ids = model("llama"), _ids(12)
    cache = SinkCache(llama, budget=64, positions=positions)
    first = prefill(llama, cache, ids, chunk=5).argmax(dim=-1, keepdim=True)
    got = _generate(llama, cache, torch.cat([ids, first], dim=1))
    expected = _generate(llama, DynamicCache(config=llama.config), torch.cat([ids, first], dim=1))
    assert got == expected


def test_prefill_reads_on_where_the_cache_is(model: Model) -> None:
    llama, ids = model("llama"), _ids(20)
    cache, other = SinkCache(llama, budget=12), SinkCache(llama, budget=12)
    prefill(llama, cache, ids[:, :8], chunk=4)
    torch.testing.assert_close(prefill(llama, cache, ids[:, 8:], chunk=4), prefill(llama, other, ids, chunk=4))


def test_a_share_is_of_the_whole_prompt_and_not_of_its_first_chunk(model: Model) -> None:
    cache = SinkCache(model("llama"), StreamingLLM(2), budget=0.5)
    prefill(model("llama"), cache, _ids(30), chunk=4)
    assert cache.kept(0)[0, 0].tolist() == [0, 1, *range(17, 30)]


def test_prefill_takes_a_mask_of_ones(model: Model) -> None:
    llama, ids = model("llama"), _ids(13)
    got = prefill(llama, SinkCache(llama, budget=8), ids, 5, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(got, prefill(llama, SinkCache(llama, budget=8), ids, 5))


def test_prefill_refuses_a_row_without_tokens_before_it_reads(model: Model) -> None:
    llama, ids = model("llama"), _ids(13).expand(2, -1)
    cache, mask = SinkCache(llama, budget=8), torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match="attention_mask hides all of row 1: leave that row out"):
        prefill(llama, cache, ids, 5, attention_mask=mask)
    assert cache.seen == 0


def test_prefill_moves_a_rebased_cache_back(model: Model) -> None:
    llama, ids = model("llama"), _ids(60)
    cache, other = SinkCache(llama, budget=12), SinkCache(llama, budget=12)
    _stream(llama, cache, ids[:, :50], chunk=2, rebase_at=16)
    _stream(llama, other, ids[:, :50], chunk=2, rebase_at=NEVER)
    got, expected = (prefill(llama, each, ids[:, 50:], 4) for each in (cache, other))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)  # float64, keys turned a few times


@pytest.mark.parametrize("chunk", [0, -3])
def test_prefill_refuses_an_empty_chunk(model: Model, chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk must be at least 1 token, got {chunk}"):
        prefill(model("llama"), SinkCache(model("llama")), _ids(5), chunk=chunk)


@pytest.mark.parametrize("shape", [(1, 0), (5,)])
def test_prefill_refuses_what_is_no_prompt(model: Model, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="input_ids must be"):
        unwrap(prefill)(model("llama"), SinkCache(model("llama")), torch.ones(shape, dtype=torch.int64))


# stream


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4])
def test_stream_yields_the_logits_after_each_token(model: Model, batch: int, chunk: int) -> None:
    llama, ids = model("llama"), _ids(11, batch)
    got = list(stream(llama, SinkCache(llama, budget=64), ids.unbind(dim=1), chunk=chunk))
    assert [each.shape for each in got] == [(batch, 97)] * 11
    expected = _forward(llama, DynamicCache(config=llama.config), ids)
    torch.testing.assert_close(torch.stack(got, dim=1), expected)


def test_stream_takes_plain_integers(model: Model) -> None:
    llama, ids = model("llama"), _ids(9)
    got = torch.stack(list(stream(llama, SinkCache(llama, budget=6), ids[0].tolist())), dim=1)
    torch.testing.assert_close(got, _stream(llama, SinkCache(llama, budget=6), ids))


@conventions
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_stream_is_one_pass_per_chunk(model: Model, positions: Any, chunk: int) -> None:
    llama, ids = model("llama"), _ids(31, batch=2)
    cache, by_hand = (SinkCache(llama, StreamingLLM(2), budget=8, positions=positions) for _ in range(2))
    got = _stream(llama, cache, ids, chunk=chunk)
    expected = torch.cat([_forward(llama, by_hand, piece) for piece in ids.split(chunk, dim=1)], dim=1)
    torch.testing.assert_close(got, expected)
    assert torch.equal(cache.kept(1), by_hand.kept(1))


def test_stream_of_nothing_yields_nothing(model: Model) -> None:
    assert list(stream(model("llama"), SinkCache(model("llama")), [])) == []


def test_stream_may_sample_from_the_logits_it_yields(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=64)
    said = [5]

    def choose() -> Iterator[int]:
        while len(said) < 10:
            yield said[-1]

    for logits in stream(llama, cache, choose()):
        said.append(int(logits.argmax()))
    assert said[1:] == _generate(llama, DynamicCache(config=llama.config), torch.tensor([[5]]))


def test_stream_takes_no_token_before_it_is_asked(model: Model) -> None:
    taken: list[int] = []

    def tokens() -> Iterator[int]:
        for token in range(1, 9):
            taken.append(token)
            yield token

    logits = stream(model("llama"), SinkCache(model("llama"), budget=6), tokens())
    assert taken == []
    next(logits)
    assert taken == [1]


def test_stream_of_an_endless_iterable_ends_when_the_reader_does(model: Model) -> None:
    cache = SinkCache(model("llama"), budget=6)
    assert len(list(islice(stream(model("llama"), cache, cycle([3, 4, 5]), chunk=2), 9))) == 9


def test_a_stream_closed_early_leaves_a_cache_that_goes_on(model: Model) -> None:
    llama, ids = model("llama"), _ids(20)
    cache = SinkCache(llama, budget=8)
    opened = stream(llama, cache, ids[:, :12].unbind(dim=1), chunk=3)
    for _ in range(4):  # the first of the second chunk, which was read whole
        next(opened)
    opened.close()  # type: ignore[attr-defined]
    assert cache.seen == 6
    got = _stream(llama, cache, ids[:, 6:], chunk=3)
    torch.testing.assert_close(got, _stream(llama, SinkCache(llama, budget=8), ids, chunk=3)[:, 6:])


@pytest.mark.parametrize("chunk", [0, -1])
def test_stream_refuses_an_empty_chunk_when_it_is_called(model: Model, chunk: int) -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        stream(model("llama"), SinkCache(model("llama")), [1], chunk=chunk)


def test_stream_refuses_a_chunk_longer_than_the_frame(model: Model) -> None:
    with pytest.raises(ValueError, match="chunk must not exceed rebase_at"):
        stream(model("llama"), SinkCache(model("llama")), [1], chunk=9, rebase_at=8)


# re-basing


@contextmanager
def _positions_given(model: Any) -> Iterator[list[int]]:
    """The positions the model is given while the block runs."""
    given: list[int] = []

    def note(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given.extend(kwargs["position_ids"][0].tolist())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield given
    finally:
        handle.remove()


@conventions
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "glm", "smollm3"])
def test_rebasing_is_invisible(model: Model, family: str, positions: Any) -> None:
    tiny, ids, chunk = model(family), _ids(45, batch=2), 1 if family == "llama" else 3
    often, never = (SinkCache(tiny, StreamingLLM(2), budget=8, positions=positions) for _ in range(2))
    got = _stream(tiny, often, ids, chunk=chunk, rebase_at=7)
    expected = _stream(tiny, never, ids, chunk=chunk, rebase_at=NEVER)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)  # float64, keys turned some times


@pytest.mark.parametrize(("rebase_at", "expected"), [(8, [*range(6), *range(6)]), (9, [*range(9), *range(3)])])
def test_positions_stay_below_rebase_at(model: Model, rebase_at: int, expected: list[int]) -> None:
    llama = model("llama")
    cache = SinkCache(llama, budget=6)  # made first: it probes the model
    with _positions_given(llama) as given:
        _stream(llama, cache, _ids(40), chunk=3, rebase_at=rebase_at)
    assert max(given) < rebase_at
    assert given[:12] == expected


def test_positions_stay_below_the_trained_length_by_default(model: Model) -> None:
    llama = model("llama")
    with _positions_given(llama) as given:
        _stream(llama, SinkCache(llama, budget=6), _ids(300), chunk=50)
    assert max(given) == 99  # of 128


@conventions
def test_a_stream_begun_four_million_tokens_on_equals_one_from_the_start(model: Model, positions: Any) -> None:
    llama, ids = model("llama", dtype=torch.float32), _ids(40)
    far, near = (SinkCache(llama, StreamingLLM(2), budget=12, positions=positions) for _ in range(2))
    far.rebase(-FAR)
    got = _stream(llama, far, ids)
    torch.testing.assert_close(got, _stream(llama, near, ids), rtol=0, atol=1e-3)  # float32, weights of 0.3


@conventions
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_keys_come_back_from_four_million_tokens_away(
    model: Model, positions: Any, dtype: torch.dtype, tolerance: float
) -> None:
    llama, ids = model("llama", dtype=dtype), _ids(30)
    far, near = (SinkCache(llama, StreamingLLM(2), budget=12, positions=positions) for _ in range(2))
    _stream(llama, far, ids[:, :20], chunk=4)
    _stream(llama, near, ids[:, :20], chunk=4)
    far.rebase(20 - FAR)
    got, expected = (_stream(llama, each, ids[:, 20:]) for each in (far, near))
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)  # angles of float64 are off by 2e-10 there


@conventions
def test_rebasing_in_bfloat16_keeps_stored_keys_within_one_percent(model: Model, positions: Any) -> None:
    llama, ids = model("llama", dtype=torch.bfloat16), _ids(320)
    cache = SinkCache(llama, StreamingLLM(2), budget=12, positions=positions)
    _stream(llama, cache, ids, chunk=4, rebase_at=12)
    layer = cache.layers[0]
    assert isinstance(layer, SinkLayer)
    kept = cache.kept(0)[0, 0]
    fresh = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=ids[:, kept], position_ids=torch.zeros_like(kept)[None], **{cache_argument(llama): fresh})
    first: Any = fresh.layers[0]
    unturned = first.keys  # at position 0: every key as it is before its rotation
    rotation = layer.rotation
    assert rotation is not None
    order = layer.ledger.books[0].positions[: layer.ledger.books[0].held].argsort()
    arrived_at = kept - layer.ledger.books[0]._frame[order]
    expected = unturned.double()
    rotation.put(expected, rotation.pick(expected) * rotation.phase(arrived_at, expected))
    stored = _stored(cache, 0).double()
    error = (stored - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 0.01


@conventions
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_goes_on_after_a_rebased_stream(model: Model, family: str, positions: Any) -> None:
    tiny, ids = model(family), _ids(51)
    often, never = (SinkCache(tiny, StreamingLLM(2), budget=12, positions=positions) for _ in range(2))
    _stream(tiny, often, ids[:, :50], chunk=2, rebase_at=16)
    _stream(tiny, never, ids[:, :50], chunk=2, rebase_at=NEVER)
    assert _generate(tiny, often, ids) == _generate(tiny, never, ids)


@conventions
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_plain_pass_goes_on_after_a_rebased_stream(model: Model, family: str, positions: Any) -> None:
    tiny, ids = model(family), _ids(56)
    often, never = (SinkCache(tiny, StreamingLLM(2), budget=12, positions=positions) for _ in range(2))
    _stream(tiny, often, ids[:, :50], chunk=2, rebase_at=16)
    _stream(tiny, never, ids[:, :50], chunk=2, rebase_at=NEVER)
    for piece in ids[:, 50:].split(2, dim=1):
        got, expected = _forward(tiny, often, piece), _forward(tiny, never, piece)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)  # float64, keys turned some times


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_stream_begun_in_inference_mode_goes_on_outside_of_it(model: Model, family: str) -> None:
    tiny, ids = model(family), _ids(40)
    cache, other = (SinkCache(tiny, StreamingLLM(2), budget=8) for _ in range(2))
    with torch.inference_mode():
        _stream(tiny, cache, ids[:, :20], chunk=2, rebase_at=10)
    got = _stream(tiny, cache, ids[:, 20:].clone(), chunk=2, rebase_at=10)
    expected = _stream(tiny, other, ids, chunk=2, rebase_at=10)[:, 20:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)  # float64


def test_stored_keys_are_those_of_a_stream_that_was_never_rebased(model: Model) -> None:
    llama, ids = model("llama"), _ids(50)
    often, never = (SinkCache(llama, StreamingLLM(2), budget=12) for _ in range(2))
    _stream(llama, often, ids, rebase_at=16)
    _stream(llama, never, ids, rebase_at=NEVER)
    often.rebase(0)
    rows = slice(2, None)  # the young are moved for good, the sinks on read
    torch.testing.assert_close(_stored(often, 1)[:, :, rows], _stored(never, 1)[:, :, rows], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_four_million_tokens_end_as_a_fresh_stream_of_what_is_left(model: Model) -> None:
    """One layer: its keys depend on their own token alone, so only the positions can drift."""
    tiny = model(
        "llama",
        dtype=torch.float32,
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
    )
    ids = [torch.tensor([token]) for token in _ids(1009)[0].tolist()]
    cache = SinkCache(tiny, StreamingLLM(4), budget=64)
    count = 0
    for _ in stream(tiny, cache, islice(cycle(ids), FAR), chunk=1024, rebase_at=8192):
        count += 1
    last = list(stream(tiny, cache, [7]))[-1]
    left = ids[:4] + [ids[position % len(ids)] for position in range(FAR - 59, FAR)] + [torch.tensor([7])]
    fresh = list(stream(tiny, SinkCache(tiny, StreamingLLM(4), budget=64), left))[-1]
    assert count == FAR
    torch.testing.assert_close(last, fresh, rtol=0, atol=1e-3)  # float32 angles up to 8192 are off by 5e-4


# memory


def _tensor_bytes() -> int:
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
    return sum(storages.values())


def test_two_thousand_tokens_leave_no_memory_behind(model: Model) -> None:
    tiny = model("llama", dtype=torch.float32, num_hidden_layers=1)
    cache = SinkCache(tiny, StreamingLLM(2), budget=12)
    logits = stream(tiny, cache, cycle(range(1, 50)), chunk=10, rebase_at=100)
    sizes = []
    for _ in range(3):
        for _ in range(700):
            next(logits)
        sizes.append((_tensor_bytes(), cache.nbytes))
    assert sizes[0] == sizes[1] == sizes[2]


# Ctrl-C


@contextmanager
def _interrupted(model: Any, times: int = 1) -> Iterator[list[int]]:
    """Sends SIGINT to this process, `times` times, when layer 0 of the next pass has run."""
    sent: list[int] = []

    def interrupt(*_: Any) -> None:
        while len(sent) < times:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    handle = model.model.layers[0].register_forward_hook(interrupt)  # type: ignore[union-attr]
    try:
        yield sent
    finally:
        handle.remove()


@contextmanager
def _handler(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # would end the whole test run
        pytest.fail("KeyboardInterrupt was raised")


Reader = Callable[[Any, SinkCache, Tensor], Any]
readers = pytest.mark.parametrize(
    "read",
    [lambda m, c, ids: _stream(m, c, ids, chunk=3), lambda m, c, ids: prefill(m, c, ids, chunk=3)],
    ids=["stream", "prefill"],
)


@readers
def test_an_interrupt_waits_for_the_end_of_the_step(model: Model, read: Reader) -> None:
    llama, ids = model("llama"), _ids(24)
    cache = SinkCache(llama, budget=8)
    prefill(llama, cache, ids[:, :12], chunk=3)
    with _interrupted(llama) as sent, pytest.raises(KeyboardInterrupt):
        read(llama, cache, ids[:, 12:])
    assert len(sent) == 1
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [15, 15]


@readers
def test_an_interrupted_cache_goes_on_as_if_it_had_not_been(model: Model, read: Reader) -> None:
    llama, ids = model("llama"), _ids(24)
    cache, other = SinkCache(llama, budget=8), SinkCache(llama, budget=8)
    with _interrupted(llama), pytest.raises(KeyboardInterrupt):
        read(llama, cache, ids)
    got = _stream(llama, cache, ids[:, cache.seen :], chunk=3)
    torch.testing.assert_close(got, _stream(llama, other, ids, chunk=3)[:, 3:])


def test_the_interrupt_handler_is_restored(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    before = signal.getsignal(signal.SIGINT)
    _stream(llama, cache, _ids(3))
    assert signal.getsignal(signal.SIGINT) is before


def test_the_interrupt_handler_is_restored_after_an_interrupt(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    before = signal.getsignal(signal.SIGINT)
    with _interrupted(llama), pytest.raises(KeyboardInterrupt):
        _stream(llama, cache, _ids(3))
    assert signal.getsignal(signal.SIGINT) is before


def test_the_interrupt_handler_is_restored_after_an_error(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(IndexError):
        _stream(llama, cache, torch.tensor([[1000]]))  # of 97
    assert signal.getsignal(signal.SIGINT) is before


def test_the_interrupt_handler_is_the_callers_between_steps(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    before = signal.getsignal(signal.SIGINT)
    opened = stream(llama, cache, [1, 2, 3])
    next(opened)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_reaches_the_callers_own_handler(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    told: list[int] = []
    with _handler(lambda number, frame: told.append(number)), _interrupted(llama), _no_interrupt():
        _stream(llama, cache, _ids(5))
    assert told == [signal.SIGINT]


def test_a_process_that_ignores_interrupts_is_not_interrupted(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    with _handler(signal.SIG_IGN), _interrupted(llama), _no_interrupt():
        _stream(llama, cache, _ids(5))
    assert cache.seen == 5


def test_a_second_interrupt_is_not_held_back(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    before = signal.getsignal(signal.SIGINT)
    with _interrupted(llama, times=2), pytest.raises(KeyboardInterrupt):
        _stream(llama, cache, _ids(5))
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [1, 0]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_cache_torn_by_a_second_interrupt_says_so(model: Model) -> None:
    llama, cache = model("llama"), SinkCache(model("llama"), budget=8)
    with _interrupted(llama, times=2), pytest.raises(KeyboardInterrupt):
        _stream(llama, cache, _ids(5))
    with pytest.raises(RuntimeError, match="interrupted"):
        _stream(llama, cache, _ids(5))


def test_a_worker_thread_can_stream(model: Model) -> None:
    llama, ids = model("llama"), _ids(9)
    got: list[Tensor] = []
    worker = threading.Thread(target=lambda: got.append(_stream(llama, SinkCache(llama, budget=6), ids)))
    worker.start()
    worker.join()
    torch.testing.assert_close(got[0], _stream(llama, SinkCache(llama, budget=6), ids))


def test_gradients_are_not_recorded(model: Model) -> None:
    llama = model("llama")
    assert not _stream(llama, SinkCache(llama, budget=6), _ids(3)).requires_grad


def test_window_streams_without_turning_a_key(model: Model) -> None:
    llama = model("llama")
    cache = SinkCache(llama, Window(), budget=6)
    _stream(llama, cache, _ids(20), chunk=3)
    layer = cache.layers[0]
    assert isinstance(layer, SinkLayer)
    assert layer.store is not None
    assert layer.store.arrived is None


def test_stream_reads_a_generator_of_rows(model: Model) -> None:
    llama, ids = model("llama"), _ids(7, batch=2)
    rows: Iterable[Tensor] = (ids[:, at] for at in range(7))
    got = torch.stack(list(stream(llama, SinkCache(llama, budget=5), rows)), dim=1)
    torch.testing.assert_close(got, _stream(llama, SinkCache(llama, budget=5), ids))
