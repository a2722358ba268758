"""A stream of any length is read in flat memory, at exact positions, and to the same bits if it is killed."""

import gc
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, build

from experiments import checkpoints, costs, reading
from experiments.checkpoints import Checkpoint
from experiments.interrupts import interrupted
from experiments.measure import measure
from experiments.options import bucket_for, options, parser
from experiments.pace import Pace
from experiments.reading import Reading
from experiments.runs import Setting
from experiments.spool import Spool
from experiments.subject import Subject
from sinkcache import SinkCache, predictions
from sinkcache.metrics import Scored, perplexity, recompute, reread, score
from sinkcache.policies import StreamingLLM

SETTINGS = {
    "window": Setting("window", "none", 16, 0, "cache", 8, "held"),
    "sinks": Setting("sinks", "none", 16, 2, "cache", 8, "held"),
    "one by one": Setting("sinks", "none", 16, 2, "cache", 1, "held"),
    "original": Setting("sinks", "prepend", 16, 2, "original", 7, "held"),
    "token": Setting("sinks", "none", 16, 2, "original", 8, "token"),
    "recompute": Setting("recompute", "none", 16, every=1),
    "sampled": Setting("recompute", "prepend", 16, every=3),
    "reread": Setting("reread", "none", 16, every=7),
    "reread behind BOS": Setting("reread", "prepend", 16, every=64),
}
TOKENS = 150


@pytest.fixture
def subject(model, tmp_path) -> Subject:
    return made(model("llama", dtype=torch.float32), tmp_path, TOKENS)


def made(network: Any, folder: Path, tokens: int, **more: Any) -> Subject:
    """A tiny model and random ids, in a spool."""
    spool, ids = Spool(folder), torch.randint(2, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(7))
    spool.add(ids.tolist())
    identity = {"bucket": 20, "tokens": tokens, "device": "cpu", **more}
    return Subject(network, None, ids[None, :1], 1, identity, {}, spool)  # type: ignore[arg-type] - no tokenizer


def of(subject: Subject) -> torch.Tensor:
    """All ids."""
    return subject.piece(0, subject.tokens)


def cache_for(subject: Subject, setting: Setting) -> SinkCache | None:
    if setting.policy is None:
        return None
    return SinkCache(subject.model, setting.policy, setting.budget or 1, setting.positions)  # type: ignore[arg-type]


def plainly(subject: Subject, setting: Setting) -> list[Scored]:
    """What the library's own functions make of the whole text."""
    ids, bos = of(subject), 1 if setting.bos == "prepend" else None
    if setting.policy is not None:
        cache = cache_for(subject, setting)
        assert cache is not None
        return list(score(subject.model, cache, ids, setting.chunk or 1, bos, setting.attend))  # type: ignore[arg-type]
    whole = ids if bos is None else torch.cat([ids.new_full((1, 1), bos), ids], dim=1)
    again = recompute if setting.method == "recompute" else reread
    scores = again(subject.model, whole, setting.budget or 1, setting.every or 1)
    return [Scored(each.start - (bos is not None), each.nll) for each in scores]


def same(one: list[Scored], other: list[Scored]) -> bool:
    return [each.start for each in one] == [each.start for each in other] and all(
        torch.equal(mine.nll, theirs.nll) for mine, theirs in zip(one, other, strict=True)
    )


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the machine's mood, or on where the run was stopped."""
    moods = {"date", "seconds", "cpu_seconds", "ms_per_token", "tokens_per_second", "resumed_at"}
    return {name: value for name, value in row.items() if name not in moods}


def quiet(_: Any) -> None:
    pass


@pytest.mark.parametrize("name", SETTINGS)
def test_a_short_text_is_read_as_the_library_reads_it(subject, name):
    setting = SETTINGS[name]
    read = [each for block in Reading(subject, setting, cache_for(subject, setting)).blocks() for each in block]
    assert same(read, plainly(subject, setting))


@pytest.mark.parametrize("stretch", [1, 30, 64])
@pytest.mark.parametrize("name", ["recompute", "sampled", "reread", "reread behind BOS"])
def test_windows_read_in_stretches_are_those_of_the_whole(subject, name, stretch, monkeypatch):
    monkeypatch.setattr(reading, "_STRETCH", stretch)
    setting = SETTINGS[name]
    read = [each for block in Reading(subject, setting, None).blocks() for each in block]
    assert same(read, plainly(subject, setting))


