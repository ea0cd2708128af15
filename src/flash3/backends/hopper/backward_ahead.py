"""D of a column's rows (backward_prepare's equation), beside tiles of an earlier column: its spare warps make it where they clear the sum of
dQ (backward_clear). L is small, and backward_prepare's for all rows.

A warp takes 32 rows at a time. Each lane copies 16 bytes of O and dO into its own part of a ring in shared memory and reads them again: the
ring stands for the registers that the producer warpgroup has not.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import storage
from .backward_operands import RowOperands
from .backward_prepare import lanes_per_row
from .backward_tiles import STATISTICS_TAIL, BackwardSpec, BackwardTiles, statistics_words
from .extents import Extent
from .rows import PIECE, row_of, statistic_of

ROWS = 32
"""At a time, of a warp."""
RING = 8
"""Steps of 32 pieces of O and of dO on their way."""
STEP_BYTES = 2 * 32 * 16


@cute.jit
def copy_piece(target: cute.Pointer, source: cute.Pointer, num_bytes: Int32):
    """16 bytes global → shared memory, of which num_bytes are there and the rest becomes 0."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target.toint(), source.toint(), num_bytes]
    )


@cute.jit
def rows_ahead(
    ops: RowOperands, ring: cute.Pointer, record: Int32, first_head: Int32, q: Extent, q_blocks: Int32, first: Int32, end: Int32,
    warp: Int32, lane: Int32, spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    """One spare warp's part of blocks [first, end) of each query head of a column. record: of its first head's block 0; ring: this warp's."""
    parts = tiles.q // ROWS
    each = (end - first) * parts
    for n in cutlass.range(warp, each * spec.heads_per_kv, tiles.spare_warps, unroll=1):
        head = n // each
        part = n - head * each
        block = first + part // parts
        within = part % parts * ROWS
        rows_of_warp(ops, ring, record + head * q_blocks + block, first_head + head, q, block * tiles.q + within, within, lane, spec, tiles)


@cute.jit
def rows_of_warp(
    ops: RowOperands, ring: cute.Pointer, record: Int32, head: Int32, q: Extent, first_row: Int32, within: Int32, lane: Int32,
    spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    here = cutlass.min(first_row + lane, q.length - 1)
    of_row, d_lse = statistic_of(ops.lse, spec.q_layout, q, head, here), Float32(0.0)
    if const_expr(ops.d_lse is not None):
        d_lse = statistic_of(ops.d_lse, spec.q_layout, q, head, here)
    lanes = lanes_per_row(spec)
    at_once = 32 // lanes
    total = Float32(0.0)
    for p in cutlass.range(lanes + RING - 1, unroll=1):
        if p < lanes:
            fetch_rows(ops, ring + p % RING * STEP_BYTES, head, q, first_row + p * at_once, lane, spec)
        cute.arch.cp_async_commit_group()
        done = p - (RING - 1)
        if done >= 0:
            cute.arch.cp_async_wait_group(RING - 1)
            sums = sums_of(ring + done % RING * STEP_BYTES, lane, spec)
            mine = cute.arch.shuffle_sync(sums, lane % at_once * lanes)
            total = mine if lane // at_once == done else total
    delta = total - d_lse
    if first_row + lane >= q.length or of_row == -Float32.inf:
        delta = Float32(0.0)
    place = ops.statistics.iterator + (Int64(record) * statistics_words(tiles) + (tiles.q + STATISTICS_TAIL + within + lane))
    cute.make_tensor(place, cute.make_layout(1))[0] = delta


@cute.jit
def fetch_rows(ops: RowOperands, slot: cute.Pointer, head: Int32, q: Extent, row: Int32, lane: Int32, spec: cutlass.Constexpr[BackwardSpec]):
    """Rows from `row` on, as many as 32 pieces make."""
    lanes = lanes_per_row(spec)
    column, width = lane % lanes * PIECE, ops.out.shape[-1]
    some = cutlass.select_(column < width, Int32(16), Int32(0))
    column = cutlass.min(column, width - PIECE)
    row = cutlass.min(row + lane // lanes, q.length - 1)
    for i, m in enumerate((ops.out, ops.d_out)):
        copy_piece(slot + (512 * i + 16 * lane), row_of(m, spec.q_layout, q, head, row).iterator + column, some)


@cute.jit
def sums_of(slot: cute.Pointer, lane: Int32, spec: cutlass.Constexpr[BackwardSpec]):
    """rowsum(dO ∘ O) of a step's rows, in every lane of a row."""
    element = storage.ELEMENTS[spec.dtype]
    pieces = []
    for i in cutlass.range_constexpr(2):
        piece = cute.make_rmem_tensor(PIECE, element)
        place = cute.recast_ptr((slot + (512 * i + 16 * lane)).align(16), dtype=element)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(PIECE)), piece)
        pieces.append(piece)
    total = Float32(0.0)
    for e in cutlass.range_constexpr(PIECE):
        total = total + pieces[0][e].to(Float32) * pieces[1][e].to(Float32)
    return cute.arch.warp_reduction_sum(total, threads_in_group=lanes_per_row(spec))
