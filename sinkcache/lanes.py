"""Which rows of a batch have read the same: a padded batch falls into lanes.

Columns are what transformers counts, pads included; a row's own tokens are the columns that were not hidden, counted
from 0 as if the row had been read alone. Rows whose columns were hidden alike form a lane and share one book of slots.
A batch without pads is one lane.
"""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Lanes:
    """`seen` columns read; `of`, the lane of each row, and `shown`, which columns were real; None: all were.

    `real` says the same of the columns of the step that was announced last; None: all are.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to an empty stream."""
        self.seen = 0
        self.of: Int[Tensor, " batch"] | None = None
        self.shown: Bool[Tensor, "batch seen"] | None = None
        self.real: Bool[Tensor, "batch q_len"] | None = None

    @property
    def padded(self) -> bool:
        """Whether any column of any row was ever hidden."""
        return self.of is not None

    def announce(
        self,
        batch: int,
        q_len: int,
        mask: Shaped[Tensor, "batch kv_len"] | None,
        ends: bool,
    ) -> list[int] | None:
        """Notes which of `q_len` new columns are real; returns the lanes that rows split from, None if none did.

        `ends`: the logits of the last column are what the pass is for. Raises ValueError if `mask` does not cover the
        columns seen and the new ones, hides others than when they were read, or hides a row's last.
        """
        self.real = None
        if mask is None:
            return None
        if mask.shape[1] != self.seen + q_len:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens, but the cache has seen {self.seen} and {q_len} are "
                f"new: pass a mask of width {self.seen + q_len}, or none"
            )
        if mask.shape[0] != batch:
            raise ValueError(f"attention_mask has {mask.shape[0]} rows for a batch of {batch}: give one for each")
        mask = mask.bool()
        old, shown = mask[:, : self.seen], None if self.shown is None else self.shown.to(mask.device)
        alike = (old if shown is None else old == shown).all(dim=1, keepdim=True)
        told = torch.cat([alike, mask[:, self.seen :]], dim=1).cpu()  # in one transfer
        if not bool(told[:, 0].all()):
            raise ValueError(
                f"attention_mask of row {int(told[:, 0].int().argmin())} hides other tokens than when they were read: "
                "what was read as text stays text, and what was hidden stays hidden"
            )
        real = told[:, 1:]
        if bool(real.all()):
            return None
        if ends:
            self._check_end(real, shown)
        self.real = real
        return self.split(real.long())

    def holed(self) -> bool:
        """Whether the announced columns hide some behind a row's first token."""
        if self.real is None:
            return False
        begun = self.real.cumsum(dim=1) > 0
        if self.shown is not None:
            begun |= self.shown.any(dim=1, keepdim=True).to(begun.device)
        return bool((begun & ~self.real).any())

    def split(self, keys: Int[Tensor, "batch keys"]) -> list[int]:
        """Puts rows of a lane whose keys differ into lanes of their own; returns the lane each lane was part of."""
        if self.of is None:
            self.of = torch.zeros(len(keys), dtype=torch.int64)
            self.shown = torch.ones(len(keys), self.seen, dtype=torch.bool)
        lanes, self.of = torch.cat([self.of[:, None], keys], dim=1).unique(dim=0, return_inverse=True)
        return lanes[:, 0].tolist()

    def select(self, rows: Int[Tensor, " batch"]) -> list[int] | None:
        """Keeps `rows`, in that order; returns the lanes that are left, None if there is but one."""
        self.real = None
        if self.of is None or self.shown is None:
            return None
        self.shown = self.shown[rows.to(self.shown.device)]
        lanes, self.of = self.of[rows].unique(return_inverse=True)
        return lanes.tolist()

    def advance(self, q_len: int) -> None:
        """Books the announced columns as seen."""
        self.seen += q_len
        if self.shown is not None:
            real = self.shown.new_ones(len(self.shown), q_len) if self.real is None else self.real
            self.shown = torch.cat([self.shown, real.to(self.shown.device)], dim=1)

    def crop(self, columns: int) -> list[int]:
        """Takes the last `columns` back; returns how many of them were real, lane by lane."""
        self.seen -= columns
        self.real = None
        if self.shown is None:
            return [columns]
        gone = self.shown[:, self.seen :].sum(dim=1)
        self.shown = self.shown[:, : self.seen]
        return [int(gone[int(self.rows(lane)[0])]) for lane in range(len(self))]

    def rows(self, lane: int) -> Int[Tensor, " rows"]:
        """The rows of a lane of a padded batch."""
        assert self.of is not None
        return (self.of == lane).nonzero()[:, 0]

    def columns(self, lane: int, q_len: int) -> Int[Tensor, " real"]:
        """Which of the announced `q_len` columns are real for a lane of a padded batch."""
        if self.real is None:
            return torch.arange(q_len)
        return self.real[int(self.rows(lane)[0])].nonzero()[:, 0]

    def __len__(self) -> int:
        return 1 if self.of is None else int(self.of.max()) + 1

    def _check_end(self, real: Bool[Tensor, "batch q_len"], shown: Tensor | None) -> None:
        begun = real.any(dim=1)
        if shown is not None:
            begun |= shown.any(dim=1).cpu()
        elif self.seen > 0:
            begun[:] = True
        wrong = (begun & ~real[:, -1]).nonzero()[:, 0]
        if len(wrong):
            raise ValueError(
                f"attention_mask hides the last token of row {int(wrong[0])}: a batch padded on the right would be "
                'continued from its pads. Pad on the left (tokenizer.padding_side = "left")'
            )
