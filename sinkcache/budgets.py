"""What a caller may ask for as a budget."""

from typing import Any


def asked_budget(budget: Any, layers: int) -> int | float:
    """The budget that `layers` bounded layers share: tokens, or a share in (0, 1] of the prompt.

    Raises TypeError or ValueError for anything else, with the value and the way out.
    """
    if isinstance(budget, (list, tuple)):
        for each in budget:
            asked_budget(each, layers)
        if len(budget) != layers:
            raise ValueError(f"budget has {len(budget)} entries for {layers} bounded layers: give one number for each")
        if len(set(budget)) > 1:
            raise ValueError(f"budgets that differ between layers are not supported yet, got {budget}: give one number")
        budget = budget[0]
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be tokens (a whole number) or a share of the prompt (a float), got {budget!r}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"a budget as a share of the prompt must be in (0, 1], got {budget}: for tokens give an int")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"budget must be at least 1 token, got {budget}")
    return budget
