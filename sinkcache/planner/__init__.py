"""What a model's cache costs, to the byte, before anything is loaded; and how many users fit.

`plan` reads a model's layers from what describes them (`sources`), says what each kind stores, and puts side by side
what engines hold of one conversation (`engines`, `in_vllm` and others). Needs neither torch nor transformers.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinkcache.planner.engines import Engine
from sinkcache.planner.in_llamacpp import LlamaCpp
from sinkcache.planner.in_sinkcache import bounded
from sinkcache.planner.in_transformers import Dynamic, Quantized, Static, Unaware
from sinkcache.planner.in_vllm import VLLM
from sinkcache.planner.kinds import (
    KINDS,
    Kind,
    Layer,
    Model,
    check_tokens,
    per_token,
    size,
    state_bytes,
    unbounded,
    visible,
)
from sinkcache.planner.sources import model_of

LENGTHS = (4096, 32_768, 131_072)
NOT_COUNTED = (
    "weights, activations, draft models, the copy while tensors are joined, allocator and driver: figures are of the "
    "cache alone, users a bound by memory alone"
)


@dataclass(frozen=True)
class KindRow:
    """All layers of one kind and size: bytes of one more token, bytes that never grow, and in all at each length.

    `capped`: bytes that a token takes until a window is full.
    """

    kind: Kind
    layers: int
    per_token: int
    capped: int
    window: int | None
    fixed: int
    totals: tuple[int, ...]

    @property
    def formula(self) -> str:
        """Bytes as a function of the tokens T."""
        parts = [f"{self.per_token:,} T"] if self.per_token else []
        parts += [f"{self.capped:,} min(T, {self.window:,})"] if self.capped else []
        return " + ".join(parts + ([f"{self.fixed:,}"] if self.fixed else [])) or "0"


@dataclass(frozen=True)
class EngineRow:
    """One conversation in one engine: bytes held and at the worst moment, at each length; or why there is no rule."""

    name: str
    rules: str
    held: tuple[int, ...] = ()
    peak: tuple[int, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Plan:
    """What the cache of `model` costs at `lengths`, by kind of layer and by engine."""

    model: Model
    lengths: tuple[int, ...]
    kinds: list[KindRow]
    engines: list[EngineRow]

    @property
    def per_token(self) -> int:
        """Bytes that one more token of a long conversation takes."""
        return per_token(self.model.layers, self.model.dtype)

    @property
    def least(self) -> tuple[int, ...]:
        """Bytes at each length of what some later query can see, and of states as transformers keeps them."""
        return tuple(map(sum, zip(*(row.totals for row in self.kinds), strict=True)))

    @property
    def warnings(self) -> list[str]:
        """What a reader must know of the lengths."""
        longest = self.model.max_length
        past = [length for length in self.lengths if longest is not None and length > longest]
        return [f"{each:,} tokens are past the trained length of {longest:,}" for each in past]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, fit for JSON."""
        model = self.model
        return {
            "model": model.name,
            "model_type": model.model_type,
            "dtype": model.dtype,
            "parameters": model.parameters,
            "weight_bytes": model.weights,
            "lengths": list(self.lengths),
            "bytes_per_token": self.per_token,
            "bytes_per_token_without_windows": unbounded(model.layers, model.dtype),
            "least_bytes": list(self.least),
            "kinds": [{**dataclasses.asdict(row), "formula": row.formula} for row in self.kinds],
            "engines": [dataclasses.asdict(row) for row in self.engines],
            "assumed": list(model.assumed),
            "warnings": self.warnings,
            "not_counted": NOT_COUNTED,
        }


def plan(
    source: Any,
    lengths: Sequence[int] = LENGTHS,
    engines: Sequence[Engine] | None = None,
    dtype: str | None = None,
    model_type: str | None = None,
) -> Plan:
    """The plan for a hub id, a path, a config, a loaded model or a live cache; `dtype` is that of the cache.

    Raises ValueError, which names the file or field, for what cannot be read and what no rule is known for.

    >>> fields = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> plan({"model_type": "qwen3", "head_dim": 128, "dtype": "bfloat16", **fields}).per_token
    147456
    """
    if not lengths:
        raise ValueError("lengths must have one number of tokens at least, got none")
    for length in lengths:
        check_tokens("a length", length)
    model = model_of(source, dtype, model_type)
    asked = default_engines(model) if engines is None else engines
    return Plan(model, tuple(lengths), kind_rows(model, lengths), [engine_row(each, model, lengths) for each in asked])


