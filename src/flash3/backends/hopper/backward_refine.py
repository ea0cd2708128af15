"""The second part of a large L.

float32 holds an L of 1e5 to 0.004, and P would be wrong by as much. Where |L·log2 e| is large, the row's sum is made again relative to the
rounded one, Σ_j 2^(S_j − L₂): it is 2^rest, and L₂ + rest is the sum's logarithm to float32's digits of 1. A row whose sum is not near 1
keeps rest = 0: its L is not that of these keys alone (in a ring the keys at hand are a part).

One warp for a row, one lane for a key: slow, and almost never needed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import mask
from .backward_operands import RowOperands
from .backward_tiles import BackwardSpec
from .extents import Extent
from .masking import bounds_of
from .rows import PIECE, piece_of
from .softmax import LOG2_E
from .weights import rcp_of_cap

LARGEST_EXACT = 256.0
"""Up to here float32 holds L₂ to 2⁻¹⁷, far below a 16-bit P's rounding."""
SAME_SUM = 2.0**-20
"""How far L₂ and the sum made again may be apart, relatively: their rounding, and that of scores by another order of sums."""
LANES = 32


@cute.jit
def dot(a: cute.Tensor, b: cute.Tensor, width: Int32):
    """Of two rows in global memory."""
    total = Float32(0.0)
    for column in cutlass.range(0, width, PIECE, unroll=1):
        x, y = piece_of(a, column), piece_of(b, column)
        for e in cutlass.range_constexpr(PIECE):
            total = total + x[e].to(Float32) * y[e].to(Float32)
    return total


@cute.jit
def exponent(ops: RowOperands, score: Float32, spec: cutlass.Constexpr[BackwardSpec]):
    """A raw score as exponent of two."""
    if const_expr(spec.softcap):
        score = Float32(1.0) - Float32(2.0) * rcp_of_cap(score, ops.tanh_scale)
    return score * ops.scale_log2


@cute.jit
def rest_of_row(
    ops: RowOperands, q_row: cute.Tensor, keys: cute.Tensor, row: Int32, q: Extent, k: Extent, lse_log2: Float32, head: Int32,
    spec: cutlass.Constexpr[BackwardSpec],
):  # fmt: skip
    """log2 of the row's sum relative to lse_log2. keys: (rows, columns) of the sequence. The whole warp must ask."""
    bounds = bounds_of(ops.mask, q.length, k.length)
    begin, end = mask.visible_keys(row, k.length, bounds, spec.mask_kind, cutlass.min, cutlass.max)
    total = Float32(0.0)
    for first in cutlass.range(Int32(begin), Int32(end), LANES, unroll=1):
        key = first + cute.arch.lane_idx()
        score = dot(q_row, keys[cutlass.min(key, k.length - 1), None], q_row.shape[0])
        weight = cute.math.exp2(exponent(ops, score, spec) - lse_log2, fastmath=True)
        total = total + (weight if key < end else Float32(0.0))
    total = cute.arch.warp_reduction_sum(total)
    if const_expr(spec.sink):
        total = total + cute.math.exp2(ops.sink[head] * Float32(LOG2_E) - lse_log2, fastmath=True)
    rest = cute.math.log2(total, fastmath=True)
    size = rest if rest > Float32(0.0) else -rest
    limit = lse_log2 if lse_log2 > Float32(0.0) else -lse_log2
    return rest if size <= limit * Float32(SAME_SUM) else Float32(0.0)
