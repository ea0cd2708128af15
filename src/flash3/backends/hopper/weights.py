"""Scores and what is made of them, transposed: keys are the rows of a thread's fragment, queries its columns."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import mask
from ...mask import MaskKind
from ...sequences import SequenceKind
from .backward_operands import BackwardSizes
from .backward_tiles import BackwardSpec, BackwardTiles
from .extents import Extent
from .fragments import ROW_STEP, ROWS_PER_THREAD, as_rows, convert
from .rows import row_of

UNSEEN = 1 << 30
"""First row that sees a key past the end of the keys."""


@dataclass
class TransposedMask:
    """For one thread: keys `tile_key + first_key` and 8 more, query columns first_column + 8j + {0, 1} of a block."""

    tile_key: Int32
    first_key: Int32
    first_column: Int32
    k_len: Int32
    bounds: mask.Bounds
    spec: cutlass.Constexpr[BackwardSpec]

    def limits(self, first_row: Int32):
        """For each of the two keys: columns [first, end) that see it; None: no end."""
        found = []
        for r in range(ROWS_PER_THREAD):
            key = self.tile_key + self.first_key + ROW_STEP * r
            begin, end = mask.visible_rows(key, self.bounds, self.spec.mask_kind, cutlass.min, cutlass.max)
            here = first_row + self.first_column
            first = -here if begin is None else begin - here
            found.append((cutlass.select_(key < self.k_len, first, Int32(UNSEEN)), None if end is None else end - here))
        return found

    def sees(self, limits, r: int, c: int):
        first, end = limits[r]
        column = (c // 2) * 8 + c % 2
        return column >= first if end is None else (column >= first) & (column < end)


@cute.jit
def read_rows(rows: cute.Tensor, stage: Int32, first_column: Int32, tiles: cutlass.Constexpr[BackwardTiles]):
    """The statistic of a thread's query columns, first_column + 8j + {0, 1}."""
    eighths = tiles.q // 8
    mine = cute.make_rmem_tensor(2 * eighths, Float32)
    source = cute.make_tensor((rows[None, stage].iterator + first_column).align(8), cute.make_layout((2, eighths), stride=(1, 8)))
    cute.autovec_copy(source, cute.make_tensor(mine.iterator, cute.make_layout((2, eighths))))
    return mine


def pair_of_rows(rows: cute.Tensor, stage: Int32, column):
    """The statistics of two neighbouring columns, in shared memory."""
    return cute.make_tensor((rows[None, stage].iterator + column).align(8), cute.make_layout(2))


