"""What a cache was made for, a model and a policy: remembered, told in a file's header, and recognised."""

import hashlib
import json
import weakref
from dataclasses import fields
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

import sinkcache.policies
from sinkcache.packing import pack, unpack
from sinkcache.plugins import found, qualified
from sinkcache.policy import Policy

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


def fingerprint(model: nn.Module | PreTrainedConfig) -> dict[str, Any]:
    """What tells a model from another: its config and, unless it is one, its dtype, frequencies and some weights.

    `weights` has 8 hexadecimal digits for 16 elements spread over each weight; None where these are not in memory
    (offloaded, on the meta device) or the tensor is of a kind of its own.
    """
    config = model if isinstance(model, PreTrainedConfig) else cast(Any, model).config
    told: dict[str, Any] = {"config": json.loads(json.dumps(_lasting(config.to_dict()), default=str))}
    if isinstance(model, nn.Module):
        told["dtype"] = str(cast(Any, model).get_input_embeddings().weight.dtype)
        told["frequencies"] = {
            name.replace("_orig_mod.", ""): buffer.double().tolist()
            for name, buffer in model.named_buffers()
            if name.endswith("inv_freq") and "original" not in name and not buffer.is_meta
        }
        told["weights"] = {
            name.replace("_orig_mod.", ""): _sampled(weight.detach())
            for name, weight in cast(Any, model)
            .state_dict(keep_vars=True)
            .items()  # tied ones under each of their names
            if isinstance(weight, Tensor)
        }
    return told


def check_model(path: str, header: dict[str, str], model: Any) -> None:
    """Raises ValueError, saying what differs, if a file was not saved for `model`; TypeError if it is none."""
    if not isinstance(model, (nn.Module, PreTrainedConfig)):
        raise TypeError(f"model must be a causal LM or its config, got {type(model).__name__}")
    saved, told = json.loads(header["model"]), fingerprint(model)
    keys = saved["config"].keys() | told["config"].keys()
    if header["transformers"] != transformers.__version__:  # each version has settings of its own
        keys = saved["config"].keys() & told["config"].keys()
    if ("weights" in saved) != ("weights" in told):
        one, other = ("the model", "a config") if "weights" in saved else ("a config", "a model")
        raise ValueError(f"{path} was saved by a cache made for {one}, got {other}: load it with {one}")
    changed = sorted(key for key in keys if saved["config"].get(key) != told["config"].get(key))
    differs = f"its config differs ({', '.join(changed)})" if changed else None
    if differs is None and "weights" in saved:
        differs = _different(saved, told)
    if differs is not None:
        raise ValueError(f"{path} was saved for another model: {differs}. Load it with that model, as it was")


def pack_policy(policy: Policy) -> dict[str, Any]:
    """A policy as JSON; raises ValueError if a file cannot hold one of its fields."""
    packed = {}
    for each in fields(policy):
        value = getattr(policy, each.name)
        inner = isinstance(value, Policy)
        packed[each.name] = {"policy": pack_policy(value)} if inner else pack(value, f"policy.{each.name}", None)
    return {"class": qualified(type(policy)), "fields": packed}


def policy_of(path: str, saved: dict[str, Any], given: Policy | None) -> Policy:
    """The policy of a file: `given` if it is that, or made of classes that `sinkcache.plugins` knows.

    Of plug-ins, those are imported whose names the file has. Raises ValueError if it is neither.
    """
    told = f"{path} was saved with the policy {_written(saved)}"
    if given is not None:
        if not isinstance(given, Policy) or not _alike(saved, pack_policy(given)):
            raise ValueError(f"{told}, got {given!r}: give the same, or leave it out")
        return given
    try:
        return _made(saved)
    except LookupError as error:
        raise ValueError(
            f"{told} ({error.args[0]}), which is not one of sinkcache.policies or of an installed plug-in: give it, "
            "load(path, model, policy=...)"
        ) from None
    except (TypeError, ValueError) as error:  # of a plug-in that cannot be imported, or is no longer what it was
        raise ValueError(f"{told}, which cannot be made: {error}; or give it, load(path, model, policy=...)") from error


def _written(saved: dict[str, Any]) -> str:
    """A policy of a file as Python writes it."""
    values = ((name, _written(value["policy"]) if _nested(value) else repr(value)) for name, value in _items(saved))
    return f"{_last(saved)}({', '.join(f'{name}={value}' for name, value in values)})"


def _alike(saved: dict[str, Any], packed: dict[str, Any]) -> bool:
    """Whether both are the same policy; a class of a script is known by its name, `__main__` is elsewhere imported."""
    ours = {qualified(getattr(sinkcache.policies, name)) for name in sinkcache.policies.__all__}
    same = packed["class"] == saved["class"]
    if saved["class"] not in ours and packed["class"] not in ours:
        same = _last(packed) == _last(saved)
    others = packed["fields"]
    return same and others.keys() == saved["fields"].keys() and all(
        _alike(value["policy"], others[name]["policy"]) if _nested(value) and _nested(others[name])
        else value == others[name]
        for name, value in _items(saved)
    )  # fmt: skip


def _made(saved: dict[str, Any]) -> Policy:
    """Raises LookupError with a class that is not found, or whose fields are others; else what the class raises."""
    kind = found(saved["class"])
    known = {} if kind is None else {each.name: each.init for each in fields(kind)}
    if kind is None or not saved["fields"].keys() <= known.keys():
        raise LookupError(saved["class"])
    cpu = torch.device("cpu")
    values = {
        name: _made(value["policy"]) if _nested(value) else unpack(value, {}, cpu) for name, value in _items(saved)
    }
    made = kind(**{name: value for name, value in values.items() if known[name]})
    if any(getattr(made, name) != value for name, value in values.items()):
        raise LookupError(saved["class"])
    return made


def _nested(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"policy"}


def _items(saved: dict[str, Any]) -> Any:
    return saved["fields"].items()


def _last(saved: dict[str, Any]) -> str:
    return saved["class"].rpartition(".")[2]


def _lasting(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {str(key): _lasting(value) for key, value in config.items() if key not in _VOLATILE}


def _sampled(weight: Tensor) -> str | None:
    if weight.is_meta or type(weight.data) is not Tensor or weight.numel() == 0:
        return None
    places = torch.arange(_SAMPLE) * weight.numel() // _SAMPLE
    where = [each.to(weight.device) for each in torch.unravel_index(places, weight.shape)]
    sample = weight.data[tuple(where)] if where else weight.data.reshape(1)
    return hashlib.sha256(sample.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def _different(saved: dict[str, Any], told: dict[str, Any]) -> str | None:
    if saved["dtype"] != told["dtype"]:
        return f"its dtype differs ({saved['dtype']} in the file, got {told['dtype']})"
    if saved["weights"].keys() != told["weights"].keys():
        return "its weights differ (in their names)"
    pairs = ((one, told["weights"][name]) for name, one in saved["weights"].items())
    if any(one != other for one, other in pairs if one is not None and other is not None):
        return "its weights differ"
    for name in saved["frequencies"].keys() & told["frequencies"].keys():
        one, other = (torch.tensor(each["frequencies"][name], dtype=torch.float64) for each in (saved, told))
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=0):  # devices differ by 1e-7
            return f"its rotary frequencies differ ({name}; a model that was cast once keeps them rounded)"
    return None
