"""Runs made up for the tests of reports: cells written as the store has them, with scores that are known."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VERSIONS = {"sinkcache": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}
COMMAND = ["python", "-m", "experiments.compare_policies", "--text", "a book.txt", "--budget", "64"]
METHODS = {"full": "full", "recompute": "recompute", "reread": "reread"}
Row = dict[str, Any]


def nlls(count: int, seed: int, level: float = 3.0, noise: float = 1.0) -> np.ndarray:
    """Scores of a text of `count` tokens, the first of which is not scored."""
    values = np.random.default_rng(seed).gamma(level / noise, noise, size=count)
    values[0] = np.nan
    return values


def stream(
    folder: Path,
    name: str,
    nll: np.ndarray,
    text: str = "one",
    kl: np.ndarray | None = None,
    agree: np.ndarray | None = None,
    figures: Row | None = None,
    cost: Row | None = None,
    date: str = "2026-01-02T03:04:05+00:00",
    command: Sequence[str] = COMMAND,
    **asked: Any,
) -> Row:
    """Writes a finished cell of kind "stream"; returns its row."""
    method = METHODS.get(name.partition(" ")[0], "policy")
    budget = None if method == "full" else 64
    bounded = method == "policy"
    whole: Row = {
        **{"kind": "stream", "model": "tiny", "revision": None, "weights": "abc", "dtype": "float32", "device": "cpu"},
        **{"attention": "sdpa", "threads": 1, "text": text, "text_sha256": hashlib.sha256(text.encode()).hexdigest()},
        **{"ids_sha256": "ids of " + text, "tokens": len(nll), "bos": None, "method": method, "name": name},
        "bytes_of_text": 4 * (len(nll) - 1),
        **{"policy": f"{name}()" if bounded else None, "budget": budget, "budgets": None, "chunk": 16},
        **{"positions": "cache" if bounded else None, "every": None, "versions": VERSIONS, **asked},
    }
    scored = ~np.isnan(nll)
    kl = np.where(scored, 0.0, np.nan) if kl is None else kl
    agree = np.where(scored, 1.0, np.nan) if agree is None else agree
    found = {**figures_of(whole, nll, kl, agree), **(figures or {})}
    costs = {"prefill_seconds": 0.5, "ms_per_token": 12.5, "tokens_per_second": 80.0}
    row = line("experiments.stream_cell:measure", whole, found, cost or costs, date, command)
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    save_file({"nll": nll, "kl": kl, "agree": agree}, folder / "scores" / f"{row['key']}.safetensors")
    return append(folder, row)


def figures_of(asked: Row, nll: np.ndarray, kl: np.ndarray, agree: np.ndarray) -> Row:
    """What a cell with these scores tells."""
    scored = ~np.isnan(nll)
    first = None if asked["budget"] is None else asked["budget"] + 1
    bounded = asked["method"] == "policy"
    after = np.arange(len(nll)) >= (first or 0)
    return {
        "perplexity": float(np.exp(nll[scored].mean())),
        "scored": int(scored.sum()),
        "perplexity_after": float(np.exp(nll[scored & after].mean())) if first and (scored & after).any() else None,
        "after": int((scored & after).sum()),
        "first_after": first,
        "kl": float(np.nanmean(kl[after])) if after.any() and (scored & after).any() else None,
        "top1": float(np.nanmean(agree[after])) if after.any() and (scored & after).any() else None,
        **{"recall": 0.75 if bounded else None, "recall_best": 0.9 if bounded else None},
        **{"bytes": 2**20 * (1 if bounded else 8), "bytes_peak": 2**21 * (1 if bounded else 8)},
        "held": 2.0 * (asked["budget"] or 0) if bounded else None,
        "curve": [[64, 10.5], [len(nll), 11.5]],
    }


def retrieval(folder: Path, name: str, hits: Sequence[int], visible: Sequence[int | None], **asked: Any) -> Row:
    """Writes a finished cell of kind "retrieval"; returns its row."""
    method = METHODS.get(name, "policy")
    whole: Row = {
        **{"kind": "retrieval", "model": "tiny", "revision": None, "weights": "abc", "dtype": "float32"},
        **{"device": "cpu", "attention": "sdpa", "threads": 1, "task": "passkey", "language": "en", "length": 512},
        **{"depth": 0.5, "trials": len(hits), "seed": 0, "prompts_sha256": "prompts", "method": method, "name": name},
        **{"policy": f"{name}()" if method == "policy" else None, "budget": 64 if method == "policy" else None},
        **{"budgets": None, "positions": "cache" if method == "policy" else None, "chunk": 16, "versions": VERSIONS},
        **asked,
    }
    figures = {"hits": list(hits), "accuracy": sum(hits) / len(hits), "answers": ["12345"] * len(hits)}
    figures |= {"expected": ["12345"] * len(hits), "visible": list(visible)}
    return append(folder, line("experiments.retrieval:measure", whole, figures, {"seconds": 1.0}))


def failed(folder: Path, name: str, reason: str, text: str = "one", **asked: Any) -> Row:
    """Writes a cell of kind "stream" that failed; returns its row."""
    method = METHODS.get(name, "policy")
    whole = {"kind": "stream", "model": "tiny", "text": text, "name": name, "method": method, "budget": 64, **asked}
    row = {**line("experiments.stream_cell:measure", whole, {}, {}), "status": "failed", "reason": reason}
    return append(folder, row)


def line(
    function: str, asked: Row, figures: Row, cost: Row, date: str = "2026-01-02T03:04:05+00:00", command: Any = COMMAND
) -> Row:
    """A finished cell as a line of `results.jsonl` has it."""
    key = hashlib.sha256(json.dumps([function, asked], sort_keys=True).encode()).hexdigest()[:16]
    return {
        **{"key": key, "function": function, "kind": asked["kind"], "status": "done", "reason": None, "asked": asked},
        **{"figures": figures, "cost": cost, "date": date, "command": list(command), "arrays": []},
        "host": {"python": "3.11.7", "system": "Linux", "cores": 2},
    }


def append(folder: Path, row: Row) -> Row:
    """Adds a line to `results.jsonl`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(row, sort_keys=True) + "\n")
    return row


