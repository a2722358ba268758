"""What a caller may ask for as a budget."""

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
