"""Budgets by layer for `policy_quality`: stored for the embedded model, found for others on the embedded text.

`calibrated.json` holds, by the fingerprint of a model's weights, the list and the command that made it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.subject import Subject
from experiments.whole import put
from sinkcache.book import least_budget
from sinkcache.budgets import scaled
from sinkcache.calibration import calibrate
from sinkcache.policies import H2O
from sinkcache.texts import embedded, tokenize

POLICY = H2O(recent=16, num_sinks=4, half_life=256, reduce="mean")
BUDGET, TOKENS = 256, 3072
STORED = Path(__file__).with_name("calibrated.json")


class Calibrated:
    """The list of a subject's model, at any budget; one that has to be found is kept in `folder`."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say

    def budgets(self, read: Subject, budget: int) -> list[int]:
        """Tokens for each bounded layer, `budget` on average: the shares are the same at each."""
        return scaled(self._found(read), budget, least_budget(POLICY, budget))

    def _found(self, read: Subject) -> list[int]:
        weights = read.identity["weights"]
        if weights in (stored := _stored()):
            return stored[weights]["budgets"]
        path = self.folder / f"calibrated-{weights}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["policy"] == repr(POLICY):
                return kept["budgets"]
        self.say(f"calibrating {read.identity['model']} on {embedded().name}")
        found = calibrate(read.model, tokenize(embedded(), read.tokenizer, TOKENS).to(read.ids.device), POLICY, BUDGET)
        put(path, json.dumps({"policy": repr(POLICY), "budgets": found}) + "\n")
        return found


def _stored() -> dict[str, Any]:
    return json.loads(STORED.read_text(encoding="utf-8"))
