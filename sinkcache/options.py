"""What the command line's options are made of: a parser that reports a mistake in one line, and types of values."""

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage before it."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def number(kind: Callable[[str], int | float], least: int) -> Callable[[str], int | float]:
    """The type of an option that is a number of `kind`, `least` or more and finite."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {noun}, {least} or more, got {text!r}")
        return value

    return parse


def budgets(text: str) -> int | float | list[int | float]:
    """Tokens, or a share of the prompt; or a list of these, one for each layer, as `calibrate` prints it."""
    if "," not in text and not text.startswith("["):
        return _budget(text)
    return [_budget(each.strip()) for each in text.removeprefix("[").removesuffix("]").split(",")]


def _budget(text: str) -> int | float:
    try:
        value = float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        value = math.nan
    if isinstance(value, int) and value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 token, got {text}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"must be tokens (a whole number) or a share of the prompt in (0, 1], got {text!r}"
        )
    return value


def device(text: str) -> "torch.device":
    """One that tensors can be put on here."""
    import torch  # takes seconds, and `plan` does without

    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here ({reason}): try cpu") from error
