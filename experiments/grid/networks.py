"""The models that cells are measured on: what is known of one before its weights are, and the one that is loaded."""

import argparse
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import sinkcache
from experiments.grid.options import threads
from experiments.grid.pool import first_line
from experiments.results import Row
from experiments.revisions import Revision, weights_of
from experiments.subject import TYPES
from sinkcache.models import EMBEDDED, load, source
from sinkcache.planner import weights as planned_weights

VERSIONS = {each.__name__: str(each.__version__) for each in (sinkcache, torch, transformers)}
DEVICES = ("cpu", "cuda", "auto")


@dataclass(frozen=True)
class Network:
    """A model by name; `asked` is what tells a cell that was measured on it from one of another."""

    name: str
    asked: Row
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    nbytes: int | None  # of its weights in the asked type, if its files tell

    @property
    def trained(self) -> int | None:
        """Tokens it was trained to read, if its config says."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)


def network(name: str, given: argparse.Namespace) -> Network:
    """What is known of a model; no weights are read into memory. Raises ValueError if there is no such model."""
    if given.device == "cuda" and given.ray is None and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device: use --device cpu")
    where, revision = source(name, given.revision), given.revision
    folder = isinstance(where, Path)
    weights = weights_of(Revision(name, str(where), None if folder else revision or "main", 0))
    pinned = None if folder else weights
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, revision=pinned)
        config = AutoConfig.from_pretrained(where, revision=pinned)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {name!r} cannot be read: {first_line(error)}") from error
    asked = {
        "model": name,
        "revision": pinned,
        "weights": weights,
        "dtype": given.dtype,
        "device": given.device,
        "attention": given.attention,
        "threads": threads(given),
        "versions": VERSIONS,
    }
    numbers = planned_weights.in_folder(where)[0] if folder else None
    size = None if numbers is None else numbers * TYPES[given.dtype].itemsize
    return Network(name, asked, tokenizer, config, size)


def loaded(asked: Row) -> PreTrainedModel:
    """The model that a cell asks for, in eval mode; the last one is kept.

    Raises ValueError if what is here is not what was asked for: other versions, or other files in a folder.
    """
    if asked["versions"] != VERSIONS:
        raise ValueError(f"the cell asks for versions {asked['versions']}, and here are {VERSIONS}")
    return _loaded(*(asked[each] for each in ("model", "revision", "weights", "dtype", "device", "attention")))


@lru_cache(maxsize=1)
def _loaded(name: str, revision: str | None, weights: str, dtype: str, device: str, attention: str) -> PreTrainedModel:
    where = source(name, revision)
    if isinstance(where, Path) and weights_of(Revision(name, str(where), None, 0)) != weights:
        raise ValueError(
            f"the files of model {name!r} are not those that the cell asks for: they changed, or differ here"
        )
    transformers.logging.disable_progress_bar()
    model, _ = load(name, TYPES[dtype], revision, device)
    model.set_attn_implementation(attention)
    return model


def add_options(group: Any) -> None:
    """Adds what says which models, in which type, and where."""
    group.add_argument("--model", nargs="+", default=[EMBEDDED], metavar="M", help="hub ids, folders, the embedded one")
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--dtype", default="float32", choices=TYPES, help="of the weights and the cache")
    group.add_argument("--device", default="cpu", choices=DEVICES, help="auto: over all GPUs, as accelerate places it")
    group.add_argument("--attention", default="sdpa", metavar="NAME", help="sdpa, eager or flash_attention_2")