def kind_rows(model: Model, lengths: Sequence[int]) -> list[KindRow]:
    """A row for all layers that are alike, in the order of `KINDS`."""
    alike: dict[Layer, int] = {}
    for layer in model.layers:
        alike[layer] = alike.get(layer, 0) + 1
    rows = [_kind_row(layer, number, model.dtype, lengths) for layer, number in alike.items()]
    return sorted(rows, key=lambda row: list(KINDS).index(row.kind))


def _kind_row(layer: Layer, number: int, dtype: str, lengths: Sequence[int]) -> KindRow:
    row = size(layer.row, dtype) if layer.row else 0
    state = layer.state
    fixed = 0 if state is None else number * state_bytes(state, dtype, state.kernel)
    totals = tuple(number * row * visible(layer, length) + fixed for length in lengths)
    return KindRow(
        kind=layer.kind,
        layers=number,
        per_token=number * row if layer.grows else 0,
        capped=number * row if layer.slides else 0,
        window=layer.window,
        fixed=fixed,
        totals=totals,
    )


def engine_row(engine: Engine, model: Model, lengths: Sequence[int]) -> EngineRow:
    """What `engine` holds of one conversation of `model`, or why it has no rule for it."""
    try:
        held = tuple(engine.held(model, length) for length in lengths)
        peak = tuple(engine.peak(model, length) for length in lengths)
    except ValueError as refusal:
        return EngineRow(engine.name, engine.rules, refused=str(refusal))
    return EngineRow(engine.name, engine.rules, held, peak)


def default_engines(
    model: Model,
    llamacpp: LlamaCpp | None = None,
    vllm: VLLM | None = None,
    policy: Any = "StreamingLLM(num_sinks=4)",
    budget: int = 1024,
    chunk: int | None = 512,
    source: int = 0,
) -> list[Engine]:
    """The engines that a plan sets side by side."""
    llamacpp, vllm = llamacpp or LlamaCpp(), vllm or VLLM()
    slides = any(layer.slides for layer in model.layers)
    plain = llamacpp.keys == llamacpp.values == "f16"
    return [
        Dynamic(chunk, source),
        *([Unaware()] if slides else []),
        Static(),
        Quantized(),
        llamacpp,
        *([dataclasses.replace(llamacpp, keys=each, values=each) for each in ("q8_0", "q4_0")] if plain else []),
        *([dataclasses.replace(llamacpp, parallel=4, unified=True)] if llamacpp.parallel == 1 else []),  # llama-server
        *([dataclasses.replace(llamacpp, swa_full=True)] if slides and not llamacpp.swa_full else []),
        vllm,
        bounded(policy, budget, None),
        *([bounded(policy, budget, chunk)] if chunk else []),
    ]


def default_choices(engine: Engine, budget: int = 1024) -> dict[str, Engine]:
    """Settings of `engine` that may save memory, by what they are called there."""
    if isinstance(engine, LlamaCpp):
        change = dataclasses.replace
        choices: dict[str, Engine] = {
            "-ctk q8_0 -ctv q8_0": change(engine, keys="q8_0", values="q8_0"),
            "-ctk q4_0 -ctv q4_0": change(engine, keys="q4_0", values="q4_0"),
            "-ub 256": change(engine, ubatch=256),
        }
        return {**choices, "without --swa-full": change(engine, swa_full=False)} if engine.swa_full else choices
    if isinstance(engine, VLLM):
        return {
            "--max-num-batched-tokens 2048": dataclasses.replace(engine, max_num_batched_tokens=2048),
            "--max-num-batched-tokens 512": dataclasses.replace(engine, max_num_batched_tokens=512),
            "--no-async-scheduling": dataclasses.replace(engine, concurrent_batches=1),
            "--no-enable-prefix-caching": dataclasses.replace(engine, prefix_caching=False),
            "--kv-cache-dtype fp8": dataclasses.replace(engine, dtype="fp8"),
        }
    if isinstance(engine, Dynamic):
        return {
            f"SinkCache(StreamingLLM(4), {budget})": bounded("StreamingLLM", budget),
            "QuantizedCache, 4 bits": Quantized(4),
            "QuantizedCache, 2 bits": Quantized(2),
        }
    return {}