def grid(folder: Path, documents: int = 2, budgets: Sequence[int] = (64, 128), tokens: int = 700, **asked: Any) -> None:
    """A whole run: the full cache, six policies of which two are alike, a sampled recompute and a reread."""
    for document in range(documents):
        text, base = f"book {document}", nlls(tokens + 50 * document, document)
        generator = np.random.default_rng(100 + document)
        stream(folder, "full", base, text, **asked)
        for budget in budgets:
            for index, (name, worse) in enumerate(
                {"window": 1.2, "StreamingLLM": 0.15, "H2O(recent=32)": 0.05, "TOVA": 0.05, "Clairvoyant": 0.01}.items()
            ):
                harm = worse * 64 / budget * generator.gamma(1.0, 1.0, size=len(base))
                harm[: budget + 1] = 0
                agree = (generator.random(len(base)) > worse / 2).astype(float)
                cost = {"ms_per_token": 10.0 + index + document, "prefill_seconds": 0.5, "tokens_per_second": 99.0}
                figures = {"recall": 0.95 - worse / 2, "bytes": budget * 2**14, "bytes_peak": budget * 2**15}
                stream(folder, name, base + harm, text, harm / 3, agree, figures, cost, budget=budget, **asked)
            sampled = base + 0.03
            sampled[budget + 1 :][np.arange(len(base) - budget - 1) % 32 != 0] = np.nan
            stream(folder, "recompute 1/32", sampled, text, budget=budget, every=32, chunk=None, **asked)
            stream(folder, "reread 64", base + 0.04, text, budget=budget, every=64, chunk=None, **asked)