@dataclass
class Weights:
    """Scores → P, for one thread's part of Sᵀ."""

    rows: cute.Tensor  # L₂ and its tail beside each stage of Q: (words, stage)
    dq: cute.Tensor  # as the framework has it: the second parts of L₂
    queries: Extent  # of a ragged sequence
    sizes: BackwardSizes
    record: Int32  # of the head's block 0
    mask: TransposedMask
    first_column: Int32
    scale_log2: Float32
    tanh_scale: Float32
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def apply(
        self, S: cute.Tensor, P: cute.Tensor, stage: Int32, q_block: Int32, masked: cutlass.Constexpr[bool], coarse: cutlass.Constexpr[bool]
    ):
        """S becomes what dS is multiplied by: P, with a softcap times the cap's slope. P: the 16-bit operand of dV. coarse: L may have a
        second part."""
        if const_expr(self.spec.softcap):  # r = 1 / (1 + e^2x): tanh x = 1 − 2r, and its slope is 4r·(1 − r)
            for i in cutlass.range_constexpr(cute.size(S)):
                S[i] = rcp_of_cap(S[i], self.tanh_scale)
        rows, lse = as_rows(S), None
        if const_expr(not self.spec.softcap):
            lse = read_rows(self.rows, stage, self.first_column, self.tiles)
        limits, first_row = self.mask.limits(q_block * self.tiles.q), q_block * self.tiles.q + self.first_column
        one_edge = self.spec.mask_kind in (MaskKind.FULL, MaskKind.CAUSAL)
        pairs = self.tiles.q // 8 if one_edge and not self.tiles.dq_transposed else 1  # at once: as ptxas spills least
        if const_expr(coarse and pairs > 1):
            rest = self.rest_of(first_row, stage, pairs)
        pair = cute.make_rmem_tensor(2, Float32)
        for c in cutlass.range_constexpr(0, cute.size(rows, mode=[1]), 2):
            here = cute.make_rmem_tensor(2, Float32)
            if const_expr(self.spec.softcap):  # registers are few
                cute.autovec_copy(pair_of_rows(self.rows, stage, self.first_column + 4 * c), here)
            else:
                here[0], here[1] = lse[c], lse[c + 1]
            if const_expr(coarse and pairs == 1):
                rest = self.rest_of(first_row + 4 * c, stage, 1)
            for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
                for e in cutlass.range_constexpr(2):
                    score = rows[r, c + e]
                    if const_expr(self.spec.softcap):
                        exponent = (Float32(1.0) - Float32(2.0) * score) * self.scale_log2 - here[e]
                    else:
                        exponent = score * self.scale_log2 - here[e]
                    if const_expr(coarse):
                        exponent = exponent - rest[e, c // 2 % pairs]
                    if const_expr(masked):
                        exponent = cutlass.select_(self.mask.sees(limits, r, c + e), exponent, -Float32.inf)
                    p = cute.math.exp2(exponent, fastmath=True)
                    pair[e], rows[r, c + e] = p, p
                    if const_expr(self.spec.softcap):
                        rows[r, c + e] = p * (Float32(4.0) * score * (Float32(1.0) - score))
                convert(pair, cute.make_tensor(P.iterator + 2 * (c + r), cute.make_layout(2)))

    @cute.jit
    def rest_of(self, row: Int32, stage: Int32, pairs: cutlass.Constexpr[int]):
        """The second part of L₂ of rows row + 8j + e, in global memory, at (e, j)."""
        found = cute.make_rmem_tensor((2, pairs), Float32)
        some = self.rows[self.tiles.q, stage] != Float32(0.0)  # else anything may be there; a branch would serialize the matmuls
        layout, z, q = self.spec.q_layout, self.sizes, self.queries
        head = self.record // z.q_blocks
        if const_expr(layout.kind is SequenceKind.DENSE):  # known anyhow: nothing to be kept for this walk
            q = Extent((self.record - head * z.q_blocks) // (z.q_blocks // z.batch), Int32(0), z.q_rows)
        for j in cutlass.range_constexpr(pairs):
            for e in cutlass.range_constexpr(2):
                there = second_part_at(self.dq, layout, q, head, cutlass.min(row + (8 * j + e), q.length - 1))[0]
                found[e, j] = cutlass.select_(some, there, Float32(0.0))
        return found


def second_part_at(dq, layout, extent: Extent, head, row):
    """Where the second part of a row's L₂ waits: in the row's own dQ, which is written when nobody reads it any more."""
    place = row_of(dq, layout, extent, head, row).iterator.align(4)
    return cute.make_tensor(cute.recast_ptr(place, dtype=Float32), cute.make_layout(1))


@cute.jit
def rcp_of_cap(score: Float32, tanh_scale: Float32):
    """r = 1 / (1 + e^2x) of x = scale·score/cap: tanh x = 1 − 2r, and its slope is 4r·(1 − r)."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(score * tanh_scale, fastmath=True))


@cute.jit
def some_are_coarse(
    statistics: cute.Tensor,
    record: Int32,
    count: Int32,
    heads: cutlass.Constexpr[int],
    q_blocks: Int32,
    tiles: cutlass.Constexpr[BackwardTiles],
):
    """Whether any L of `count` records, and of those of the next heads, has a second part. The whole warp must ask."""
    some = Float32(0.0)
    for head in cutlass.range(heads, unroll=1):
        for first in cutlass.range(0, count, 32, unroll=1):
            at = cutlass.min(first + cute.arch.lane_idx(), count - 1)
            some = some + statistics[record + head * q_blocks + at, tiles.q]
    return cute.arch.vote_any_sync(some != Float32(0.0))


@cute.jit
def to_score_gradients(dP: cute.Tensor, P: cute.Tensor, delta: cute.Tensor):
    """dP becomes dS = P ∘ (dP − D) in place."""
    out, p = as_rows(dP), as_rows(P)
    for r in cutlass.range_constexpr(cute.size(out, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
            out[r, c] = p[r, c] * (out[r, c] - delta[c])
