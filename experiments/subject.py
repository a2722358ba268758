"""What is measured: a model, the ids of a text, and all that tells this pair and its surroundings from others."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import sinkcache
from experiments.sources import Source
from experiments.spool import Spool, spooled
from sinkcache.texts import Text, tokenize

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Subject:
    """A model and the ids of a text, without BOS; `bos` is the id a run may put in front, None if there is none.

    `spool`: where the ids are if they are too many to hold; `ids` are then the first of them. `identity` is what a
    run's key depends on beside its setting; `host` is where it was measured.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Int[Tensor, "1 kv_len"]
    bos: int | None
    identity: dict[str, Any]
    host: dict[str, Any]
    spool: Spool | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the text."""
        return self.ids.shape[1] if self.spool is None else self.spool.tokens

    def piece(self, start: int, stop: int) -> Int[Tensor, "1 q_len"]:
        """The ids from number `start` to before number `stop`, where the model is."""
        held = self.ids[:, start:stop]
        return held if self.spool is None else self.spool.read(start, stop).to(held.device)


def subject(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    text: Text,
    tokens: int,
    model: str,
    revision: str | None,
    bucket: int,
) -> Subject:
    """The first `tokens` tokens of `text` for a loaded model. Raises ValueError if the text has fewer."""
    network, tokenizer = loaded
    bos = cast("int | None", tokenizer.bos_token_id)
    ids = tokenize(text, tokenizer, tokens + 1)
    if bos is not None and int(ids[0, 0]) == bos and tokenizer.num_special_tokens_to_add():
        ids = ids[:, 1:]  # whether there is a BOS is the run's to say
    ids = ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(
            f"text {text.name!r} has {ids.shape[1]} tokens, got --tokens {tokens}: lower it or give a longer text"
        )
    identity = _identity(network, model, revision, bucket, text.name, text.sha256, tokens, bos)
    identity["ids_sha256"] = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    device = cast(Tensor, network.get_input_embeddings().weight).device
    return Subject(network, tokenizer, ids.to(device), bos, identity, _host(device))


def long_subject(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    source: Source,
    tokens: int,
    model: str,
    revision: str | None,
    bucket: int,
    folder: Path,
) -> Subject:
    """The same of a text of any length, whose ids go to a file in `folder` while the process lives."""
    network, tokenizer = loaded
    bos = cast("int | None", tokenizer.bos_token_id)
    spool = spooled(source, tokenizer, tokens, folder)
    identity = _identity(network, model, revision, bucket, source.name, spool.text_sha256, tokens, bos)
    identity["ids_sha256"] = spool.sha256
    device = cast(Tensor, network.get_input_embeddings().weight).device
    return Subject(network, tokenizer, spool.read(0, 1).to(device), bos, identity, _host(device), spool)


def _identity(
    network: PreTrainedModel,
    model: str,
    revision: str | None,
    bucket: int,
    name: str,
    sha256: str,
    tokens: int,
    bos: int | None,
) -> dict[str, Any]:
    weight = network.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return {
        "model": model,
        "revision": revision,
        "commit": getattr(network.config, "_commit_hash", None),
        "weights": _fingerprint(network),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "attention": str(network.config._attn_implementation),
        "threads": torch.get_num_threads(),
        "text": name,
        "text_sha256": sha256,
        "tokens": tokens,
        "bos": bos,
        "bucket": bucket,
        "versions": {each.__name__: each.__version__ for each in (sinkcache, torch, transformers)},
    }


def _fingerprint(model: PreTrainedModel) -> str:
    """A hash of every weight's name, shape and about 64 of its values: enough to tell two checkpoints apart."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(flat[:: max(1, len(flat) // 64)].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _host(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"python": platform.python_version(), "system": platform.system(), "device": name, "cores": os.cpu_count()}
