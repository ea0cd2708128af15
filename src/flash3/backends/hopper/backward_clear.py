"""Zeros for the float32 sum of dQ, ahead of the tiles that add to it and beside them.

A column is a key head of a sequence: its key tiles add to the records of its query heads. Blocks are launched column by column. The spare
warps of a tile's block clear a slice of the column that is `ahead` columns further on, whose tiles come two waves of blocks later;
backward_prepare has cleared the first ones. So the zeros cost no time of their own, and are still in L2 when they are added to.

A column's tiles wait until all of its slices are there, behind the loads of their keys; the counter is that of its first record. They wait
for tiles that were begun before, whose spare warps wait for nobody; a persistent block begins a tile once it has issued all loads of the one
before, which in turn waits only for tiles still earlier.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .backward_tiles import BackwardSpec, BackwardTiles
from .bulk import add_release
from .dq import counter_of, wait_for

WAVES = 2
"""Of blocks, between a slice of zeros and the first tile that adds to it."""


def columns_ahead(num_tiles, multiprocessors, maximum=max):
    """How many columns further on a tile clears."""
    num_tiles = maximum(num_tiles, 1)
    return (WAVES * multiprocessors + num_tiles - 1) // num_tiles + 1


def slice_of(kv_block, blocks, num_tiles, minimum=min):
    """The blocks [first, end) of each query head of a column that a tile clears."""
    most = (blocks + num_tiles - 1) // num_tiles
    first = minimum(kv_block * most, blocks)
    return first, minimum(first + most, blocks)


def slices_of(num_tiles, tiles: BackwardTiles):
    """What a column's counter reaches: every tile of another column clears a slice for each spare warp."""
    return num_tiles * tiles.spare_warps


@cute.jit
def wait_cleared(statistics: cute.Tensor, record: Int32, num_tiles: Int32, tiles: cutlass.Constexpr[BackwardTiles]):
    wait_for(counter_of(statistics, record, tiles), slices_of(num_tiles, tiles))


@cute.jit
def clear_slice(
    statistics: cute.Tensor, dq_sum: cute.Tensor, record: Int32, q_blocks: Int32, blocks: Int32, kv_block: Int32, num_tiles: Int32,
    thread: Int32, spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    """One spare warp's part. record: of the column's first query head and block 0; blocks: of each of its query heads."""
    fours = tiles.q * spec.qk_width // 4
    first, end = slice_of(kv_block, blocks, num_tiles, cutlass.min)
    count = (end - first) * fours
    zeros = cute.make_rmem_tensor(4, Float32)
    zeros.fill(0.0)
    for head in cutlass.range(spec.heads_per_kv, unroll=1):
        start = dq_sum.iterator + Int64(record + head * q_blocks + first) * (4 * fours)
        for i in cutlass.range(thread, count, 32 * tiles.spare_warps, unroll=4):
            cute.autovec_copy(zeros, cute.make_tensor((start + Int64(4) * i).align(16), cute.make_layout(4)))


@cute.jit
def say_cleared(statistics: cute.Tensor, record: Int32, thread: Int32, tiles: cutlass.Constexpr[BackwardTiles]):
    """One spare warp, of all that it has written."""
    cute.arch.sync_warp()
    if thread % 32 == 0:
        add_release(counter_of(statistics, record, tiles), Int32(1))
