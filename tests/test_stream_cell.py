import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import score_oracle as oracle
import tokenizers
import torch
from conftest import VOCABULARY, build
from masked_pass import clairvoyant, masked_nll
from tokenizers import models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from experiments import stream_cell
from experiments.compare_policies import cells_of, parser
from experiments.documents import stretches
from experiments.entrants import CALIBRATED
from experiments.grid.cell import Cell
from experiments.grid.networks import network
from experiments.measure import measure as measure_run
from experiments.runs import Setting
from experiments.stream_cell import divergence, measure
from experiments.subject import subject
from sinkcache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.models import EMBEDDED, load
from sinkcache.plugins import named
from sinkcache.policies import Clairvoyant
from sinkcache.recording import recall, record
from sinkcache.texts import embedded, from_file

TOKENS, BUDGET, CHUNK = 60, 16, 6
POLICIES = {
    "StreamingLLM(num_sinks=4)": oracle.recency(4),
    "H2O(recent=budget//2)": oracle.h2o(BUDGET // 2),
    "SnapKV(observation_window=4, kernel=3)": oracle.snapkv(4, 3),
    "TOVA()": oracle.tova(),
    "ExpectedAttention(horizon=16, recent=4)": oracle.expected_attention(16, 4, 4),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of three layers, its tokenizer, and a text of 80 tokens (`one.txt`)."""
    folder = tmp_path_factory.mktemp("place")
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"w{index}": index + 2 for index in range(VOCABULARY - 2)}}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    grown: Any = build("llama", torch.float32)
    grown.save_pretrained(folder)
    (folder / "one.txt").write_text("".join(f"w{index * index * 7 % 89} " for index in range(80)))
    return folder


def options(place: Path, *more: str) -> argparse.Namespace:
    read = ["--model", str(place), "--threads", "1", "--tokens", str(TOKENS), "--text", str(place / "one.txt")]
    how = ["--budget", str(BUDGET), "--chunk", str(CHUNK), "--recompute-every", "5", "--reread-every", "7"]
    return parser().parse_args([*read, *how, "--horizon", "12", "--policy", "TOVA()", *more])


def cells(place: Path, *more: str) -> dict[str, Cell]:
    """By name, the cells of a grid."""
    given = options(place, *more)
    one = network(given.model[0], given)
    texts = [from_file(each) for each in given.text]
    return {cell.asked["name"]: cell for cell in cells_of(one, stretches(texts, given.documents), given)}


def ids_of(cell: Cell) -> torch.Tensor:
    return torch.from_numpy(cell.payload)[None]


@pytest.mark.parametrize("written", POLICIES)
def test_a_policy_predicts_what_one_pass_under_its_mask_does(place: Path, written: str) -> None:
    cell = cells(place, "--policy", written)[written]
    llama, _ = load(str(place))
    layers = llama.config.num_hidden_layers
    theirs = masked_nll(llama, ids_of(cell), [BUDGET] * layers, CHUNK, lambda layer: POLICIES[written])
    found = measure(cell)
    np.testing.assert_allclose(found.scores["nll"][1:], theirs.numpy(), atol=1e-4)
    assert found.figures["perplexity"] == pytest.approx(math.exp(theirs.mean()), rel=1e-4)
    assert found.figures["held"] == BUDGET * layers


@pytest.mark.parametrize(
    ("name", "scorer"),
    [("window", lambda *_: lambda layer: oracle.recency()), ("Clairvoyant(12)", clairvoyant)],
    ids=["window", "Clairvoyant"],
)
def test_a_baseline_predicts_what_one_pass_under_its_mask_does(place: Path, name: str, scorer: Any) -> None:
    cell = cells(place)[name]
    llama, _ = load(str(place))
    budgets = [BUDGET] * llama.config.num_hidden_layers
    theirs = masked_nll(llama, ids_of(cell), budgets, CHUNK, scorer(llama, ids_of(cell), 12))
    np.testing.assert_allclose(measure(cell).scores["nll"][1:], theirs.numpy(), atol=1e-4)


def test_budgets_by_layer_predict_what_one_pass_under_their_masks_does(place: Path, tmp_path: Path) -> None:
    (lists := tmp_path / "budgets.json").write_text(str([32, 16] + [24] * 10)[:8] + "]")
    llama, _ = load(str(place))
    layers = llama.config.num_hidden_layers
    lists.write_text(str([40, 20, 30, 20][:layers]))
    more = ["--budget", "24", "--layer-budgets", str(lists), "--policy", CALIBRATED]
    cell = cells(place, *more)[CALIBRATED]
    assert sum(cell.asked["budgets"]) == 24 * layers
    assert len(set(cell.asked["budgets"])) > 1
    scorer = oracle.h2o(16, 4, 2 ** (-1 / 256), mean=True)
    theirs = masked_nll(llama, ids_of(cell), cell.asked["budgets"], CHUNK, lambda layer: scorer)
    found = measure(cell)
    np.testing.assert_allclose(found.scores["nll"][1:], theirs.numpy(), atol=1e-4)
    assert found.figures["held"] == 24 * layers


@pytest.mark.parametrize("bos", ["none", "prepend"])
@pytest.mark.parametrize("positions", ["original", "cache"])
def test_figures_are_those_of_stream_perplexity_to_the_bit(place: Path, bos: str, positions: str) -> None:
    network_, tokenizer = load(str(place))
    read = subject((network_, tokenizer), from_file(place / "one.txt"), TOKENS, str(place), None, 128)
    found = cells(place, "--bos", bos, "--positions", positions, "--policy", "StreamingLLM(num_sinks=4)")
    settings = {
        "full": Setting("full", bos, chunk=CHUNK),
        "window": Setting("window", bos, BUDGET, 0, positions, CHUNK, "held"),
        "StreamingLLM(num_sinks=4)": Setting("sinks", bos, BUDGET, 4, positions, CHUNK, "held"),
        "recompute 1/5": Setting("recompute", bos, BUDGET, every=5),
        "reread 7": Setting("reread", bos, BUDGET, every=7),
    }
    assert set(settings) < set(found)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, setting in settings.items():
            row, nll = measure_run(read, setting, "", 0, lambda tokens: None)
            mine = measure(found[name])
            np.testing.assert_array_equal(mine.scores["nll"], nll.numpy())
            for figure in ("perplexity", "perplexity_after", "scored"):
                assert mine.figures[figure] == row[figure], (name, figure)
            if setting.policy is not None or name == "full":
                assert mine.figures["bytes"] == row["bytes"]
                assert mine.figures["bytes_peak"] == row["bytes"] + row["bytes_transient"]
    finally:
        torch.set_num_threads(threads)


def test_divergence_and_agreement_are_with_the_full_cache_on_the_same_tokens(place: Path) -> None:
    llama, _ = load(str(place))
    for name, cell in cells(place, "--policy", "TOVA()").items():
        found, ids = measure(cell), ids_of(cell)
        nll, kl, agree = (found.scores[each] for each in ("nll", "kl", "agree"))
        with torch.no_grad():
            whole = llama(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        scored = ~np.isnan(nll)
        for values in (kl, agree):
            np.testing.assert_array_equal(np.isnan(values), ~scored)
        if name == "full":
            np.testing.assert_allclose(nll[1:], -whole.gather(-1, ids[0, 1:, None])[:, 0].numpy(), atol=1e-5)
            assert (found.figures["kl"], found.figures["top1"]) == (0, 1)
            continue
        before = np.arange(TOKENS)[scored] <= (CHUNK if name.startswith("re") else BUDGET)
        if not name.startswith("reread"):
            assert np.abs(kl[scored][before]).max() < 1e-9  # nothing was evicted yet
            assert agree[scored][before].min() == 1
        after = np.isnan(kl) | (np.arange(TOKENS) < BUDGET + 1)
        assert found.figures["after"] == (~after).sum()
        assert found.figures["kl"] == pytest.approx(kl[~after].mean())
        assert found.figures["top1"] == pytest.approx(agree[~after].mean())
        assert kl[~after].mean() > 1e-4


def test_clairvoyant_knows_what_comes_after_a_bos(place: Path) -> None:
    cell = cells(place, "--bos", "prepend")["Clairvoyant(12)"]
    llama, _ = load(str(place))
    ids = torch.cat([torch.tensor([[cell.asked["bos"]]]), ids_of(cell)], dim=1)
    budgets = [BUDGET] * llama.config.num_hidden_layers
    theirs = masked_nll(llama, ids, budgets, CHUNK, clairvoyant(llama, ids, 12))
    found = measure(cell)
    np.testing.assert_allclose(found.scores["nll"], theirs.numpy(), atol=1e-4)
    own, best = recall(llama, ids, [Clairvoyant(record(llama, ids, CHUNK), 12)], BUDGET, CHUNK)
    assert (found.figures["recall"], found.figures["recall_best"]) == (pytest.approx(own), pytest.approx(best))


def test_predictions_that_are_no_numbers_fail_the_cell(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama: Any = load(str(place))[0]
    with torch.no_grad():
        llama.lm_head.weight[5] = math.nan
    monkeypatch.setattr(stream_cell, "loaded", lambda asked: llama)
    with pytest.raises(ValueError, match="predicted of token 1 is no number"):
        measure(cells(place)["full"])


def test_what_can_never_come_diverges_from_nothing() -> None:
    one, other = torch.randn(3, 11), torch.randn(3, 11)
    one[:, 4] = other[:, 4] = -math.inf
    without = [index for index in range(11) if index != 4]
    np.testing.assert_allclose(divergence(one, other), divergence(one[:, without], other[:, without]), rtol=1e-9)


def test_a_model_that_changed_or_other_versions_are_not_measured(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, folder := tmp_path / "model")
    cell = cells(folder)["full"]
    with pytest.raises(ValueError, match="the cell asks for versions"):
        measure(Cell(cell.function, {**cell.asked, "versions": {}}, cell.payload))
    grown: Any = build("llama", torch.float32, seed=1)
    grown.save_pretrained(folder)
    with pytest.raises(ValueError, match="they changed, or differ here"):
        measure(cell)
    again = measure(cells(folder)["full"])
    shutil.copytree(place, folder, dirs_exist_ok=True)
    assert measure(cell).figures["perplexity"] != again.figures["perplexity"]


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    one, other = torch.randn(37, 11), torch.randn(37, 11)
    p, q = one.double().softmax(-1), other.double().softmax(-1)
    expected = [sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]  # fmt: skip  # noqa: E501
    np.testing.assert_allclose(divergence(one, other), expected, rtol=1e-9)
    assert divergence(one, one).max() == 0


def test_the_reference_hands_out_any_stretch_in_order(place: Path) -> None:
    cell = cells(place)["full"]
    llama, _ = load(str(place))
    with torch.no_grad():
        whole = llama(input_ids=ids_of(cell)).logits[0]
    for stretches_ in ([(1, 59)], [(1, 1), (2, 7), (9, 2), (30, 1), (59, 1)], [(5, 3), (8, 1), (40, 20)]):
        reference = stream_cell._Reference(llama, ids_of(cell), cell.asked)
        for start, count in stretches_:
            torch.testing.assert_close(
                reference.of(start, count), whole[start - 1 : start - 1 + count], atol=1e-4, rtol=0
            )


def test_recall_is_the_library_s(place: Path) -> None:
    found = cells(place, "--policy", "TOVA()")
    llama, _ = load(str(place))
    own, best = recall(llama, ids_of(found["full"]), [named("TOVA()")], BUDGET, CHUNK)
    figures = measure(found["TOVA()"]).figures
    assert (figures["recall"], figures["recall_best"]) == (pytest.approx(own), pytest.approx(best))
    assert measure(found["full"]).figures["recall"] == 1
    assert measure(found["reread 7"]).figures["recall"] is None


def test_where_attention_cannot_be_heard_recall_says_why(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(*_: Any) -> Any:
        raise ValueError("no layer\nto listen to")

    monkeypatch.setattr(stream_cell, "recall", deaf)
    figures = measure(cells(place)["window"]).figures
    assert (figures["recall"], figures["recall_lacks"]) == (None, "no layer to listen to")
    assert figures["perplexity"] > 1


@pytest.mark.parametrize("other", [BUDGET + 1, BUDGET - 1])
def test_a_cache_that_holds_more_or_less_than_its_budget_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    cell = cells(place)["window"]
    made = lambda *arguments: SinkCache(arguments[0], named("Window()"), other, "original")  # noqa: E731
    monkeypatch.setattr(stream_cell, "SinkCache", made)
    with pytest.raises(AssertionError, match=f"entries held where {BUDGET} in each of"):
        measure(cell)


def test_bytes_of_the_full_cache_are_its_keys_and_values(place: Path) -> None:
    cell = cells(place)["full"]
    llama, _ = load(str(place))
    cache: Any = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=ids_of(cell), **{cache_argument(llama): cache})
    figures, one = measure(cell).figures, cache.layers[0]
    assert figures["bytes"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert figures["bytes_peak"] - figures["bytes"] == one.keys.nbytes + one.values.nbytes
    assert figures["held"] is None


def test_times_are_of_a_prompt_and_of_single_tokens(place: Path) -> None:
    found = cells(place)
    cost = measure(found["window"]).cost
    assert cost["prefill_tokens"] == TOKENS - 30
    assert min(cost[each] for each in ("prefill_seconds", "ms_per_token", "cpu_seconds")) > 0
    assert cost["tokens_per_second"] == pytest.approx(1000 / cost["ms_per_token"])
    assert set(measure(found["recompute 1/5"]).cost) == {"stream_tokens_per_second", "cpu_seconds"}


def test_a_second_measurement_gives_the_same_bits(place: Path) -> None:
    for cell in cells(place, "--policy", "H2O(recent=4)").values():
        one, other = measure(cell), measure(cell)
        assert one.figures == other.figures
        for name, array in one.scores.items():
            np.testing.assert_array_equal(array, other.scores[name])


@pytest.mark.slow
@pytest.mark.parametrize("written", [*POLICIES, "window", "Clairvoyant(64)", CALIBRATED])
def test_on_the_embedded_model_too(written: str) -> None:
    budget, tokens = 64, 160
    policy = "TOVA()" if written in ("window", "Clairvoyant(64)") else written
    asked = ["--tokens", str(tokens), "--budget", str(budget), "--horizon", "64", "--threads", "1", "--policy", policy]
    given = parser().parse_args(asked)
    one = network(EMBEDDED, given)
    cell = next(each for each in cells_of(one, stretches([embedded()], 1), given) if each.asked["name"] == written)
    smollm, _ = load(EMBEDDED)
    budgets = cell.asked["budgets"] or [budget] * smollm.config.num_hidden_layers
    scorers = {
        **POLICIES,
        "H2O(recent=budget//2)": oracle.h2o(budget // 2),
        CALIBRATED: oracle.h2o(16, 4, 2 ** (-1 / 256), mean=True),
        "window": oracle.recency(),
    }
    ahead = (
        clairvoyant(smollm, ids_of(cell), 64) if written.startswith("Clairvoyant") else lambda layer: scorers[written]
    )
    theirs = masked_nll(smollm, ids_of(cell), budgets, 64, ahead)
    assert measure(cell).figures["perplexity"] == pytest.approx(math.exp(theirs.mean()), rel=1e-3)
