"""What is measured: a model, the ids of a text, and all that tells this pair and its surroundings from others."""

import hashlib
import os
import platform
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import sinkcache
from sinkcache.texts import Text, tokenize

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Subject:
    """A model and the ids of a text, without BOS; `bos` is the id a run may put in front, None if there is none.

    `identity` is what a run's key depends on beside its setting; `host` is where it was measured.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Int[Tensor, "1 kv_len"]
    bos: int | None
    identity: dict[str, Any]
    host: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of the text."""
        return self.ids.shape[1]


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
    weight = network.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    identity = {
        "model": model,
        "revision": revision,
        "commit": getattr(network.config, "_commit_hash", None),
        "weights": _fingerprint(network),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "attention": str(network.config._attn_implementation),
        "threads": torch.get_num_threads(),
        "text": text.name,
        "text_sha256": text.sha256,
        "ids_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "tokens": tokens,
        "bos": bos,
        "bucket": bucket,
        "versions": {each.__name__: each.__version__ for each in (sinkcache, torch, transformers)},
    }
    return Subject(network, tokenizer, ids.to(weight.device), bos, identity, _host(weight.device))


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
