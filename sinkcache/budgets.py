"""What a caller may ask for as a budget, and how one may differ from layer to layer."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any


def asked_budgets(budget: Any, layers: int) -> list[int | float]:
    """The budget of each of `layers` bounded layers: tokens, or a share in (0, 1] of the prompt.

    Raises TypeError or ValueError for anything but one such number or a list of one for each layer.
    """
    if not isinstance(budget, (list, tuple)):
        return [_asked(budget)] * layers
    each = [_asked(one) for one in budget]
    if len(each) != layers:
        raise ValueError(f"budget has {len(each)} entries for {layers} bounded layers: give one number for each")
    return each


def _asked(budget: Any) -> int | float:
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be tokens (a whole number) or a share of the prompt (a float), got {budget!r}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"a budget as a share of the prompt must be in (0, 1], got {budget}: for tokens give an int")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"budget must be at least 1 token, got {budget}")
    return budget


def pyramid(budget: int, layers: int, beta: int | float = 20, window: int = 0) -> list[int]:
    """Budgets that fall from the first of `layers` layers to the last in equal steps, `budget` tokens on average.

    Each layer gets `window` tokens and a share of the rest, the last `1 / beta` of the average share. The sum is
    `layers * budget` to the token: of the fractions the largest are rounded up, and no layer gets less than 1 token.
    PyramidKV (Cai et al., 2024, section 3, arXiv 2406.02069), whose code rounds the steps and hands out up to 5% more.

    >>> pyramid(12, layers=4, window=2)
    [22, 15, 9, 2]
    """
    for name, number, least in (("budget", budget, 1), ("layers", layers, 1), ("window", window, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, got {number!r}")
    if window > budget:
        raise ValueError(f"window must be at most the budget, got window={window} with budget={budget}")
    if not 1 <= beta < math.inf:
        raise ValueError(f"beta must be 1 (all layers alike) or more, got {beta}")
    share = budget - window
    last = Fraction(share) / Fraction(beta)
    fall = 2 * (share - last) / max(layers - 1, 1)
    exact = [2 * share - last - fall * layer for layer in range(layers)] if layers > 1 else [Fraction(share)]
    tokens = [window + one for one in _whole(exact)]
    while min(tokens) < 1:
        tokens[tokens.index(min(tokens))] += 1
        tokens[tokens.index(max(tokens))] -= 1
    return tokens


def scaled(budgets: Sequence[int], budget: int, least: int = 1) -> list[int]:
    """The shares that layers have in `budgets`, at `budget` tokens on average: what was found at one size, at another.

    The sum is `len(budgets) * budget` to the token: of the fractions the largest are rounded up. What layers lack of
    `least` is taken, token by token, from whichever has most.

    >>> scaled([64, 128, 64, 256], budget=64)
    [32, 64, 32, 128]
    >>> scaled([64, 128, 64, 256], budget=64, least=40)
    [40, 64, 40, 112]
    """
    numbers = [("budget", budget), ("least", least), *(("a layer's budget", each) for each in budgets)]
    for name, number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a whole number of tokens, 1 or more, got {number!r}")
    if not budgets:
        raise ValueError("budgets must have an entry for each bounded layer, got none")
    if least > budget:
        raise ValueError(f"least must be at most the budget, got least={least} with budget={budget}")
    tokens = _whole([Fraction(each * len(budgets) * budget, sum(budgets)) for each in budgets])
    while min(tokens) < least:
        tokens[tokens.index(min(tokens))] += 1
        tokens[tokens.index(max(tokens))] -= 1
    return tokens


def evened(budgets: Sequence[int], even: int | float) -> list[int]:
    """Budgets between those given and their mean, which must be a whole number: `even` 0 is as they are, 1 all alike.

    The sum stays the same to the token: of the fractions the largest are rounded up.

    >>> evened([64, 128, 64, 256], even=0.25)
    [80, 128, 80, 224]
    """
    if not 0 <= even <= 1:
        raise ValueError(f"even must be between 0 (as found) and 1 (all alike), got {even}")
    mean, part = Fraction(sum(budgets), len(budgets)), Fraction(even)
    return _whole([part * mean + (1 - part) * each for each in budgets])


def _whole(exact: Sequence[Fraction]) -> list[int]:
    """Whole numbers of the same, whole, sum: those with the largest fractions are rounded up."""
    tokens = [math.floor(one) for one in exact]
    by_fraction = sorted(range(len(exact)), key=lambda index: tokens[index] - exact[index])
    for index in by_fraction[: int(sum(exact)) - sum(tokens)]:
        tokens[index] += 1
    return tokens
