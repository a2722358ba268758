"""How many weights a model has and how many bytes they take, read from the headers of its files."""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

from sinkcache.planner.kinds import FORMATS

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it


def in_folder(folder: Path) -> tuple[int | None, int | None]:
    """Weights and their bytes in the safetensors files of `folder`; None where there are none, or not all of them.

    Raises ValueError, which names the file, for one that is damaged.
    """
    files = _files(folder)
    if not files:
        return None, None
    counts = [_in_file(file) for file in files]
    return sum(numbers for numbers, _ in counts), sum(size for _, size in counts)


def bytes_of(text: str, parameters: int | None, stored: int | None) -> int:
    """Bytes of the weights: `text` is a size such as "15.3GiB", a format such as q4_0, or "stored" for the file's.

    Raises ValueError where a number of parameters is needed and not known.
    """
    if text == "stored":
        if stored is None:
            raise ValueError("the model's files do not tell the size of its weights: give --weights 15.3GiB")
        return stored
    if text in FORMATS:
        if parameters is None:
            raise ValueError(f"--weights {text} needs the number of weights: give --parameters 8.19e9, or a size")
        block_bytes, block = FORMATS[text]
        return -(-parameters // block) * block_bytes
    return parsed(text)


def parsed(text: str) -> int:
    """Bytes in "24GiB", "80GB", "512 MiB" or a plain number.

    >>> parsed("1.5KiB")
    1536
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?i?b?)\s*", text, re.IGNORECASE)
    unit = found[2].upper() if found else ""
    unit = f"{unit}B" if unit and not unit.endswith("B") else unit
    if not found or unit not in _UNITS:
        raise ValueError(f"a size is written as 24GiB, 80GB or a number of bytes, got {text!r}")
    if (size := float(found[1]) * _UNITS[unit]) == math.inf:
        raise ValueError(f"no memory is as large as {text!r}")
    return round(size)


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads; others beside them hold the same weights once more, or those of adapters."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        files = [
            folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(index)!r} is no index of safetensors files") from error
    return files if all(each.is_file() for each in files) else []


def _in_file(path: Path) -> tuple[int, int]:
    """Weights and bytes of one safetensors file, by its header."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LARGEST_HEADER + 1
        if length > min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"safetensors file {str(path)!r} is truncated: its header is not all there")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"safetensors file {str(path)!r} has a header that is no JSON") from error
    try:
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        numbers = sum(math.prod(tensor["shape"]) for tensor in tensors)
        size = sum(end - begin for begin, end in (tensor["data_offsets"] for tensor in tensors))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"safetensors file {str(path)!r} has a header that does not describe tensors") from error
    return numbers, size
