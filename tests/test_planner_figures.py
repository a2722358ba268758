"""Every figure the articles print, and what llama.cpp and vLLM say themselves, comes out of the planner's functions.

tests/data/ holds the figures: as expressions over those functions, with the text that was printed; the sizes that
libllama printed; the bytes that vLLM's own code returned.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sinkcache.planner.capacity import recomputed
from sinkcache.planner.configs import from_config
from sinkcache.planner.in_llamacpp import LlamaCpp, unpacked
from sinkcache.planner.in_transformers import Dynamic, grouped_bits
from sinkcache.planner.in_vllm import VLLM
from sinkcache.planner.kinds import Layer, Model, per_token, size, tally, unbounded, within_window
from sinkcache.planner.weights import bytes_of

DATA = Path(__file__).parent / "data"


def data(name: str) -> Any:
    return json.loads((DATA / f"planner_{name}.json").read_text())


CONFIGS = data("models")["models"]
MODELS = {name: from_config(config, name) for name, config in CONFIGS.items()}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def f16(model: str, name: str, tokens: int, options: dict[str, Any]) -> int:
    found = LlamaCpp(**options).buffers(MODELS[model], tokens)
    return getattr(found, name)


FUNCTIONS: dict[str, Any] = {
    "+": lambda *each: sum(each),
    "-": lambda a, b: a - b,
    "*": lambda *each: math.prod(each),
    "/": lambda a, b: a / b,
    "<": lambda a, b: int(a < b),
    "max": max,
    "ceil": math.ceil,
    "per_token": lambda model: per_token(MODELS[model].layers, MODELS[model].dtype),
    "unbounded": lambda model: unbounded(MODELS[model].layers, MODELS[model].dtype),
    "in_window": lambda model, tokens: within_window(MODELS[model].layers, tokens, MODELS[model].dtype),
    "together": lambda model, tokens, users: Dynamic(1).together(MODELS[model], {tokens: users}),
    "layers": lambda model, kind: tally(MODELS[model].layers)[kind],
    "row": lambda model: MODELS[model].layers[0].row,
    "group": lambda model: MODELS[model].layers[0].heads // MODELS[model].layers[0].kv_heads,
    "window": lambda model: MODELS[model].layers[0].window,
    "max_length": lambda model: MODELS[model].max_length,
    "unpacked": lambda model: per_token(unpacked(MODELS[model]).layers, MODELS[model].dtype),
    "size": size,
    "weights": lambda dtype, parameters: bytes_of(dtype, parameters, None),
    "llamacpp": lambda model, tokens, options: (
        f16(model, "grown", tokens, options) + f16(model, "sliding", tokens, options)
    ),
    "states": lambda model, tokens, options: f16(model, "states", tokens, options),
    "cells": lambda model, tokens, options: f16(model, "window_cells", tokens, options),
    "vllm": lambda model, tokens, options: VLLM(**options).held(MODELS[model], tokens),
    "block": lambda model: VLLM().request(MODELS[model], 4096).block_size,
    "in_flight": lambda: VLLM().concurrent_batches * VLLM().max_num_batched_tokens,
    "recomputed": lambda prompt, answer, cached: recomputed(prompt, answer)[cached],
}


def value(expression: Any) -> Any:
    if isinstance(expression, list):
        return FUNCTIONS[expression[0]](*(value(each) for each in expression[1:]))
    return UNITS.get(expression, expression) if isinstance(expression, str) else expression


FIGURES = data("figures")["figures"]


@pytest.mark.parametrize("figure", FIGURES, ids=[f"{each['where']}: {each['what']}" for each in FIGURES])
def test_a_figure_of_the_articles(figure):
    found = value(figure["value"])
    if "printed" in figure:
        text = figure["printed"].replace(",", "")
        decimals = len(text.partition(".")[2])
        assert f"{found:.{decimals}f}" == text
    elif "equals" in figure:
        assert found == figure["equals"]
    else:
        low, high = figure["within"]
        assert low <= found <= high


def test_all_117_figures_are_there_and_four_of_them_are_counted_or_timed():
    assert len(FIGURES) == 117
    assert sum(each.get("counted", False) for each in FIGURES) == 4


LLAMACPP = data("llamacpp")["rows"]


def named(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['tokens']} {row['options']}"


@pytest.mark.parametrize("row", LLAMACPP, ids=map(named, LLAMACPP))
def test_what_llamacpp_allocates(row):
    model = MODELS[row["model"]]
    found = LlamaCpp(**row["options"]).buffers(unpacked(model) if row["unpacked"] else model, row["tokens"])
    slides = len(row["kv_mib"]) == 2
    sizes = [found.grown, found.sliding] if slides else [found.grown]
    assert [round(each / 2**20, 2) for each in sizes] == row["kv_mib"]
    assert found.states / 2**20 == row["states_mib"]
    assert [found.sequence, found.window_cells][: len(sizes)] == row["cells"]
    assert (found.context, found.sequence) == (row["context"], row["sequence"])
    assert (
        found.total
        == sum(sizes) + found.states
        == LlamaCpp(**row["options"]).held(unpacked(model) if row["unpacked"] else model, row["tokens"])
    )


def test_170_sizes_of_llamacpp_are_compared():
    assert sum(2 * len(row["kv_mib"]) for row in LLAMACPP) >= 170
    assert sum(row["states_mib"] > 0 for row in LLAMACPP) >= 10


VLLM_ROWS = data("vllm")["rows"]


def pool_of(row: dict[str, Any]) -> Model:
    made = row["model"]
    if isinstance(made, str):
        return MODELS[made]
    number, window = made["sliding"]
    sizes = (made["heads"], made["heads"], made["head_dim"], made["head_dim"])
    layers = [Layer("full", *sizes)] * made["full"] + [Layer("sliding", *sizes, window=window)] * number
    return Model("made up", tuple(layers))


@pytest.mark.parametrize("row", VLLM_ROWS, ids=[str(tuple(row.values())[:5]) for row in VLLM_ROWS])
def test_what_vllm_reserves_for_a_request(row):
    engine = VLLM(row["max_num_batched_tokens"], row["concurrent_batches"], row["prefix_caching"])
    found = engine.request(pool_of(row), row["tokens"])
    assert (found.total, found.groups) == (row["bytes"], row["groups"])


def test_the_42_requests_of_the_six_models_are_among_them():
    six = {"Qwen3-8B", "Mistral-7B-v0.3", "gemma-3-4b", "gpt-oss-20b", "DeepSeek-V2-Lite", "Qwen3.5-9B"}
    assert sum(isinstance(row["model"], str) and row["model"] in six for row in VLLM_ROWS) >= 42


@pytest.mark.parametrize(
    ("bits", "group", "percent"), [(8, 128, 51.56), (4, 128, 26.56), (3, 128, 20.31), (2, 128, 14.06)]
)
def test_bits_of_a_number_in_a_group(bits, group, percent):
    assert round(100 * grouped_bits(bits, group) / 16, 2) == percent
