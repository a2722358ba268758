"""What every policy must keep, as a test that its author runs: `check_policy(Mine())`, in a test or at a prompt.

A policy is asked by many layers, rows and steps, about slots that are in no order and may be empty, and caches that
hold it are copied, pickled and saved. What goes wrong there is silent: other tokens are kept than were meant. Each
check says in an AssertionError what is violated, by which value, and the way out.
"""

import pickle
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sinkcache.policy import Policy, Watch
from sinkcache.testing_caches import CACHES, Run
from sinkcache.testing_scores import SCORES, Case, heads_alike


def check_policy(
    policy: Policy,
    budget: int = 64,
    model: nn.Module | None = None,
    heads: Literal["alike", "by number"] = "alike",
) -> list[str]:
    """What was checked, a line each; raises AssertionError for what `policy` violates, ValueError for this budget.

    Scores are checked on random entries, then caches of `budget` tokens on `model` or a tiny random Llama: some
    seconds. Give `heads="by number"` for a policy that is meant to treat the heads of a layer differently.
    """
    if heads not in ("alike", "by number"):
        raise ValueError(f'heads must be "alike" or "by number", got {heads!r}')
    case, done = Case(policy, budget), []
    with torch.random.fork_rng(devices=[]):
        for claim, check in {**OBJECT, **SCORES}.items():
            if check is not heads_alike or heads == "alike":
                check(case)
                done.append(claim)
        run = Run(policy, budget, model)
        for claim, check in CACHES.items():
            check(run)
            done.append(claim)
    case.require(policy == case.twin, f"it was {case.twin!r} before it was used: a policy must not change")
    if unread := sorted(set(case.asked) - case.read):
        done.append(f"note: watch() asks for {', '.join(unread)}, which score never read, at the price of storing it")
    return done


def _plain(case: Case) -> None:
    policy, kind = case.policy, type(case.policy).__name__
    way = f"give an object of it, {policy.__name__}()" if isinstance(policy, type) else "subclass sinkcache.Policy"
    _require(isinstance(policy, Policy), f"{policy!r} is no Policy object: {way}")
    decorated = "__dataclass_params__" in vars(type(policy))
    _require(decorated, f"{kind} is no dataclass of its own: decorate it with @dataclass(frozen=True)")
    for name, value in vars(policy).items():
        owner = _owner(value)
        _require(owner is None, f"{kind}.{name} holds a {owner}: a policy owns no tensor, give it numbers alone")
    try:
        case.twin = pickle.loads(pickle.dumps(policy))
    except Exception as error:
        way = "define the class in a module, and have its fields hold plain values"
        raise AssertionError(f"{policy!r} cannot be pickled ({type(error).__name__}: {error}): {way}") from error
    way = "leave @dataclass its eq=True"
    _require(case.twin == policy, f"{policy!r} does not equal its pickled copy: {way}, and compare fields by value")
    try:
        same = hash(case.twin) == hash(policy)
    except TypeError as error:
        raise AssertionError(f"{policy!r} cannot be hashed ({error}): have fields hold tuples, not lists") from error
    _require(same, f"{policy!r} and its pickled copy are equal but hash differently: {way}")


def _declared(case: Case) -> None:
    case.policy.check(case.budget)
    watch = case.policy.watch()
    case.require(
        isinstance(watch, Watch), f"watch() returned a {type(watch).__name__}: return a sinkcache.policy.Watch"
    )
    again = case.policy.watch()
    case.require(again == watch, f"watch() returned {watch}, then {again}: it must be the same each time")
    names = ("mass", "window", "keys", "values", "queries")
    case.asked = tuple(name for name in names if getattr(watch, name))
    convention = case.policy.convention
    case.require(convention in ("cache", "original"), f'convention is "cache" or "original", got {convention!r}')


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(broken)


def _owner(value: Any) -> str | None:
    """The type of what has tensors within `value`, if anything has."""
    if isinstance(value, (Tensor, nn.Module)) or type(value).__module__ == "numpy":
        return type(value).__name__
    if isinstance(value, Policy):
        return next(filter(None, map(_owner, vars(value).values())), None)
    if isinstance(value, dict):
        value = list(value.values())
    return next(filter(None, map(_owner, value)), None) if isinstance(value, (list, tuple, set, frozenset)) else None


OBJECT: dict[str, Callable[[Case], None]] = {
    "a frozen dataclass without tensors, which compares, hashes and pickles": _plain,
    "watch, check and convention say what a cache needs to know": _declared,
}
