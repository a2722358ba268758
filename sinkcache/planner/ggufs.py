"""A model's metadata in a GGUF file, read without loading a weight: which layers it has and what they store.

The format: ggml's docs/gguf.md, versions 2 and 3. The names of fields and the patterns of sliding layers: llama.cpp
b11434, `llama-arch.cpp` and `llama-model.cpp`, where patterns are part of the code and not of the file.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from sinkcache.planner.kinds import Kind, Layer, Model, State

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_LAYERS = 10_000
_KEPT = 4096  # entries: longer arrays are vocabularies

# Of how many layers the last keeps everything, for architectures whose others slide; 0 where none slides.
_PERIODS = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
} | dict.fromkeys(
    ("apertus", "arcee", "bloom", "command-r", "deepseek2", "ernie4_5", "falcon", "falcon-h1", "gemma", "glm4",
     "glm4moe", "gpt2", "gptneox", "granite", "granitehybrid", "jamba", "lfm2", "llama", "mamba", "mamba2",
     "minimax-m2", "mistral3", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmoe", "phi2", "phi3", "phimoe",
     "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "seed_oss", "smollm3", "stablelm",
     "starcoder2"), 0)  # fmt: skip
_HYBRID = ("falcon-h1",)  # attention and a state in every layer
_DELTA = ("qwen35", "qwen35moe", "qwen3next")  # one layer in so many has attention


class Reader:
    """Reads values one after another; raises ValueError, which tells the place, where the file ends too early."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def number(self, code: str) -> Any:
        """The next number, little-endian, by its `struct` code."""
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """The next string."""
        return self._take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """The next value of a kind; None for an array that is too long to be of use here."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, length = self.number("I"), self.number("Q")
            if inner in _NUMBERS and length > _KEPT:
                self._take(length * struct.calcsize(_NUMBERS[inner]))
                return None
            entries = [self.value(inner) for _ in range(length)]
            return entries if length <= _KEPT else None
        if kind not in _NUMBERS:
            raise ValueError(f"GGUF file {self.name!r} has a value of kind {kind} at byte {self.at}, which is unknown")
        return self.number(_NUMBERS[kind])

    def _take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(
                f"GGUF file {self.name!r} is truncated: {count} bytes are wanted at byte {self.at} of {len(self.data)}"
            )
        self.at += count
        return self.data[self.at - count : self.at]


def from_gguf(path: Path) -> Model:
    """The model in a GGUF file; raises ValueError, which names file and field, if a rule or a part of it is missing."""
    fields, parameters, stored = read(path)
    name = str(fields.get("general.name") or path.stem)
    facts = _Facts(fields, path)
    layers = tuple(_layer(facts, index) for index in range(_number(facts)))
    context = facts.get("context_length")
    assumed = [f"dtype = f16, llama.cpp's default for a cache ({path.name} does not say)", *facts.assumed.values()]
    splits = fields.get("split.count")
    if isinstance(splits, int) and splits > 1:
        assumed.append(f"weights are those of this file alone, one of {splits}")
    if stored is None:
        assumed.append("bytes of the weights are not known, as the file ends before them")
    longest = context if isinstance(context, int) and context > 0 else None
    return Model(name, layers, "f16", facts.architecture, longest, parameters, stored, tuple(assumed))


def _number(facts: "_Facts") -> int:
    """How many layers have a cache; those that draft have none in it."""
    number, drafting = facts.whole("block_count"), facts.optional("nextn", 0)
    if number > _MOST_LAYERS:
        raise ValueError(f"GGUF field {facts.architecture}.block_count = {number:,} is more layers than any model has")
    without = max(drafting, facts.optional("attention.shared_kv_layers", 0))
    if without >= number:
        raise ValueError(
            f"GGUF fields contradict: {facts.architecture}.block_count is {number}, and {without} layers have no cache"
        )
    return number - drafting


def read(path: Path) -> tuple[dict[str, Any], int, int | None]:
    """The metadata of a GGUF file, how many weights it has, and their bytes; None where the file ends before them."""
    with path.open("rb") as file:
        if path.stat().st_size == 0 or file.read(4) != b"GGUF":
            raise ValueError(f"{str(path)!r} is no GGUF file: it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = Reader(data, str(path))
            reader.number("I")
            version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
            if version not in (2, 3):
                raise ValueError(f"GGUF file {str(path)!r} is of version {version}: versions 2 and 3 are known")
            fields = {reader.text(): reader.value(reader.number("I")) for _ in range(pairs)}
            parameters = last = 0
            for _ in range(tensors):
                reader.text()
                numbers = 1
                for _ in range(reader.number("I")):
                    numbers *= reader.number("Q")
                parameters += numbers
                reader.number("I")  # how its numbers are stored
                last = max(last, reader.number("Q"))  # where they begin
            return fields, parameters, None if reader.at + last >= len(data) else len(data) - reader.at


class _Facts:
    """Fields of an architecture, by their names without its own; `assumed` tells which were not there."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self.fields, self.path, self.assumed = fields, path, dict[str, str]()
        self.architecture = str(fields.get("general.architecture"))
        if self.architecture not in _PERIODS:
            raise ValueError(
                f"GGUF field general.architecture = {self.architecture!r} is none whose cache is known (llama.cpp "
                "b11434): refused, as any figure would be a guess"
            )

    def get(self, name: str) -> Any:
        return self.fields.get(f"{self.architecture}.{name}")

    def whole(self, name: str, index: int = 0, least: int = 1) -> int:
        """A whole number, of layer `index` where there is one for each."""
        value = self.get(name)
        if isinstance(value, list):
            value = value[index] if index < len(value) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"GGUF field {self.architecture}.{name} of {str(self.path)!r} must be a whole number, {least} or more, "
                f"got {value!r}"
            )
        return value

    def optional(self, name: str, default: int) -> int:
        """A number that may be missing."""
        full = "nextn_predict_layers" if name == "nextn" else name
        if self.get(full) is None:
            return default
        return self.whole(full, least=0)

    def kv_heads(self, index: int) -> int:
        """Heads of keys of a layer; 0 where it has no attention."""
        if self.get("attention.head_count_kv") is not None:
            return self.whole("attention.head_count_kv", index, 0)
        heads = self.whole("attention.head_count", index, 0)
        self.assumed["kv"] = f"{self.architecture}.attention.head_count_kv = {heads}, as many as head_count"
        return heads

    def derived(self, name: str, index: int) -> int:
        """The size of a head's keys or values: by default the share that a head has of the model's width."""
        if self.get(name) is not None:
            return self.whole(name)
        size = self.whole("embedding_length") // self.whole("attention.head_count", index)
        self.assumed[name] = f"{self.architecture}.{name} = {size}, embedding_length / head_count"
        return size


