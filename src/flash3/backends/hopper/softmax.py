"""Online softmax over blocks of keys, in powers of two.

    m' = max(m, rowmax S)      α = 2^(c·(m − m'))      P = 2^(c·S − c·m')      l = α·l + rowsum P      O = α·O + P·V
    at the end  O / l  and  L = ln2·(c·m + log2 l),      c = |scale|·log2 e

Any m does that is near enough to the maximum: O / l is the same number. So most blocks are taken on trust: P = 2^(c·S − c·m) with the
old m, without a look at the maximum. No P is larger than the sum of its row, which is wanted anyway: while sums stay below TRUSTED_SUM
all is well. Else the block is taken again, from S = Q·Kᵀ on, and now m is raised to the maximum. That costs a block of work, and with
every time m has grown by at least two powers of two. Blocks with a mask, of which a row may see nothing, go by their maximum at once.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from .fragments import LANES_PER_ROW, as_rows
from .tiles import ForwardSpec, ScaleSign, Tiles

LOG2_E = math.log2(math.e)
TRUSTED_SUM = 256.0
"""What a thread's part of its two rows may sum up to in a block before m is raised. P then stays within 16-bit floats, and O in float32."""
TOLERANCE_LOG2 = 8.0
"""By how many powers of two a masked block's maximum may exceed m before O is rescaled."""


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


def total_of(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def hold_waits(x):
    """Keep ptxas from moving the next wait for a matmul above the computation of x: a store that never happens, since no sum has the bits
    −1 (a NaN that arithmetic makes is 0x7fffffff). A float comparison will not do: x may be inf, and ptxas knows that it is not negative.

    wait_group has no operands, so ptxas puts it where it likes; with luck below the exponentials, else P·V no longer hides them."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 a, x; mov.b32 a, 0; mov.b32 x, {$r0}; setp.eq.s32 p, x, -1; @p st.shared.b32 [a], x; }",
        read_only_args=[x],
    )


@dataclass
class OnlineSoftmax:
    """State of a thread's two rows."""

    shift: cute.Tensor  # c·m; −inf while the row has seen nothing
    row_sum: cute.Tensor  # this thread's part; summed over the row's lanes at the end
    scale_log2: Float32
    spec: cutlass.Constexpr[ForwardSpec]
    tiles: cutlass.Constexpr[Tiles]

    @cute.jit
    def start(self, S: cute.Tensor):
        """The first block of a tile: S becomes P."""
        self.shift.fill(-Float32.inf)
        self.row_sum.fill(0.0)
        self.update(S, tolerance_log2=0.0, hold=0)

    @cute.jit
    def trust(self, S: cute.Tensor, sums: cute.Tensor, hold: cutlass.Constexpr[int]):
        """A later block, or a part of it: S becomes P relative to the old m, and the rows' sums are added to `sums`."""
        rows = as_rows(S)
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] * self.scale_log2 - self.shift[r]
        self.exponentials(rows, sums, hold)

    @cute.jit
    def accept(self, sums: cute.Tensor):
        """P of a block stands."""
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            self.row_sum[r] = self.row_sum[r] + sums[r]

    @cute.jit
    def update(self, S: cute.Tensor, tolerance_log2: cutlass.Constexpr[float], hold: cutlass.Constexpr[int]):
        """A later block, by its maximum: S becomes P. Returns alpha, by which what came before shrinks; m is kept while that would be no
        less than 2^−tolerance_log2."""
        rows = as_rows(S)
        alpha = cute.make_rmem_tensor_like(self.shift)
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            m = cute.arch.warp_reduction_max(row_max(rows, r), threads_in_group=LANES_PER_ROW) * self.scale_log2
            m = m if m - self.shift[r] > Float32(tolerance_log2) else self.shift[r]
            shift = cutlass.select_(m == -Float32.inf, Float32(0.0), m)  # −inf − (−inf) would be NaN
            alpha[r] = cute.math.exp2(self.shift[r] - shift, fastmath=True)
            self.shift[r] = m
            self.row_sum[r] = self.row_sum[r] * alpha[r]
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] * self.scale_log2 - shift
        self.exponentials(rows, self.row_sum, hold)
        return alpha

    @cute.jit
    def exponentials(self, rows: cute.Tensor, sums: cute.Tensor, hold: cutlass.Constexpr[int]):
        """Exponents become P. The next wait for a matmul comes after `hold` percent of them."""
        n = cute.size(rows, mode=[1])
        rows_before = []
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            part = [Float32(0.0), Float32(0.0)]
            for c in cutlass.range_constexpr(n):
                rows[r, c] = cute.math.exp2(rows[r, c], fastmath=True)
                part[c % 2] = part[c % 2] + rows[r, c] if const_expr(c > 1) else rows[r, c]
                if const_expr(r * n + c + 1 == cute.size(rows) * hold // 100):
                    hold_waits(total_of([*rows_before, *part]))
            rows_before = [part[0] + part[1]]
            sums[r] = sums[r] + rows_before[0]

    @cute.jit
    def finish(self, sink_log2: tuple, has_sink: cutlass.Constexpr[bool]):
        """1/l for O, and L, per row. A row without keys: 0 and −inf, with a sink 0 and the sink."""
        inverse = cute.make_rmem_tensor_like(self.row_sum)
        lse = cute.make_rmem_tensor_like(self.row_sum)
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            top = cutlass.select_(total == Float32(0.0), -Float32.inf, self.shift[r])
            numerator = Float32(1.0)
            if const_expr(has_sink):
                # both terms relative to the larger exponent, whichever that is
                larger = cute.arch.fmax(top, sink_log2[r])
                larger = Float32(0.0) if larger == -Float32.inf else larger
                numerator = cute.math.exp2(top - larger, fastmath=True)
                total = total * numerator + cute.math.exp2(sink_log2[r] - larger, fastmath=True)
                top = larger
            empty = total == Float32(0.0)
            inverse[r] = Float32(0.0) if empty else numerator * cute.arch.rcp_approx(total)
            lse[r] = -Float32.inf if empty else (top + cute.math.log2(total, fastmath=True)) * Float32(1 / LOG2_E)
        return inverse, lse
