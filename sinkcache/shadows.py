"""Bounded layers that run beside those of a full cache, on the same keys, values and queries.

What they hold is what a policy would, were the hidden states those of a model that evicts nothing.
"""

from typing import Any

from jaxtyping import Int
from torch import Tensor

from sinkcache.hearing import Heard
from sinkcache.observe import attention
from sinkcache.policy import Policy
from sinkcache.positions import Rotation
from sinkcache.ragged import RaggedLayer
from sinkcache.scored import ScoredLayer
from sinkcache.tally import Tallies


def shadow_of(policy: Policy, book: Tallies, rotation: Rotation | str | None, layer: int) -> "_Shadow | _RaggedShadow":
    """An empty layer to run beside number `layer` of a full cache, which keeps what `policy` does as `book` counts."""
    known = rotation if isinstance(rotation, Rotation) else None
    return (_RaggedShadow if policy.across_heads else _Shadow)(book, known, False, policy, layer, False)


class _Beside:
    """What a layer beside one of a full cache does; `attended`: positions its last step's queries would have seen.

    Heads that would see fewer are filled up with -1.
    """

    attended: Int[Tensor, "batch num_kv_heads kv_len"]
    most: int  # tokens kept for the last step's queries beside its own

    def follow(self: Any, heard: Heard) -> None:
        """Takes the step that the other layer has made."""
        new = slice(-heard.queries.shape[2], None)
        keys, values = self.update(heard.keys[:, :, new], heard.values[:, :, new])
        if self.reads_attention:
            received, weights = None, self.weights()
            if self.watch.mass:
                shown, group = self.mask(), self.watch.group
                received = attention(heard.queries, keys, values, shown, heard.kernel, weights, group=group)[1]
            self.observe(heard.queries, received, heard.kernel)

    def _settle(self: Any) -> None:
        step, joined = self._under_way
        self.most = step.most
        self.attended = (self._slots(step.most + 1) if joined is None else joined.fields)["positions"].long()
        mixed: Any = super()
        mixed._settle()


class _Shadow(_Beside, ScoredLayer):
    """A shadow whose heads all hold as many."""


class _RaggedShadow(_Beside, RaggedLayer):
    """A shadow whose heads compete."""