def _layer(facts: _Facts, index: int) -> Layer:
    kind = _kind(facts, index)
    state = _state(facts) if kind in ("linear", "conv", "hybrid") else None
    if kind in ("linear", "conv", "none", "shared"):
        return Layer(kind, state=state)
    heads, kv_heads = facts.whole("attention.head_count", index), facts.kv_heads(index)
    keys, values = facts.derived("attention.key_length", index), facts.derived("attention.value_length", index)
    rotary = facts.optional("rope.dimension_count", keys)
    if facts.get("attention.key_length_mla") is not None:
        rank = facts.whole("attention.kv_lora_rank")
        if keys <= rank:
            raise ValueError(
                f"GGUF fields contradict: {facts.architecture}.attention.key_length is {keys}, and its latent is {rank}"
            )
        own = facts.whole("attention.key_length_mla") + facts.whole("attention.value_length_mla")
        return Layer("mla", heads, 1, rank, keys - rank, keys - rank, unpacked=heads * own)
    window = facts.whole("attention.sliding_window") if kind == "sliding" else None
    return Layer(kind, heads, kv_heads, keys, values, rotary, window, state)


def _kind(facts: _Facts, index: int) -> Kind:
    last = facts.whole("block_count")
    if index >= last - facts.optional("attention.shared_kv_layers", 0):
        return "shared"
    if facts.architecture in _HYBRID:
        return "hybrid"
    if facts.architecture in _DELTA:
        return "full" if (index + 1) % facts.optional("full_attention_interval", 4) == 0 else "linear"
    if not facts.kv_heads(index):  # Mamba and its hybrids say so with 0 heads of keys
        if facts.architecture == "nemotron_h" and facts.whole("feed_forward_length", index, 0):
            return "none"
        return "conv" if facts.get("shortconv.l_cache") is not None else "linear"
    given = facts.get("attention.sliding_window_pattern")
    if isinstance(given, list) and index >= len(given):
        raise ValueError(
            f"GGUF field {facts.architecture}.attention.sliding_window_pattern of {str(facts.path)!r} has {len(given)} "
            f"entries for {last} layers"
        )
    period = given if isinstance(given, int) else _PERIODS[facts.architecture]
    slides = bool(given[index]) if isinstance(given, list) else period > 0 and (index + 1) % period != 0
    return "sliding" if slides and facts.optional("attention.sliding_window", 0) > 0 else "full"


def _state(facts: _Facts) -> State:
    if facts.get("shortconv.l_cache") is not None:
        return State(facts.whole("embedding_length"), facts.whole("shortconv.l_cache"))
    inner, size, groups = (
        facts.whole("ssm.inner_size"),
        facts.whole("ssm.state_size"),
        facts.optional("ssm.group_count", 0),
    )
    return State(inner + 2 * groups * size, facts.whole("ssm.conv_kernel"), inner * size)
