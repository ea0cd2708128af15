"""dQ behind: the float32 sum of a column (backward_clear) in the inputs' dtype and in rows again, beside tiles of a later column.

A column is ready when all of its key tiles have added to it. Each says so at its end, in the counter of the column's first record; a tile
of column c takes over a slice of column c − ahead, whose tiles were launched two waves of blocks earlier, and waits for no other. What is
left, the last columns, is backward_finish's.

The spare warps of the producer warpgroup do it, each for itself: 4 KB pieces of the sum come by bulk copies into shared memory, three at a
time; two float4s of 128 threads of a consumer each (dq.py). A row gets 4 bytes of every thread, its neighbours bring the rest of a sector.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import storage
from .backward_tiles import COUNTER_WORD, PIECE_FOURS, PIECE_STAGES, PIECE_WORDS, BackwardSpec, BackwardTiles, statistics_words
from .bulk import add_release, bulk_load
from .dq import wait_for
from .extents import Extent
from .fragments import convert
from .roles import WARPGROUP_THREADS
from .rows import row_of


def place_of(piece, pieces: int):
    """(consumer, first float4) of a piece, of so many in a block."""
    consumer = piece // (pieces // 2)
    return consumer, (piece - consumer * (pieces // 2)) * PIECE_FOURS


def heads_left(heads, kv_heads, batch, ahead, minimum=min):
    """Query heads of the last columns, those that no tile converts: all from heads − this on hold some."""
    return heads // kv_heads * minimum(kv_heads, (ahead + batch - 1) // batch)


def done_counter(statistics: cute.Tensor, record, tiles: BackwardTiles) -> cute.Pointer:
    """Of the column whose first record this is: how many of its key tiles have added their share."""
    place = statistics.iterator + (Int64(record) * statistics_words(tiles) + (tiles.q + COUNTER_WORD))
    return cute.recast_ptr(place.align(4), dtype=Int32)


@cute.jit
def say_done(statistics: cute.Tensor, record: Int32, tiles: cutlass.Constexpr[BackwardTiles]):
    """One thread, after all others' additions."""
    add_release(done_counter(statistics, record, tiles), Int32(1))


@dataclass
class Converter:
    """One spare warp."""

    pieces: cute.Tensor  # (words, stage) in shared memory
    full: cute.Pointer  # mbarriers, one for each stage
    dq: cute.Tensor  # as the framework has it
    dq_sum: cute.Tensor
    scale: Float32
    warp: Int32  # among the spare warps
    lane: Int32
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    def pieces_of_block(self) -> int:
        return self.tiles.q * self.spec.qk_width // PIECE_WORDS

    @cute.jit
    def fetch(self, record: Int32, piece: Int32, stage: Int32):
        """Piece number `piece` from a record on."""
        if self.lane == 0:
            barrier = self.full + stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * PIECE_WORDS)
            words = Int64(record) * (self.tiles.q * self.spec.qk_width) + Int64(piece) * PIECE_WORDS
            bulk_load(self.pieces[None, stage].iterator, (self.dq_sum.iterator + words).align(16), barrier, 4 * PIECE_WORDS)

    @cute.jit
    def take_over(
        self, statistics: cute.Tensor, record: Int32, extent: Extent, first_head: Int32, q_blocks: Int32, first: Int32, end: Int32,
        num_tiles: Int32,
    ):  # fmt: skip
        """This warp's share of blocks [first, end) of each query head of a column. record: of its first head's block 0."""
        wait_for(done_counter(statistics, record, self.tiles), num_tiles)
        cute.arch.fence_proxy("async.global")
        step = self.tiles.spare_warps
        each = (end - first) * self.pieces_of_block()
        total = each * self.spec.heads_per_kv
        for s in cutlass.range_constexpr(PIECE_STAGES - 1):
            self.fetch_at(record, q_blocks, first, each, self.warp + s * step, total, Int32(s))
        stage, phase = Int32(0), Int32(0)
        for n in cutlass.range(self.warp, total, step, unroll=1):
            ahead = cutlass.select_(stage == 0, Int32(PIECE_STAGES - 1), stage - 1)
            self.fetch_at(record, q_blocks, first, each, n + (PIECE_STAGES - 1) * step, total, ahead)
            cute.arch.mbarrier_wait(self.full + stage, phase)
            head = n // each
            piece = n - head * each
            block = piece // self.pieces_of_block()
            self.convert(extent, first_head + head, first + block, piece - block * self.pieces_of_block(), stage)
            cute.arch.sync_warp()
            stage = stage + 1
            if stage == PIECE_STAGES:
                stage, phase = Int32(0), phase ^ 1

    @cute.jit
    def fetch_at(self, record: Int32, q_blocks: Int32, first: Int32, each: Int32, n: Int32, total: Int32, stage: Int32):
        """Piece n of the slice, if there is one."""
        if n < total:
            head = n // each
            self.fetch(record + head * q_blocks + first, n - head * each, stage)

    @cute.jit
    def convert(self, extent: Extent, head: Int32, block: Int32, piece: Int32, stage: Int32):
        """A piece, into its rows of dQ: the fragments of one consumer's matmul, four warps side by side."""
        spec, tiles = self.spec, self.tiles
        consumer, four = place_of(piece, self.pieces_of_block())
        source = (self.pieces[None, stage].iterator + 4 * self.lane).align(16)
        element, width = storage.ELEMENTS[spec.dtype], self.dq.shape[-1]
        values, words = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, element)
        for i in cutlass.range_constexpr(PIECE_FOURS):
            for w in cutlass.range(WARPGROUP_THREADS // 32, unroll=1):
                cute.autovec_copy(cute.make_tensor(source + (4 * WARPGROUP_THREADS * i + 128 * w), cute.make_layout(4)), values)
                for e in cutlass.range_constexpr(4):
                    values[e] = values[e] * self.scale
                convert(values, words)
                pairs = cute.recast_tensor(words, Int32)
                across, along = 8 * (four + i), 64 * consumer + 16 * w
                for half in cutlass.range_constexpr(2):
                    row, column = along + 8 * half + self.lane // 4, across
                    pair = pairs[half]
                    if const_expr(tiles.dq_transposed):
                        row, column = across + self.lane // 4, along + 8 * half
                        pair = transposed(pair)
                    row = block * tiles.q + row
                    if row < extent.length and column < width:
                        line = row_of(self.dq, spec.q_layout, extent, head, row)
                        target = (line.iterator + (column + self.lane % 4 * 2)).align(4)
                        cute.make_tensor(cute.recast_ptr(target, dtype=Int32), cute.make_layout(1))[0] = pair


@cute.jit
def transposed(pair: Int32):
    """8 × 8 numbers of 16 bits, two to a lane."""
    return cute.arch.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair])
