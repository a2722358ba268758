"""The zoo's reference is that of other references, its cells are ok, it can fail, and its page is of this code."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import oracles
import pytest
import torch
import transformers as tf
import zoo
from conftest import build
from torch import Tensor

from sinkcache import SinkCache
from sinkcache.layer import SinkLayer
from sinkcache.policies import Window
from sinkcache.positions import Rotation

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
CHUNKS = [9, 1, 1, 1, 7, 5]
REFUSED_PADS = ("refused", True)  # whoever cannot have pads may say so
FEW = ["Gemma 2", "Falcon", "Cohere 2", "GPT-OSS", "LFM2", "Qwen3-Next"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Of what transformers says about its own odd families."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def animal(label: str) -> zoo.Animal:
    model = zoo.build(label)
    if isinstance(model, str):
        pytest.skip(f"transformers {tf.__version__}: {model}")
    return zoo.Animal(label, model)


# the reference


@pytest.mark.parametrize("convention", zoo.CONVENTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_reference_is_that_written_by_hand(family, convention):
    arguments = (build(family), zoo.tokens(24)[0].tolist(), CHUNKS, zoo.BUDGET, oracles.sinks_and_recent(2), convention)
    torch.testing.assert_close(zoo.by_layer(*arguments), oracles.by_hand(*arguments), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("convention", zoo.CONVENTIONS)
@pytest.mark.parametrize("family", ["gemma3", "smollm3", "glm", "cohere"])
def test_reference_is_that_of_keys_rotated_anew(family, convention):
    arguments = (build(family), zoo.tokens(24)[0].tolist(), CHUNKS, zoo.BUDGET, oracles.sinks_and_recent(2), convention)
    torch.testing.assert_close(zoo.by_layer(*arguments), oracles.by_module(*arguments), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", ["Qwen3.5", "OLMo Hybrid", "DeepSeek-V3", "GPT-J"])
def test_reference_is_that_of_one_masked_pass(label):
    arguments = (animal(label).model, zoo.tokens(24)[0].tolist(), CHUNKS, zoo.BUDGET, oracles.sinks_and_recent(2))
    expected = oracles.by_mask(*arguments)
    torch.testing.assert_close(zoo.by_layer(*arguments, "original"), expected, rtol=1e-4, atol=1e-4)  # some in float32


# the cells


@pytest.mark.parametrize("label", FEW)
def test_families_equal_the_reference_in_every_usage(label):
    mine = animal(label)
    cells = [mine.cell("StreamingLLM", "cache", usage) for usage in zoo.USAGES]
    if {cell.verdict for cell in cells if not cell.usage.startswith("padded")} == {"transformers"}:
        pytest.skip(f"transformers {zoo.tf.__version__} cannot serve {label} with a cache of its own")
    wrong = [cell for cell in cells if cell.verdict != "ok" and (cell.verdict, "padded" in cell.usage) != REFUSED_PADS]
    assert not wrong


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("label", zoo.FAMILIES)
def test_no_cell_is_wrong(label):
    wrong = [cell for cell in animal(label).cells() if cell.verdict in ("WRONG", "crash")]
    assert not wrong


# that it can fail


def _turned_back(self: Rotation, moves: Tensor, like: Tensor) -> Tensor:
    return right(self, moves, like).conj()


right = Rotation.phase


def test_a_rotation_of_the_wrong_sign_is_wrong(monkeypatch):
    monkeypatch.setattr(Rotation, "phase", _turned_back)
    mine = animal("Qwen2")
    assert {mine.cell("StreamingLLM", "cache", usage).verdict for usage in zoo.USAGES} == {"WRONG"}


def test_a_sink_less_is_wrong(monkeypatch):
    policy, _ = zoo.POLICIES["StreamingLLM"]
    monkeypatch.setitem(zoo.POLICIES, "StreamingLLM", (policy, oracles.sinks_and_recent(3)))
    mine = animal("Qwen2")
    assert {mine.cell("StreamingLLM", "original", usage).verdict for usage in zoo.USAGES} == {"WRONG"}


def test_beams_that_are_not_reordered_are_wrong(monkeypatch):
    monkeypatch.setattr(SinkCache, "reorder_cache", lambda self, beam_idx: None)
    assert animal("Qwen2").cell("Window", "cache", "beams").verdict == "WRONG"


def test_a_family_in_which_eviction_changes_nothing_proves_nothing(monkeypatch):
    monkeypatch.setattr(zoo, "BUDGET", 64)
    assert animal("Qwen2").cell("Window", "cache", "one shot").verdict == "crash"


# the page


def _page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {tf.__version__}." not in text:
        pytest.skip(f"the page is not of transformers {tf.__version__}")
    return text


def test_the_page_has_a_row_for_each_family():
    rows = [line.split("|")[1].strip() for line in _page().splitlines() if line.startswith("| ")][1:]
    assert rows == list(zoo.FAMILIES)


@pytest.mark.parametrize("label", zoo.FAMILIES)
def test_the_page_says_what_is_refused_at_construction(label):
    text, model = _page(), animal(label).model
    [row] = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    refused = 0
    for convention in zoo.CONVENTIONS:
        try:
            layers = SinkCache(model, Window(), zoo.BUDGET, cast(Any, convention)).layers
        except zoo.REFUSALS as error:
            refused += 1
            [line] = [line for line in text.splitlines() if f". `{error}` (" in line]
            assert f"[{line.split('.')[0]}]" in row
        else:
            assert f"{sum(isinstance(each, SinkLayer) for each in layers)} bounded" in row
    assert ("| none |" in row) == (refused == len(zoo.CONVENTIONS))


def test_the_page_says_what_is_refused_in_use():
    text = _page()
    for what, why in zoo.misused().items():
        assert f"* {what}: `{why}`" in text
