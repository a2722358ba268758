"""kvpress against ours: the same algorithm, tokens and number of entries, each in its own environment.

    python -m venv PEER
    PEER/bin/pip install torch==2.13.0 kvpress==0.5.5    # which resolves to transformers 5.2.0
    python -m benchmarks.head_to_head --peer PEER/bin/python [--text FILE ...] [--out FOLDER]

kvpress 0.5.5 does not run with transformers 5.4 or later, hence two environments: token ids and results pass between
them as JSON in FOLDER, weights as safetensors. `benchmarks/peers/kvpress_peer.py` is the other side; what it answered
is used again while the job is the same. Unless the two agree on the full cache's perplexity to 0.1%, nothing is shown.

First table, streaming: 128 entries a key head, read 32 tokens at a time, each chunk attending to 128 entries and
itself. Theirs evicts to 128 after a chunk; ours reduces a budget of 129 to 128 before the next: as many attend.
Second, continuation: a context of 1,024 tokens read in one pass and reduced, then 192 tokens read in one pass on top of
n entries; ours again with a budget of n + 1. Both at the positions of the document. "held" is storage between steps:
theirs n entries and at its peak n + 32 or the whole context, ours n + 1 and what the policy keeps of each.

Ratios are of perplexities, ours to theirs, below 1 where ours is better; the ± is two standard errors of the mean
difference of the tokens' log-likelihoods, taken as independent. A "sorted" press is theirs with one line added, which
keeps survivors in the order of the document (see the peer's file); "-": the other side has no such thing.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from benchmarks.machine import machine
from benchmarks.pairs import CONTINUATION, STREAMING, Pair, continuation_pairs, streaming_pairs
from experiments.calibrated import STORED
from sinkcache import SinkCache, prefill
from sinkcache.book import least_budget
from sinkcache.budgets import scaled
from sinkcache.memory import held_bytes
from sinkcache.metrics import score
from sinkcache.models import EMBEDDED, load
from sinkcache.policy import Policy
from sinkcache.streaming import step
from sinkcache.texts import embedded, from_file, tokenize

_AGREE = 1e-3  # of the perplexity of the full cache
_PEER = Path(__file__).parent / "peers" / "kvpress_peer.py"


@dataclass(frozen=True)
class Result:
    """Negative log-likelihoods of a run's scored tokens over all documents, and the most bytes its cache held."""

    nll: list[float]
    held: int

    @property
    def perplexity(self) -> float:
        """exp of the mean over all tokens."""
        return math.exp(statistics.fmean(self.nll))


