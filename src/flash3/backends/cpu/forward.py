"""Forward by blocks: the paper's Algorithm 1 over one dense batch.

for each tile of queries:                   O = 0, row_sum = 0, row_max = −inf
    for each block of keys the tile sees:   S = scale·Q Kᵀ;  row_max' = max(row_max, rowmax S);  P = exp(S − row_max')
                                            alpha = exp(row_max − row_max');  O = alpha·O + P V;  row_sum = alpha·row_sum + rowsum P
    out = O / row_sum;  lse = row_max + log row_sum
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Operands, by_kv_head, operands, stack, tiling
from .work import Tiling, Work


def attend(work: Work, out: Tensor, lse: Tensor | None) -> None:
    """Fill out (batch, heads_q, q_len, value_dim) and lse (batch, heads_q, q_len), of any strides. No keys: out 0, lse −inf (the sink)."""
    ops, tiles = operands(work), tiling(work)
    O_all = ops.q.new_empty(*ops.q.shape[:-1], ops.v.shape[-1])
    lse_all = ops.q.new_empty(ops.q.shape[:-1])
    for heads, slab in ops.slabs(tiles):
        for first, stop in tiles.tiles():
            tile_out, tile_lse = attend_tile(slab, tiles, first, stop)
            O_all[heads, :, first:stop] = tile_out
            lse_all[heads, :, first:stop] = tile_lse
    if work.sink is not None:
        sink = by_kv_head(work.sink.to(lse_all.dtype).expand(work.q.shape[0], -1), work)
        add_sink(O_all, lse_all, sink[..., None])
    out.copy_(O_all.view(out.shape))
    if lse is not None:
        lse.copy_(lse_all.view(lse.shape))


def attend_tile(ops: Operands, tiles: Tiling, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Output (heads, group, rows, value_dim) and LSE of one tile, in the dtype of computation."""
    q = stack(ops.q, first, stop)
    qv = None if ops.qv is None else stack(ops.qv, first, stop)
    acc = q.new_zeros(*q.shape[:-1], ops.v.shape[-1])
    row_sum = q.new_zeros(*q.shape[:-1], 1)
    row_max = torch.full_like(row_sum, -torch.inf)
    for block in tiles.blocks(first, stop):
        S = ops.scores(q, qv, block)
        new_max = torch.maximum(row_max, S.amax(-1, keepdim=True))
        shift = finite(new_max)
        P = S.sub_(shift).exp_()
        alpha = row_max.sub_(shift).exp_()
        row_sum.mul_(alpha).add_(P.sum(-1, keepdim=True))
        acc.mul_(alpha).baddbmm_(P, ops.v[:, block.begin : block.end])
        row_max = new_max
    acc.div_(row_sum.masked_fill(row_sum == 0, 1))
    shape = (len(q), ops.group, stop - first)
    return acc.view(*shape, -1), row_max.add_(row_sum.log_()).view(shape)


def finite(row_max: Tensor) -> Tensor:
    """row_max with 0 for rows that have seen no key: exp(−inf − 0) is 0, exp(−inf + inf) would be NaN."""
    return row_max.masked_fill(row_max == -torch.inf, 0)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Put one more logit into the denominator, in place: exact, since O and LSE say all there is to know of the other keys."""
    total = torch.logaddexp(lse, sink)
    out.mul_((lse - finite(total)).exp_()[..., None])
    lse.copy_(total)
