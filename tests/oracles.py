"""References for a bounded cache, in float64, which hold none: lists of stream positions say what is attended to.

The rule, for a step of q tokens: what is held is trimmed to `budget - 1`, the q are appended, each attends to what is
held and to its own past in the step, then what is held is reduced to `budget`, the newest staying. Positions are those
inside `held + new`, from 0 ("cache"), or those of the stream ("original").

Three references, which share nothing but that rule: `by_hand` writes Llama and GPT-NeoX out from un-rotated keys;
`by_mask` reads the stream in one pass under an explicit mask ("original" alone); `by_module` has the model's own
attention modules rotate the keys anew in every step, at the positions they are to be read at, and so serves every
family.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

Select = Callable[
    [list[int], int, int], list[int]
]  # (ascending positions, tokens seen, how many may stay) -> who stays


def sinks_and_recent(num_sinks: int) -> Select:
    def select(positions: list[int], seen: int, room: int) -> list[int]:
        sinks = [position for position in positions if position < num_sinks]
        others = [position for position in positions if position >= num_sinks]
        return sinks + others[len(others) - (room - len(sinks)) :]

    return select


def every_kth_and_recent(k: int, recent: int) -> Select:
    """Recent tokens first, then multiples of k, then the rest; of equals the newer."""

    def select(positions: list[int], seen: int, room: int) -> list[int]:
        def worth(position: int) -> tuple[int, int]:
            return (2 if position >= seen - recent else 1 if position % k == 0 else 0), position

        return sorted(sorted(positions, key=worth)[len(positions) - room :])

    return select


def steps(chunks: list[int], budget: int, select: Select) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Per step: who is held when it attends, who is new, who is held afterwards."""
    held: list[int] = []
    seen = 0
    for q_len in chunks:
        if len(held) > budget - 1:
            held = select(held, seen, budget - 1)
        new = list(range(seen, seen + q_len))
        seen += q_len
        after = held + new
        if len(after) > budget:
            after = select(after[:-1], seen, budget - 1) + after[-1:]  # the newest stays
        yield held, new, after
        held = after


def kept(chunks: list[int], budget: int, select: Select) -> list[list[int]]:
    """Who is held after each step."""
    return [after for _, _, after in steps(chunks, budget, select)]


def _positions(held: list[int], new: list[int], convention: str) -> list[int]:
    return list(range(len(held) + len(new))) if convention == "cache" else held + new


# by hand


