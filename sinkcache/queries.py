"""What a layer remembers of the queries it has answered, for policies that ask: the newest, or the moments of all."""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sinkcache.positions import Rotation


class Recent:
    """A ring of the newest `window` queries of each row, as they came; `positions` are -1 where there is none yet."""

    def __init__(self, window: int, like: Float[Tensor, "batch num_heads q_len head_dim"]) -> None:
        batch, heads, _, head_dim = like.shape
        with torch.inference_mode(False):  # or they could not be written outside of it
            self.queries = like.new_zeros(batch, heads, window, head_dim)
            self.positions = torch.full((batch, window), -1, dtype=torch.int64, device=like.device)
            self.frames = torch.zeros_like(self.positions)  # the shift under which each was rotated

    def add(
        self,
        queries: Float[Tensor, "batch num_heads q_len head_dim"],
        positions: Int[Tensor, "rows q_len"],
        shift: int | Int[Tensor, "batch 1"],
    ) -> None:
        """Puts queries in the place of the oldest; those at position -1 (pads) are left out."""
        window = self.positions.shape[1]
        if len(positions) == 1:  # rows alike, no pads
            new = positions[:, -window:]
            slots = new[0] % window
            self.queries.index_copy_(2, slots, queries[:, :, -window:])
            self.positions.index_copy_(1, slots, new.expand(len(queries), -1))
            self.frames[:, slots] = shift
            return
        newest = positions.amax(dim=1, keepdim=True)
        rows, columns = ((positions >= 0) & (positions > newest - window)).nonzero(as_tuple=True)
        slots = positions[rows, columns] % window
        self.queries[rows, :, slots] = queries[rows, :, columns]
        self.positions[rows, slots] = positions[rows, columns]
        self.frames[rows, slots] = shift if isinstance(shift, int) else shift[rows, 0]


class Moments:
    """Running mean and covariance of queries turned back to position 0, by Chan, Golub and LeVeque's update (1979)."""

    def __init__(self, like: Float[Tensor, "batch num_heads q_len head_dim"]) -> None:
        batch, heads, _, head_dim = like.shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        with torch.inference_mode(False):  # or they could not be written outside of it
            self.count = torch.zeros(batch, 1, 1, dtype=dtype, device=like.device)
            self.mean = torch.zeros(batch, heads, head_dim, dtype=dtype, device=like.device)
            self.spread = torch.zeros(batch, heads, head_dim, head_dim, dtype=dtype, device=like.device)

    def add(
        self,
        queries: Float[Tensor, "batch num_heads q_len head_dim"],
        places: Int[Tensor, "rows q_len"],
        counted: Float[Tensor, "rows q_len"],
        rotation: Rotation | None,
    ) -> None:
        """Counts in queries that were rotated to `places`, each as often as `counted` says, 0 or 1."""
        plain = queries.to(self.mean.dtype)
        if rotation is not None:
            plain = plain.clone()
            rotation.put(plain, rotation.pick(plain) * rotation.phases(-places, plain)[:, None])
        weights = counted.to(self.mean.dtype)[:, None, :, None]
        new = weights.sum(dim=(1, 2, 3))[:, None, None].expand_as(self.count)
        total = (self.count + new).clamp_min(1)
        mean = (plain * weights).sum(dim=2) / new.clamp_min(1)
        centred = (plain - mean[:, :, None]) * weights  # weights are 0 or 1
        apart = (mean - self.mean) * (new > 0)
        between = (self.count * new / total)[..., None] * apart[..., :, None] * apart[..., None, :]
        self.spread += torch.matmul(centred.transpose(-1, -2), centred) + between
        self.mean += apart * new / total
        self.count += new

    def covariance(self) -> Float[Tensor, "batch num_heads head_dim head_dim"]:
        """Of all queries counted so far (divided by their number)."""
        return self.spread / self.count.clamp_min(1)[..., None]


def turned(
    queries: Float[Tensor, "batch num_heads window head_dim"],
    moves: Int[Tensor, "batch num_kv_heads window"],
    rotation: Rotation,
) -> Float[Tensor, "batch num_heads window head_dim"]:
    """A copy of `queries`, those of each key head moved by its `moves`."""
    heads = moves.shape[1]
    split = rearrange(queries, "b (h g) w d -> b h g w d", h=heads).clone()
    rotation.put(split, rotation.pick(split) * rotation.phases(moves, split)[:, :, None])
    return rearrange(split, "b h g w d -> b (h g) w d")
