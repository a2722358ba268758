"""Budgets that differ from layer to layer, found for one model and one policy by reading a text.

Idea: layers share the memory so that as little squared attention as can be falls on tokens that are gone. What a head
loses with a token is its probability times a difference of values, so the loss of a layer, to second order in it, goes
with the square of what was missed. The mass itself does not compare between layers (tried: it does not work): it gives
most to those that spread their attention thin. How much each layer misses, at each of some budgets, is measured by
shadows that run the policy itself beside a full cache; then tokens go, step by step, where a token saves most.
Source: our own. Budgets by layer are PyramidKV's idea (arXiv 2406.02069), which fixes their shape; marginal gains are
those of Fox, "Discrete Optimization via Marginal Analysis", Management Science 13(3), 1966.

A list belongs to one model, and to policies that keep much the same. What carries over to other texts and sizes is the
shares: `sinkcache.budgets.scaled` gives them at another budget.

Measured (SmolLM2-135M-Instruct, H2O with recent=16, num_sinks=4, half_life=256, reduce="mean", 256 tokens on average,
found on 3,072 tokens of Python's reference, 4,096 tokens of three novels): of the perplexity gap between StreamingLLM
and the full cache equal budgets close 43, 66 and 43%, the list found 53, 74 and 60%, and of the recall gap between
StreamingLLM and Clairvoyant 89, 89 and 88%. With nothing evened out it is 52, 75 and 61%, and 85% of recall on the
first. It took 75 seconds of one core. experiments/calibrated.json holds it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkcache.book import check_budget, least_budget
from sinkcache.budgets import evened
from sinkcache.hearing import Heard, check_text, overhear
from sinkcache.lanes import Lanes
from sinkcache.policy import Policy
from sinkcache.positions import Rotation
from sinkcache.shadows import shadow_of
from sinkcache.support import check_watch, decoder_config, found_in
from sinkcache.tally import Tallies, Tally

_TRIED = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3)  # times the budget
_SINKS = 4  # first tokens that do not count: every policy worth its budget holds them, and they would drown the rest


def calibrate(
    model: nn.Module,
    input_ids: Int[Tensor, "1 kv_len"],
    policy: Policy,
    budget: int,
    chunk: int = 64,
    least: int | None = None,
    grid: Sequence[int] | None = None,
    even: int | float = 0.25,
) -> list[int]:
    """Budgets for `SinkCache(model, policy, ...)`: tokens for each layer of full attention, `budget` on average.

    The text is read once, `chunk` tokens at a time, positions original; it should be like those to come and some times
    as long as the budget. No layer gets less than `least` tokens (by default a quarter of `budget`, or what the policy
    needs, if that is more), nor more than the text has. Budgets of the `grid` are tried, `least` among them (by default
    12, up to three times `budget`). One text does not say all about a layer, so of what is found `even` is shared out
    to all alike. The sum is layers times `budget` to the token. Time and memory are those of a full cache and of as
    many bounded ones as budgets are tried.

    Raises TypeError for a config, ValueError if the policy cannot work within `budget` or `least`, nothing would be
    evicted from the text, or the model's attention cannot be shown.
    """
    _check(model, input_ids, policy, budget, chunk)
    tokens = input_ids.shape[1]
    if least is None:
        least = max(budget // 4, least_budget(policy, budget))
    if not 1 <= least <= budget:
        raise ValueError(f"least must be between 1 token and the budget, got least={least} with budget={budget}")
    wanted = [round(share * budget) for share in _TRIED] if grid is None else grid
    if not all(isinstance(each, int) for each in wanted):
        raise ValueError(f"grid must hold whole numbers of tokens, got {wanted}")
    tried = sorted({least, *(min(each, tokens) for each in wanted if each >= least)})
    for each in tried:
        check_budget(policy, each, 1)
    if tried[-1] < budget:
        raise ValueError(f"grid must reach the budget, got at most {tried[-1]} with budget={budget}")
    evened([budget], even)  # refuses what is no part
    missing = missed(model, input_ids, policy, tried, chunk)
    return evened(shared_out(missing, tried, budget), even)


def missed(
    model: nn.Module, input_ids: Int[Tensor, "1 kv_len"], policy: Policy, budgets: Sequence[int], chunk: int = 64
) -> Float[Tensor, "layers budgets"]:
    """Squared attention that falls on what `policy` does not show at each of `budgets`, by bounded layer, in float64.

    The probabilities are those of a model that evicts nothing, summed over queries and key heads, mean over the query
    heads of each. Tokens at positions below 4 are left out. Raises as `sinkcache.hearing.overhear` does.
    """
    rotations = found_in(model).rotations
    books = [Tallies(Tally(policy, each, None), Lanes()) for each in budgets]
    shadows: dict[int, list[Any]] = {}
    sums: dict[int, Tensor] = {}

    def follow(heard: Heard) -> None:
        layer = heard.layer
        if layer not in shadows:
            shadows[layer] = [shadow_of(policy, book, rotations[layer], layer) for book in books]
            sums[layer] = torch.zeros(len(books), dtype=torch.float64)
        squares = _squares(heard)
        for index, shadow in enumerate(shadows[layer]):
            shadow.follow(heard)
            gone = torch.ones_like(squares).scatter_(-1, shadow.attended[0].cpu() % squares.shape[-1], 0)
            sums[layer][index] += (squares * gone).sum()

    overhear(model, input_ids, chunk, follow)
    return torch.stack([sums[layer] for layer in sorted(sums)])


def shared_out(missing: Float[Tensor, "layers budgets"], tried: Sequence[int], budget: int) -> list[int]:
    """Of the budgets `tried`, ascending, one for each layer, so that little is missed; `budget` on average.

    Every layer begins with the first; again and again one is raised, perhaps by several, where it misses less by most
    for each token. What is then left, too little for any or of no use to any, goes to layers that have least. The last
    budget must be `budget` at least.

    >>> shared_out(torch.tensor([[8.0, 2.0, 1.0], [8.0, 7.0, 0.0]]), [2, 4, 8], budget=6)
    [4, 8]
    """
    table = missing.tolist()
    at = [0] * len(table)
    left = len(table) * (budget - tried[0])
    while True:
        best, layer, to = 0.0, None, 0
        for number, row in enumerate(table):
            now = at[number]
            for index in range(now + 1, len(tried)):
                price = tried[index] - tried[now]
                if price <= left and (row[now] - row[index]) / price > best:
                    best, layer, to = (row[now] - row[index]) / price, number, index
        if layer is None:
            break
        left -= tried[to] - tried[at[layer]]
        at[layer] = to
    given = [tried[index] for index in at]
    for _ in range(left):
        given[given.index(min(given))] += 1
    return given


def _check(model: Any, input_ids: Tensor, policy: Any, budget: Any, chunk: int) -> None:
    decoder_config(model, "original")
    if not isinstance(model, nn.Module):
        raise TypeError(f"a text is read to find budgets, which needs the model: got its {type(model).__name__}")
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy object such as H2O(num_sinks=4), got {policy!r}")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ValueError(f"budget must be a whole number of tokens, 1 or more, got {budget!r}")
    check_budget(policy, budget, 1)
    check_text(input_ids, chunk)
    if input_ids.shape[1] <= budget:
        raise ValueError(
            f"a budget of {budget} evicts nothing from a text of {input_ids.shape[1]} tokens: give one some times as "
            "long as the budget"
        )
    found = found_in(model)
    if any(isinstance(each, Rotation) and each.values for each in found.rotations):
        raise ValueError(f"{type(model).__name__} has latent attention, whose keys are not those that are stored")
    if not found.ordered:
        check_watch(model, policy.watch(), False, found.rotations)


def _squares(heard: Heard) -> Float[Tensor, "num_kv_heads places"]:
    """The squared attention that each position receives in a step, on the CPU; and a last place, for none, with 0."""
    q_len, kv_len = heard.queries.shape[2], heard.keys.shape[2]
    shown = torch.ones(q_len, kv_len, dtype=torch.bool, device=heard.keys.device).tril(kv_len - q_len)
    paid = heard.kernel.probabilities(heard.queries, heard.keys, shown[None, None])[0]
    squares = paid.square_().sum(dim=2).mean(dim=1).cpu().double()
    squares[:, :_SINKS] = 0
    return torch.nn.functional.pad(squares, (0, 1))
