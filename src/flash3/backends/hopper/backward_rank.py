"""Ragged sequences' key tiles in the order of their launch: the longest walks first.

A tile walks over the query blocks that see it: as many as its sequence is long, less what the mask hides. Blocks of the grid start in
order, so a long tile launched last would end long after all others. Lengths live on the device; so one block of backward_prepare sorts the
tiles' numbers (blocklist) by level. Walks of one level are equal to within a quarter, which is as good as sorted (docs/performance.md).

A deterministic backward has an order of its own (backward_order).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from . import blocklist
from .backward_operands import RowOperands
from .backward_tiles import BackwardSpec, BackwardTiles
from .extents import extent_of
from .masking import bounds_of
from .queryblocks import query_blocks
from .schedule import bit_length

LEVELS = 128
"""More than `level_of` any walk that 32 bits can count."""


def level_of(blocks, length=int.bit_length):
    """Four levels for each power of two; 0 is no walk at all."""
    bits = length(blocks)
    return 4 * bits + ((blocks << 3 >> bits) & 3)


def level_at(ops: RowOperands, index: Int32, spec: BackwardSpec, tiles: BackwardTiles) -> Int32:
    """Of key tile `index` of the batch; where blocks make clusters, of the tiles that walk together."""
    z = ops.sizes
    batch = blocklist.search(index, ops.k_arrays, z.batch, z.k_rows, spec.k_layout, tiles.walk_keys)
    q, k = (extent_of(arrays, layout, batch, rows) for arrays, layout, rows in (
        (ops.q_arrays, spec.q_layout, z.q_rows), (ops.k_arrays, spec.k_layout, z.k_rows)
    ))  # fmt: skip
    number = index - blocklist.first_block(spec.k_layout, ops.k_arrays, batch, z.k_rows, tiles.walk_keys)
    bounds = bounds_of(ops.mask, q.length, k.length)
    walk = query_blocks(spec, tiles, number, q.length, k.length, bounds, cutlass.min, cutlass.max).count()
    return level_of(Int32(cutlass.select_(number * tiles.walk_keys < k.length, Int32(walk), Int32(0))), bit_length)


@cute.jit
def rank_tiles(
    ops: RowOperands,
    thread: Int32,
    spec: cutlass.Constexpr[BackwardSpec],
    tiles: cutlass.Constexpr[BackwardTiles],
    threads: cutlass.Constexpr[int],
):
    """Fill ops.order, with a block of so many threads: how many tiles there are of each level, where each level begins, and then each
    tile takes a place of its level."""
    z = ops.sizes
    places = SmemAllocator().allocate_tensor(Int32, cute.make_layout(LEVELS), 16)
    num_tiles = blocklist.num_blocks(spec.k_layout, z.k_rows, z.batch, tiles.walk_keys)
    if thread < LEVELS:
        places[thread] = Int32(0)
    cute.arch.sync_threads()
    for index in cutlass.range(thread, num_tiles, threads, unroll=1):
        cute.arch.atomic_add(places.iterator + level_at(ops, index, spec, tiles), Int32(1))
    cute.arch.sync_threads()
    before = Int32(0)
    for level in cutlass.range_constexpr(LEVELS):
        before = before + cutlass.select_(level > thread, places[level], Int32(0))
    cute.arch.sync_threads()
    if thread < LEVELS:
        places[thread] = before
    cute.arch.sync_threads()
    for index in cutlass.range(thread, num_tiles, threads, unroll=1):
        place = cute.arch.atomic_add(places.iterator + level_at(ops, index, spec, tiles), Int32(1))
        ops.order[place] = index
