"""A cache as a file: one safetensors file, of tensors and a header of strings, that no pickle has touched.

The header names the model, policy, budgets and conventions, and holds a SHA-256 of the whole file but itself, so that a
file that was cut short or altered anywhere is refused. Tensors are written and read one at a time: beside the cache and
its copy no more than one of them is in memory. Only slots in use are written. Every field of what a cache is made of is
saved, whatever its name; one of a kind that a file cannot hold is an error, not an omission.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

import sinkcache.policies
from sinkcache.layer import SinkLayer
from sinkcache.policy import Policy
from sinkcache.store import Store

_VERSION = 1  # of the format
_CHECKSUM_AT = len('........{"__metadata__":{"checksum":"')  # bytes; after the 8 of the header's length
_BLANK = b"0" * 64  # what is hashed in place of the checksum
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TRANSIENT = {  # of these classes, what a cache that is built anew has already, or what lasts for one pass only
    "Lanes": {"real"},
    "Ledger": {"lanes", "books", "last"},
    "Slots": {"policy", "last"},
    "SinkLayer": {"ledger", "rotation", "store", "device"},
    "Store": {"_turning"},
}
_VOLATILE = {  # of a config: how it was loaded, and what does not change a key
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_experts_implementation"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states"),
}
_SAMPLE = 16  # elements of each weight


class Origin:
    """What a cache was made for, the model (held weakly) or a config; copies share it, a pickle forgets the model."""

    def __init__(self, model: nn.Module | PreTrainedConfig | None) -> None:
        self._model: Any = weakref.ref(model) if isinstance(model, nn.Module) else lambda: model

    def __call__(self) -> nn.Module | PreTrainedConfig | None:
        return self._model()

    def __deepcopy__(self, memo: dict) -> "Origin":
        return self

    def __reduce__(self) -> tuple:
        model = self()
        return Origin, (None if isinstance(model, nn.Module) else model,)


def write(cache: Any, path: str | os.PathLike[str]) -> None:
    """Writes a `SinkCache` to `path`, all of it or nothing: what was there before stays until the new file is whole.

    Raises RuntimeError in the middle of a forward pass or after one that failed; ValueError if the model is gone, or
    something in the cache or its policy is of a kind that a file cannot hold; OSError as writing does.
    """
    model = _made_for(cache)
    tensors: dict[str, Tensor] = {}
    state = {
        "lanes": _pack_object(cache.lanes, "lanes", tensors),
        "ledgers": [_pack_ledger(each, f"ledgers.{index}", tensors) for index, each in enumerate(cache.ledgers)],
        "layers": [_pack_layer(each, f"layers.{index}", tensors) for index, each in enumerate(cache.layers)],
    }
    bounded = (layer for layer in cache.layers if isinstance(layer, SinkLayer))
    header = {
        "format": "sinkcache",
        "version": str(_VERSION),
        "sinkcache": sinkcache.__version__,
        "transformers": transformers.__version__,
        "model": _dump(_fingerprint(model)),
        "policy": _dump(_pack_policy(cache.policy)),
        "budgets": _dump([layer.ledger.books[0].asked for layer in bounded]),
        "positions": cache.positions,
        "sliding": cache.sliding,
        "state": _dump(state),
    }
    _replace(path, header, tensors)


@dataclass(frozen=True)
class Saved:
    """What a file says: the arguments to make the cache with, and the rest of it, which `restore` puts in."""

    path: str
    header: dict[str, str]
    tensors: dict[str, Tensor]
    policy: Policy
    budgets: list[int | float]
    positions: Any
    sliding: Any

    @torch.inference_mode(False)  # buffers made in inference mode could not be written outside of it
    def restore(self, cache: Any, model: nn.Module | PreTrainedConfig) -> None:
        """Brings `cache`, new and made for `model`, to where the saved one was.

        Raises ValueError if other versions of the libraries make it of other parts.
        """
        state = json.loads(self.header["state"])
        self._fill(cache.lanes, state["lanes"])
        for ledger, saved in zip(cache.ledgers, state["ledgers"], strict=True):
            self._fill(ledger, saved)
            ledger.books = [ledger.books[0].rehearsal() for _ in saved["books"]]
            for book, each in zip(ledger.books, saved["books"], strict=True):
                self._fill(book, each, length=each["capacity"])
        devices = _devices(model, len(cache.layers))
        for layer, saved, device in zip(cache.layers, state["layers"], devices, strict=True):
            if type(layer).__name__ != saved["type"]:
                raise self._otherwise(f"a {saved['type']} and not a {type(layer).__name__}")
            self._fill(layer, saved, device)
            if saved.get("store") is not None:
                layer.store, layer.device = self._store(layer, saved["store"], device), device

    def _store(self, layer: SinkLayer, saved: dict[str, Any], device: torch.device) -> Store:
        keys, values = (self._unpack(saved["fields"][name], device) for name in ("keys", "values"))
        store = Store(layer.ledger.capacity or 0, keys, values)
        store.write(slice(0, keys.shape[2]), keys, values)
        rest = {name: value for name, value in saved["fields"].items() if name not in ("keys", "values")}
        self._fill(store, {"fields": rest}, device, known={"keys", "values"})
        return store

    def _fill(
        self,
        target: Any,
        saved: dict[str, Any],
        device: torch.device | None = None,
        length: int | None = None,
        known: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """Sets the fields of `target`; tensors are filled up with zeros to `length` where one is given."""
        missing = vars(target).keys() - saved["fields"].keys() - known - _TRANSIENT.get(type(target).__name__, set())
        if missing:
            raise self._otherwise(f"without the {min(missing)} of a {type(target).__name__}")
        for name, value in saved["fields"].items():
            given = self._unpack(value, device or torch.device("cpu"))
            if length is not None and isinstance(given, Tensor):
                given = nn.functional.pad(given, (0, length - len(given)))
            vars(target)[name] = given

    def _unpack(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            tensor = self.tensors.pop(value["tensor"])
            tensor = torch.view_as_complex(tensor) if "complex" in value else tensor
            if "strides" not in value:
                return tensor.to(device)
            laid = torch.empty_strided(tensor.shape, value["strides"], dtype=tensor.dtype, device=device)
            return laid.copy_(tensor)  # kernels may add up in another order where memory is laid out otherwise
        ((kind, inner),) = value.items()
        if kind == "device":
            return device
        if kind == "dtype":
            return getattr(torch, inner)
        if kind == "dict":
            return {key: self._unpack(each, device) for key, each in inner}
        parts = [self._unpack(each, device) for each in inner]
        return tuple(parts) if kind == "tuple" else parts

    def _otherwise(self, what: str) -> ValueError:
        versions = f"sinkcache {self.header['sinkcache']} and transformers {self.header['transformers']}"
        return ValueError(
            f"{self.path} was saved by {versions}, {what}: load it with these versions, or read the prompt again"
        )


def read(
    path: str | os.PathLike[str],
    model: nn.Module | PreTrainedConfig,
    policy: Policy | None = None,
    positions: str | None = None,
) -> Saved:
    """What the file at `path` holds, checked to the last byte and found to be for `model`, `policy` and `positions`.

    `policy` must be given for one that is not of `sinkcache.policies`. Raises FileNotFoundError if there is no file;
    ValueError if it is not a cache's, damaged, of a newer format, or made for another model, policy or convention.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        header, tensors = _read(file, name)
    _check_model(name, header, model)
    chosen = _policy(name, json.loads(header["policy"]), policy)
    if positions is not None and positions != header["positions"]:
        raise ValueError(
            f"{name} was saved with positions={header['positions']!r}, got {positions!r}: its keys were read so. Leave "
            "positions out, or read the prompt again"
        )
    budgets = json.loads(header["budgets"])
    return Saved(name, header, tensors, chosen, budgets, header["positions"], header["sliding"])


