"""kvpress' side of `benchmarks.head_to_head`: a program of its own, run by a Python that has kvpress and none of ours.

    python -m venv PEER
    PEER/bin/pip install torch==2.13.0 kvpress==0.5.5    # which resolves to transformers 5.2.0
    PEER/bin/python benchmarks/peers/kvpress_peer.py JOB.json OUT.json

JOB holds a model's folder, the token ids of documents and what to measure; OUT a line of versions and, per run, the
negative log-likelihood of every scored token and the bytes that its cache held. No text and no tokenizer is involved.

streaming     `DecodingPress(press, compression_interval=1, target_size=held)`: the first `held` tokens are read, then
              `chunk` at a time; each chunk attends to `held` entries and itself, then the press evicts to `held`
continuation  the context is read in one pass and compressed; what follows is read in one pass on top of what was kept

Positions are those of the document throughout, given explicitly: kvpress does not turn keys in decoding, and left alone
transformers would count from the compressed length. The presses have their defaults, but for what PRESSES says.
"""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports] - of the other environment
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


class Sorted(kvpress.ScorerPress):
    """Another press whose survivors stay in the order of the document; kvpress stores them in order of score.

    Its StreamingLLM scores by place in storage, so that without this it loses its sinks in the second eviction.
    """

    def __init__(self, press: Any) -> None:
        super().__init__()
        self.press = press

    def score(self, *args: Any, **kwargs: Any) -> Tensor:
        self.press.compression_ratio = self.compression_ratio
        return self.press.score(*args, **kwargs)

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.compression_ratio == 0:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        count = max(1, int(keys.shape[2] * (1 - self.compression_ratio)))  # as ScorerPress does
        kept = scores.topk(count, dim=-1).indices.sort(dim=-1).values[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, kept).contiguous(), values.gather(2, kept).contiguous()


# By name, how to make each press; what it is given are the settings of the job's part.
PRESSES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "none": lambda _: None,
    "window, sorted": lambda _: Sorted(kvpress.StreamingLLMPress(n_sink=0)),
    "streaming": lambda _: kvpress.StreamingLLMPress(),
    "streaming, sorted": lambda _: Sorted(kvpress.StreamingLLMPress()),
    "snapkv": lambda job: kvpress.SnapKVPress(window_size=job["observation_window"]),
    "snapkv, sorted": lambda job: Sorted(kvpress.SnapKVPress(window_size=job["observation_window"])),
    "tova": lambda _: kvpress.TOVAPress(),
    "observed": lambda _: kvpress.ObservedAttentionPress(),
    "expected": lambda _: kvpress.ExpectedAttentionPress(),
    "keydiff": lambda _: kvpress.KeyDiffPress(),
    "knorm": lambda _: kvpress.KnormPress(),
    "lagkv": lambda job: kvpress.LagKVPress(lag_size=job["lag"]),
    "lagkv, sorted": lambda job: Sorted(kvpress.LagKVPress(lag_size=job["lag"])),
    "random": lambda _: kvpress.RandomPress(),  # no seed: with one, every layer would draw the same
    "adakv(snapkv)": lambda job: kvpress.AdaKVPress(kvpress.SnapKVPress(window_size=job["observation_window"])),
}


def main() -> None:
    """Answers the job and writes the answer, whole or not at all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    job = json.loads(options.job.read_text())
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    runs = [run for attention in ("sdpa", "eager") for run in measure(job, attention)]
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    versions["Python"] = platform.python_version()
    unfinished = options.out.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"digest": job["digest"], "versions": versions, "runs": runs}))
    unfinished.replace(options.out)


@torch.no_grad()
def measure(job: dict[str, Any], attention: str) -> list[dict[str, Any]]:
    """All runs that need this attention: "observed" reads the probabilities, which eager attention alone hands out."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=attention
    ).eval()
    runs = []
    for part, ratios in (("streaming", [None]), ("continuation", job["continuation"]["ratios"])):
        for name in job[part]["presses"]:
            if (name == "observed") != (attention == "eager"):
                continue
            for ratio in ratios if name != "none" else [None]:
                for document in job["documents"]:
                    torch.manual_seed(0)
                    for layer in model.model.layers:
                        layer.self_attn.masked_key_indices = None  # per-head presses leave it on the model
                    press = PRESSES[name](job[part])
                    ids = torch.tensor([document["ids"]])
                    if part == "streaming":
                        result = streaming(model, ids, press, job[part])
                    else:
                        result = continuation(model, ids, press, ratio, job[part], one_by_one="adakv" in name)
                    run = {"part": part, "name": name, "ratio": ratio, "document": document["name"], **result}
                    runs.append(run)
                    print(part, name, ratio, document["name"], f"{_perplexity(result['nll']):.3f}", flush=True)
    return runs


def streaming(model: Any, ids: Tensor, press: Any, job: dict[str, int]) -> dict[str, Any]:
    """Scores every token after the first `held`, reading `chunk` at a time through a cache reduced to `held`."""
    held, chunk = job["held"], job["chunk"]
    ids = ids[:, : held + job["tokens"]]
    cache: Any = DynamicCache()
    nll: list[float] = []
    most = 0
    wrapped = press and kvpress.DecodingPress(press, compression_interval=1, target_size=held)
    with wrapped(model) if wrapped is not None else contextlib.nullcontext():
        before = model(ids[:, :held], past_key_values=cache).logits[:, -1:]
        for start in range(held, ids.shape[1], chunk):
            piece = ids[:, start : start + chunk]
            positions = torch.arange(start, start + piece.shape[1])[None]
            logits = model(piece, past_key_values=cache, position_ids=positions).logits
            nll += _nll(torch.cat([before, logits[:, :-1]], dim=1), piece)
            before = logits[:, -1:]
            most = max(most, kv_bytes(cache))
    return {"nll": nll, "bytes": most, "entries": cache.layers[0].get_seq_length()}


def continuation(
    model: Any, ids: Tensor, press: Any, ratio: float | None, job: dict[str, int], one_by_one: bool
) -> dict[str, Any]:
    """Scores what follows the context, which was read in one pass and compressed.

    `one_by_one`: per-head presses only hide keys, by a search that may fail for many queries at once.
    """
    context, following = ids[:, : job["context"]], ids[:, job["context"] :][:, : job["tokens"]]
    cache: Any = DynamicCache()
    if press is not None:
        press.compression_ratio = ratio
    with press(model) if press is not None else contextlib.nullcontext():
        logits = [model(context, past_key_values=cache, logits_to_keep=1).logits]
    held, entries = kv_bytes(cache), cache.layers[0].get_seq_length()
    start = context.shape[1]
    for piece in following[:, :-1].split(1 if one_by_one else following.shape[1], dim=1):
        positions = torch.arange(start, start + piece.shape[1])[None]
        logits.append(model(piece, past_key_values=cache, position_ids=positions).logits)
        start += piece.shape[1]
    return {"nll": _nll(torch.cat(logits, dim=1), following), "bytes": held, "entries": entries}


def kv_bytes(cache: Any) -> int:
    """Bytes of storage behind all keys and values, whatever view of it the cache shows."""
    return sum(each.untyped_storage().nbytes() for layer in cache.layers for each in (layer.keys, layer.values))


def _nll(logits: Tensor, targets: Tensor) -> list[float]:
    return torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="none").tolist()


def _perplexity(nll: list[float]) -> float:
    return math.exp(sum(nll) / len(nll))


if __name__ == "__main__":
    main()
