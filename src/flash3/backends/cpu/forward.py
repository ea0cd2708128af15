"""Forward by blocks: the paper's Algorithm 1 over one dense batch.

for each tile of queries:                   O = 0, row_sum = 0, row_max = −inf    (with a sink: row_sum = 1, row_max = sink)
    for each block of keys the tile sees:   S = scale·Q Kᵀ;  row_max' = max(row_max, rowmax S);  P = exp(S − row_max')
                                            alpha = exp(row_max − row_max');  O = alpha·O + P V;  row_sum = alpha·row_sum + rowsum P
    out = O / row_sum;  lse = row_max + log row_sum
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Operands, operands, stack, tiling
from .work import Tiling, Work


def attend(work: Work, out: Tensor, lse: Tensor | None) -> None:
    """Fill out (batch, heads_q, q_len, value_dim) and lse (batch, heads_q, q_len), of any strides. No keys: out 0, lse −inf (the sink)."""
    ops, tiles = operands(work), tiling(work)
    all_out = ops.q.new_empty(*ops.q.shape[:-1], ops.v.shape[-1])
    all_lse = ops.q.new_empty(*ops.q.shape[:-1], 1)
    for heads, slab in ops.slabs(tiles):
        for first, stop in tiles.tiles():
            tile_out, softmax = attend_tile(slab, tiles, first, stop)
            all_out[heads, :, first:stop] = slab.unstack(tile_out)
            all_lse[heads, :, first:stop] = slab.unstack(softmax.row_max + softmax.log_sum())
    out.copy_(all_out.view(out.shape))
    if lse is not None:
        lse.copy_(all_lse.view(lse.shape))


class OnlineSoftmax:
    """Running maximum and sum of the rows of S, (heads, rows, 1)."""

    def __init__(self, ops: Operands, q: Tensor) -> None:
        self.row_max = ops.first_max(q)
        self.row_sum = (self.row_max > -torch.inf).to(q.dtype)

    def update(self, S: Tensor) -> Tensor:
        """Turn S into P in place; the answer is alpha, by which what was summed before must shrink."""
        row_max = torch.maximum(self.row_max, S.amax(-1, keepdim=True))
        shift = finite(row_max)
        S.sub_(shift).exp_()
        alpha = self.row_max.sub_(shift).exp_()
        self.row_sum.mul_(alpha).add_(S.sum(-1, keepdim=True))
        self.row_max = row_max
        return alpha

    def log_sum(self) -> Tensor:
        """lse − row_max; −inf for a row without keys."""
        return self.row_sum.log()


def attend_tile(ops: Operands, tiles: Tiling, first: int, stop: int) -> tuple[Tensor, OnlineSoftmax]:
    """O (heads, group · rows, value_dim) of one tile, normalized, and its softmax, in the dtype of computation."""
    q, qv = stack(ops.q, first, stop), None if ops.qv is None else stack(ops.qv, first, stop)
    out, softmax = q.new_zeros(*q.shape[:-1], ops.v.shape[-1]), OnlineSoftmax(ops, q)
    for block in tiles.blocks(first, stop):
        S = ops.scores(q, qv, block)
        alpha = softmax.update(S)
        out.mul_(alpha).baddbmm_(S, ops.v[:, block.begin : block.end])
    return out.div_(softmax.row_sum.masked_fill(softmax.row_sum == 0, 1)), softmax


def row_statistics(ops: Operands, tiles: Tiling, first: int, stop: int) -> OnlineSoftmax:
    """The softmax of one tile alone."""
    q = stack(ops.q, first, stop)
    softmax = OnlineSoftmax(ops, q)
    for block in tiles.blocks(first, stop):
        softmax.update(ops.scores(q, None, block))
    return softmax


def finite(row_max: Tensor) -> Tensor:
    """row_max with 0 for rows that have seen no key: exp(−inf − 0) is 0, exp(−inf + inf) would be NaN."""
    return row_max.masked_fill(row_max == -torch.inf, 0)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Put one more logit into the denominator, in place: exact, since O and LSE say all there is to know of the other keys."""
    total = torch.logaddexp(lse, sink)
    out.mul_((lse - finite(total)).exp_()[..., None])
    lse.copy_(total)