@torch.no_grad()
def by_hand(model: Any, ids: list[int], chunks: list[int], budget: int, select: Select, convention: str) -> Tensor:
    """Logits `[tokens, vocab]` of a Llama or a GPT-NeoX."""
    frequencies = rope(model)
    neox = model.config.model_type == "gpt_neox"
    base = model.gpt_neox if neox else model.model
    embed, norm = (base.embed_in, base.final_layer_norm) if neox else (base.embed_tokens, base.norm)
    keys: list[list[Tensor]] = [
        [] for _ in base.layers
    ]  # per layer and stream position [kv heads, channels], un-rotated
    values: list[list[Tensor]] = [[] for _ in base.layers]
    logits = []
    for held, new, _ in steps(chunks, budget, select):
        places = _positions(held, new, convention)
        hidden = [embed.weight[ids[position]].double() for position in new]
        for index, layer in enumerate(base.layers):
            projected = [(_neox_qkv if neox else _llama_qkv)(layer, each) for each in hidden]
            keys[index] += [key for _, key, _ in projected]
            values[index] += [value for _, _, value in projected]
            turned = [_rotated(keys[index][p], place, frequencies) for p, place in zip(held + new, places, strict=True)]
            for i, (query, _, _) in enumerate(projected):
                upto = len(held) + i + 1  # its own past in the step, itself included
                query = _rotated(query, places[upto - 1], frequencies)
                group = len(query) // len(turned[0])
                heads = []
                for head in range(len(query)):
                    mine = torch.stack([key[head // group] for key in turned[:upto]])
                    weights = (mine @ query[head] / query.shape[-1] ** 0.5).softmax(0)
                    heads.append(weights @ torch.stack([values[index][p][head // group] for p in (held + new)[:upto]]))
                hidden[i] = (_neox_rest if neox else _llama_rest)(layer, hidden[i], torch.cat(heads))
        head = model.get_output_embeddings().weight
        logits += [head @ norm(each) for each in hidden]
    return torch.stack(logits)


def rope(model: Any) -> list[float]:
    """The frequencies a Llama or a GPT-NeoX holds: float32, so that logits are 2e-6 from those of the formula."""
    base = model.gpt_neox if model.config.model_type == "gpt_neox" else model.model
    return base.rotary_emb.inv_freq.double().tolist()


def _rotated(x: Tensor, position: int, frequencies: list[float]) -> Tensor:
    """Channels f and f + half as a pair, turned by position * frequencies[f]; those past 2 * half as they are."""
    half = len(frequencies)
    angle = position * torch.tensor(frequencies, dtype=torch.float64)
    a, b = x[:, :half], x[:, half : 2 * half]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[:, 2 * half :]], dim=1)


def _llama_qkv(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    attention, x = layer.self_attn, layer.input_layernorm(hidden)
    q, k, v = (w(x).reshape(-1, attention.head_dim) for w in (attention.q_proj, attention.k_proj, attention.v_proj))
    return q, k, v


def _llama_rest(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    hidden = hidden + layer.self_attn.o_proj(attended)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _neox_qkv(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = layer.attention.head_size
    fused = layer.attention.query_key_value(layer.input_layernorm(hidden)).reshape(-1, 3 * size)  # per head q, k, v
    return fused[:, :size], fused[:, size : 2 * size], fused[:, 2 * size :]


def _neox_rest(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    out = layer.attention.dense(attended)
    if layer.use_parallel_residual:
        return hidden + out + layer.mlp(layer.post_attention_layernorm(hidden))
    hidden = hidden + out
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


# by mask


@torch.no_grad()
def by_mask(model: nn.Module, ids: list[int], chunks: list[int], budget: int, select: Select) -> Tensor:
    """Logits `[tokens, vocab]` of one pass, positions "original": each query's mask shows what it attends to."""
    shown = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for held, new, _ in steps(chunks, budget, select):
        for i, position in enumerate(new):
            shown[position, held + new[: i + 1]] = True

    def substitute(module: Any, given: dict[str, Any]) -> None:
        window = _window(module)
        mask = (
            shown
            if window is None
            else torch.tensor([[0 <= q - k < window for k in range(len(ids))] for q in range(len(ids))])
        )
        given["attention_mask"] = _additive(mask)

    with _each_attention(model, substitute):
        return cast(Any, model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


# by module


class _Given:
    """Stands where an attention module expects its cache: puts `keys` and `values` before the new ones, notes both."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values


@torch.no_grad()
def by_module(
    model: nn.Module, ids: list[int], chunks: list[int], budget: int, select: Select, convention: str
) -> Tensor:
    """Logits `[tokens, vocab]`: what an attention module was given is kept per token, and goes through it each step."""
    angles: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    inputs: dict[nn.Module, list[Tensor]] = {}

    def note(module: Any, given: dict[str, Any]) -> None:
        angles[module] = given["position_embeddings"]
        inputs[module] = []

    with _each_attention(model, note):
        cast(Any, model)(input_ids=torch.tensor([ids]), use_cache=False)
    logits = []
    for held, new, _ in steps(chunks, budget, select):

        def at(module: Any, places: list[int]) -> tuple[Tensor, Tensor]:
            cos, sin = angles[module]
            return cos[:, places], sin[:, places]

        def substitute(module: Any, given: dict[str, Any], held: list[int] = held, new: list[int] = new) -> None:
            window, old = _window(module), held
            places = _positions(held, new, convention)
            if window is not None:  # a native layer: the stream's positions, the newest window
                old = list(range(max(0, new[0] - window + 1), new[0]))
                places = old + new
            mask = [[key <= query and (window is None or query - key < window) for key in old + new] for query in new]
            given["attention_mask"] = _additive(torch.tensor(mask))
            given["position_embeddings"] = at(module, places[len(old) :])
            cache = _cache_name(module)
            given[cache] = _Given()
            if old:
                again = {**given, "attention_mask": None, "position_embeddings": at(module, places[: len(old)])}
                again["hidden_states"] = torch.cat([inputs[module][position] for position in old], 1)
                module.forward(**again)  # not the module itself: no hook
                given[cache] = _Given(again[cache].keys, again[cache].values)
            inputs[module] += list(given["hidden_states"].split(1, dim=1))

        with _each_attention(model, substitute):
            logits.append(cast(Any, model)(input_ids=torch.tensor([ids])[:, new], use_cache=False).logits[0])
    return torch.cat(logits)


def _window(module: Any) -> int | None:
    return module.sliding_window if getattr(module, "is_sliding", False) else None


def _cache_name(module: nn.Module) -> str:
    names = inspect.signature(module.forward).parameters
    return next(name for name in ("cache", "past_key_values", "layer_past") if name in names)


def _additive(shown: Tensor) -> Tensor:
    mask = torch.zeros(shown.shape, dtype=torch.float64)
    return mask.masked_fill(~shown, torch.finfo(torch.float64).min)[None, None]


@contextmanager
def _each_attention(model: nn.Module, change: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Has `change` see, and alter, what each attention module is given, by name."""

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        change(module, given)
        return (), given

    modules = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
