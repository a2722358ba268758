"""Where a model computes, also one whose weights accelerate brings there as they are needed."""

from typing import Any, cast

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """Where `model` takes its tokens; raises ValueError if its weights are not in memory."""
    embedding = cast(Any, model).get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)  # accelerate loads this module's weights when it is called
    if embedding.weight.device.type != "meta":
        return embedding.weight.device
    if hook is None or hook.execution_device is None:
        raise ValueError(
            f"{type(model).__name__} is on the meta device: load its weights before you attach a SinkCache"
        )
    return torch.device(hook.execution_device)


def layer_devices(model: nn.Module, layers: int) -> list[torch.device]:
    """Where each of the `layers` layers of a model computes: where its weights are, or where accelerate brings them."""
    found = blocks(model, layers) or [cast(Any, model).get_input_embeddings()] * layers
    return [_device(each) or device_of(model) for each in found]


def blocks(model: nn.Module, layers: int) -> nn.ModuleList | None:
    """The `layers` blocks of a model's decoder, in order; None if it has no list of so many."""
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    stacks = (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == layers)
    return next(stacks, None)


def _device(module: nn.Module) -> torch.device | None:
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(cast(Any, hook).execution_device)
        for weight in each.parameters(recurse=False):
            if not weight.is_meta:
                return weight.device
    return None
