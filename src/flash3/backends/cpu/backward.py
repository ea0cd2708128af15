"""Backward by blocks: P is made again from the LSE, a tile of queries at a time, so nothing but O and the LSE is kept.

delta = rowsum(dO ∘ O) − dLSE
for each tile of queries:
    for each block of keys the tile sees:   P = exp(S − lse);  dV += Pᵀ dO;  dP = dO Vᵀ
                                            dS = P ∘ (dP − delta) [∘ (1 − (S / softcap)²)];  dQ += scale·dS K;  dK += scale·dSᵀ Q
dsink = −Σ exp(sink − lse) · delta
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Gradients, Saved
from .blocks import Operands, by_kv_head, compute_dtype, operands, stack, tiling
from .work import Block, Tiling, Work


@dataclass(frozen=True)
class Rows:
    """What the backward knows of each query row: gradient of the output, LSE and delta; laid out and sliced as Operands.q is."""

    d_out: Tensor
    lse: Tensor
    delta: Tensor

    def __getitem__(self, heads: slice) -> Rows:
        return Rows(self.d_out[heads], self.lse[heads], self.delta[heads])

    def stacked(self, first: int, stop: int) -> Rows:
        return Rows(*(stack(x, first, stop) for x in (self.d_out, self.lse, self.delta)))


def gradients(work: Work, saved: Saved, grads: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the shapes of work.q, k and v, and d_sink (heads_q,); in the dtype of computation."""
    ops, tiles = operands(work), tiling(work)
    rows = row_data(work, saved, grads)
    dq, dk, dv = torch.zeros_like(ops.q), torch.zeros_like(ops.k), torch.zeros_like(ops.v)
    for heads, slab in ops.slabs(tiles):
        for first, stop in tiles.tiles():
            dq[heads, :, first:stop] = tile_gradients(slab, tiles, rows[heads], (first, stop), (dk[heads], dv[heads]))
    d_sink = None if work.sink is None else sink_gradient(work.sink, work, rows)
    return dq.view(work.q.shape), dk.view(work.k.shape), dv.view(work.v.shape), d_sink


def row_data(work: Work, saved: Saved, grads: Gradients) -> Rows:
    """delta and LSE of every row. Rows without keys get gradient 0 and LSE +inf, so that their P is 0 whatever their d_out holds."""
    dtype = compute_dtype(work.q.dtype)
    d_out, lse = grads.d_out.to(dtype), saved.lse.to(dtype)
    delta = (d_out * saved.out).sum(-1)
    if grads.d_lse is not None:
        delta -= grads.d_lse
    empty = lse == -torch.inf
    if empty.any():
        d_out, delta, lse = d_out.masked_fill(empty[..., None], 0), delta.masked_fill(empty, 0), lse.masked_fill(empty, torch.inf)
    return Rows(by_kv_head(d_out, work), by_kv_head(lse[..., None], work), by_kv_head(delta[..., None], work))


def tile_gradients(ops: Operands, tiles: Tiling, rows: Rows, tile: tuple[int, int], dkv: tuple[Tensor, Tensor]) -> Tensor:
    """dQ of one tile (heads, group, rows, head_dim); its share of dK and dV is added in place."""
    q, own = stack(ops.q, *tile), rows.stacked(*tile)
    dq = torch.zeros_like(q)
    for block in tiles.blocks(*tile):
        k, v, dk, dv = (x[:, block.begin : block.end] for x in (ops.k, ops.v, *dkv))
        P, slope = probabilities(ops, q, own.lse, block)
        dv.baddbmm_(P.mT, own.d_out)
        dS = torch.bmm(own.d_out, v.mT).sub_(own.delta).mul_(P)
        if slope is not None:
            dS.mul_(slope)
        dq.baddbmm_(dS, k, alpha=ops.scale)
        dk.baddbmm_(dS.mT, q, alpha=ops.scale)
    return dq.view(len(q), ops.group, tile[1] - tile[0], -1)


def probabilities(ops: Operands, q: Tensor, lse: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """P = exp(S − lse), and the slope of the softcap, 1 − tanh² (None without one)."""
    S = ops.scores(q, None, block)
    slope = None
    if ops.softcap:
        slope = (S / ops.softcap).square_().neg_().add_(1)
        if block.hidden is not None:  # there S is −inf and P is 0
            slope.view(len(S), ops.group, *block.hidden.shape).masked_fill_(block.hidden, 0)
    return S.sub_(lse).exp_(), slope


def sink_gradient(sink: Tensor, work: Work, rows: Rows) -> Tensor:
    """float32 (heads_q,), summed over the batch and its rows."""
    sink = by_kv_head(sink.to(rows.lse.dtype).expand(work.q.shape[0], -1), work)
    share = (sink[..., None, None] - rows.lse).exp_() * rows.delta
    return -share.sum((-1, -2)).view(work.q.shape[0], -1).sum(0)
