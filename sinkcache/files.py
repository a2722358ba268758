"""A cache as a file: one safetensors file, of tensors and a header of strings, that no pickle has touched.

The header names the model, policy, budgets and conventions, and what each part of the cache is made of. Only slots in
use are written. Every field is saved, whatever its name.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

import sinkcache
from sinkcache import container
from sinkcache.bounded import BoundedLayer
from sinkcache.devices import layer_devices
from sinkcache.origin import check_model, fingerprint, pack_policy, policy_of
from sinkcache.packing import lasting, pack_fields, unpack
from sinkcache.policy import Policy
from sinkcache.queries import Moments, Recent
from sinkcache.store import Store


def write(cache: Any, path: str | os.PathLike[str]) -> None:
    """Writes a `SinkCache` to `path`, all of it or nothing: what was there before stays until the new file is whole.

    Raises RuntimeError in the middle of a forward pass or after one that failed; ValueError if the model is gone, or
    something in the cache or its policy is of a kind that a file cannot hold; OSError as writing does.
    """
    model = _made_for(cache)
    tensors: dict[str, Tensor] = {}
    state = {
        "lanes": pack_fields(cache.lanes, "lanes", tensors),
        "ledgers": [_pack_ledger(each, f"ledgers.{index}", tensors) for index, each in enumerate(cache.ledgers)],
        "layers": [_pack_layer(each, f"layers.{index}", tensors) for index, each in enumerate(cache.layers)],
    }
    asked = [layer.ledger.books[0].asked for layer in cache.layers if isinstance(layer, BoundedLayer)]
    header = {
        "sinkcache": sinkcache.__version__,
        "transformers": transformers.__version__,
        "model": _dump(fingerprint(model)),
        "policy": _dump(pack_policy(cache.policy)),
        "budgets": _dump(asked),
        "positions": cache.positions,
        "sliding": cache.sliding,
        "evict_every": str(cache.evict_every),
        "state": _dump(state),
    }
    container.write(path, header, tensors)


@dataclass(frozen=True)
class Saved:
    """What a file says: the `arguments` to make the cache with, and the rest of it, which `restore` puts in."""

    path: str
    header: dict[str, str]
    tensors: dict[str, Tensor]
    arguments: dict[str, Any]

    @torch.inference_mode(False)  # buffers made in inference mode could not be written outside of it
    def restore(self, cache: Any, model: nn.Module | PreTrainedConfig) -> None:
        """Brings `cache`, new and made for `model`, to where the saved one was.

        Raises ValueError if other versions of the libraries make it of other parts.
        """
        state, cpu = json.loads(self.header["state"]), torch.device("cpu")
        self._fill(cache.lanes, state["lanes"], cpu)
        for ledger, saved in zip(cache.ledgers, state["ledgers"], strict=True):
            self._fill(ledger, saved["fields"], cpu)
            ledger.books = [ledger.books[0].rehearsal() for _ in saved["books"]]
            for book, each in zip(ledger.books, saved["books"], strict=True):
                self._fill(book, each, cpu)
        count = len(cache.layers)
        devices = layer_devices(model, count) if isinstance(model, nn.Module) else [cpu] * count
        for layer, saved, device in zip(cache.layers, state["layers"], devices, strict=True):
            if type(layer).__name__ != saved["type"]:
                raise self._otherwise(f"a {saved['type']} and not a {type(layer).__name__}")
            self._fill(layer, saved["fields"], device)
            none = torch.zeros(1, 1, 0, 1)
            empty = {"store": Store(0, none, none), "recent": Recent(0, none), "moments": Moments(none)}
            for name, part in saved["parts"].items():
                setattr(layer, name, empty[name])
                self._fill(empty[name], part, device)
                layer.device = device

    def _fill(self, target: Any, saved: dict[str, Any], device: torch.device) -> None:
        if missing := lasting(target).keys() - saved.keys():
            raise self._otherwise(f"without the {min(missing)} of a {type(target).__name__}")
        vars(target).update({name: unpack(value, self.tensors, device) for name, value in saved.items()})

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
    ValueError if it is not a cache's, damaged, of a newer format, or made for another model, policy or convention;
    TypeError if `model` is neither a model nor a config.
    """
    name = os.fspath(path)
    header, tensors = container.read(path)
    check_model(name, header, model)
    chosen = policy_of(name, json.loads(header["policy"]), policy)
    if positions is not None and positions != header["positions"]:
        raise ValueError(
            f"{name} was saved with positions={header['positions']!r}, got {positions!r}: its keys were read so. Leave "
            "positions out, or read the prompt again"
        )
    arguments = {"policy": chosen, "budget": json.loads(header["budgets"])}
    arguments |= {each: header[each] for each in ("positions", "sliding")}
    arguments["evict_every"] = int(header["evict_every"])
    return Saved(name, header, tensors, arguments)


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


def _pack_ledger(ledger: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    books = [  # each tensor of a book has an element for each slot
        pack_fields(book, f"{name}.books.{index}", tensors, slots=(0, book.held))
        for index, book in enumerate(ledger.books)
    ]
    return {"fields": pack_fields(ledger, name, tensors), "books": books}


def _pack_layer(layer: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    parts = {}
    for part in ("store", "recent", "moments"):
        if (value := getattr(layer, part, None)) is not None:
            held = getattr(layer, "in_use", max(book.held for book in layer.ledger.books))
            parts[part] = pack_fields(value, f"{name}.{part}", tensors, (2, held) if part == "store" else None)
    return {"type": type(layer).__name__, "fields": pack_fields(layer, name, tensors), "parts": parts}


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