def main() -> int:
    """Prints both tables; 0 if the two environments agree on the full cache."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_to_head", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--peer", metavar="PYTHON", help="of an environment with kvpress")
    parser.add_argument("--text", metavar="FILE", nargs="+", default=[], help="default: the embedded text")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("out/head_to_head"))
    options = parser.parse_args()
    if options.peer is None:
        commands = "\n".join((__doc__ or "").split("\n\n")[1].splitlines())
        print(f"kvpress needs an environment of its own; --peer names its Python:\n\n{commands}")
        return 2
    torch.set_num_threads(1)
    model, tokenizer = load(EMBEDDED)
    texts = [from_file(each) for each in options.text] or [embedded()]
    most = max(STREAMING["held"] + STREAMING["tokens"], CONTINUATION["context"] + CONTINUATION["tokens"])
    documents = {each.name: tokenize(each, tokenizer, most) for each in texts}
    for name, ids in documents.items():
        if ids.shape[1] < most:
            raise ValueError(f"text {name!r} has {ids.shape[1]} tokens, {most} are needed: give a longer one")
    answer = ask(options.peer, model, documents, options.out)
    theirs = {key: collected(runs) for key, runs in by_run(answer["runs"]).items()}
    whole = Pair(None, None)
    full_streaming = streaming(model, documents, whole)
    full_continuation = continuation(model, documents, whole, None)
    for part, mine in (("streaming", full_streaming), ("continuation", full_continuation)):
        other = theirs[part, "none", None].perplexity
        if abs(mine.perplexity / other - 1) > _AGREE:
            print(f"the environments disagree: {part}, full cache, ours {mine.perplexity:.4f}, theirs {other:.4f}")
            return 1
    print(f"{machine()}\ntheirs: {', '.join(f'{name} {version}' for name, version in answer['versions'].items())}")
    print("\n".join(f"{each.name}, SHA-256 {each.sha256[:16]}" for each in texts))
    print_streaming(model, documents, theirs, full_streaming)
    print_continuation(model, documents, theirs, full_continuation)
    return 0


def ask(peer: str, model: Any, documents: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """The peer's answer, from `folder` if it holds one to the same job."""
    folder.mkdir(parents=True, exist_ok=True)
    job: dict[str, Any] = {
        "model": str((folder / "model").resolve()),
        "threads": 1,
        "documents": [{"name": name, "ids": ids[0].tolist()} for name, ids in documents.items()],
        "streaming": STREAMING | {"presses": _names(streaming_pairs())},
        "continuation": CONTINUATION | {"presses": _names(continuation_pairs())},
    }
    asked = json.dumps(job) + _PEER.read_text()
    digest = hashlib.sha256(asked.encode()).hexdigest()
    question, answer = folder / "job.json", folder / "kvpress.json"
    if not answer.exists() or json.loads(answer.read_text())["digest"] != digest:
        if not (folder / "model" / "config.json").exists():
            model.save_pretrained(folder / "model")
        question.write_text(json.dumps(job | {"digest": digest}))
        command = [peer, str(_PEER), str(question), str(answer)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return json.loads(answer.read_text())


def _names(pairs: list[Pair]) -> list[str]:
    return ["none", *(pair.press for pair in pairs if pair.press is not None)]


def by_run(runs: list[dict[str, Any]]) -> dict[tuple[str, str, float | None], list[dict[str, Any]]]:
    """Runs that differ in the document alone, under (part, press, ratio)."""
    grouped = defaultdict(list)
    for run in runs:
        grouped[run["part"], run["name"], run["ratio"]].append(run)
    return grouped


def collected(runs: list[dict[str, Any]]) -> Result:
    """One result of the runs over all documents, in order."""
    return Result([each for run in runs for each in run["nll"]], max(run["bytes"] for run in runs))


def streaming(model: nn.Module, documents: dict[str, Tensor], pair: Pair) -> Result:
    """Ours, on the tokens that the peer scores: those after the first `held`. No policy is the full cache."""
    held, chunk = STREAMING["held"], STREAMING["chunk"]
    nll: list[float] = []
    most = 0
    for ids in documents.values():
        cache = cache_of(model, pair, held)
        for scored in score(model, cache, ids[:, : held + STREAMING["tokens"]], chunk):
            nll += scored.nll[max(0, held - scored.start) :].tolist()
            most = max(most, held_bytes(cache))
    return Result(nll, most)


def continuation(model: nn.Module, documents: dict[str, Tensor], pair: Pair, ratio: float | None) -> Result:
    """Ours, on the tokens that the peer scores: those after the context. No policy is the full cache."""
    context = CONTINUATION["context"]
    nll: list[float] = []
    most = 0
    for ids in documents.values():
        following = ids[:, context : context + CONTINUATION["tokens"]]
        cache = cache_of(model, pair, context if ratio is None else int(context * (1 - ratio)))
        if isinstance(cache, SinkCache):
            first = prefill(model, cache, ids[:, :context], chunk=context)[:, None]
        else:
            first = step(model, cache, ids[:, :context], last_only=True)
        most = max(most, held_bytes(cache))
        logits = torch.cat([first, step(model, cache, following[:, :-1])], dim=1)
        nll += torch.nn.functional.cross_entropy(logits[0].float(), following[0], reduction="none").tolist()
    return Result(nll, most)


def cache_of(model: nn.Module, pair: Pair, entries: int) -> Cache:
    """A cache that has the queries of a step attend to `entries`, in layers on average, and the step itself."""
    if pair.policy is None:
        return DynamicCache()
    budget: Any = entries + 1
    if pair.by_layer:
        (stored,) = json.loads(STORED.read_text(encoding="utf-8")).values()  # of the embedded model
        budget = scaled(stored["budgets"], budget, least_budget(pair.policy, budget))
    return SinkCache(model, pair.policy, budget, positions="original")


def print_streaming(model: nn.Module, documents: dict[str, Tensor], theirs: dict[Any, Result], full: Result) -> None:
    """The first table."""
    print(f"\nStreaming: {len(full.nll):,} tokens, full cache {full.perplexity:.2f} ({_mib(full)})\n")
    print("| kvpress | perplexity | held | ours | perplexity | held | ratio |\n|---|---:|---:|---|---:|---:|---:|")
    known: dict[tuple[Policy, bool], Result] = {}
    for pair in streaming_pairs():
        mine = None
        if pair.policy is not None:
            ours = pair.policy, pair.by_layer
            mine = known[ours] = known[ours] if ours in known else streaming(model, documents, pair)
        other = theirs["streaming", pair.press, None] if pair.press is not None else None
        cells = [pair.press or "-", *_figures(other), _name(pair), *_figures(mine), ratio_of(mine, other)]
        print(f"| {' | '.join(cells)} |", flush=True)


def print_continuation(model: nn.Module, documents: dict[str, Tensor], theirs: dict[Any, Result], full: Result) -> None:
    """The second table."""
    print(f"\nContinuation: {len(full.nll):,} tokens, full cache {full.perplexity:.2f} ({_mib(full)})\n")
    print("| kvpress | evicted | perplexity | held | ours | perplexity | held | ratio |")
    print("|---|---:|---:|---:|---|---:|---:|---:|")
    for pair in continuation_pairs():
        for ratio in CONTINUATION["ratios"]:
            other = theirs["continuation", pair.press, ratio] if pair.press is not None else None
            mine = continuation(model, documents, pair, ratio) if pair.policy is not None else None
            cells = [pair.press or "-", f"{ratio:.0%}", *_figures(other), _name(pair), *_figures(mine)]
            print(f"| {' | '.join(cells)} | {ratio_of(mine, other)} |", flush=True)


def ratio_of(mine: Result | None, other: Result | None) -> str:
    """Our perplexity over theirs and two standard errors of it."""
    if mine is None or other is None:
        return "-"
    differences = [a - b for a, b in zip(mine.nll, other.nll, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    return f"{ratio:.3f} ± {2 * ratio * statistics.stdev(differences) / math.sqrt(len(differences)):.3f}"


def _figures(result: Result | None) -> list[str]:
    return ["-", "-"] if result is None else [f"{result.perplexity:.2f}", _mib(result)]


def _mib(result: Result) -> str:
    return f"{result.held / 2**20:.2f} MiB"


def _name(pair: Pair) -> str:
    """The call of our policy, without the fields that have their default."""
    policy = pair.policy
    if policy is None:
        return "-"
    given = [(each, getattr(policy, each.name)) for each in fields(policy)]
    said = [f"{each.name}={value!r}" for each, value in given if value != each.default]
    return f"`{type(policy).__name__}({', '.join(said)})`" + (", budgets by layer" if pair.by_layer else "")


if __name__ == "__main__":
    sys.exit(main())
