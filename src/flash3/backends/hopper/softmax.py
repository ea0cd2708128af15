"""Online softmax over blocks of keys, in powers of two.

    m' = max(m, rowmax S)      α = 2^(c·(m − m'))      P = 2^(c·S − c·m')      l = α·l + rowsum P      O = α·O + P·V
    at the end  O / l  and  L = ln2·(c·m + log2 l),      c = |scale|·log2 e

Lazy: the old m is kept while no row's maximum grew by more than 2^rescale_log2, so that O is rarely rescaled; P then stays below
2^rescale_log2, and O / l is the same number.
"""

import math
import struct
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...mask import MaskKind
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


def finite(shift, masked: bool):
    """0 where nothing was seen yet: −inf − (−inf) would be NaN."""
    if not masked:
        return shift
    return cutlass.select_(shift == -Float32.inf, Float32(0.0), shift)


def float_bits(x: float) -> int:
    """The float32 x as a signed integer: for positive x in the same order."""
    return int(struct.unpack("i", struct.pack("f", x))[0])


def largest_of_three(a, b, c):
    """One instruction for three integers; Hopper has none for floats."""
    return cute.arch.inline_ptx(
        "{ .reg .s32 t; max.s32 t, {$r0}, {$r1}; max.s32 {$w0}, t, {$r2}; }", write_only_types=[Int32], read_only_args=[a, b, c]
    )


def largest_bits(rows, r: int):
    """The largest of one thread's columns as signed integers: that of the largest float where one is positive, else no positive number."""
    bits = cute.recast_tensor(rows, Int32)
    part = [bits[r, i] for i in range(4)]
    for i, c in enumerate(range(4, cute.size(rows, mode=[1]), 2)):
        part[i % 4] = largest_of_three(part[i % 4], bits[r, c], bits[r, c + 1])
    return largest_of_three(largest_of_three(part[0], part[1], part[2]), part[3], part[3])


