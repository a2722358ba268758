"""The cells of a comparison by retrieval: every task, language, length and depth, by every method and budget."""

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

from experiments.entrants import Entrant, at_budget, check_on, usual, written
from experiments.grid.cell import Cell
from experiments.grid.networks import Network
from experiments.results import Row
from experiments.retrieval.cell import FUNCTION
from experiments.retrieval.filler import of_language, of_text
from experiments.retrieval.prompts import HIDING, PASSKEY, Language, Reading, hidden
from experiments.retrieval.streameval import STREAMEVAL, lines, stream, tokens_back
from experiments.retrieval.wording import LANGUAGES
from experiments.stream_cell import FULL, POLICY
from sinkcache.policies import Window
from sinkcache.texts import Text

TASKS = (*HIDING, STREAMEVAL)
_CALIBRATED = re.compile(r"\s*calibrated\s*", re.IGNORECASE)
_READS_AHEAD = re.compile(r"\bClairvoyant\b")


def check(given: argparse.Namespace) -> None:
    """Raises ValueError for what is wrong whatever the model is."""
    for text in given.policy or []:
        if _READS_AHEAD.search(text):
            raise ValueError(
                f"--policy {text}: Clairvoyant must have seen the text attended to in advance, its answer too, so that "
                "retrieval by it says nothing: leave it out"
            )
        if not _CALIBRATED.fullmatch(text):
            for budget in given.budget:
                written(text, budget)
    if set(given.task) & set(HIDING):
        shortest = min(given.length)
        for budget in (each for each in given.budget if each >= shortest):
            raise ValueError(f"--budget {budget} evicts nothing from --length {shortest}: lower the budget")


def cells_of(one: Network, text: Text | None, given: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a model. Raises ValueError if one of them makes no sense."""
    entrants = list(_entrants(one, given))
    for setting, readings in _settings(one, text, given):
        _check_lengths(one, readings, given)
        setting |= {"trials": sum(len(each.questions) for each in readings), "seed": given.seed}
        whole = json.dumps([asdict(each) for each in readings])
        setting["prompts_sha256"] = hashlib.sha256(whole.encode()).hexdigest()
        for entrant in entrants:
            told = {name: value for name, value in entrant.asked().items() if name not in ("horizon", "every")}
            ways = product(given.positions, given.chunk) if entrant.method == POLICY else [(None, None)]
            for positions, chunk in ways:
                asked = {"kind": "retrieval", **one.asked, **setting, **told, "positions": positions, "chunk": chunk}
                yield Cell(FUNCTION, asked, readings)


def _entrants(one: Network, given: argparse.Namespace) -> Iterator[Entrant]:
    """The full cache and the window, which are always there, and the policies asked for, no two alike at a budget."""
    if not given.no_full:
        yield Entrant(FULL, FULL)
    for budget in given.budget:
        known = set()
        policies = given.policy or usual(one, given.layer_budgets)
        asked = [at_budget(each, budget, one, given.layer_budgets) for each in policies]
        for entrant in (Entrant("window", POLICY, budget, Window()), *asked):
            alike = (repr(entrant.policy), entrant.budgets)
            if alike not in known:
                known.add(alike)
                check_on(one, entrant)
                yield entrant


def _settings(
    one: Network, text: Text | None, given: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], list[Reading]]]:
    """What is asked of each setting, and what is read in it."""
    seeds = range(given.seed, given.seed + given.trials)
    for task, name in product(given.task, given.language):
        wording = LANGUAGES[name]
        language = Language(one.tokenizer, wording, of_language(wording) if text is None else of_text(text))
        told: Row = {"task": task, "language": name}
        if task == STREAMEVAL:
            most = max(lines(each, given.every, given.trials) for each in given.distance)
            for distance in given.distance:
                reading = stream(language, distance, given.every, given.trials, given.seed, most)
                back = {"lines": distance, "tokens": tokens_back(reading)}
                yield told | {"length": len(reading.ids), "depth": None, "distance": back}, [reading]
            continue
        for length, depth in product(given.length, given.depth):
            readings = [hidden(language, task, length, depth, given.keys, seed) for seed in seeds]
            keys = 1 if task == PASSKEY else given.keys
            yield told | {"length": length, "depth": depth, "keys": keys}, readings


def _check_lengths(one: Network, readings: list[Reading], given: argparse.Namespace) -> None:
    longest, shortest = (pick(len(each.ids) for each in readings) for pick in (max, min))
    for budget in (each for each in given.budget if each >= shortest):
        raise ValueError(f"--budget {budget} evicts nothing from a stream of {shortest} tokens: lower the budget")
    if one.trained is None or longest <= one.trained:
        return
    beyond = f"{longest:,} tokens are more than the {one.trained:,} that {one.name} was trained to read"
    if not given.no_full:
        raise ValueError(
            f"{beyond}, so that its full cache sets no standard: shorter ones, or leave it out (--no-full)"
        )
    if "original" in given.positions:
        raise ValueError(f"{beyond}, and so many positions: shorter ones, or --positions cache")
