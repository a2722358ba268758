"""Bytes of storage that caches really hold, whatever view of it their layers show."""

from typing import Any

from torch import Tensor
from transformers import Cache

from sinkcache.bounded import BoundedLayer


def held_bytes(cache: Cache) -> int:
    """Bytes of storage that the layers of any cache keep alive."""
    return storage([tensor for layer in cache.layers for tensor in tensors_of(layer)])


def storage(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def tensors_of(layer: Any) -> list[Tensor]:
    """Every tensor that a cache layer of any kind keeps alive."""
    if isinstance(layer, BoundedLayer):
        return layer.tensors()
    held: list[Tensor] = []
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        held += [part for part in parts if isinstance(part, Tensor)]
    return held
