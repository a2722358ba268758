"""What vLLM reserves for a request: blocks of a pool that all layers share.

Rules read in vLLM 0.29.0 (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`, `config/vllm.py`) and checked
against that code. Layers of one kind form groups of equal size; a block holds a page of every layer of a group, and
each group of a request takes its own blocks. Before 0.26 (pull request 47728) one batch was in flight, not two.
"""

from dataclasses import dataclass
from typing import ClassVar

from sinkcache.planner.engines import Engine, refuse
from sinkcache.planner.kinds import Kind, Layer, Model, check_tokens, size, state_bytes


@dataclass(frozen=True)
class Pool:
    """What a request takes: `blocks` of `block_bytes`, each a page of `block_size` tokens for a group's layers."""

    groups: int
    blocks: int
    block_bytes: int
    block_size: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.blocks * self.block_bytes


@dataclass(frozen=True)
class VLLM(Engine):
    """`max_num_batched_tokens` by default: 8,192 for class LLM on an A100 (2,048 for `vllm serve`), 16,384 and 8,192 on
    an H100. `concurrent_batches`: 2 with asynchronous scheduling, the default; `dtype`: None for the model's."""

    max_num_batched_tokens: int = 8192
    concurrent_batches: int = 2
    prefix_caching: bool = True
    block_size: int = 16
    dtype: str | None = None
    speculative: int = 0
    rules: ClassVar[str] = "vLLM 0.29.0"

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "concurrent_batches", "block_size"):
            check_tokens(name, getattr(self, name))

    @property
    def name(self) -> str:
        """What tables call it, its options included."""
        stored = f", {self.dtype}" if self.dtype else ""
        caching = "" if self.prefix_caching else ", no prefix caching"
        return f"vLLM, {self.max_num_batched_tokens:,} batched tokens{stored}{caching}"

    def held(self, model: Model, tokens: int) -> int:
        """Bytes that are reserved for one request of so many tokens."""
        return self.request(model, tokens).total

    def request(self, model: Model, tokens: int) -> Pool:
        """The blocks that one request of so many tokens takes."""
        check_tokens("tokens", tokens)
        refuse(self.rules, model, ("cross",), "no rule is known for layers that read another sequence")
        kinds, page_row = self._counted(model), self._page_row(model)
        if not kinds:
            return Pool(0, 0, 0, self.block_size)
        fewest, most = min(kinds.values()), max(kinds.values())
        layers = most if 2 * most < 3 * fewest else fewest  # of a group; the last group of a kind is filled up
        block = self._block(model, page_row)
        groups = {each: -(-number // layers) for each, number in kinds.items()}
        blocks = sum(number * self._blocks(*each, tokens, block) for each, number in groups.items())
        return Pool(sum(groups.values()), blocks, block * page_row * layers, block)

    def _counted(self, model: Model) -> dict[tuple[Kind, int], int]:
        """How many layers of each kind and window; a hybrid layer is one that grows and one that has a state."""
        counted: dict[tuple[Kind, int], int] = {}
        for layer in model.layers:
            kinds: list[tuple[Kind, int]] = []
            if layer.grows:
                kinds.append(("full", 0))
            if layer.slides:
                kinds.append((layer.kind, layer.window or 0))
            if layer.state is not None:
                kinds.append(("linear", 0))
            for each in kinds:
                counted[each] = counted.get(each, 0) + 1
        return counted

    def _page_row(self, model: Model) -> int:
        """Bytes of one token in one layer, which must be the same in all."""
        if any(layer.extra for layer in model.layers):
            raise ValueError(f"{self.rules}: no rule is known for the keys of an indexer (sparse attention)")
        rows = {size(layer.row, self.dtype or model.dtype) for layer in model.layers if layer.row}
        if len(rows) != 1:
            found = f"rows of {' and '.join(map(str, sorted(rows)))} bytes" if rows else "no layer of keys and values"
            raise ValueError(f"{self.rules}: no rule is known for pages of different sizes, and this model has {found}")
        return rows.pop()

    def _block(self, model: Model, page_row: int) -> int:
        """Tokens of a block: of a hybrid so many that a layer's page has room for a state."""
        states = [_state(layer, model.dtype) for layer in model.layers if layer.state is not None]
        widest = max(states, default=0)
        return max(self.block_size, self.block_size * -(-widest // (self.block_size * page_row)))

    def _blocks(self, kind: Kind, window: int, tokens: int, block: int) -> int:
        """Blocks that a request takes in a group of that kind."""
        in_flight = self.concurrent_batches * self.max_num_batched_tokens
        if kind == "linear":
            return (2 if self.prefix_caching else 1) + self.speculative
        if kind == "sliding":  # one more, as a window may begin inside a block
            return -(-min(window - 1 + in_flight, tokens) // block) + 1
        if kind == "chunked":
            return -(-min(window + in_flight, tokens) // block)
        return -(-tokens // block)


def _state(layer: Layer, dtype: str) -> int:
    assert layer.state is not None
    return state_bytes(layer.state, dtype, layer.state.kernel - 1)
