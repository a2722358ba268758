"""Layers that make room for a decoded token together: their policy is asked once for all of them.

What tokens have received is a few numbers each; scoring them layer by layer would cost more in calls than in work. The
fields of layers that share a tally are therefore views of tensors `[layers, batch, num_kv_heads, slots]`, laid side by
side again whenever something else (a reordering, a longer buffer) has put others in their place.
"""

from typing import Any

import torch
from torch import Tensor

from sinkcache.policy import weakest
from sinkcache.tally import Counts

EMPTY = {
    "positions": -1,
    "heads": 0,
    "mass": 0,
    "moves": 0,
    "frames": 0,
    "applied": 0,
}  # what a slot without a token says


class Peers:
    """Layers that decide at once; one alone where its policy reads what is its own, or tokens go several at a time."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._step: Counts | None = None
        self._slots: int | Tensor = 0
        self._places: Tensor | None = None
        self._side: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(Peers(self.layers))  # what is laid side by side would not be, in a copy

    def forget(self) -> None:
        """Lets go of what was laid side by side: some layer has other fields now."""
        self._side = {}

    def room(self, layer: Any, step: Counts) -> tuple[int | Tensor, Tensor | None]:
        """Where the new token of `step` goes: a slot, or slots `[batch, num_kv_heads, 1]` and their flat places.

        Of tokens that go, one in a row and head, those with the least score; every layer's fields tell of the new ones
        when the first layer has asked.
        """
        if self._step is not step:
            if step.most == 0 and len(self.layers) > 1:  # others have no slots yet
                return Peers([layer]).room(layer, step)
            if len({(each.device, next(iter(each.fields.values())).device) for each in self.layers}) > 1:
                return _alone(layer).room(layer, step)
            self._step = step
            self._decide(step)
        if isinstance(self._slots, int) or self._places is None:
            return self._slots, None
        index = self.layers.index(layer)
        return self._slots[index], self._places[index]

    def _decide(self, step: Counts) -> None:
        first, fields = self.layers[0], self._side_by_side()
        count, device = len(self.layers), first.device
        slots: int | Tensor = step.on("kept", device)
        if step.trims and first.ledger.books[0].every == 1:
            used = {name: field[..., : first.held] for name, field in fields.items()}
            positions = used["positions"]
            scores = first.scores(
                first.store.read(first.held), {n: f.flatten(0, 1) for n, f in used.items()}, step, count
            )
            if not isinstance(step.held, int):
                scores = scores.masked_fill(positions.flatten(0, 1) < 0, torch.inf)  # what is not there makes no room
            victims = weakest(scores, positions.flatten(0, 1)).unflatten(0, (count, -1))[..., None]
            held, kept = step.on("held", device), step.on("kept", device)
            trimmed = held > kept if isinstance(held, Tensor) else None
            if first.in_cache:
                older = positions < positions.gather(-1, victims)
                used["moves"].add_(older if trimmed is None else older & trimmed)
                for layer in self.layers:
                    layer.restless = True
            slots = victims if trimmed is None else torch.where(trimmed, victims, torch.as_tensor(slots))
        new = {"positions": step.on("seen", device), "frames": step.on("shift", device)}
        if isinstance(slots, Tensor):
            slots = torch.as_tensor(slots).expand(count, *first.store.keys.shape[:2], 1)
            capacity, heads = first.store.keys.shape[2], slots[0].numel()
            self._places = slots.flatten(1) + torch.arange(heads, device=device) * capacity
        for name, field in fields.items():
            _fill(field, slots, new.get(name, EMPTY[name]))
        self._slots = slots

    def _side_by_side(self) -> dict[str, Tensor]:
        for name in self.layers[0].fields:
            fields, side = [layer.fields[name] for layer in self.layers], self._side.get(name)
            if side is None or any(
                field.data_ptr() != mine.data_ptr() for field, mine in zip(fields, side, strict=True)
            ):
                with torch.inference_mode(False):  # or they could not be written outside of it
                    self._side[name] = torch.stack(fields)
                for layer, mine in zip(self.layers, self._side[name].unbind(), strict=True):
                    layer.fields[name] = mine
        return self._side


def _alone(layer: Any) -> Peers:
    """The layer by itself: others compute, or are kept, elsewhere."""
    layer.peers = Peers([layer])
    return layer.peers


def _fill(field: Tensor, slots: int | Tensor, value: int | Tensor) -> None:
    """Writes `value`, of all rows or `[batch, 1, 1]`, into `slots` of each layer, row and head."""
    if isinstance(slots, int):
        field[..., slots : slots + 1] = value
    elif isinstance(value, int):
        field.scatter_(-1, slots, value)
    else:
        field.scatter_(-1, slots, value.to(field.dtype).expand(slots.shape))
