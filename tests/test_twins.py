import json
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from conftest import VOCABULARY, build
from rich.console import Console
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from experiments import cache_bytes, concurrency, crowd, step_time, twins
from experiments.crowd import between, by_length, counts, knee, percentile, rows_of, waits
from sinkcache.memory import held_bytes
from sinkcache.planner.capacity import Class, mixed, users
from sinkcache.planner.in_sinkcache import Bounded, bounded
from sinkcache.planner.in_transformers import Dynamic
from sinkcache.planner.sources import model_of

pytest.importorskip("matplotlib")

COMMANDS = (cache_bytes, step_time, concurrency)
SMALL: dict[Any, list[str]] = {
    cache_bytes: ["--tokens", "44", "--piece", "16", "--budget", "20"],
    step_time: ["--lengths", "8,40", "--repeats", "2", "--chunk", "16", "--budget", "20"],
    concurrency: ["--prompt", "24", "--steps", "4", "--chunk", "8", "--budget", "12", "--memory", "100KiB"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, a folder each by family."""
    folder = tmp_path_factory.mktemp("place")
    plain = tokenizers.Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    for family in ("llama", "gemma3"):
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0").save_pretrained(folder / family)
        network: Any = build(family, torch.float32)
        network.save_pretrained(folder / family)
    return folder


def run(command: Any, place: Path, out: Path, *more: str, family: str = "llama") -> int:
    return command.main(["--model", str(place / family), "--out", str(out), *SMALL[command], *more])


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def unmeasured(*arguments: Any) -> None:
    raise AssertionError("measured again")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bytes_are_the_formulas_at_every_length(place: Path, tmp_path: Path, family: str) -> None:
    policies = "Window,StreamingLLM(num_sinks=3),H2O,TOVA,KeyDiff(),SnapKV(observation_window=5),RKV,ExpectedAttention"
    assert run(cache_bytes, place, tmp_path, "--policy", policies, "--budget", "20", family=family) == 0
    found = rows(tmp_path)
    assert len(found) == 3 * 9
    assert {row["tokens"] for row in found} == {16, 32, 44}
    assert {row["difference"] for row in found} == {0}
    network = model_of(build(family, torch.float32))
    assert [row["measured"] for row in found[:3]] == [Dynamic().held(network, tokens) for tokens in (16, 32, 44)]
    assert (tmp_path / "cache_bytes.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_counted_is_all_that_a_cache_holds(place: Path, tmp_path: Path) -> None:
    loaded = twins.bench(made(place, tmp_path, cache_bytes), Console())
    for method in (twins.Method("full"), *twins.methods(made(place, tmp_path, cache_bytes))):
        network = loaded.twin(method)
        cache = method.cache(network)
        twins.read(network, cache, loaded.tokens(30))
        assert cache_bytes.counted(cache) == held_bytes(cache) > 0


def made(place: Path, out: Path, command: Any, *more: str) -> Namespace:
    return command._parser().parse_args(["--model", str(place / "llama"), "--out", str(out), *SMALL[command], *more])


def test_a_wrong_formula_is_found(place: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    held = Bounded.held
    monkeypatch.setattr(Bounded, "held", lambda *given: held(*given) + 1)
    assert run(cache_bytes, place, tmp_path / "bytes", "--policy", "StreamingLLM") == 1
    assert [row["difference"] for row in rows(tmp_path / "bytes")] == [0, 0, 0, -1, -1, -1]
    assert "3 of 6 differ from the formula" in capsys.readouterr().out
    assert run(concurrency, place, tmp_path / "users", "--policy", "StreamingLLM") == 1
    assert "bytes are not the planner's" in capsys.readouterr().out


def test_a_formula_that_promises_too_much_is_found(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    held = Dynamic.held
    monkeypatch.setattr(Dynamic, "held", lambda *given: held(*given) // 2)
    assert run(concurrency, place, tmp_path, "--policy", "none") == 1
    end = rows(tmp_path)[-1]
    assert end["users"] < end["planned_users"]


@pytest.mark.parametrize("command", COMMANDS)
def test_finished_cells_are_not_measured_again(command: Any, place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert run(command, place, tmp_path) == 0
    before = rows(tmp_path)
    for module in (*COMMANDS[:2], twins, crowd):
        for name in ("read", "seconds"):
            monkeypatch.setattr(module, name, unmeasured, raising=False)
    assert run(command, place, tmp_path) == 0
    assert rows(tmp_path) == before
    with pytest.raises(AssertionError, match="measured again"):
        run(command, place, tmp_path, "--fresh")


@pytest.mark.parametrize("command", COMMANDS)
def test_stopped_it_goes_on_where_it_was(command: Any, place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file, filed = twins.Bench.file, []

    def stop(bench: twins.Bench, wanted: dict, found: dict) -> dict:
        if len(filed) == 1:
            raise KeyboardInterrupt
        filed.append(wanted)
        return file(bench, wanted, found)

    monkeypatch.setattr(twins.Bench, "file", stop)
    assert run(command, place, tmp_path) == 130
    again = []
    monkeypatch.setattr(twins.Bench, "file", lambda *given: (again.append(given[1]), file(*given))[1])
    assert run(command, place, tmp_path) == 0
    assert again
    assert filed[0] not in again


def test_each_step_has_its_times_and_an_uncached_one_beside_them(place: Path, tmp_path: Path) -> None:
    assert run(step_time, place, tmp_path, "--policy", "StreamingLLM") == 0
    found = rows(tmp_path)
    assert [row["tokens"] for row in found] == [8, 40]
    for row in found:
        assert set(row["seconds"]) == {"without a cache", "full", "StreamingLLM, 20"}
        assert all(len(each) == 2 and min(each) > 0 for each in row["seconds"].values())
        ratio = row["medians"]["without a cache"] / row["medians"]["full"]
        assert row["uncached_over_cached"] == pytest.approx(ratio)
    assert (tmp_path / "step_time.png").exists()


def test_a_policy_that_reads_attention_leaves_the_full_caches_model_as_it_was(place: Path, tmp_path: Path) -> None:
    given = made(place, tmp_path, step_time, "--policy", "H2O")
    loaded, (full, h2o) = twins.bench(given, Console()), twins.methods(given)
    h2o.cache(loaded.twin(h2o))
    attention = [each.config._attn_implementation for each in (loaded.model, loaded.twin(full), loaded.twin(h2o))]
    assert attention[0] == attention[1] != attention[2]
    weights: list[Any] = [next(each.parameters()) for each in (loaded.model, loaded.twin(h2o))]
    assert weights[0] is weights[1]


@pytest.mark.parametrize("policy", ["StreamingLLM", "H2O"])
def test_users_in_a_memory_are_those_of_the_planners_inverse(place: Path, tmp_path: Path, policy: str) -> None:
    assert run(concurrency, place, tmp_path, "--policy", policy) == 0
    found = rows(tmp_path)
    ends = {row["method"]: row for row in found if "why" in row}
    network = model_of(build("llama", torch.float32))
    full = users(Dynamic(8), network, 100 * 1024, 28)
    least = users(bounded(twins.POLICIES[policy](12), 12, 8), network, 100 * 1024, 28)
    assert (ends["full"]["users"], ends[f"{policy}, 12"]["users"]) == (full, least)
    assert 0 < full < least
    measured = [row for row in found if "why" not in row]
    assert all(row["bytes"] == row["planned"] <= 100 * 1024 for row in measured)
    assert [row["users"] for row in measured if row["method"] == "full"] == counts(full)
    assert all(end["why"] == "memory" and end["next_bytes"] > 100 * 1024 for end in ends.values())


def test_users_of_a_mix_are_those_of_the_planners_inverse(place: Path, tmp_path: Path) -> None:
    mix = ("--mix", "10:0.75,40:0.25", "--memory", "160KiB")
    assert run(concurrency, place, tmp_path, *mix, "--policy", "StreamingLLM") == 0
    found = rows(tmp_path)
    classes = [Class(10, 4, 0.75), Class(40, 4, 0.25)]
    network = model_of(build("llama", torch.float32))
    wanted = sum(mixed(Dynamic(8), network, 160 * 1024, classes).values())
    assert next(row["users"] for row in found if "why" in row) == wanted > 2
    for row in (each for each in found if "why" not in each):
        assert row["bytes"] == row["planned"]
        assert row["tokens"] == sum(length * count for length, count in by_length(classes, row["users"]).items())
        assert 0 < row["p50"] <= row["p90"] <= row["p99"] <= row["compute"]
        assert len(row["cpu"]) == len(row["steps"]) == 3
        assert min(row["cpu"]) > 0


def test_no_more_memory_ends_a_method_and_not_the_command(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def small(cache: Any, count: int) -> Any:
        if count > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows_of(cache, count)

    monkeypatch.setattr(crowd, "rows_of", small)
    assert run(concurrency, place, tmp_path, "--policy", "StreamingLLM", "--memory", "1MiB") == 0
    ends = [row for row in rows(tmp_path) if "why" in row]
    assert [(end["users"], end["why"], end["beyond"]) for end in ends] == [(5, "out of memory", 6)] * 2


def test_other_errors_of_a_step_are_not_taken_for_want_of_memory(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(crowd, "rows_of", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run(concurrency, place, tmp_path)


def test_a_limit_of_time_ends_it(place: Path, tmp_path: Path) -> None:
    assert run(concurrency, place, tmp_path, "--policy", "none", "--step-limit", "1e-9") == 0
    (end,) = rows(tmp_path)
    assert (end["users"], end["why"], end["beyond"]) == (0, "step limit", 1)


def test_a_memory_that_holds_nobody_is_told(place: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(concurrency, place, tmp_path, "--memory", "1KiB", "--policy", "none") == 0
    (end,) = rows(tmp_path)
    assert (end["users"], end["planned_users"], end["beyond"]) == (0, 0, 1)


def test_who_comes_later_waits_for_the_prompts_before() -> None:
    short, long = Class(1, 1, 0.75), Class(9, 1, 0.25)
    assert waits({Class(1, 1, 1): 1.0}, 4) == [0, 1, 2, 3]
    waited = waits({short: 1.0, long: 10.0}, 4)
    assert waited[0] == 0
    assert waited == sorted(waited)
    assert sorted(after - before for before, after in pairwise(waited)) == [1, 1, 10]


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99)] == [50, 90, 99]
    assert percentile([3.0], 0.99) == 3.0


def test_the_knee_is_where_a_step_takes_more_than_twice_its_time() -> None:
    assert knee([(1, 0.1), (2, 0.1), (4, 0.2)]) is None
    assert knee([(1, 0.1), (2, 0.15), (4, 0.21), (8, 0.15)]) == 2
    assert knee([]) is None


def test_users_are_doubled_up_to_the_most_and_halved_back() -> None:
    assert between(0, 1) == between(16, 18) == []
    assert between(16, 32) == [24]
    assert counts(0) == []
    assert counts(8) == [1, 2, 4, 8]
    assert counts(11) == [1, 2, 4, 8, 11]


BAD = [
    (cache_bytes, ["--tokens", "0"], "must be a whole number, 1 or more"),
    (cache_bytes, ["--policy", "Streaming"], "--policy Streaming at --budget 20: no policy is named Streaming"),
    (cache_bytes, ["--policy", "H2O(recent=64)"], "--policy H2O(recent=64) at --budget 20: num_sinks + recent"),
    (cache_bytes, ["--policy", "Random", "--budget", "40"], "Random, 40 (Protect(policy=Random("),
    (cache_bytes, ["--device", "nowhere"], "'nowhere' cannot be used here"),
    (cache_bytes, ["--model", "./nothing"], "model folder './nothing' does not exist"),
    (step_time, ["--lengths", "1,5"], "must be a whole number, 2 or more"),
    (concurrency, ["--mix", "256"], "is written as 256:0.8,1024:0.2"),
    (concurrency, ["--mix", "256:0.5,10:0.4"], "the shares must sum to 1, got 0.9"),
    (concurrency, ["--mix", "256:2"], "a share must be in (0, 1]"),
    (concurrency, ["--mix", "256:0.5,256:0.5"], "a length is there twice"),
    (concurrency, ["--memory", "much"], "a size is written as 24GiB"),
    (concurrency, ["--memory", "0"], "must be 1 byte or more"),
    (concurrency, ["--step-limit", "-1"], "must be seconds, more than 0"),
]


@pytest.mark.parametrize(
    ("command", "more", "said"), BAD, ids=lambda each: " ".join(each) if isinstance(each, list) else None
)
def test_what_cannot_be_run_is_told_in_one_line(
    command: Any, more: list[str], said: str, place: Path, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, place, tmp_path, *more)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
