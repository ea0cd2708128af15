"""What the backward knows of each query row, before its main kernel: L and D, padded to whole blocks; and zeros where dQ is added up.

equations   D = rowsum(dO ∘ O) − dL      L₂ = L·log2 e      d_sink = −Σ_rows 2^(sink·log2 e − L₂)·D, here per block of rows
            A row that sees nothing (L = −inf) and one past the end have L₂ = +inf and D = 0: their P is 0, and the main kernel needs no
            mask for them.

record      of each block of rows and head (blocklist), float32: L₂ (q) · whether some row has a second part, the block's share of the
            sink's gradient, two counters (backward_clear, backward_order, backward_behind) · D (q)
second part of L₂ (backward_refine), in a block that has some: in its rows of dQ, which nobody else needs until all have read it

roles       one block of 256 threads for each record; as many threads to a row as it has 16-byte pieces (a power of two), then one to a
            row. Where lengths are ragged one block more, the first, which ranks the key tiles (backward_rank)
zeros       everywhere, but: where tiles clear the sum ahead of each other (backward_clear) only for those that have none before them, and
            in a deterministic order, whose first tile stores, only for rows that nobody sees
limits      16-bit O and dO; rows of 16 bytes
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ... import mask
from . import blocklist
from .backward_clear import slices_of
from .backward_operands import RowOperands
from .backward_rank import rank_tiles
from .backward_refine import LARGEST_EXACT, rest_of_row
from .backward_tiles import (
    COUNTER_WORD,
    STATISTICS_TAIL,
    TURN_WORD,
    BackwardSpec,
    BackwardTiles,
    DqPath,
    clears_ahead,
    is_ranked,
    statistics_words,
    tiles_of,
)
from .extents import Extent, extent_of
from .masking import bounds_of
from .rows import PIECE, piece_of, row_of, rows_of, statistic_of
from .softmax import LOG2_E
from .weights import second_part_at

THREADS = 256
WARPS = THREADS // 32


def lanes_per_row(spec: BackwardSpec) -> int:
    return 1 << (spec.v_width // PIECE - 1).bit_length()


def zeros_of(ops: RowOperands, head: Int32, batch: Int32, q: Extent, k: Extent, first_row: Int32, spec: BackwardSpec, tiles: BackwardTiles):
    """Whether this kernel clears a block's part of dQ's sum, and the record's counter."""
    z = ops.sizes
    if clears_ahead(spec, tiles):
        mine = head // spec.heads_per_kv * z.batch + batch < z.columns_ahead
        return mine, cutlass.select_(mine, slices_of(tiles_of(z.k_rows, tiles)), Int32(0))
    if tiles.dq_path is not DqPath.ORDERED:
        return Boolean(True), Int32(0)
    bounds, last_row = bounds_of(replace(ops.mask), q.length, k.length), first_row + (tiles.q - 1)
    found = mask.key_blocks(first_row, last_row, k.length, tiles.walk_keys, bounds, spec.mask_kind, cutlass.min, cutlass.max)
    return found.begin == found.end, Int32(0)


