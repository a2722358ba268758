"""A slow twin of `SinkCache`, of Python lists: each row by itself, which is what a row of a padded batch must equal.

The rule, for a row that reads q tokens of its own in a step: what it holds is trimmed to `budget - 1`, the q are
appended and attended to, then what it holds is reduced to `budget`, of which the newest is one. Who is worth least goes
first, of equals the older.
In the cache's convention a token is read at its number less the frame plus one for each younger token that is gone.
A budget that is a share is of the own tokens of the row's first step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Token:
    """`number` counts a row's own tokens, `position` is what the model was given; key and value as they came."""

    number: int
    position: int
    key: Tensor  # [heads, channels]
    value: Tensor


@dataclass
class Row:
    """`shown`: which columns were text; per layer the tokens held, the numbers of all that are gone, and the budget."""

    held: list[list[Token]]
    gone: list[list[int]]
    budgets: list[int] = field(default_factory=list)  # none before the first token of its own
    shown: list[bool] = field(default_factory=list)
    frame: int = 0  # by how much the model's positions lag behind the row's numbers

    @property
    def own(self) -> int:
        """Tokens of the row's own that were read."""
        return sum(self.shown)

    def copy(self) -> "Row":
        """A row that goes its own way."""
        held, gone = [list(each) for each in self.held], [list(each) for each in self.gone]
        return Row(held, gone, list(self.budgets), list(self.shown), self.frame)


class ListCache:
    """`budgets` layer by layer; `worth` of a token's number; `in_cache`: places are those inside the cache."""

    def __init__(self, budgets: tuple[int | float, ...], worth: Callable[[int], int], in_cache: bool) -> None:
        self.budgets, self.worth, self.in_cache = budgets, worth, in_cache
        self.reset()

    def reset(self) -> None:
        """Back to an empty stream."""
        self.rows: list[Row] = []
        self.seen = 0

    def begin(self, batch: int) -> None:
        """A stream's first step says how many rows there are, and so does the first after a single row."""
        if not self.rows:
            self.rows = [self.empty_row() for _ in range(batch)]
        elif len(self.rows) == 1:
            self.select([0] * batch)

    def empty_row(self) -> Row:
        """A row that has read nothing."""
        return Row([[] for _ in self.budgets], [[] for _ in self.budgets])

    def read(
        self, real: list[list[bool]], positions: list[list[int]], keys: Tensor, values: Tensor
    ) -> list[list[list[tuple[Token, int]]]]:
        """Reads a step; returns for each layer and row the tokens that its last query sees and how far each key moved.

        `keys` and `values` are `[layers, rows, heads, columns, channels]`. A row without a token of its own stays.
        """
        rows = zip(real, positions, self.rows, keys.unbind(1), values.unbind(1), strict=True)
        attended = [self._read(*each) for each in rows]
        self.seen += len(real[0])
        return [[row[layer] for row in attended] for layer in range(len(self.budgets))]

    def _read(
        self, real: list[bool], positions: list[int], row: Row, keys: Tensor, values: Tensor
    ) -> list[list[tuple[Token, int]]]:
        columns, first = [column for column, each in enumerate(real) if each], row.own
        row.shown += real
        if not columns:
            return [[] for _ in self.budgets]
        row.frame = first - positions[columns[0]]
        if not row.budgets:
            row.budgets = [b if isinstance(b, int) else math.ceil(b * len(columns)) for b in self.budgets]
        attended = []
        for layer, budget in enumerate(row.budgets):
            self._trim(row, layer, budget - 1, first)
            row.held[layer] += [
                Token(first + i, positions[column], keys[layer, :, column], values[layer, :, column])
                for i, column in enumerate(columns)
            ]
            attended.append([(token, self._place(row, layer, token) - token.position) for token in row.held[layer]])
            self._trim(row, layer, budget, row.held[layer][-1].number)
        return attended

    def _trim(self, row: Row, layer: int, budget: int, upto: int) -> None:
        while len(row.held[layer]) > budget:
            able = [token for token in row.held[layer] if token.number < upto]
            least = min(able, key=lambda token: (self.worth(token.number), token.number))
            row.held[layer].remove(least)
            row.gone[layer].append(least.number)

    def _place(self, row: Row, layer: int, token: Token) -> int:
        younger = sum(number > token.number for number in row.gone[layer]) if self.in_cache else 0
        return token.number - row.frame + younger

    def kept(self, layer: int) -> list[list[int]]:
        """Each row's numbers held, filled up with -1 in front."""
        held = [[token.number for token in row.held[layer]] for row in self.rows]
        longest = max((len(each) for each in held), default=0)
        return [[-1] * (longest - len(each)) + each for each in held]

    def whole(self) -> bool:
        """Whether no row has lost a token."""
        return not any(gone for row in self.rows for gone in row.gone)

    def crop(self, columns: int) -> None:
        """Takes the newest columns back."""
        self.seen -= columns
        for row in self.rows:
            del row.shown[self.seen :]
            row.held = [[token for token in held if token.number < row.own] for held in row.held]

    def select(self, rows: list[int]) -> None:
        """Keeps `rows`, in that order."""
        self.rows = [self.rows[row].copy() for row in rows]

    def repeat(self, times: int) -> None:
        """Repeats each row `times` times."""
        self.select([row for row in range(len(self.rows)) for _ in range(times)])

    def fork(self) -> "ListCache":
        """A cache that goes its own way."""
        twin = ListCache(self.budgets, self.worth, self.in_cache)
        twin.rows, twin.seen = [row.copy() for row in self.rows], self.seen
        return twin


def turned(keys: Tensor, moves: list[int], inv_freq: Tensor, interleaved: bool) -> Tensor:
    """`keys`, `[tokens, heads, channels]`, each turned by as many positions as `moves` says."""
    half = len(inv_freq)
    angles = torch.tensor(moves, dtype=torch.float64)[:, None, None] * inv_freq
    first = torch.arange(half) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    a, b = keys[..., first], keys[..., second]
    result = keys.clone()
    result[..., first] = a * angles.cos() - b * angles.sin()
    result[..., second] = a * angles.sin() + b * angles.cos()
    return result
