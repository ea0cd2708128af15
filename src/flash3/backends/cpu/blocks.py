"""What forward and backward share: heads in slabs, tile sizes, and the scores of a tile of queries against a block of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .work import Block, Tiling, Work

TILE_ROWS = 256
TILE_KEYS = 256
STEP_ELEMENTS = 1 << 19
"""Scores of one step, over all its heads: 2 MB in float32, so that what a step makes stays in the caches."""


@dataclass(frozen=True)
class Operands:
    """Key heads in the dtype of computation: k, v (heads, k_len, ·), and for the query heads that share them q, qv (heads, group, q_len, ·)
    and sink (heads, group).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None
    sink: Tensor | None
    scale: float
    softcap: float

    @property
    def group(self) -> int:
        return self.q.shape[1]

    def slabs(self, tiles: Tiling) -> Iterator[tuple[slice, Operands]]:
        """As many heads at a time as keep a step within STEP_ELEMENTS."""
        size = max(1, STEP_ELEMENTS // (tiles.rows * self.group * tiles.keys))
        for first in range(0, self.k.shape[0], size):
            heads = slice(first, first + size)
            qv, sink = (None if x is None else x[heads] for x in (self.qv, self.sink))
            yield heads, Operands(self.q[heads], self.k[heads], self.v[heads], qv, sink, self.scale, self.softcap)

    def first_max(self, q: Tensor) -> Tensor:
        """The row maximum (heads, rows, 1) before any key: the sink, or −inf."""
        start = q.new_full(q.shape[:-1], -torch.inf)
        if self.sink is not None:
            start.view(*self.sink.shape, -1).copy_(self.sink[..., None])
        return start[..., None]

    def unstack(self, x: Tensor) -> Tensor:
        """A tile's (heads, group · rows, ·) as (heads, group, rows, ·)."""
        return x.unflatten(1, (self.group, -1))

    def scores(self, q: Tensor, qv: Tensor | None, block: Block) -> Tensor:
        """S = scale·q kᵀ (capped), −inf where hidden, for stacked rows q (heads, group · rows, head_dim)."""
        factor = self.scale / self.softcap if self.softcap else self.scale
        S = torch.baddbmm(q.new_zeros(()), q, self.k[:, block.begin : block.end].mT, beta=0, alpha=factor)
        if qv is not None:
            S.baddbmm_(qv, self.v[:, block.begin : block.end].mT, alpha=factor)
        if self.softcap:
            S.tanh_().mul_(self.softcap)
        if block.hidden is not None:
            self.unstack(S).masked_fill_(block.hidden, -torch.inf)
        return S


def operands(work: Work) -> Operands:
    """The work in its dtype of computation. Copies only where dtype or strides ask for it; K and V are never repeated."""
    dtype = compute_dtype(work.q.dtype)
    q, qv = (None if x is None else by_kv_head(x.to(dtype), work) for x in (work.q, work.qv))
    k, v = (x.to(dtype).flatten(0, 1) for x in (work.k, work.v))
    assert q is not None
    sink = None if work.sink is None else by_kv_head(work.sink.to(dtype).expand(work.q.shape[0], -1), work)
    return Operands(q, k, v, qv, sink, work.scale, work.softcap)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics and accumulation: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def by_kv_head(x: Tensor, work: Work) -> Tensor:
    """(batch, heads_q, …) -> (batch · heads_kv, heads_q / heads_kv, …): the query heads beside the key head they share."""
    return x.unflatten(1, (work.k.shape[1], -1)).flatten(0, 1)


def stack(x: Tensor, first: int, stop: int) -> Tensor:
    """Rows first … stop - 1 of x (heads, group, rows, dim), a group's rows stacked into one matrix per head."""
    return x[:, :, first:stop].flatten(1, 2)


def tiling(work: Work) -> Tiling:
    """Fewer rows to a tile where several query heads stack up on a key head, longer blocks where there are few rows."""
    group = work.q.shape[1] // work.k.shape[1]
    if work.sizes is not None and work.sizes.keys:
        return Tiling(work.sees, max(1, work.sizes.rows // group), work.sizes.keys)
    rows = min(max(1, TILE_ROWS // group), work.sees.q_len)
    keys = max(TILE_KEYS, TILE_ROWS * TILE_KEYS // (rows * group))
    return Tiling(work.sees, rows, keys)