@pytest.mark.parametrize("name", ["sinks", "original", "recompute", "sampled", "reread"])
def test_ids_are_read_a_piece_at_a_time(subject, name, monkeypatch):
    monkeypatch.setattr(reading, "_STRETCH", 20)
    longest, real = [], Spool.read

    def noted(self, start, stop):
        longest.append(stop - start)
        return real(self, start, stop)

    monkeypatch.setattr(Spool, "read", noted)
    setting = SETTINGS[name]
    for _ in Reading(subject, setting, cache_for(subject, setting)).blocks():
        pass
    assert max(longest) <= 20 + 16 + 8 * (setting.every or 1) + 1


@pytest.mark.parametrize("every", [1, 30])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_stopped_anywhere_ends_with_the_same_bits(subject, tmp_path, monkeypatch, name, every):
    monkeypatch.setattr(reading, "_STRETCH", 48)
    setting, stops = SETTINGS[name], iter([3, 40, 41, 90, 120, 145])
    whole, nll = measure(subject, setting, "k", 0, quiet)
    stop = next(stops)

    def killed(told: Any) -> None:
        if told.upto >= stop:
            raise ZeroDivisionError

    resumed = 0
    while True:
        checkpoint = Checkpoint(tmp_path / "checkpoints", "k")
        try:
            row, again = measure(subject, setting, "k", 0, killed, checkpoint, every)
            break
        except ZeroDivisionError:
            stop, resumed = next(stops, TOKENS + 1), resumed + 1
        finally:
            checkpoint.close()
    assert resumed == 6
    assert torch.equal(nll.view(torch.int64), again.view(torch.int64))
    assert figures(row) == figures(whole)
    assert len(row["resumed_at"]) >= 2


@pytest.mark.parametrize("fails", [0, 1, 3, 6, 7, 8, 9, 12, 14, 15, 16])  # of two checkpoints
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(subject, tmp_path, monkeypatch, fails):
    """Each call that changes what is on disk fails in its turn, and all after it, as where a disk is full."""
    setting = SETTINGS["sinks"]
    _, nll = measure(subject, setting, "k", 0, quiet)
    left = iter(range(fails))

    def failing(real):
        def call(*arguments, **named):
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            return real(*arguments, **named)

        return call

    checkpoint = Checkpoint(tmp_path, "k")
    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(os, name, failing(getattr(os, name)))
        patch.setattr(Path, "unlink", failing(Path.unlink))
        with pytest.raises(OSError, match="No space"):
            measure(subject, setting, "k", 0, quiet, checkpoint, 40)
    checkpoint.close()
    stopped(subject, tmp_path, at=120)  # which writes over what the failure left
    checkpoint = Checkpoint(tmp_path, "k")
    _, again = measure(subject, setting, "k", 0, quiet, checkpoint, 1000)
    checkpoint.close()
    assert torch.equal(nll[1:], again[1:])