class PrepareKernel:
    """The kernel of one (BackwardSpec, BackwardTiles)."""

    def __init__(self, spec: BackwardSpec, tiles: BackwardTiles):
        self.spec, self.tiles = spec, tiles

    @cute.jit
    def launch(self, ops: RowOperands, blocks: Int32, heads: Int32, stream):
        rankers = int(is_ranked(self.spec, self.tiles))
        self.kernel(ops).launch(grid=[blocks + rankers, heads, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, ops: RowOperands):
        spec, tiles = self.spec, self.tiles
        thread, _, _ = cute.arch.thread_idx()
        index, head, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()  # the main kernel's blocks may come as soon as there is room
        if const_expr(is_ranked(spec, tiles)):
            index = index - 1
            if index < 0:
                if head == 0:
                    rank_tiles(ops, thread, spec, tiles, THREADS)
            else:
                self.record(ops, index, head, thread)
        else:
            self.record(ops, index, head, thread)

    @cute.jit
    def record(self, ops: RowOperands, index: Int32, head: Int32, thread: Int32):
        """One block of rows and head, the last of all first: the first tiles' dO may still be in the L2 then."""
        spec, tiles, z = self.spec, self.tiles, ops.sizes
        blocks, heads, _ = cute.arch.grid_dim()
        index, head = blocks - 1 - int(is_ranked(spec, tiles)) - index, heads - 1 - head
        smem = SmemAllocator()
        totals, lse = (smem.allocate_tensor(Float32, cute.make_layout(tiles.q), 16) for _ in range(2))
        sums = smem.allocate_tensor(Float32, cute.make_layout((WARPS, 2)), 16)
        batch = blocklist.sequence_of(index, ops.q_arrays, z.batch, z.q_rows, spec.q_layout, tiles.q)
        extent = extent_of(ops.q_arrays, spec.q_layout, batch, z.q_rows)
        k = extent_of(ops.k_arrays, spec.k_layout, batch, z.k_rows)
        first_row = (index - blocklist.first_block(spec.q_layout, ops.q_arrays, batch, z.q_rows, tiles.q)) * tiles.q
        record = head * z.q_blocks + index
        mine, counter = zeros_of(ops, head, batch, extent, k, first_row, spec, tiles)
        if mine:
            self.clear(ops, record, thread)
        partial, coarse, rest = Float32(0.0), Float32(0.0), Float32(0.0)
        if first_row < extent.length:
            partial = self.rows(ops, record, head, extent, first_row, totals, lse, thread)
            coarse, rest = self.second_parts(ops, head, extent, k, first_row, lse, thread)
        some = self.write_tail(ops, record, partial, coarse, counter, sums, thread)
        rows, lane = tiles.q // WARPS, thread % 32
        row = first_row + (thread // 32 * rows + lane)
        if some != Float32(0.0) and lane < rows and row < extent.length:
            place = second_part_at(ops.dq, spec.q_layout, extent, head, row)
            place[0] = rest

    @cute.jit
    def clear(self, ops: RowOperands, record: Int32, thread: Int32):
        words = self.tiles.q * self.spec.qk_width
        start = (ops.dq_sum.iterator + (Int64(record) * words + 4 * thread)).align(16)
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(words // (4 * THREADS)):
            cute.autovec_copy(zeros, cute.make_tensor(start + 4 * THREADS * i, cute.make_layout(4)))

    @cute.jit
    def rows(
        self, ops: RowOperands, record: Int32, head: Int32, extent: Extent, first_row: Int32, totals: cute.Tensor, lse: cute.Tensor,
        thread: Int32,
    ):  # fmt: skip
        """L₂ and D of every row, L₂ also into shared memory (0 where there is none). The answer: a share of the sink's gradient.

        All loads are on their way at once: L and dL of a row are read by another thread than O and dO, into whose sum they go.
        """
        spec, tiles = self.spec, self.tiles
        last, row = extent.length - 1, cutlass.min(thread, tiles.q - 1)
        here = cutlass.min(first_row + row, last)
        of_row, d_lse = statistic_of(ops.lse, spec.q_layout, extent, head, here), Float32(0.0)
        if const_expr(ops.d_lse is not None):
            d_lse = statistic_of(ops.d_lse, spec.q_layout, extent, head, here)
        self.row_sums(ops, head, extent, first_row, totals, thread)
        cute.arch.sync_threads()
        partial, line = Float32(0.0), ops.statistics.iterator + Int64(record) * statistics_words(tiles)
        lse_line = cute.make_tensor(line, cute.make_layout(tiles.q))
        delta_line = cute.make_tensor(line + (tiles.q + STATISTICS_TAIL), cute.make_layout(tiles.q))
        if thread < tiles.q:
            lse_log2, delta = Float32.inf, Float32(0.0)
            if first_row + row <= last and of_row != -Float32.inf:
                lse_log2, delta = of_row * Float32(LOG2_E), totals[row] - d_lse
            lse_line[row], delta_line[row] = lse_log2, delta
            lse[row] = Float32(0.0) if lse_log2 == Float32.inf else lse_log2
            if const_expr(spec.sink):
                share = cute.math.exp2(ops.sink[head] * Float32(LOG2_E) - lse_log2, fastmath=True)
                partial = Float32(0.0) if lse_log2 == Float32.inf else -share * delta
        cute.arch.sync_threads()
        return partial

    @cute.jit
    def row_sums(self, ops: RowOperands, head: Int32, extent: Extent, first_row: Int32, totals: cute.Tensor, thread: Int32):
        """rowsum(dO ∘ O) of every row."""
        spec, tiles = self.spec, self.tiles
        lanes = lanes_per_row(spec)
        passes = tiles.q * lanes // THREADS
        column, last, width = thread % lanes * PIECE, extent.length - 1, ops.out.shape[-1]
        here = cutlass.min(column, width - PIECE)  # narrower than the tile: read something, and leave it out
        pieces = []
        for i in cutlass.range_constexpr(passes):
            row = cutlass.min(first_row + (thread // lanes + THREADS // lanes * i), last)
            rows = (row_of(m, spec.q_layout, extent, head, row) for m in (ops.out, ops.d_out))
            pieces.append([piece_of(r, here) for r in rows])
        for i in cutlass.range_constexpr(passes):
            out, d_out = pieces[i]
            total = Float32(0.0)
            for e in cutlass.range_constexpr(PIECE):
                total = total + out[e].to(Float32) * d_out[e].to(Float32)
            total = cutlass.select_(column < width, total, Float32(0.0))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            if thread % lanes == 0:
                totals[thread // lanes + THREADS // lanes * i] = total

    @cute.jit
    def second_parts(
        self, ops: RowOperands, head: Int32, q: Extent, k: Extent, first_row: Int32, lse: cute.Tensor, thread: Int32
    ):  # fmt: skip
        """1 where this warp's rows have a second part of L₂, else 0; and that of the row that is this lane's in the warp."""
        spec, tiles = self.spec, self.tiles
        rows, lane = tiles.q // WARPS, thread % 32
        first = thread // 32 * rows
        lse_log2 = Float32(0.0)
        if lane < rows:
            lse_log2 = lse[first + lane]
        large = lse_log2 > Float32(LARGEST_EXACT) or lse_log2 < Float32(-LARGEST_EXACT)
        coarse = cute.arch.vote_ballot_sync(large)
        rest, found = Float32(0.0), Float32(0.0)
        if coarse != 0:
            found = Float32(1.0)
            keys = rows_of(ops.k, spec.k_layout, k, head // spec.heads_per_kv)
            for i in cutlass.range(rows, unroll=1):
                if (coarse >> i) & 1 != 0:
                    row = first_row + first + i
                    q_row = row_of(ops.q, spec.q_layout, q, head, row)
                    of_row = cute.arch.shuffle_sync(lse_log2, i)
                    again = rest_of_row(ops, q_row, keys, row, q, k, of_row, head, spec)
                    rest = again if lane == i else rest
        return found, rest

    @cute.jit
    def write_tail(
        self, ops: RowOperands, record: Int32, partial: Float32, coarse: Float32, counter: Int32, sums: cute.Tensor, thread: Int32
    ):  # fmt: skip
        """The four words behind L₂. The answer: the first of them."""
        of_warp = cute.arch.warp_reduction_sum(partial) if const_expr(self.spec.sink) else Float32(0.0)
        if thread % 32 == 0:
            sums[thread // 32, 0], sums[thread // 32, 1] = of_warp, coarse
        cute.arch.sync_threads()
        share, some = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(WARPS):
            share, some = share + sums[i, 0], some + sums[i, 1]
        if thread == 0:
            start = Int64(record) * statistics_words(self.tiles) + self.tiles.q
            place = (ops.statistics.iterator + start).align(16)
            tail, counters = (cute.make_tensor(p, cute.make_layout(STATISTICS_TAIL)) for p in (place, cute.recast_ptr(place, dtype=Int32)))
            tail[0], tail[1] = some, share
            counters[TURN_WORD], counters[COUNTER_WORD] = counter, Int32(0)
        return some
