"""Online softmax over blocks of keys, in powers of two.

    m' = max(m, rowmax S)      α = 2^(c·(m − m'))      P = 2^(c·S − c·m')      l = α·l + rowsum P      O = α·O + P·V
    at the end  O / l  and  L = ln2·(c·m + log2 l),      c = |scale|·log2 e

Lazy: the old m is kept while no row's maximum grew by more than 2^rescale_log2, so that O is rarely rescaled; P then stays below
2^rescale_log2, and O / l is the same number.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from .fragments import LANES_PER_ROW, as_rows, scale_rows
from .tiles import ForwardSpec, ScaleSign, Tiles

LOG2_E = math.log2(math.e)


@dataclass
class ScoreMap:
    """What happens to raw scores before the mask: nothing; or the sign of the scale; or c·tanh(scale·s/c), of which the factor c
    goes into the softmax's scale."""

    tanh_scale: Float32
    spec: cutlass.Constexpr[ForwardSpec]

    @cute.jit
    def apply(self, S: cute.Tensor):
        if const_expr(self.spec.softcap):
            # tanh x = 1 − 2 / (1 + e^2x): exact to float32 rounding, where the hardware's tanh has 11 bits
            for i in cutlass.range_constexpr(cute.size(S)):
                e = cute.math.exp2(S[i] * self.tanh_scale, fastmath=True)
                S[i] = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(Float32(1.0) + e)
        elif const_expr(self.spec.scale_sign is ScaleSign.NEGATIVE):
            for i in cutlass.range_constexpr(cute.size(S)):
                S[i] = -S[i]
        elif const_expr(self.spec.scale_sign is ScaleSign.ZERO):
            S.fill(0.0)


def row_max(rows, r: int):
    """Over one thread's columns, in four chains."""
    n = cute.size(rows, mode=[1])
    part = [rows[r, i] for i in range(4)]
    for c in range(4, n):
        part[c % 4] = cute.arch.fmax(part[c % 4], rows[r, c])
    return cute.arch.fmax(cute.arch.fmax(part[0], part[1]), cute.arch.fmax(part[2], part[3]))


@dataclass
class OnlineSoftmax:
    """State of a thread's two rows."""

    row_max: cute.Tensor
    row_sum: cute.Tensor  # this thread's part; summed over the row's lanes at the end
    scale_log2: Float32
    tiles: cutlass.Constexpr[Tiles]

    @cute.jit
    def update(self, S: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool]):
        """S becomes P. Returns α, by which what earlier blocks gave shrinks."""
        rows = as_rows(S)
        alpha = self.new_maximum(rows, first, masked)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            base = self.row_max[r]
            if const_expr(masked):  # a row that has seen nothing yet: −inf − (−inf) would be NaN
                base = Float32(0.0) if base == -Float32.inf else base
            shift = base * self.scale_log2
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = cute.math.exp2(rows[r, c] * self.scale_log2 - shift, fastmath=True)
            part = [rows[r, 0], rows[r, 1]]
            for c in cutlass.range_constexpr(2, cute.size(rows, mode=[1])):
                part[c % 2] = part[c % 2] + rows[r, c]
            total = part[0] + part[1]
            if const_expr(first):
                self.row_sum[r] = total
            else:
                self.row_sum[r] = self.row_sum[r] * alpha[r] + total
        return alpha

    @cute.jit
    def new_maximum(self, rows: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool]):
        alpha = cute.make_rmem_tensor_like(self.row_max)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            m = row_max(rows, r)
            if const_expr(not first):
                m = cute.arch.fmax(m, self.row_max[r])
            m = cute.arch.warp_reduction_max(m, threads_in_group=LANES_PER_ROW)
            alpha[r] = Float32(1.0)
            if const_expr(not first):
                if const_expr(self.tiles.rescale_log2 > 0):
                    grew = (m - self.row_max[r]) * self.scale_log2
                    m = m if grew > Float32(self.tiles.rescale_log2) else self.row_max[r]
                base = m
                if const_expr(masked):
                    base = Float32(0.0) if m == -Float32.inf else m
                alpha[r] = cute.math.exp2((self.row_max[r] - base) * self.scale_log2, fastmath=True)
            self.row_max[r] = m
        return alpha

    @cute.jit
    def rescale(self, O: cute.Tensor, alpha: cute.Tensor):
        """O times α; skipped when no row of the warp needs it."""
        if const_expr(self.tiles.rescale_log2 > 0):
            same = alpha[0] == Float32(1.0)
            for r in cutlass.range_constexpr(1, cute.size(alpha)):
                same = same and alpha[r] == Float32(1.0)
            if not cute.arch.vote_all_sync(same):
                scale_rows(O, alpha)
        else:
            scale_rows(O, alpha)

    @cute.jit
    def finish(self, sink_log2: Float32, has_sink: cutlass.Constexpr[bool]):
        """1/l for O, and L, per row. A row without keys: 0 and −inf, with a sink 0 and the sink."""
        inverse = cute.make_rmem_tensor_like(self.row_sum)
        lse = cute.make_rmem_tensor_like(self.row_sum)
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            top = self.row_max[r] * self.scale_log2
            numerator = Float32(1.0)
            if const_expr(has_sink):
                # both terms relative to the larger exponent, whichever that is
                larger = cute.arch.fmax(top, sink_log2)
                larger = Float32(0.0) if larger == -Float32.inf else larger
                numerator = cute.math.exp2(top - larger, fastmath=True)
                total = total * numerator + cute.math.exp2(sink_log2 - larger, fastmath=True)
                top = larger
            empty = total == Float32(0.0)
            inverse[r] = Float32(0.0) if empty else numerator * cute.arch.rcp_approx(total)
            lse[r] = -Float32.inf if empty else (top + cute.math.log2(total, fastmath=True)) * Float32(1 / LOG2_E)
        return inverse, lse
