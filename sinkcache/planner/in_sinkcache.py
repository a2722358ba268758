"""What a `SinkCache` holds: the budget of each bounded layer, set aside at once, and what its policy notes.

Not imported from the policies, which need torch: what each of them notes is in a table here, and tests hold it against
the caches themselves, to the byte.
"""

import ast
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sinkcache.planner.engines import Engine, refuse
from sinkcache.planner.in_transformers import Dynamic
from sinkcache.planner.kinds import FORMATS, Layer, Model, check_tokens, size

Notes = Literal["nothing", "positions", "mass", "queries", "moments"]

# What a cache notes of each token, or of the queries, for a policy of that name (`Policy.watch`).
NOTES: dict[str, Notes] = {
    "Window": "nothing",
    "StreamingLLM": "nothing",
    "Random": "nothing",
    "H2O": "mass",
    "TOVA": "mass",
    "KeyDiff": "positions",
    "Knorm": "positions",
    "LagKV": "positions",
    "SnapKV": "queries",
    "RKV": "queries",
    "ExpectedAttention": "moments",
}
_SHORT = {"streaming-llm": "StreamingLLM", "window": "Window"}  # as `generate --policy` calls them

# Fields of the policies and their defaults, in order.
FIELDS: dict[str, dict[str, Any]] = {
    "Window": {},
    "StreamingLLM": {"num_sinks": 4},
    "Random": {"seed": 0},
    "H2O": {"recent": 32, "num_sinks": 0, "half_life": None, "reduce": "sum", "group": "mean"},
    "TOVA": {"per": "layer", "num_sinks": 0, "recent": 0},
    "KeyDiff": {"num_sinks": 0, "recent": 0},
    "Knorm": {"num_sinks": 0, "recent": 0},
    "LagKV": {"num_sinks": 16, "lag": 128, "value_weight": 1.0},
    "SnapKV": {"observation_window": 32, "kernel": 5, "pooling": "avg", "reduce": "sum", "group": "mean",
               "num_sinks": 0, "recent": None},
    "RKV": {"observation_window": 8, "kernel": 7, "weight": 0.1, "likeness": 0.5, "num_sinks": 0},
    "ExpectedAttention": {"horizon": 512, "num_sinks": 4, "recent": 0, "covariance": True, "epsilon": 0.0},
}  # fmt: skip
_LEAST = {"num_sinks": 0, "recent": 0, "observation_window": 1, "lag": 2}  # of fields that count tokens
_INT32, _INT64, _COMPLEX64 = 4, 8, 8  # bytes


