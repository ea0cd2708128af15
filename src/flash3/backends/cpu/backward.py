"""Backward by blocks: P is made again from the LSE, a tile of queries at a time, so nothing but O and the LSE is kept.

delta = rowsum(dO ∘ O) − dLSE
for each tile of queries:
    for each block of keys it sees:   P = exp(S − lse);  dV += Pᵀ dO;  dP = dO Vᵀ
                                      dS = P ∘ (dP − delta) [∘ (1 − (S / softcap)²)];  dQ += scale·dS K;  dK += scale·dSᵀ Q
dsink = −Σ exp(sink − lse) · delta

The saved LSE is float32: beyond ±64 its rounding would show in P (at 1e5 by 0.4 %). There, and for float64, maximum and sum of each row are
made again, and the LSE is kept as two numbers, row_max and log row_sum. Only rows whose LSE they reproduce take them: in a ring the keys at
hand are a part of the row's, and the saved LSE is that of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Gradients, Saved
from .blocks import Operands, by_kv_head, compute_dtype, operands, stack, tiling
from .forward import attend_tile, finite
from .work import Block, Tiling, Work

LARGEST_LSE = {torch.float64: -1.0, torch.float32: 64.0, torch.float16: 1024.0, torch.bfloat16: 8192.0}
"""Up to here float32 holds an LSE well enough for gradients of this type; for those of float64 never."""
SAME_LSE = 2.0**-20
"""How far two float32 LSEs of the same row may be apart, relatively: their rounding, and that of the scores by another order of sums."""


@dataclass(frozen=True)
class Rows:
    """What the backward knows of each query row, (heads, group, rows, ·): gradient of the output, delta, and the LSE as lse + rest."""

    d_out: Tensor
    delta: Tensor
    lse: Tensor
    rest: Tensor | None

    def tile(self, heads: slice, first: int, stop: int) -> Rows:
        """One tile's, stacked as its queries are."""
        d_out, delta, lse = (stack(x[heads], first, stop) for x in (self.d_out, self.delta, self.lse))
        return Rows(d_out, delta, lse, None if self.rest is None else stack(self.rest[heads], first, stop))


def gradients(work: Work, saved: Saved, grads: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the shapes of work.q, k and v, and d_sink (heads_q,); in the dtype of computation."""
    ops, tiles = operands(work), tiling(work)
    rows = row_data(work, saved, grads, (ops, tiles))
    dq, dk, dv = torch.zeros_like(ops.q), torch.zeros_like(ops.k), torch.zeros_like(ops.v)
    for heads, slab in ops.slabs(tiles):
        for first, stop in tiles.tiles():
            blocks, q, own = tiles.blocks(first, stop), stack(slab.q, first, stop), rows.tile(heads, first, stop)
            tile_dq = tile_gradients(slab, blocks, q, own, (dk[heads], dv[heads]))
            dq[heads, :, first:stop] = slab.unstack(tile_dq)
    d_sink = None if ops.sink is None else sink_gradient(ops.sink, rows).view(work.q.shape[:2]).sum(0)
    return dq.view(work.q.shape), dk.view(work.k.shape), dv.view(work.v.shape), d_sink


def lse_is_coarse(lse: Tensor, dtype: torch.dtype) -> bool:
    """Whether some row's LSE is too large for float32 to hold it well enough for gradients of this dtype."""
    return lse.numel() > 0 and bool(finite(lse).abs().max() > LARGEST_LSE[dtype])


def delta_of(d_out: Tensor, out: Tensor, d_lse: Tensor | None) -> Tensor:
    """rowsum(dO ∘ O) − dLSE, (batch, heads_q, rows), in d_out's dtype."""
    delta = (d_out * out).sum(-1)
    return delta if d_lse is None else delta.sub_(d_lse)


def row_data(work: Work, saved: Saved, grads: Gradients, loops: tuple[Operands, Tiling]) -> Rows:
    """Rows without keys get gradient 0 and LSE +inf: their P is 0, whatever their d_out holds."""
    dtype = compute_dtype(work.q.dtype)
    lse, rest, out = by_kv_head(saved.lse.to(dtype)[..., None], work), None, saved.out
    if lse_is_coarse(saved.lse, work.q.dtype):
        lse, rest, stacked_out = refined(*loops, lse, by_kv_head(out.to(dtype), work))
        out = stacked_out.view(out.shape)
    d_out = grads.d_out.to(dtype)
    delta = delta_of(d_out, out, grads.d_lse)
    empty = saved.lse == -torch.inf
    if empty.any():
        d_out, delta = d_out.masked_fill(empty[..., None], 0), delta.masked_fill(empty, 0)
    return Rows(by_kv_head(d_out, work), by_kv_head(delta[..., None], work), lse.masked_fill(lse == -torch.inf, torch.inf), rest)


def refined(ops: Operands, tiles: Tiling, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LSE in two parts, row_max and log row_sum, and O, made again where the saved LSE is these keys'; other rows keep (lse, 0, out).

    O too: where P is nearly all on one key, dP − delta is a small difference, and O must be of the P that dP meets.
    """
    whole, rest, out = lse.clone(), torch.zeros_like(lse), out.clone()
    for heads, slab in ops.slabs(tiles):
        for first, stop in tiles.tiles():
            again, softmax = attend_tile(slab, tiles, first, stop)
            row_max, log_sum, saved = softmax.row_max, softmax.log_sum(), stack(lse[heads], first, stop)
            same = (row_max + log_sum - saved).abs() <= saved.abs() * SAME_LSE
            whole[heads, :, first:stop] = slab.unstack(torch.where(same, row_max, saved))
            rest[heads, :, first:stop] = slab.unstack(torch.where(same, log_sum, 0))
            out[heads, :, first:stop] = slab.unstack(torch.where(same, again, stack(out[heads], first, stop)))
    return whole, rest, out


def tile_gradients(ops: Operands, blocks: Iterator[Block], q: Tensor, rows: Rows, dkv: tuple[Tensor, Tensor]) -> Tensor:
    """dQ of one tile, rows stacked; its share of dK and dV is added in place."""
    dq = torch.zeros_like(q)
    for block in blocks:
        k, v, dk, dv = (x[:, block.begin : block.end] for x in (ops.k, ops.v, *dkv))
        P, slope = probabilities(ops, q, rows, block)
        dv.baddbmm_(P.mT, rows.d_out)
        dS = torch.bmm(rows.d_out, v.mT).sub_(rows.delta).mul_(P)
        if slope is not None:
            dS.mul_(slope)
        dq.baddbmm_(dS, k, alpha=ops.scale)
        dk.baddbmm_(dS.mT, q, alpha=ops.scale)
    return dq


def probabilities(ops: Operands, q: Tensor, rows: Rows, block: Block) -> tuple[Tensor, Tensor | None]:
    """P = exp(S − lse), and the slope of the softcap, 1 − tanh² (None without one)."""
    S = ops.scores(q, None, block)
    slope = None
    if ops.softcap:
        slope = (S / ops.softcap).square_().neg_().add_(1)
        if block.hidden is not None:  # there S is −inf and P is 0
            ops.unstack(slope).masked_fill_(block.hidden, 0)
    S.sub_(rows.lse)
    return (S if rows.rest is None else S.sub_(rows.rest)).exp_(), slope


def sink_gradient(sink: Tensor, rows: Rows) -> Tensor:
    """(heads, group): the sink's share of each row's softmax times −delta, summed over the rows."""
    share = sink[..., None, None] - rows.lse
    share = share if rows.rest is None else share - rows.rest
    return -(share.exp_() * rows.delta).sum((-1, -2), dtype=torch.float64)