def _made_for(cache: Any) -> nn.Module | PreTrainedConfig:
    """The model of `cache`; raises RuntimeError unless all layers have seen the same tokens, to the end."""
    books = [book for ledger in cache.ledgers for book in ledger.books]
    apart = cache._apart() or any(ledger.seen != cache.lanes.seen for ledger in cache.ledgers)
    if cache._before is not None or apart or any(book._torn for book in books):
        raise RuntimeError(
            "a forward pass is under way or was interrupted, so layers may have seen different tokens: save when a "
            "pass has ended; after a failed one call cache.reset() and read the prompt again"
        )
    model = cache.origin()
    if model is None:
        raise ValueError(
            "the model this cache was made for is gone (or the cache comes from a pickle), and a file names its model: "
            "save while the model lives"
        )
    if isinstance(model, nn.Module) and cache._checked not in (None, id(model)):
        raise ValueError(
            "this cache was last read by another model than the one it was made for, and a file names its model: make "
            "the cache for the model that reads it"
        )
    return model


# What objects are made of, as JSON; tensors go to a dictionary of their own.


def _pack_ledger(ledger: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    books = []
    for index, book in enumerate(ledger.books):  # each tensor has an element for each slot
        packed = _pack_object(book, f"{name}.books.{index}", tensors, slots=(0, book.held))
        books.append({**packed, "capacity": book.capacity})
    return {**_pack_object(ledger, name, tensors), "books": books}


def _pack_layer(layer: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    packed = {"type": type(layer).__name__, **_pack_object(layer, name, tensors)}
    if isinstance(layer, SinkLayer) and layer.store is not None:
        held = max(book.held for book in layer.ledger.books)
        packed["store"] = _pack_object(layer.store, f"{name}.store", tensors, slots=(2, held))
    return packed


def _pack_object(
    target: Any, name: str, tensors: dict[str, Tensor], slots: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The fields of `target`; of its tensors the first of `slots`, an axis and how many."""
    packed = {}
    for field, value in vars(target).items():
        if field in _TRANSIENT.get(type(target).__name__, set()):
            continue
        if slots is not None and type(value) is Tensor:
            value = value.narrow(slots[0], 0, min(slots[1], value.shape[slots[0]]))
        packed[field] = _pack(value, f"{name}.{field}", tensors)
    return {"fields": packed}


def _pack(value: Any, name: str, tensors: dict[str, Tensor] | None) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        parts = [_pack(each, f"{name}.{index}", tensors) for index, each in enumerate(value)]
        return {type(value).__name__: parts}
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, _pack(each, f"{name}.{key}", tensors)] for key, each in value.items()]}
    if type(value) is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if tensors is not None and type(value) is torch.device:
        return {"device": "of the layer"}
    if tensors is None or type(value) is not Tensor or value.layout != torch.strided:
        raise ValueError(f"{name} is a {type(value).__name__}, which a file cannot hold: keep this cache in memory")
    real = torch.view_as_real(value) if value.is_complex() else value
    if real.dtype not in _NAMES:
        raise ValueError(f"{name} is a tensor of {value.dtype}, which a file cannot hold: keep this cache in memory")
    tensors[name] = real.detach()
    packed: dict[str, Any] = {"tensor": name}
    if value.is_complex():
        packed["complex"] = True
    dense = torch.empty_like(value, device="meta")
    if not dense.is_contiguous():
        packed["strides"] = list(dense.stride())
    return packed


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


# The policy


def _pack_policy(policy: Policy) -> dict[str, Any]:
    kind, packed = type(policy), {}
    for each in fields(policy):
        value = getattr(policy, each.name)
        inner = isinstance(value, Policy)
        packed[each.name] = {"policy": _pack_policy(value)} if inner else _pack(value, f"policy.{each.name}", None)
    return {"class": _qualified(kind), "fields": packed}


def _policy(path: str, saved: dict[str, Any], given: Policy | None) -> Policy:
    """The policy of the file: `given` if it is that, or one of `sinkcache.policies`."""
    ours = {
        _qualified(kind): kind for kind in (getattr(sinkcache.policies, name) for name in sinkcache.policies.__all__)
    }
    told = f"{saved['class'].rpartition('.')[2]}({', '.join(f'{k}={v!r}' for k, v in saved['fields'].items())})"
    if given is not None:
        packed = _pack_policy(given) if isinstance(given, Policy) else {"class": "", "fields": {}}
        alike = packed["class"] == saved["class"]
        if saved["class"] not in ours and packed["class"] not in ours:  # a script's __main__ may be imported elsewhere
            alike = packed["class"].rpartition(".")[2] == saved["class"].rpartition(".")[2]
        if not alike or packed["fields"] != saved["fields"]:
            raise ValueError(f"{path} was saved with the policy {told}, got {given!r}: give the same, or leave it out")
        return given
    nested = any(isinstance(value, dict) for value in saved["fields"].values())
    known = {each.name for each in fields(ours[saved["class"]])} if saved["class"] in ours else set()
    if saved["class"] not in ours or nested or not saved["fields"].keys() <= known:
        raise ValueError(
            f"{path} was saved with the policy {told} ({saved['class']}), which is not one of sinkcache.policies: give "
            "it, load(path, model, policy=...)"
        )
    return ours[saved["class"]](**saved["fields"])


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# The model


def _fingerprint(model: nn.Module | PreTrainedConfig) -> dict[str, Any]:
    """What tells a model from another: its config and, unless it is one, its dtype, frequencies and some weights.

    `weights` has 8 hexadecimal digits for each weight, in the order of their names, of 16 elements spread over it; 8
    dashes where these are not in memory (offloaded, on the meta device) or the tensor is of a kind of its own.
    """
    config = model if isinstance(model, PreTrainedConfig) else cast(Any, model).config
    told: dict[str, Any] = {"config": json.loads(json.dumps(_lasting(config.to_dict()), default=str))}
    if isinstance(model, nn.Module):
        weights = cast(Any, model).state_dict(keep_vars=True)  # tied ones under each of their names
        named = sorted((name.replace("_orig_mod.", ""), weight) for name, weight in weights.items())
        named = [(name, weight.detach()) for name, weight in named if isinstance(weight, Tensor)]
        told["dtype"] = str(cast(Any, model).get_input_embeddings().weight.dtype)
        told["frequencies"] = {
            name.replace("_orig_mod.", ""): buffer.double().tolist()
            for name, buffer in model.named_buffers()
            if name.endswith("inv_freq") and "original" not in name and not buffer.is_meta
        }
        told["names"] = hashlib.sha256("\n".join(name for name, _ in named).encode()).hexdigest()
        told["weights"] = "".join(map(_sampled, (weight for _, weight in named)))
    return told


def _lasting(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {str(key): _lasting(value) for key, value in config.items() if key not in _VOLATILE}


def _sampled(weight: Tensor) -> str:
    if weight.is_meta or type(weight.data) is not Tensor or weight.numel() == 0:
        return "-" * 8
    places = torch.arange(_SAMPLE) * weight.numel() // _SAMPLE
    where = [each.to(weight.device) for each in torch.unravel_index(places, weight.shape)]
    sample = weight.data[tuple(where)] if where else weight.data.reshape(1)
    return hashlib.sha256(_bytes(sample.cpu())).hexdigest()[:8]


def _check_model(path: str, header: dict[str, str], model: Any) -> None:
    """Raises ValueError, saying what differs, if a file was not saved for `model`; TypeError if it is none."""
    if not isinstance(model, (nn.Module, PreTrainedConfig)):
        raise TypeError(f"model must be a causal LM or its config, got {type(model).__name__}")
    saved, told = json.loads(header["model"]), _fingerprint(model)
    if header["transformers"] != transformers.__version__:  # each version has settings of its own
        one, other = saved["config"], told["config"]
        saved["config"], told["config"] = (
            {key: each[key] for key in one.keys() & other.keys()} for each in (one, other)
        )
    if ("weights" in saved) != ("weights" in told):
        one, other = ("the model", "a config") if "weights" in saved else ("a config", "a model")
        raise ValueError(f"{path} was saved by a cache made for {one}, got {other}: load it with {one}")
    differs = _different(saved, told)
    if differs is not None:
        raise ValueError(f"{path} was saved for another model: {differs}. Load it with that model, as it was")


def _different(saved: dict[str, Any], told: dict[str, Any]) -> str | None:
    keys = sorted(
        key
        for key in saved["config"].keys() | told["config"].keys()
        if saved["config"].get(key) != told["config"].get(key)
    )
    if keys:
        return f"its config differs ({', '.join(keys)})"
    if "weights" not in saved:
        return None
    if saved["dtype"] != told["dtype"]:
        return f"its dtype differs ({saved['dtype']} in the file, got {told['dtype']})"
    if saved["names"] != told["names"]:
        return "its weights differ (in their names)"
    pairs = zip(_eights(saved["weights"]), _eights(told["weights"]), strict=True)
    if any(one != other for one, other in pairs if "-" not in one + other):
        return "its weights differ"
    for name in saved["frequencies"].keys() & told["frequencies"].keys():
        one, other = (torch.tensor(each["frequencies"][name], dtype=torch.float64) for each in (saved, told))
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=0):  # devices differ by 1e-7
            return f"its rotary frequencies differ ({name}; a model that was cast once keeps them rounded)"
    return None


def _eights(digits: str) -> Iterator[str]:
    return (digits[index : index + 8] for index in range(0, len(digits), 8))


def _devices(model: nn.Module | PreTrainedConfig, layers: int) -> list[torch.device]:
    """Where each of `layers` layers of a model computes: where its weights are, or where accelerate brings them."""
    if not isinstance(model, nn.Module):
        return [torch.device("cpu")] * layers
    default = _device(cast(Any, model).get_input_embeddings()) or _device(model) or torch.device("cpu")
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    stacks = (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == layers)
    stack = next(stacks, None)
    return [default] * layers if stack is None else [_device(each) or default for each in stack]


def _device(module: nn.Module) -> torch.device | None:
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(cast(Any, hook).execution_device)
        for weight in each.parameters(recurse=False):
            if not weight.is_meta:
                return weight.device
    return None


# The file


def _replace(path: str | os.PathLike[str], header: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Writes beside `path` and puts the whole file in its place; after a failure nothing is left of it."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".sinkcache-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            _write_to(file, header, tensors)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    with suppress(OSError):  # not every system can open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_to(file: BinaryIO, header: dict[str, str], tensors: dict[str, Tensor]) -> None:
    told: dict[str, Any] = {"__metadata__": {"checksum": _BLANK.decode(), **header}}
    end = 0
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that each is aligned
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        told[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    assert start[_CHECKSUM_AT : _CHECKSUM_AT + 64] == _BLANK
    digest = hashlib.sha256(start)
    file.write(start)
    for name in names:
        part = _bytes(tensors[name].cpu().contiguous())
        digest.update(part)
        file.write(part)
    file.seek(_CHECKSUM_AT)
    file.write(digest.hexdigest().encode())


def _read(file: BinaryIO, path: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header's strings and the tensors, on the CPU; raises ValueError unless every byte is as it was written."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    text = file.read(length) if 8 + length <= size else b""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if len(start) < 8 or not isinstance(told, dict):
        raise ValueError(f"{path} is not a safetensors file, or was cut short: give a file that cache.save wrote")
    header = told.pop("__metadata__", None)
    if not isinstance(header, dict) or header.get("format") != "sinkcache":
        raise ValueError(f"{path} is a safetensors file of something else: give a file that cache.save wrote")
    damaged = ValueError(f"{path} is damaged or was cut short: save the cache again, or copy the file again")
    version = header.get("version")
    if not isinstance(version, str) or not version.isdecimal():
        raise damaged
    if int(version) > _VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, and this sinkcache knows {_VERSION}: install a newer one "
            f"({header.get('sinkcache')} wrote it)"
        )
    start += text
    checksum = start[_CHECKSUM_AT : _CHECKSUM_AT + 64]
    digest = hashlib.sha256(start[:_CHECKSUM_AT] + _BLANK + start[_CHECKSUM_AT + 64 :])
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in told.items():
        shape, end = _place(entry, end, size - len(start), damaged)
        with torch.inference_mode(False):
            tensors[name] = torch.empty(shape, dtype=_DTYPES[entry["dtype"]])
        part = _bytes(tensors[name])
        cast(Any, file).readinto(part)
        digest.update(part)
    if end != size - len(start) or digest.hexdigest().encode() != checksum:
        raise damaged
    return header, tensors


def _place(entry: Any, start: int, size: int, damaged: ValueError) -> tuple[list[int], int]:
    """The shape of a tensor and where it ends; it must follow the one that ends at `start`."""
    if not isinstance(entry, dict):
        raise damaged
    shape, dtype, offsets = (entry.get(each) for each in ("shape", "dtype", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise damaged
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise damaged
    end = start + math.prod(shape) * _DTYPES[dtype].itemsize
    if offsets != [start, end] or end > size:
        raise damaged
    return shape, end


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))
