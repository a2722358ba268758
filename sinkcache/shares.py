"""What one layer of a model pays attention to and one block makes of its hidden states, as sums over queries.

Sums are kept for each key and for ranges of queries: so the share of any set of positions, from any of these on, can be
asked for afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class LayerSinks:
    """What one layer of attention pays and to whom; all float32 and on the CPU.

    `ranges` are the queries that sums are over: `received` is what each key receives from them; `even` what it would,
    if each query shared its attention out evenly among the keys it sees; `visible` by how many of them it is seen. Each
    query's `entropy` counts as a part of the greatest there could be, and `learned` is what goes to learned sinks, None
    where there are none. Of the queries from the first counted on: `first_choice`, the part that attends to a key more
    than to any other; `cosine`, the mean of that between query and key.
    """

    index: int
    ranges: Ranges
    received: Float[Tensor, "batch num_heads ranges kv_len"]
    entropy: Float[Tensor, "batch num_heads ranges"]
    learned: Float[Tensor, "batch num_heads ranges"] | None
    even: Float[Tensor, "ranges kv_len"]
    visible: Float[Tensor, "ranges kv_len"]
    first_choice: Float[Tensor, "batch num_heads kv_len"]
    cosine: Float[Tensor, "batch num_heads kv_len"]
    key_norms: Float[Tensor, "batch num_kv_heads kv_len"]
    value_norms: Float[Tensor, "batch num_kv_heads kv_len"]

    def share(self, positions: Iterable[int] = (0,), first: int | None = None) -> Float[Tensor, "batch num_heads"]:
        """Of the attention of queries from `first` on, what keys at `positions` receive together; mean over queries.

        Raises ValueError if no range begins with query `first` or a position is none of the text's.
        """
        counted, queries = self._from(first)
        return self.received[:, :, counted][..., self._known(positions)].sum(dim=(2, 3)) / queries

    def uniform(self, positions: Iterable[int] = (0,), first: int | None = None) -> float:
        """The same share, if each query shared its attention out evenly. Raises ValueError as `share` does."""
        counted, queries = self._from(first)
        return float(self.even[counted][:, self._known(positions)].sum()) / queries

    def columns(self, first: int | None = None) -> Float[Tensor, "batch num_heads kv_len"]:
        """What each key receives from queries from `first` on, mean over them. Raises ValueError as `share` does."""
        counted, queries = self._from(first)
        return self.received[:, :, counted].sum(dim=2) / queries

    def importance(self) -> Float[Tensor, "batch num_heads kv_len"]:
        """What each key receives, mean over all queries that see it: its own among them."""
        return self.received.sum(dim=2) / self.visible.sum(dim=0)

    def _from(self, first: int | None) -> tuple[slice, int]:
        starts = [start for start, _ in self.ranges]
        start = self.counted if first is None else first
        if start not in starts:
            raise ValueError(f"sums are kept from queries {', '.join(map(str, starts))} on, got {first}")
        return slice(starts.index(start), None), self.ranges[-1][1] - start

    @property
    def counted(self) -> int:
        """The first query counted, if not told another: that of the second range."""
        return self.ranges[1][0]

    def _known(self, positions: Iterable[int]) -> list[int]:
        wanted, tokens = sorted(set(positions)), self.received.shape[-1]
        if not wanted or not 0 <= wanted[0] <= wanted[-1] < tokens:
            raise ValueError(f"positions must be of the text, 0 to {tokens - 1}, got {wanted}")
        return wanted


@dataclass(frozen=True, eq=False)
class BlockStates:
    """Hidden states behind one decoder block, of each row: where the greatest is, and how long each token's is.

    `greatest` is the largest absolute value, at `position` and `channel`; `median` is that of all absolute values.
    """

    index: int
    greatest: Float[Tensor, " batch"]
    position: Int[Tensor, " batch"]
    channel: Int[Tensor, " batch"]
    median: Float[Tensor, " batch"]
    norms: Float[Tensor, "batch kv_len"]

    @property
    def massive(self) -> Float[Tensor, " batch"]:
        """How many times the median the greatest is; without bound where half of a state is zero."""
        return self.greatest / self.median