def hold_waits(x):
    """Keep ptxas from moving the next wait for a matmul above the computation of x, which is below 2^100: a store that never happens.

    wait_group has no operands, so ptxas puts it where it likes; with luck below the exponentials, else P·V no longer hides them."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .u32 a; mov.u32 a, 0; setp.gt.f32 p, {$r0}, 0f71800000; @p st.shared.f32 [a], {$r0}; }", read_only_args=[x]
    )


@dataclass
class OnlineSoftmax:
    """State of a thread's two rows. The maximum of every block is taken, without a branch: ptxas can mix all of it."""

    shift: cute.Tensor  # c·m
    row_sum: cute.Tensor  # this thread's part; summed over the row's lanes at the end
    alpha: cute.Tensor
    raised: Boolean  # m of some row of the warp has changed: O is to be multiplied by alpha
    scale_log2: Float32
    spec: cutlass.Constexpr[ForwardSpec]
    tiles: cutlass.Constexpr[Tiles]

    @cute.jit
    def settle(self):
        """At the beginning of a block: m has not changed yet."""
        self.alpha.fill(1.0)
        self.raised = Boolean(False)

    @cute.jit
    def start(self, S: cute.Tensor):
        """The first block of a tile: S becomes P."""
        rows = as_rows(S)
        self.settle()
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            self.shift[r] = cute.arch.warp_reduction_max(row_max(rows, r), threads_in_group=LANES_PER_ROW) * self.scale_log2
        self.row_sum.fill(0.0)
        self.to_exponents(rows, masked=True)
        self.exponentials(rows, hold=0)

    @cute.jit
    def update(self, S: cute.Tensor, earlier: object, hold: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool]):
        """A later block: S becomes P, and alpha that by which what came before shrinks."""
        rows = as_rows(S)
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            m = cute.arch.warp_reduction_max(row_max(rows, r), threads_in_group=LANES_PER_ROW) * self.scale_log2
            m = m if m - self.shift[r] > Float32(self.tiles.rescale_log2) else self.shift[r]
            self.alpha[r] = cute.math.exp2(self.shift[r] - finite(m, masked), fastmath=True)
            self.shift[r] = m
            self.row_sum[r] = self.row_sum[r] * self.alpha[r]
        self.to_exponents(rows, masked)
        self.exponentials(rows, hold)
        self.raised = not cute.arch.vote_all_sync(self.alpha[0] == Float32(1.0) and self.alpha[1] == Float32(1.0))

    @cute.jit
    def to_exponents(self, rows: cute.Tensor, masked: cutlass.Constexpr[bool]):
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            shift = finite(self.shift[r], masked)
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] * self.scale_log2 - shift

    @cute.jit
    def exponentials(self, rows: cute.Tensor, hold: cutlass.Constexpr[int]):
        """Exponents become P. The next wait for a matmul comes after `hold` percent of them."""
        n = cute.size(rows, mode=[1])
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            part = [Float32(0.0), Float32(0.0)]
            for c in cutlass.range_constexpr(n):
                rows[r, c] = cute.math.exp2(rows[r, c], fastmath=True)
                part[c % 2] = part[c % 2] + rows[r, c] if const_expr(c > 1) else rows[r, c]
                if const_expr(r * n + c + 1 == cute.size(rows) * hold // 100):
                    hold_waits(part[c % 2])
            self.row_sum[r] = self.row_sum[r] + (part[0] + part[1])

    @cute.jit
    def rescale(self, O: cute.Tensor):
        """O times alpha; skipped when no row of the warp needs it."""
        if self.raised:
            scale_rows(O, self.alpha)

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


@dataclass
class SteadySoftmax(OnlineSoftmax):
    """m stays where it is until scores outgrow it.

    A block's scores at once become exponents c·S − shift, relative to the old m. As long as none of the warp's exceeds rescale_log2,
    nothing more is to be known: no row maximum, no shuffle, no α, only the largest of their bits. Fewer instructions and a branch.
    """

    @cute.jit
    def start(self, S: cute.Tensor):
        OnlineSoftmax.start(self, S)
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            self.shift[r] = finite(self.shift[r], masked=True)  # 0 while the row has seen nothing

    @cute.jit
    def update(self, S: cute.Tensor, earlier: object, hold: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool]):
        """A later block, or a part of it: S becomes P, and so `earlier`, the block's parts before it, when m changes."""
        rows = as_rows(S)
        self.to_exponents(rows, masked=False)
        calm = Boolean(True)
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            calm = calm and largest_bits(rows, r) <= float_bits(self.tiles.rescale_log2)
            if const_expr(self.spec.mask_kind is not MaskKind.FULL):  # a row that has seen nothing has no m yet
                calm = calm and self.row_sum[r] > Float32(0.0)
        raised = not cute.arch.vote_all_sync(calm)
        if raised:
            self.raise_maximum(rows, earlier)
        self.raised = self.raised or raised
        self.exponentials(rows, hold)

    @cute.jit
    def raise_maximum(self, rows: cute.Tensor, earlier: object):
        """Rows whose exponents outgrew the limit get a new m; exponents, sum and what is P already follow."""
        for r in cutlass.range_constexpr(cute.size(self.shift)):
            top = cute.arch.warp_reduction_max(row_max(rows, r), threads_in_group=LANES_PER_ROW)
            unset = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW) == Float32(0.0)
            growth = top if top > (-Float32.inf if unset else Float32(self.tiles.rescale_log2)) else Float32(0.0)
            shrink = Float32(1.0) if unset else cute.math.exp2(-growth, fastmath=True)
            self.shift[r] = self.shift[r] + growth
            self.row_sum[r] = self.row_sum[r] * shrink
            self.alpha[r] = self.alpha[r] * shrink
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] - growth
            if const_expr(earlier is not None):
                before = as_rows(earlier)
                for c in cutlass.range_constexpr(cute.size(before, mode=[1])):
                    before[r, c] = before[r, c] * shrink
