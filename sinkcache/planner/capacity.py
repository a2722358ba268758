"""How many users fit: the rules of `sinkcache.planner.engines` turned round.

Bounds are of memory alone. What an engine needs beside weights and cache (activations, copies while tensors are joined,
allocator and driver) is not in a config: leave room for it, or measure it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sinkcache.planner.engines import Engine
from sinkcache.planner.kinds import Model, check_tokens

_MOST = 1 << 24  # users or tokens that are looked for at most


@dataclass(frozen=True)
class Class:
    """Requests of one kind: tokens read, tokens written, and the share of all requests that they are."""

    prompt: int
    answer: int
    share: int | float

    def __post_init__(self) -> None:
        check_tokens("a request's input", self.prompt)
        check_tokens("a request's output", self.answer, 0)
        if not 0 < self.share <= 1:
            raise ValueError(f"the share of a class of requests must be in (0, 1], got {self.share}")

    @property
    def length(self) -> int:
        """Tokens of the whole conversation."""
        return self.prompt + self.answer


def users(engine: Engine, model: Model, memory: int, length: int) -> int:
    """How many conversations of `length` tokens fit into `memory` bytes at once."""
    check_tokens("length", length)
    return _most(lambda count: engine.together(model, {length: count}) <= memory)


def longest(engine: Engine, model: Model, memory: int, count: int = 1) -> int:
    """The greatest length at which `count` conversations fit into `memory` bytes; 0 if none does."""
    check_tokens("users", count)
    return _most(lambda length: engine.together(model, {length: count}) <= memory)


def mixed(engine: Engine, model: Model, memory: int, classes: list[Class]) -> dict[Class, int]:
    """Of each class how many conversations fit at once, in proportion to their shares.

    Users are shared out by largest remainders. Raises ValueError unless shares sum to 1.
    """
    total = sum(each.share for each in classes)
    if not classes or abs(total - 1) > 1e-6:
        raise ValueError(f"the shares of the classes must sum to 1, got {total:g}")

    def fits(count: int) -> bool:
        lengths: dict[int, int] = {}
        for each, number in shared_out(classes, count).items():
            if number:
                lengths[each.length] = lengths.get(each.length, 0) + number
        return engine.together(model, lengths) <= memory

    return shared_out(classes, _most(fits))


def shared_out(classes: list[Class], count: int) -> dict[Class, int]:
    """`count` users, whole ones, by the shares of their classes; of the fractions the largest are rounded up.

    Raises ValueError if a class is there twice.
    """
    for index, each in enumerate(classes):
        if each in classes[:index]:
            raise ValueError(f"the class {each.prompt}:{each.answer}:{each.share} is there twice: add up its shares")
    exact = [each.share * count for each in classes]
    whole = [int(each + 1e-9) for each in exact]
    by_fraction = sorted(range(len(classes)), key=lambda index: whole[index] - exact[index])
    for index in by_fraction[: count - sum(whole)]:
        whole[index] += 1
    return dict(zip(classes, whole, strict=True))


def largest_budget(made: Callable[[int], Engine], model: Model, memory: int, users: dict[int, int]) -> int:
    """The largest budget (tokens a layer) with which these conversations fit; `made(budget)` is the engine; 0: none.

    A budget need not exceed the longest conversation.
    """

    def fits(budget: int) -> bool:
        try:
            engine = made(budget)
        except ValueError:  # too small for its policy: a larger one may do
            return True
        return engine.together(model, users) <= memory

    limit = max(users, default=1)
    found = limit if fits(limit) else _most(fits, limit)  # at the limit nothing is turned: a little less may need more
    try:
        return found if found and made(found).together(model, users) <= memory else 0
    except ValueError:
        return 0


@dataclass(frozen=True)
class Knob:
    """A setting and the bytes of a conversation with it."""

    name: str
    bytes: int
    saved: int


def knobs(engine: Engine, model: Model, length: int, choices: dict[str, Engine]) -> list[Knob]:
    """What each setting saves of a conversation of `length` tokens, most first; those without a rule are left out."""
    now, found = engine.held(model, length), []
    for name, choice in choices.items():
        try:
            then = choice.held(model, length)
        except ValueError:
            continue
        found.append(Knob(name, then, now - then))
    return sorted(found, key=lambda knob: -knob.saved)


def recomputed(prompt: int, answer: int) -> tuple[int, int]:
    """Tokens whose keys and values are computed without a cache, where each new token reads all before it, and with."""
    check_tokens("prompt", prompt)
    check_tokens("answer", answer, 0)
    return answer * prompt + answer * (answer - 1) // 2, prompt + answer


def _most(fits: Callable[[int], bool], limit: int = _MOST) -> int:
    """The greatest number up to `limit` that `fits`, where all below it do; 0 if 1 does not."""
    low, high = 0, 1
    while high < limit and fits(high):
        low, high = high, min(2 * high, limit)
    if low < high == limit and fits(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
