"""Objects as JSON, their tensors set apart: what a cache's parts and policies are made of, whatever its name.

A value of a kind that a file cannot hold is an error, not an omission.
"""

from typing import Any

import torch
from torch import Tensor

from sinkcache.container import DTYPES

_TRANSIENT = {  # of these classes, what a cache that is built anew has already, or what lasts for one pass only
    "Lanes": {"real"},
    "Ledger": {"lanes", "books", "last"},
    "Tallies": {"lanes", "books", "last"},
    "Slots": {"policy"},
    "Tally": {"policy"},
    "SinkLayer": {"ledger", "rotation", "store", "device"},
    "ScoredLayer": {
        "ledger",
        "rotation",
        "store",
        "device",
        "policy",
        "watch",
        "recent",
        "moments",
        "_under_way",
        "peers",
    },
    "Store": {"_turning"},
}
_TRANSIENT["RaggedLayer"] = _TRANSIENT["ScoredLayer"]


def lasting(target: Any) -> dict[str, Any]:
    """The fields of `target` that belong into a file."""
    left_out = _TRANSIENT.get(type(target).__name__, set())
    return {name: value for name, value in vars(target).items() if name not in left_out}


def pack_fields(
    target: Any, name: str, tensors: dict[str, Tensor], slots: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The fields of `target`; of its tensors the first of `slots`, an axis and how many."""
    return {field: pack(value, f"{name}.{field}", tensors, slots) for field, value in lasting(target).items()}


def pack(value: Any, name: str, tensors: dict[str, Tensor] | None, slots: tuple[int, int] | None = None) -> Any:
    """`value` as JSON, its tensors put into `tensors` under names that begin with `name`; None: it may hold none.

    Raises ValueError, with the name, if a file cannot hold it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(each, f"{name}.{index}", tensors) for index, each in enumerate(value)]}
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, pack(each, f"{name}.{key}", tensors)] for key, each in value.items()]}
    if type(value) is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if tensors is not None and type(value) is torch.device:
        return {"device": "of the layer"}
    if tensors is None or type(value) is not Tensor or value.layout != torch.strided:
        raise ValueError(f"{name} is a {type(value).__name__}, which a file cannot hold: keep this cache in memory")
    used = value if slots is None else value.narrow(slots[0], 0, min(slots[1], value.shape[slots[0]]))
    used = torch.view_as_real(used) if used.is_complex() else used
    if used.dtype not in DTYPES:
        raise ValueError(f"{name} is a tensor of {value.dtype}, which a file cannot hold: keep this cache in memory")
    tensors[name] = used.detach()
    strides = torch.empty_like(value, device="meta").stride()  # kernels may add up in another order in another layout
    return {"tensor": name, "complex": value.is_complex(), "shape": list(value.shape), "strides": list(strides)}


def unpack(value: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """What `pack` was given, on `device`; slots that were not in use are zeros. Takes tensors out of `tensors`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors.pop(value["tensor"])
        tensor = torch.view_as_complex(tensor) if value["complex"] else tensor
        whole = torch.empty_strided(value["shape"], value["strides"], dtype=tensor.dtype, device=device).zero_()
        whole[tuple(map(slice, tensor.shape))].copy_(tensor)
        return whole
    ((kind, inner),) = value.items()
    if kind == "device":
        return device
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "dict":
        return {key: unpack(each, tensors, device) for key, each in inner}
    parts = [unpack(each, tensors, device) for each in inner]
    return tuple(parts) if kind == "tuple" else parts
