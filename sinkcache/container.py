"""A safetensors file that is whole or not there, of which every byte is checked before any is believed.

Its header begins with a SHA-256 of the whole file, zeros in its own place. Tensors are written and read one at a time:
no more than one of them is in memory twice.
"""

import hashlib
import json
import os
import secrets
import shutil
from contextlib import suppress
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_VERSION = 1  # of the format
_CHECKSUM_AT = len('........{"__metadata__":{"checksum":"')  # bytes; after the 8 of the header's length
_BLANK = "0" * 64  # what is hashed in place of the checksum
_BLOCK = 1 << 20  # bytes


def write(path: str | os.PathLike[str], header: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Writes beside `path` and puts the whole file in its place; after a failure nothing is left of it."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".sinkcache-{secrets.token_hex(8)}")
    try:
        with open(temporary, "x+b") as file:
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


def read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header's strings and the tensors, on the CPU.

    Raises FileNotFoundError if there is no file; ValueError unless every byte is as it was written, by this version.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        told = _told(file)
        if told is None:
            raise ValueError(f"{name} is not a safetensors file, or was cut short: give a file that cache.save wrote")
        header = told.pop("__metadata__", None)
        if not isinstance(header, dict) or header.get("format") != "sinkcache":
            raise ValueError(f"{name} is a safetensors file of something else: give a file that cache.save wrote")
        version, start = str(header.get("version")), file.tell()
        if version.isdecimal() and int(version) > _VERSION:
            raise ValueError(
                f"{name} has version {version} of the format, and this sinkcache knows {_VERSION}: install a newer one "
                f"({header.get('sinkcache')} wrote it)"
            )
        if _checksum(file) != header.get("checksum"):
            raise ValueError(f"{name} is damaged or was cut short: save the cache again, or copy the file again")
        file.seek(start)
        kinds, tensors = {name: dtype for dtype, name in DTYPES.items()}, {}
        for each, entry in told.items():
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside of it
                tensors[each] = torch.empty(entry["shape"], dtype=kinds[entry["dtype"]])
            cast(Any, file).readinto(_bytes(tensors[each]))
    return header, tensors


def _write_to(file: BinaryIO, header: dict[str, str], tensors: dict[str, Tensor]) -> None:
    metadata = {"checksum": _BLANK, "format": "sinkcache", "version": str(_VERSION), **header}
    told: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that each is aligned
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        told[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_bytes(tensors[name].cpu()))
    checksum = _checksum(file)
    file.seek(_CHECKSUM_AT)
    file.write(checksum.encode())


def _told(file: BinaryIO) -> dict[str, Any] | None:
    """What the header says; None if there is none."""
    size, start = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(start, "little")
    try:
        told = json.loads(file.read(length) if 8 + length <= size else b"")
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _checksum(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256(file.read(_CHECKSUM_AT))
    digest.update(_BLANK[: len(file.read(len(_BLANK)))].encode())
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))
