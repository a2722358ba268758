"""What a bounded layer sees of its attention, and tells its policy of the tokens it holds."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.bounded import BoundedLayer
from sinkcache.observe import Kernel, from_recent
from sinkcache.policy import Entries, Policy, Queries, check_scores, score
from sinkcache.positions import Rotation
from sinkcache.queries import Moments, Recent, turned
from sinkcache.tally import Counts, Tallies


@dataclass
class Joined:
    """What a step of several tokens attends to: held and new, with what is known of each."""

    keys: Tensor
    values: Tensor
    fields: dict[str, Tensor]


class WatchingLayer(BoundedLayer):
    """Remembers of its queries what `policy` watches; `index` is its number in the model.

    `fields`: what is known of the token in each slot, tensors `[batch, num_kv_heads, slots]`. `in_cache`: keys are read
    at positions inside the cache and not those of the stream.
    """

    ledger: Tallies
    ragged = False  # heads of a row may hold different numbers of tokens
    fields: dict[str, Tensor]
    new: int  # columns of the last step
    _under_way: tuple[Counts, Joined | None] | None

    def __init__(
        self,
        ledger: Tallies,
        rotation: Rotation | None,
        is_sliding: bool,
        policy: Policy,
        index: int,
        in_cache: bool,
    ) -> None:
        super().__init__(ledger, rotation, is_sliding)
        self.policy, self.index, self.in_cache = policy, index, in_cache and rotation is not None
        self.watch = policy.watch()
        self.offloaded = False
        self._forget()

    @property
    def reads_attention(self) -> bool:
        """Whether `observe` must be called in each step, once its attention is computed."""
        return self.watch.attention

    def heads(self, key: Tensor) -> int:
        """How many key heads the layer holds; of latent attention one, however many are attended to."""
        return key.shape[1] if self.store is None else self.store.keys.shape[1]

    def mask(self) -> Tensor | None:
        """The mask of the step under way, if it is not the model's own."""
        return None

    def last_alone(self) -> bool:
        """Whether of several queries of the step under way the last is all that counts."""
        assert self._under_way is not None
        step = self._under_way[0]
        all_end = step.real is None or bool(step.real[:, -1].all())
        return self.watch.decay == 0 and step.q_len > 1 and all_end

    def weights(self) -> Float[Tensor, "rows q_len"] | None:
        """How much each query of the step under way counts, by the decay and by whether it is a pad; None: all 1."""
        assert self._under_way is not None
        step, decay = self._under_way[0], self.watch.decay
        if step.real is None and (decay == 1 or step.q_len == 1):
            return None
        real = torch.ones(1, step.q_len) if step.real is None else step.real.float()
        after = real.flip(1).cumsum(1).flip(1) - real  # real queries that follow
        return (real * decay**after).to(self.device)

    def scores(
        self,
        held: tuple[Tensor, Tensor],
        fields: dict[str, Tensor],
        step: Counts,
        layers: int = 1,
        seen: int | Tensor | None = None,
    ) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        """What the policy makes of entries, before the step or, with what has been `seen` by then, after it.

        `fields` may be those of several `layers`, whose rows then follow one another.
        """
        new = self.new if seen is None else step.q_len
        seen = step.on("seen", self.device) if seen is None else seen
        seen = seen if isinstance(seen, int) else seen.repeat(layers, 1, 1)
        entries = Entries(fields["positions"], seen, new, self.index, self._told(*held, fields, step, seen))
        scores = score(self.policy, entries)
        whole = isinstance(step.held, int) and not self.ragged  # there is a token in every slot
        if scores.device.type == "cpu" or step.q_len > 1:  # elsewhere each decoding step would wait for the device
            check_scores(scores if whole else scores.masked_fill(~entries.valid, 0))
        return scores if whole else scores.masked_fill(~entries.valid, -torch.inf)

    def _forget(self) -> None:
        """Back to no query at all."""
        self.recent: Recent | None = None
        self.moments: Moments | None = None
        self.scaling, self.softcap, self.sinks = 1.0, None, None  # the model's own, from its first step on

    def _note(self, step: Counts, queries: Tensor, kernel: Kernel) -> None:
        """Adds the step's queries to what is remembered of them."""
        self.scaling, self.softcap, self.sinks = kernel.scaling, kernel.softcap, kernel.sinks
        if not self.watch.window and not self.watch.queries:
            return
        positions, shift = step.positions(self.device)[:, 0], step.on("shift", self.device)
        behind = shift if isinstance(shift, int) else shift[:, 0]
        if self.watch.window:
            self.recent = self.recent or Recent(self.watch.window, queries)
            self.recent.add(queries, positions, behind)
        if self.watch.queries:
            self.moments = self.moments or Moments(queries)
            counted = (positions >= self.watch.skip).float()
            self.moments.add(queries, (positions - behind).clamp_min(0), counted, self.rotation)

    def _told(
        self, keys: Tensor, values: Tensor, fields: dict[str, Tensor], step: Counts, seen: int | Tensor
    ) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.watch.mass:
            told["mass"] = fields["mass"]
        if self.watch.keys:
            told["keys"] = keys
        if self.watch.values:
            told["values"] = values
        if self.watch.window and self.recent is not None:
            queries = self._turned_queries(self.recent, fields, step, seen)
            kernel = Kernel(self.scaling, self.softcap, self.sinks)
            positions = fields["positions"].long()
            told["window"] = from_recent(queries, self.recent.positions, keys, positions, kernel, self.watch)
        if self.watch.queries and self.moments is not None:
            shift = step.on("shift", self.device)
            told["queries"] = Queries(self.moments.mean, self.moments.covariance(), seen - shift, self.rotation)
        return told

    def _turned_queries(self, recent: Recent, fields: dict[str, Tensor], step: Counts, seen: int | Tensor) -> Tensor:
        """The newest queries, each as far from every key held as that is read."""
        if self.rotation is None or "frames" not in fields:
            return recent.queries
        moves = (recent.frames[:, None] - step.on("shift", self.device)).expand(-1, fields["positions"].shape[1], -1)
        if self.in_cache:
            at = recent.positions[:, None]
            younger = (fields["positions"][:, :, None] > at[..., None]).sum(dim=-1)
            moves = moves + (seen - 1 - at - younger)
        return turned(recent.queries, moves.masked_fill(recent.positions[:, None] < 0, 0), self.rotation)

    def _decayed(self, step: Counts) -> float | Tensor:
        """What is left of each token's mass after the step's queries."""
        if step.real is None:
            return self.watch.decay**step.q_len
        return (self.watch.decay ** step.real.sum(dim=1).double())[:, None, None].to(self.fields["mass"])
