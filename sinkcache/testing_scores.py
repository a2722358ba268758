"""What a policy's scores must keep, checked on random entries: see `sinkcache.testing.check_policy`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkcache.policy import Entries, Policy, Queries
from sinkcache.positions import Rotation

_GROUP, _HEAD_DIM, _VALUE_DIM = 2, 8, 5


@dataclass
class Case:
    """A policy that is checked; `read`: what its scores have read of what they are told."""

    policy: Policy
    budget: int
    read: set[str] = field(default_factory=set)
    twin: Any = None
    asked: tuple[str, ...] = ()

    def draw(
        self, kv_len: int = 11, batch: int = 2, heads: int = 3, new: int = 1, dtype: torch.dtype = torch.float64
    ) -> Entries:
        """Random entries, each row and head in an order of its own; the newest token is among them."""
        generator, seen = torch.Generator().manual_seed(kv_len), 2 * kv_len + 3
        old = torch.rand(batch, heads, seen - 1, generator=generator).argsort(dim=-1)[..., : kv_len - 1]
        positions = torch.cat([old, torch.full((batch, heads, 1), seen - 1)], dim=-1)
        order = torch.rand(batch, heads, kv_len, generator=generator).argsort(dim=-1)
        wide = torch.promote_types(dtype, torch.float32)

        def normal(*size: int, kind: torch.dtype = wide) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(kind)

        shape, of_queries = (batch, heads, kv_len), (batch, heads * _GROUP, _HEAD_DIM)
        spread = normal(*of_queries, _HEAD_DIM)
        rotation = Rotation(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64), "half")
        told: dict[str, Any] = {
            "mass": normal(*shape).abs(),
            "window": normal(*shape).abs(),
            "keys": normal(*shape, _HEAD_DIM, kind=dtype),
            "values": normal(*shape, _VALUE_DIM, kind=dtype),
            "queries": Queries(normal(*of_queries), spread @ spread.mT, seen, rotation),
        }
        told = {name: told[name] for name in self.asked}
        return Entries(positions.gather(-1, order).int(), seen, new, 0, told)

    def score(self, entries: Entries, when: str) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        """The scores of `entries`, which must be such as a cache can use."""
        before = [each.clone() for each in _tensors(entries)]
        told = _Told(entries.told, self.read)
        try:
            scores = self.policy.score(replace(entries, told=told))
        except Exception as error:
            raise AssertionError(f"{self.policy!r}: score raised {type(error).__name__} {when}: {error}") from error
        kind = type(scores).__name__
        self.require(isinstance(scores, Tensor), f"score returned a {kind} {when}: return a tensor")
        expected, got = tuple(entries.positions.shape), tuple(scores.shape)
        self.require(got == expected, f"score has shape {got} {when}: return one for each entry, {expected}")
        told_way = "return floats, such as scores.float()"
        self.require(scores.is_floating_point(), f"score has dtype {scores.dtype} {when}: {told_way}")
        bad = int((scores.isnan() & entries.valid).sum())
        self.require(bad == 0, f"score has {bad} NaN {when}: scores must be comparable, use -inf for what goes first")
        same = all(torch.equal(one, other) for one, other in zip(before, _tensors(entries), strict=True))
        self.require(same, f"score changed its entries {when}: work on copies, entries are the cache's own")
        return scores

    def agree(self, one: Tensor, other: Tensor, broken: str) -> None:
        """Raises AssertionError unless scores are the same but for the order of sums."""
        finite = one[one.isfinite()].abs()
        scale = float(finite.max()) if len(finite) else 1.0
        if not torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-5 * scale):
            at = (one.double() - other.double()).abs().nan_to_num(0, posinf=torch.inf).argmax()
            told = f"{float(one.flatten()[at]):.6g} became {float(other.flatten()[at]):.6g}"
            raise AssertionError(f"{self.policy!r}: {broken} (a score of {told})")

    def require(self, holds: bool, broken: str) -> None:
        if not holds:
            raise AssertionError(f"{self.policy!r}: {broken}")


class _Told(dict):
    """What a policy is told, which notes what is read."""

    def __init__(self, told: dict[str, Any], read: set[str]) -> None:
        super().__init__(told)
        self.noted = read

    def __getitem__(self, name: str) -> Any:
        self.noted.add(name)
        return super().__getitem__(name)


def _scores(case: Case) -> None:
    for kv_len in (1, 2, 7, case.budget, case.budget + 9):
        for new in (1, 5):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                entries = case.draw(kv_len, new=new, dtype=dtype)
                case.score(entries, f"of {kv_len} entries, keys {str(dtype).removeprefix('torch.')}")
    first = case.draw(1)
    case.score(replace(first, positions=torch.zeros_like(first.positions), seen=1), "of the first token")
    case.score(case.draw(batch=1, heads=1), "of one row and head")


def _determined(case: Case) -> None:
    entries, state = case.draw(), torch.random.get_rng_state()
    one, other = case.score(entries, "asked"), case.score(entries, "asked twice")
    random = not torch.equal(state, torch.random.get_rng_state())
    case.require(not random, "score draws random numbers: make them of positions, as sinkcache.policies.Random does")
    case.agree(one, other, "scores of the same entries differ: a policy has no memory, keep none")


def _kinds(case: Case) -> None:
    entries = case.draw()
    scores = case.score(entries, "")
    long = replace(entries, positions=entries.positions.long())
    case.agree(scores, case.score(long, "of int64 positions"), "scores differ with int64 positions")
    by_row = replace(entries, seen=torch.full((2, 1, 1), int(entries.seen)))
    told = "where entries.seen is a tensor [batch, 1, 1], as where rows differ"
    case.agree(scores, case.score(by_row, told), f"scores differ {told}")
    moments = entries.told.get("queries")
    if moments is not None:
        by_row.told["queries"] = replace(moments, position=torch.full((2, 1, 1), moments.position))
        case.agree(scores, case.score(by_row, told), f"scores differ {told}")


def _empty(case: Case) -> None:
    for kv_len in (3, 11, case.budget + 9):
        entries = case.draw(kv_len)

        def padded(each: Tensor) -> Tensor:
            junk = torch.full((*each.shape[:2], 3, *each.shape[3:]), 50 if each.is_floating_point() else -1)
            return torch.cat([each[:, :, :2], junk.to(each.dtype), each[:, :, 2:]], dim=2)

        scores = case.score(_changed(entries, padded), "with empty slots")
        found = torch.cat([scores[..., :2], scores[..., 5:]], dim=-1)
        way = "leave out what is not entries.valid from sums, means and extremes"
        case.agree(case.score(entries, ""), found, f"empty slots (position -1) change the scores of tokens: {way}")
    entries = case.draw()
    nobody = entries.positions.clone()
    nobody[1] = -1
    scores = case.score(replace(entries, positions=nobody), "of a row without tokens")
    case.agree(case.score(entries, "")[:1], scores[:1], f"a row without tokens changes another's scores: {way}")


def _slots(case: Case) -> None:
    for kv_len in (7, case.budget + 9):
        entries = case.draw(kv_len)
        order = torch.rand(entries.positions.shape, generator=torch.Generator().manual_seed(2)).argsort(dim=-1)

        def moved(each: Tensor, order: Tensor = order) -> Tensor:
            index = order if each.ndim == 3 else order[..., None].expand(*order.shape, each.shape[-1])
            return each.gather(2, index)

        expected = case.score(entries, "").gather(-1, order)
        found = case.score(_changed(entries, moved), "with slots in another order")
        case.agree(expected, found, "scores depend on the order of slots: go by entries.positions, slots have no order")


def _rows(case: Case) -> None:
    entries = case.draw()
    alone = _changed(entries, lambda each: each[1:], lambda each: each[1:])
    scores = case.score(alone, "of one row")
    case.agree(case.score(entries, "")[1:], scores, "a row scores otherwise beside another row: keep rows apart")


def heads_alike(case: Case) -> None:
    """Raises AssertionError unless scores go with their heads."""
    entries, order = case.draw(), torch.tensor([2, 0, 1])
    of_queries = (order[:, None] * _GROUP + torch.arange(_GROUP)).flatten()
    moved = _changed(entries, lambda each: each[:, order], lambda each: each[:, of_queries])
    way = 'score by what entries say, or check with heads="by number" if that is meant'
    scores = case.score(moved, "with heads in another order")
    case.agree(case.score(entries, "")[:, order], scores, f"scores depend on a head's number: {way}")


def _told_to_all(case: Case) -> None:
    watch, entries = case.policy.watch(), case.draw()
    scores = case.score(entries, "")
    if not getattr(watch, "own", watch.anything):
        way = "Watch(layer=True)" if hasattr(watch, "layer") else "Watch(keys=True)"
        broken = f"scores depend on entries.layer, but layers are asked together: have watch() return {way}"
        case.agree(scores, case.score(replace(entries, layer=3), "in layer 3"), broken)


def _tensors(entries: Entries) -> list[Tensor]:
    found = [entries.positions, *(each for each in entries.told.values() if isinstance(each, Tensor))]
    if (queries := entries.told.get("queries")) is not None:
        found += [queries.mean, queries.covariance]
    return [*found, *([entries.seen] if isinstance(entries.seen, Tensor) else [])]


def _changed(
    entries: Entries, change: Callable[[Tensor], Tensor], of_queries: Callable[[Tensor], Tensor] = lambda each: each
) -> Entries:
    told = {name: change(each) if isinstance(each, Tensor) else each for name, each in entries.told.items()}
    if (queries := entries.told.get("queries")) is not None:
        mean, covariance = of_queries(queries.mean), of_queries(queries.covariance)
        told["queries"] = replace(queries, mean=mean, covariance=covariance)
    return replace(entries, positions=change(entries.positions), told=told)


SCORES: dict[str, Callable[[Case], None]] = {
    "one score for each entry, no NaN, entries unchanged, of float64, float32 and bfloat16": _scores,
    "the same entries have the same scores": _determined,
    "positions of 32 or 64 bits, tokens seen by row": _kinds,
    "empty slots and rows change nobody's score": _empty,
    "scores follow their tokens to other slots": _slots,
    "rows do not meet": _rows,
    "heads are alike": heads_alike,
    "a layer's number counts only where watch() asks for it": _told_to_all,
}
