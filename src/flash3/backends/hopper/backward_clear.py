"""Zeros for the float32 sum of dQ, ahead of the tiles that add to it and beside them.

A column is a key head of a sequence: its key tiles add to the records of its query heads. Tiles are begun column by column. Beside a tile,
the first spare warp clears a slice of the column that is `ahead` columns further on, whose tiles come two waves of blocks later;
backward_prepare has cleared the first ones. So the zeros cost no time of their own, and are still in L2 when they are added to. They go out
by bulk copies of a kilobyte of zeros in shared memory, past the load and store units: stores of three warps held up the consumers'.

A column's tiles wait until all of its slices are there, behind the loads of their keys (with roles only the consumer that adds waits); the
counter is that of its first record. They wait for tiles that were begun before, whose spare warps wait for nobody; a persistent block
begins a tile once it has issued all loads of the one before, which in turn waits only for tiles still earlier.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...mask import MaskKind
from .backward_tiles import ZERO_WORDS, BackwardSpec, BackwardTiles
from .bulk import add_release, bulk_store
from .dq import counter_of, wait_for

WAVES = 2
"""Of blocks, between a slice of zeros and the first tile that adds to it, and between a column's last tile and its conversion."""


def columns_ahead(num_tiles, multiprocessors, maximum=max):
    """How many columns further on a tile clears, and further back it converts (backward_behind)."""
    num_tiles = maximum(num_tiles, 1)
    return (WAVES * multiprocessors + num_tiles - 1) // num_tiles + 1


def slice_of(kv_block, blocks, num_tiles, kind, minimum=min):
    """The blocks [first, end) of each query head of a column that a tile clears: as many as all tiles, under a causal mask more where a
    tile is longer."""
    if kind is MaskKind.CAUSAL:
        first, end = (blocks - blocks * (num_tiles - i) // num_tiles * (num_tiles - i) // num_tiles for i in (kv_block, kv_block + 1))
        return first, end
    most = (blocks + num_tiles - 1) // num_tiles
    first = minimum(kv_block * most, blocks)
    return first, minimum(first + most, blocks)


def slices_of(num_tiles):
    """What a column's counter reaches: a slice for every tile of another column."""
    return num_tiles


@cute.jit
def wait_cleared(statistics: cute.Tensor, record: Int32, num_tiles: Int32, tiles: cutlass.Constexpr[BackwardTiles]):
    wait_for(counter_of(statistics, record, tiles), slices_of(num_tiles))


@cute.jit
def make_zeros(zeros: cute.Tensor, lane: Int32):
    """In shared memory, by one warp, which is the one that will clear."""
    for i in cutlass.range_constexpr(ZERO_WORDS // 32):
        zeros[lane + 32 * i] = Float32(0.0)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


@cute.jit
def clear_slice(
    zeros: cute.Tensor, dq_sum: cute.Tensor, record: Int32, q_blocks: Int32, blocks: Int32, kv_block: Int32, num_tiles: Int32,
    lane: Int32, spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    """record: of the column's first query head and block 0; blocks: of each of its query heads."""
    words = tiles.q * spec.qk_width
    first, end = slice_of(kv_block, blocks, num_tiles, spec.mask_kind, cutlass.min)
    if lane == 0:
        for head in cutlass.range(spec.heads_per_kv, unroll=1):
            start = dq_sum.iterator + Int64(record + head * q_blocks + first) * words
            for i in cutlass.range((end - first) * (words // ZERO_WORDS), unroll=1):
                bulk_store((start + Int64(ZERO_WORDS) * i).align(16), zeros.iterator, 4 * ZERO_WORDS)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def say_cleared(statistics: cute.Tensor, record: Int32, lane: Int32, tiles: cutlass.Constexpr[BackwardTiles]):
    """The same warp, once its zeros are there."""
    if lane == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        add_release(counter_of(statistics, record, tiles), Int32(1))