@dataclass(frozen=True)
class Bounded(Engine):
    """`SinkCache(model, policy, budget, positions)`; the prompt read `chunk` tokens at a time, or all at once (None).

    `sinks`: first tokens that a policy in cache positions turns. `newest`: queries it remembers. `room`: the least
    budget that it can work within. Sliding and linear layers are native. `peak` is what the cache holds and hands to
    attention, at the worst moment of the prompt.
    """

    policy: str = "StreamingLLM"
    budget: int = 1024
    chunk: int | None = None
    sinks: int = 4
    newest: int = 0
    room: int = 1
    positions: Literal["cache", "original"] = "cache"
    rules: ClassVar[str] = "sinkcache 0.1"

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)
        if self.chunk is not None:
            check_tokens("chunk", self.chunk)
        if self.policy not in NOTES:
            raise ValueError(f"no plan is known for policy {self.policy}: there is {', '.join(NOTES)}")
        if self.sinks >= self.budget:
            raise ValueError(f"num_sinks must be less than the budget, got {self.sinks} with budget={self.budget}")
        if self.budget < self.room:
            raise ValueError(f"{self.policy} needs a budget of {self.room} tokens at least, got {self.budget}")

    @property
    def name(self) -> str:
        """What tables call it, its options included."""
        prompt = "at once" if self.chunk is None else f"by {self.chunk:,}"
        return f"SinkCache, {self.policy}, budget {self.budget:,}, prompt {prompt}"

    @property
    def notes(self) -> Notes:
        """What the cache notes for the policy."""
        return NOTES[self.policy]

    def held(self, model: Model, tokens: int) -> int:
        """Bytes of `SinkCache.nbytes` while decoding, whatever the length of the stream."""
        check_tokens("tokens", tokens)
        self._check(model)
        return sum(self._after(layer, model.dtype, tokens, 1, tokens > self.budget) for layer in model.layers)

    def peak(self, model: Model, tokens: int) -> int:
        """Bytes at the worst moment of the prompt: what layers hold by then, and the tokens one attends to."""
        check_tokens("tokens", tokens)
        self._check(model)
        chunk = min(self.chunk or tokens, tokens)
        whole = tokens // chunk  # of chunks that are as long, none needs more than the last; what is left may
        steps = [((whole - 1) * chunk, chunk), (whole * chunk, tokens - whole * chunk)]
        return max(self.held(model, tokens), *(self._worst(model, *step) for step in steps if step[1]))

    def _check(self, model: Model) -> None:
        refuse(self.rules, model, ("hybrid", "cross"), "SinkCache bounds layers that are keys and values alone")
        if not any(layer.grows for layer in model.layers):
            raise ValueError(f"{self.rules}: there is no layer to bound, none of this model's grows with the text")
        if any(layer.kind == "mla" and layer.extra for layer in model.layers):
            raise ValueError(f"{self.rules}: SinkCache does not bound layers with an indexer (sparse attention)")

    def _worst(self, model: Model, before: int, new: int) -> int:
        """Bytes at the worst moment of a step: earlier layers are done, later ones as the last step left them."""
        turned = before >= self.budget
        held = [self._after(layer, model.dtype, before + new, new, turned) for layer in model.layers]
        last = min(before, self.chunk or before)
        waiting = [self._after(layer, model.dtype, before, last, before > self.budget) if before else 0
                   for layer in model.layers]  # fmt: skip
        alive, most = sum(waiting), 0
        for index, layer in enumerate(model.layers):
            alive += held[index] - waiting[index]
            most = max(most, alive + self._attended(layer, model.dtype, before, new))
        return most

    def _after(self, layer: Layer, dtype: str, tokens: int, last: int, turned: bool) -> int:
        """Bytes of a layer that has read so many tokens, the `last` of them in one step."""
        if not layer.grows:
            return Dynamic().stored(layer, dtype, tokens, last)
        held = self.budget * (size(layer.row, dtype) + self._noted(layer, dtype)) + self._remembered(layer, dtype)
        if turned and self.positions == "cache" and layer.rotary:
            slots = self.sinks if self.notes == "nothing" else self.budget
            held += layer.kv_heads * slots * layer.rotary // 2 * _complex(dtype)
        return held

    def _attended(self, layer: Layer, dtype: str, before: int, new: int) -> int:
        """Bytes of what a step of several tokens attends to, if that is not the layer's own storage."""
        kept = min(before, self.budget - 1)
        if not layer.grows or new == 1 or (self.notes == "nothing" and kept + new <= self.budget):
            return 0
        return (kept + new) * (size(layer.row, dtype) + self._noted(layer, dtype))

    def _noted(self, layer: Layer, dtype: str) -> int:
        """Bytes that are noted of each token, in all heads: its position, its mass of attention, how far it moved."""
        if self.notes == "nothing":
            return 0
        mass = _wide(dtype) if self.notes == "mass" else 0
        moves = 3 * _INT64 if self.positions == "cache" and layer.rotary else 0
        return layer.kv_heads * (_INT32 + mass + moves)

    def _remembered(self, layer: Layer, dtype: str) -> int:
        """Bytes that are remembered of the queries: the newest, or their mean and covariance."""
        if self.notes == "queries":
            return self.newest * (size(layer.heads * layer.key_dim, dtype) + 2 * _INT64)
        if self.notes == "moments":
            return _wide(dtype) * (1 + layer.heads * layer.key_dim * (1 + layer.key_dim))
        return 0


def bounded(policy: Any, budget: int, chunk: int | None = None, positions: Any = None) -> Bounded:
    """The plan for `policy`: an object of `sinkcache.policies`, or text such as "H2O(recent=64)"."""
    name, fields = _told(policy) if isinstance(policy, str) else (type(policy).__name__, vars(policy))
    if name not in FIELDS:
        return Bounded(name, budget, chunk)  # which refuses it
    unknown = set(fields) - set(FIELDS[name])
    if unknown:
        known = ", ".join(FIELDS[name]) or "none"
        raise ValueError(f"{name} has no field {min(unknown)}: there is {known}")
    fields = FIELDS[name] | fields
    for field, least in _LEAST.items():
        if field in fields and not (fields[field] is None and FIELDS[name][field] is None):
            _whole(field, fields[field], least)
    by_default = "cache" if name in ("Window", "StreamingLLM") else "original"
    sinks = fields["num_sinks"] if name == "StreamingLLM" else 0
    return Bounded(
        name, budget, chunk, sinks, fields.get("observation_window", 0), _room(fields), positions or by_default
    )


def _whole(name: str, number: object, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{name} must be a whole number of tokens, {least} or more, got {number!r}")
    check_tokens(name, number, least)


def _room(fields: dict[str, Any]) -> int:
    """The least budget of a policy with such fields."""
    if "lag" in fields:
        return fields["num_sinks"] + 2 * fields["lag"]
    recent = fields.get("recent")
    return fields.get("num_sinks", 0) + (fields.get("observation_window", 0) if recent is None else recent) + 1


def _told(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the fields in "H2O(recent=64)"."""
    try:
        tree = ast.parse(_SHORT.get(text, text).strip(), mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            named = {each.arg: ast.literal_eval(each.value) for each in tree.keywords if each.arg}
            names = list(FIELDS.get(tree.func.id, ()))[: len(tree.args)]
            placed = dict(zip(names, map(ast.literal_eval, tree.args), strict=True))
            return tree.func.id, {**named, **placed}
        if isinstance(tree, ast.Name):
            return tree.id, {}
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"a policy is written as StreamingLLM(num_sinks=4), with literals alone, got {text!r}")


def _wide(dtype: str) -> int:
    """Bytes of a number in float32, or in float64 where the model is."""
    return max(4, FORMATS[dtype][0])


def _complex(dtype: str) -> int:
    return _COMPLEX64 if _wide(dtype) == 4 else 2 * _COMPLEX64
