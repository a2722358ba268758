"""Who is compared: policies as a person writes them, and the baselines that are always there.

A policy is written as `python -m sinkcache policies` lists it, `H2O(recent=64)`; a field may depend on the budget, as
in `H2O(recent=budget//2)`. `calibrated` is the recommended policy with a budget of its own for each layer.
"""

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from experiments.calibrated import POLICY, STORED
from experiments.grid.networks import Network
from experiments.options import choices, numbers
from experiments.results import Row
from experiments.stream_cell import FULL, RECOMPUTE, REREAD
from experiments.stream_cell import POLICY as BY_POLICY
from sinkcache.book import check_budget, least_budget
from sinkcache.budgets import asked_budgets, scaled
from sinkcache.models import EMBEDDED
from sinkcache.plugins import named, qualified
from sinkcache.policies import Clairvoyant, Window
from sinkcache.policy import Policy
from sinkcache.recording import Recording
from sinkcache.support import bounded_layers, decoder_config

CALIBRATED = "calibrated"
DEFAULT = (
    "StreamingLLM(num_sinks=4)",
    "H2O(recent=budget//2)",
    "SnapKV()",
    "TOVA()",
    "ExpectedAttention(horizon=128, recent=32)",
    CALIBRATED,
)
_SHARE = re.compile(r"\bbudget\s*(?://\s*(\d+))?")


@dataclass(frozen=True)
class Entrant:
    """A method at a budget: `name` is what tables call it, the same at each budget."""

    name: str
    method: str
    budget: int | None = None
    policy: Policy | None = None
    budgets: tuple[int, ...] | None = None
    horizon: int | None = None
    every: int | None = None

    def asked(self) -> Row:
        """What of a cell depends on it."""
        policy = None if self.policy is None else repr(self.policy)
        if self.horizon is not None:
            policy = f"Clairvoyant(horizon={self.horizon})"
        return {
            "method": self.method,
            "name": self.name,
            "policy": policy,
            "budget": self.budget,
            "budgets": None if self.budgets is None else list(self.budgets),
            "horizon": self.horizon,
            "every": self.every,
            **({"code": code} if (code := _code(self.policy)) else {}),
        }


def usual(network: Network, layer_budgets: Path | None) -> list[str]:
    """Who is compared if nobody is named; the calibrated policy only where its budgets by layer are known."""
    return [each for each in DEFAULT if each != CALIBRATED or layer_budgets is not None or network.name == EMBEDDED]


def add_options(group: Any) -> None:
    """Adds what says who is compared, how large and at which positions."""
    group.add_argument("--policy", nargs="+", metavar="P", help=(
        f'each its own argument, as "H2O(recent=budget//2)" is; {CALIBRATED}: a budget for each layer; without: '
        + ", ".join(DEFAULT)))  # fmt: skip
    group.add_argument("--layer-budgets", type=Path, metavar="FILE", help=(
        f"what `python -m sinkcache calibrate` printed for the model, for {CALIBRATED}"))  # fmt: skip
    group.add_argument("--budget", type=numbers(1), default="128,256", metavar="N,N", help="tokens a layer holds")
    group.add_argument("--positions", type=choices("cache", "original"), default="original", help=(
        "inside the cache, or those of the text"))  # fmt: skip


def written(text: str, budget: int) -> Policy:
    """The policy that `text` writes, at a budget. Raises ValueError, which names the text, if it is none."""
    if any(int(part) == 0 for part in _SHARE.findall(text) if part):
        raise ValueError(f"a policy's share of the budget is written as budget//2, got {text!r}")
    filled = _SHARE.sub(lambda found: str(budget // int(found[1] or 1)), text)
    try:
        policy = named(filled)
        check_budget(policy, budget, 1)
        if named(repr(policy)) != policy:  # a cell has its policy as it is written
            raise ValueError(f"{policy!r} is another policy when it is read again: its fields and name must be in it")
    except ValueError as error:
        raise ValueError(f"--policy {text}: {error}") from error
    return policy


def at_budget(text: str, budget: int, network: Network, layer_budgets: Path | None) -> Entrant:
    """The entrant that `text` writes. Raises ValueError if it is none, or cannot be had on this model or budget."""
    if text.strip().lower() != CALIBRATED:
        return Entrant(text.strip(), BY_POLICY, budget, written(text, budget))
    shares = _layer_budgets(network, layer_budgets)
    try:
        check_budget(POLICY, budget, 1)
    except ValueError as error:
        raise ValueError(f"--policy {CALIBRATED}: {error}") from error
    budgets = scaled(shares, budget, least_budget(POLICY, budget))
    return Entrant(CALIBRATED, BY_POLICY, budget, POLICY, tuple(budgets))


def baselines(budgets: Sequence[int], horizon: int, recompute: int, reread: int, tokens: int) -> list[Entrant]:
    """The full cache; and at each budget the window, its two recomputed forms, and who knows the text."""
    found = [Entrant("full", FULL)]
    for budget in budgets:
        empty = Clairvoyant(Recording(1, tokens, {}), horizon)
        found += [
            Entrant("window", BY_POLICY, budget, Window()),
            Entrant(f"Clairvoyant({horizon})", BY_POLICY, budget, empty, horizon=horizon),
            Entrant("recompute" if recompute == 1 else f"recompute 1/{recompute}", RECOMPUTE, budget, every=recompute),
            Entrant(f"reread {reread}", REREAD, budget, every=reread),
        ]
    return found


def check_on(network: Network, entrant: Entrant) -> None:
    """Raises ValueError if the model's config says already that its layers cannot be bounded so."""
    config = decoder_config(network.config, "original")
    bounded = bounded_layers(config, list(DynamicCache(config=config).layers), "native")
    asked_budgets(list(entrant.budgets or []) or entrant.budget or 1, len(bounded))


def _code(policy: Policy | None) -> dict[str, str]:
    """Of each policy that is not of this package, a hash of its file: an edit is another policy under the same name."""
    if policy is None:
        return {}
    kind, found = type(policy), {}
    for inner in (getattr(policy, each.name) for each in fields(policy)):
        found |= _code(inner) if isinstance(inner, Policy) else {}
    if not kind.__module__.startswith("sinkcache."):
        file = inspect.getsourcefile(kind)
        content = b"" if file is None else Path(file).read_bytes()
        found[qualified(kind)] = hashlib.sha256(content).hexdigest()[:16]
    return found


def _layer_budgets(network: Network, path: Path | None) -> list[int]:
    """The budgets by layer that were found for a model: in the file given, or those that are stored for one."""
    if path is None:
        if network.name != EMBEDDED:
            raise ValueError(
                f"--policy {CALIBRATED} needs the budgets of {network.name} by layer: let `python -m sinkcache "
                f"calibrate --model {network.name} > budgets.json` find them and give --layer-budgets budgets.json"
            )
        (stored,) = json.loads(STORED.read_text(encoding="utf-8")).values()
        return stored["budgets"]
    try:
        found = ast.literal_eval(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"--layer-budgets {path} cannot be read as a list of numbers: {error}") from error
    if not isinstance(found, list) or not all(type(each) is int and each > 0 for each in found):
        raise ValueError(f"--layer-budgets {path} must hold a list of whole numbers of tokens, one for each layer")
    return found