def test_ctrl_c_ends_the_block_and_leaves_a_checkpoint(subject, tmp_path):
    setting, checkpoint = SETTINGS["sinks"], Checkpoint(tmp_path, "k")
    steps = []

    def interrupt(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 10:
            signal.raise_signal(signal.SIGINT)  # in the middle of a pass

    hook = subject.model.model.layers[0].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            measure(subject, setting, "k", 0, quiet, checkpoint, 100_000)
    finally:
        hook.remove()
    checkpoint.close()
    assert checkpoints.stands_at(tmp_path, "k") >= 8 * 6  # three passes found out how the model rotates
    _, nll = measure(subject, setting, "k", 0, quiet)
    checkpoint = Checkpoint(tmp_path, "k")
    row, again = measure(subject, setting, "k", 0, quiet, checkpoint, 100_000)
    checkpoint.close()
    assert row["resumed_at"] == [checkpoints.stands_at(tmp_path, "k")]
    assert torch.equal(nll[1:], again[1:])


def test_a_second_ctrl_c_does_not_wait():
    with interrupted() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def stopped(subject: Subject, folder: Path, key: str = "k", at: int = 60) -> None:
    """A run of `sinks` killed at a token, with a checkpoint."""

    def killed(told: Any) -> None:
        if told.saved >= at:
            raise ZeroDivisionError

    checkpoint = Checkpoint(folder, key)
    with pytest.raises(ZeroDivisionError):
        measure(subject, SETTINGS["sinks"], key, 0, killed, checkpoint, 40)
    checkpoint.close()


@pytest.mark.parametrize("name", ["state.json", "scores.f64", "cache", "before"])
def test_a_damaged_checkpoint_is_refused(subject, tmp_path, name):
    stopped(subject, tmp_path)
    (path,) = (tmp_path / "k").glob(f"{name}*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content) if name != "state.json" else bytes(content[: len(content) // 2]))
    checkpoint = Checkpoint(tmp_path, "k")
    with pytest.raises(ValueError, match=r"checkpoint .*k cannot be used: .*\. Give --fresh"):
        measure(subject, SETTINGS["sinks"], "k", 0, quiet, checkpoint, 40)
    checkpoint.close()


def test_a_checkpoint_of_another_run_is_refused(subject, tmp_path):
    stopped(subject, tmp_path)
    (tmp_path / "k").rename(tmp_path / "other")
    checkpoint = Checkpoint(tmp_path, "other")
    with pytest.raises(ValueError, match="it is of the run k"):
        checkpoint.load(subject.model)
    checkpoint.close()


def test_two_processes_are_not_at_one_run(tmp_path):
    pytest.importorskip("fcntl", reason="this system has no file locks")
    checkpoint = Checkpoint(tmp_path, "k")
    with pytest.raises(ValueError, match="another process is at the run k"):
        Checkpoint(tmp_path, "k")
    checkpoint.close()
    assert not (tmp_path / "k").exists()
    Checkpoint(tmp_path, "k").close()


def test_a_checkpoint_holds_one_cache_and_the_scores_once(subject, tmp_path):
    stopped(subject, tmp_path, at=110)
    files = sorted(path.name for path in (tmp_path / "k").iterdir())
    at = json.loads((tmp_path / "k" / "state.json").read_bytes())["read"]
    named = [f"before-{at}.safetensors", f"cache-{at}.safetensors"]
    assert files == [*named, "lock", "scores.f64", "state.json"]
    assert (tmp_path / "k" / "scores.f64").stat().st_size == 8 * checkpoints.stands_at(tmp_path, "k")


def long_run(precise: bool, tokens: int, folder: Path, positions: str, at: int) -> float:
    """The perplexity of a long text, its first token at position `at`; `precise` is the oracle in float64."""
    network = build("llama", torch.float64) if precise else build("llama", torch.float32)
    subject = made(network, folder, tokens)
    cache = SinkCache(network, StreamingLLM(num_sinks=4), 32, positions)  # type: ignore[arg-type]
    if precise:
        return perplexity(network, cache, of(subject), 64).value
    setting = Setting("sinks", "none", 32, 4, positions, 64, "held")
    cache.rebase(-at)
    read = Reading(subject, setting, cache)
    nll = torch.cat([each.nll for block in read.blocks() for each in block])
    return float(nll.mean().exp())


@pytest.mark.parametrize("at", [0, 4_000_000])
def test_positions_are_exact_however_long_the_stream(tmp_path, at):
    oracle = long_run(True, 8_000, tmp_path, "cache", 0)
    assert abs(long_run(False, 8_000, tmp_path, "cache", at) / oracle - 1) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_forty_thousand_tokens_are_as_exact_as_forty(tmp_path, positions):
    oracle = long_run(True, 40_000, tmp_path, positions, 0)
    assert abs(long_run(False, 40_000, tmp_path, positions, 0) / oracle - 1) < 1e-4


def test_positions_stay_below_the_limit(subject, monkeypatch):
    monkeypatch.setattr(predictions, "REBASE_AT", 50)
    seen = []
    real = subject.model.model.rotary_emb.forward

    def noted(x, position_ids):
        seen.append(int(position_ids.max()))
        return real(x, position_ids)

    subject.model.model.rotary_emb.forward = noted
    setting = SETTINGS["sinks"]
    try:
        read = [each for block in Reading(subject, setting, cache_for(subject, setting)).blocks() for each in block]
    finally:
        del subject.model.model.rotary_emb.forward
    assert max(seen) < 50
    for mine, plain in zip(read, plainly(subject, setting), strict=True):
        torch.testing.assert_close(mine.nll, plain.nll, atol=1e-4, rtol=1e-4)  # other float32 angles


def test_a_long_stream_of_unknown_rotation_is_refused_before_it_is_read(subject, monkeypatch):
    monkeypatch.setattr(predictions, "REBASE_AT", 50)
    setting = SETTINGS["original"]
    cache = cache_for(subject, setting)
    assert cache is not None
    cache.rotations = ["its rotation is a secret"] * len(cache.rotations)
    with pytest.raises(ValueError, match="secret"):
        Reading(subject, setting, cache)


def test_nothing_grows_but_the_scores(model, tmp_path):
    subject = made(model("llama", dtype=torch.float32), tmp_path, 8_000)
    subject.identity["bucket"] = 400
    alive, held, traced = [], set(), []

    def look(told: Any) -> None:
        if told.upto % 2000 == 0:
            gc.collect()
            alive.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
            traced.append(tracemalloc.get_traced_memory()[0])
        if told.upto > 100:
            held.add(told.held)

    tracemalloc.start()
    try:
        row, nll = measure(subject, replace(SETTINGS["sinks"], chunk=100), "k", 0, look)
    finally:
        tracemalloc.stop()
    assert len(alive) == 4
    assert max(alive) == alive[0]  # fewer, where those of an earlier test go meanwhile
    assert len(held) == 1
    assert traced[-1] - traced[1] < 100_000  # Python's own objects; 4,000 tokens as objects would be a million
    assert nll.nbytes == 8 * 8_000
    assert len(row["curve"]) == 20


@pytest.mark.parametrize(("tokens", "bucket"), [(2, 256), (65_536, 256), (65_537, 512), (4_000_000, 16_384)])
def test_a_curve_has_256_points_at_most(tokens, bucket):
    assert bucket_for(tokens) == bucket
    assert -(-tokens // bucket) <= 256


def test_numbers_take_underscores_and_texts_are_several():
    given = options(parser(), ["--tokens", "1_000_000", "--budget", "1_024", "--text", "a", "b"]).given
    assert (given.tokens, given.budget, given.text, given.bucket) == (1_000_000, [1024], ["a", "b"], 4096)


@pytest.mark.parametrize("wrong", ["1__0", "_1", "1_", "-5", "1e6", "", "1.5", "\u0661"])
def test_what_is_no_whole_number_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        options(parser(), ["--tokens", wrong])
    assert "whole number" in capsys.readouterr().err


def test_a_pace_keeps_few_values_and_their_median():
    pace = Pace()
    for value in range(100_000):
        pace.add(float(value))
    assert len(pace.values) < 2048
    assert pace.values == [float(each) for each in range(0, 100_000, pace.stride)]
    assert abs(pace.median - 50_000) < 200


def test_a_full_cache_that_cannot_fit_is_refused(subject, monkeypatch):
    monkeypatch.setattr(costs, "_LONG", 100)
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, channels, bytes
    full = [Setting("full", "none", chunk=8)]
    monkeypatch.setattr(costs, "_memory", lambda _: per_token * TOKENS)
    assert [each.split(":")[0] for each in costs.costs(subject, full)] == ["full"]
    monkeypatch.setattr(costs, "_memory", lambda _: per_token * TOKENS - 1)
    with pytest.raises(ValueError, match="the full cache of 150 tokens takes"):
        list(costs.costs(subject, full))


def test_dear_methods_say_what_they_cost(subject, monkeypatch):
    monkeypatch.setattr(costs, "_LONG", 100)
    said = list(costs.costs(subject, [SETTINGS[name] for name in ("window", "sampled", "reread", "original")]))
    assert said[0].endswith("the model reads 5.3 tokens for each of the text")
    assert said[1].endswith("the model reads 3.3 tokens for each of the text")
    assert said[2].startswith("original positions: beyond the trained 128 tokens")
    assert len(said) == 3


@pytest.mark.slow
def test_a_process_killed_at_any_moment_ends_with_the_same_bits(tmp_path):
    """kill -9 at every write of a checkpoint, and at moments drawn by chance; see `killed_streams.py`."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    script = Path(__file__).with_name("killed_streams.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all equal" in done.stdout
