"""What llama.cpp allocates for a context, all of it when the context is created.

Rules read in and run on llama.cpp b11434 (`llama-context.cpp`, `llama-kv-cache-iswa.cpp`, `llama-memory-recurrent.cpp`,
`llama-model.cpp`). Sizes are those it prints: "KV buffer size" of the layers that grow, of those that slide, and the
recurrent states.
"""

from dataclasses import dataclass
from typing import ClassVar

from sinkcache.planner.engines import Engine, refuse
from sinkcache.planner.kinds import Layer, Model, check_tokens, size, state_bytes

_PAD = 256  # cells are allocated in multiples of it


@dataclass(frozen=True)
class Buffers:
    """Bytes of what a context allocates, and the cells (tokens) a stream has in layers of each kind."""

    grown: int
    sliding: int
    states: int
    context: int
    sequence: int
    window_cells: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.grown + self.sliding + self.states


@dataclass(frozen=True)
class LlamaCpp(Engine):
    """A context of llama.cpp: `-np parallel` slots, `-kvu` (one cache for all of them), `-ub`, `--swa-full`, `-ctk`,
    `-ctv`; `draft`: tokens that are drafted at a time (a state is kept for each).

    `llama-server` without `-np` takes four slots and `-kvu`.
    """

    parallel: int = 1
    unified: bool = False
    ubatch: int = 512
    swa_full: bool = False
    keys: str = "f16"
    values: str = "f16"
    draft: int = 0
    rules: ClassVar[str] = "llama.cpp b11434"

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("ubatch", 1), ("draft", 0)):
            check_tokens(name, getattr(self, name), least)
        size(32, self.keys)
        size(32, self.values)

    @property
    def name(self) -> str:
        """What tables call it, its options included."""
        types = self.keys if self.keys == self.values else f"{self.keys}/{self.values}"
        slots = f", -np {self.parallel}{' -kvu' if self.unified else ''}" if self.parallel > 1 else ""
        return f"llama.cpp {types}, -ub {self.ubatch}{slots}{', --swa-full' if self.swa_full else ''}"

    def held(self, model: Model, tokens: int) -> int:
        """Bytes of a context for `tokens` (`-c`), whoever is in it."""
        return self.buffers(model, tokens).total

    def together(self, model: Model, users: dict[int, int]) -> int:
        """Bytes of a context with a slot for each user; slots that are not unified are all as long as the longest."""
        count, longest = sum(users.values()), max(users, default=0)
        tokens = sum(length * number for length, number in users.items()) if self.unified else count * longest
        if not count:
            return 0
        many = LlamaCpp(count, self.unified, self.ubatch, self.swa_full, self.keys, self.values, self.draft)
        return many.held(model, tokens)

    def buffers(self, model: Model, tokens: int) -> Buffers:
        """What a context for `tokens` allocates."""
        check_tokens("tokens", tokens)
        refuse(self.rules, model, ("cross",), "no rule is known for layers that read another sequence")
        if any(layer.extra for layer in model.layers):
            raise ValueError(f"{self.rules}: no rule is known for the keys of an indexer (sparse attention)")
        context = _padded(tokens)
        if not self.unified and context < self.parallel:
            raise ValueError(f"{self.rules}: a context of {context} has no cell for each of {self.parallel} slots")
        sequence = context if self.unified else _padded(context // self.parallel)
        context = sequence if self.unified else sequence * self.parallel
        streams = 1 if self.unified else self.parallel
        windows = {layer.window or 0 for layer in model.layers if layer.slides}
        shared_by = self.parallel if self.unified else 1
        cells = {each: min(sequence, _padded(min(sequence, each * shared_by + self.ubatch))) for each in windows}
        if self.swa_full:
            cells = dict.fromkeys(windows, sequence)
        return Buffers(
            grown=sum(self._row(layer) * sequence * streams for layer in model.layers if layer.grows),
            sliding=sum(self._row(each) * cells[each.window or 0] * streams for each in model.layers if each.slides),
            states=sum(map(_state, model.layers)) * self.parallel * (1 + self.draft),
            context=context,
            sequence=sequence,
            window_cells=max(cells.values(), default=0),
        )

    def _row(self, layer: Layer) -> int:
        if layer.kind == "mla":  # latents are keys and values at once
            return size(layer.row, self.keys)
        return size(layer.kv_heads * layer.key_dim, self.keys) + size(layer.kv_heads * layer.value_dim, self.values)


def unpacked(model: Model) -> Model:
    """`model` as a file holds it that lacks the keys of latent attention: each head's keys and values are stored."""
    layers = [Layer("full", key_dim=each.unpacked, kv_heads=1) if each.unpacked else each for each in model.layers]
    return Model(f"{model.name}, unpacked", tuple(layers), model.dtype)


def _state(layer: Layer) -> int:
    """Bytes of a layer's state: float32 whatever the cache's type, with one column less than the kernel has."""
    return 0 if layer.state is None else state_bytes(layer.state, "f32", layer.state.kernel - 1)


def _padded(cells: int) -> int:
    return -(-cells // _PAD) * _PAD
