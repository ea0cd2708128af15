"""What a block of the backward reads and writes: the producer's loads, and dK and dV on their way out."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from . import storage
from .backward_barriers import sync_gradient
from .backward_clear import wait_cleared
from .backward_schedule import KeyDispatcher
from .backward_tiles import KEYS_PER_CONSUMER, STATISTICS_TAIL, BackwardSpec, BackwardTiles, Split, clears_ahead, tiles_of
from .bulk import bulk_load
from .extents import Extent, last_block, tile_of
from .fragments import convert
from .pipes import StagedLoad
from .queryblocks import QueryBlocks, block_at
from .roles import WARPGROUP_THREADS


@dataclass
class StagedRowsLoad(StagedLoad):
    """Producer end of a block of rows with a statistic each: TMA, and a bulk copy beside it."""

    statistics: cute.Tensor  # (heads · q_blocks, words)
    box: cute.Tensor  # (words, stage) in shared memory
    word: cutlass.Constexpr[int]  # where this statistic begins in a record
    lane: Int32

    @cute.jit
    def load_with_rows(self, block: Int32, head: Int32, extent: Extent, record: Int32):
        slot = self.producer.acquire_and_advance()
        self.load_into(slot.index, slot.barrier, block, head, extent)
        self.rows_into(slot.index, slot.barrier, record)

    @cute.jit
    def rows_into(self, stage: Int32, barrier: cute.Pointer, record: Int32):
        """The statistic alone."""
        if self.lane == 0:
            words = cute.size(self.box, mode=[0])
            start = self.statistics.iterator + (Int64(record) * self.statistics.shape[1] + self.word)
            bulk_load(self.box[None, stage].iterator, start, barrier, 4 * words)


@dataclass
class OthersKeys(StagedLoad):
    """Producer end of half of K's columns, of the tile of the other block in the cluster."""

    half: Int32

    @cute.jit
    def load_half(self, block: Int32, head: Int32, extent: Extent):
        slot = self.producer.acquire_and_advance()
        rows = tile_of(self.tensor, self.tile, block, self.half, head, extent, self.layout)
        target, source = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.buffer, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(self.atom, source, target[None, slot.index], tma_bar_ptr=slot.barrier)


@dataclass
class KeyTile:
    """What a block works on."""

    kv_block: Int32
    walk: Int32  # number of its cluster's tiles among the sequence's
    kv_head: Int32
    batch: Int32
    q: Extent
    k: Extent
    record: Int32  # of the first query head's block 0
    q_blocks: Int32  # records from a head to the next

    def rank(self, tiles: BackwardTiles):
        """Of the block in its cluster."""
        return self.kv_block - self.walk * tiles.cluster


@dataclass
class Loads:
    q: StagedRowsLoad
    do: StagedRowsLoad
    k: StagedLoad
    v: StagedLoad
    others: object  # OthersKeys; None without clusters
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def load_keys(self, tile: KeyTile):
        block = tile.kv_block
        if const_expr(self.others is not None):  # one of a cluster may be empty: it loads other keys, which its mask hides
            last = last_block(tile.k.length, self.tiles.kv)
            self.others.load_half(cutlass.min(block ^ 1, last), tile.kv_head, tile.k)
            block = cutlass.min(block, last)
        self.k.load(block, tile.kv_head, tile.k)
        self.v.load(block, tile.kv_head, tile.k)

    @cute.jit
    def load_queries(self, tile: KeyTile, head: Int32, block: Int32):
        """Q and dO of a block, of one of the key head's query heads."""
        q_head, record = tile.kv_head * self.spec.heads_per_kv + head, tile.record + head * tile.q_blocks + block
        self.q.load_with_rows(block, q_head, tile.q, record)
        self.do.load_with_rows(block, q_head, tile.q, record)


@dataclass
class FirstStage:
    """The barriers of the first block's Q and dO, on which a block that has one tile waits for K and V too."""

    q: cute.Pointer
    do: cute.Pointer


@cute.jit
def begin_tile(
    load: Loads, tile: KeyTile, blocks: QueryBlocks, full: FirstStage, spec: cutlass.Constexpr[BackwardSpec],
    tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    """The first loads of a block's only tile, of what no kernel before has made."""
    if blocks.count() > 0:
        block, size = block_at(blocks, Int32(0), spec, tiles, cutlass.min, cutlass.max), spec.dtype.bytes
        q_head = tile.kv_head * spec.heads_per_kv
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full.q, size * (tiles.q + tiles.kv) * spec.qk_width + 4 * (tiles.q + STATISTICS_TAIL))
            cute.arch.mbarrier_arrive_and_expect_tx(full.do, size * (tiles.q + tiles.kv) * spec.v_width + 4 * tiles.q)
        load.k.load_into(Int32(0), full.q, tile.kv_block, tile.kv_head, tile.k)
        load.q.load_into(Int32(0), full.q, block, q_head, tile.q)
        load.v.load_into(Int32(0), full.do, tile.kv_block, tile.kv_head, tile.k)
        load.do.load_into(Int32(0), full.do, block, q_head, tile.q)


@cute.jit
def produce_begun(
    load: Loads, tile: KeyTile, blocks: QueryBlocks, full: FirstStage, spec: cutlass.Constexpr[BackwardSpec],
    tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    """All other loads. Who adds to dQ has waited for D: the first block's comes once the sum is cleared."""
    if blocks.count() > 0:
        record = tile.record + block_at(blocks, Int32(0), spec, tiles, cutlass.min, cutlass.max)
        load.q.rows_into(Int32(0), full.q, record)
        if const_expr(clears_ahead(spec, tiles)):
            wait_cleared(load.q.statistics, tile.record, tiles_of(tile.k.length, tiles), tiles)
        load.do.rows_into(Int32(0), full.do, record)
        load.q.producer.advance()
        load.do.producer.advance()
    begun = Int32(1)
    for head in cutlass.range(spec.heads_per_kv, unroll=1):
        for i in cutlass.range(begun, blocks.count(), unroll=1):
            load.load_queries(tile, head, block_at(blocks, i, spec, tiles, cutlass.min, cutlass.max))
        begun = Int32(0)
    return load


@cute.jit
def load_keys_of_cleared(load: Loads, tile: KeyTile, spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles]):
    """K and V, and behind them, where all consumers add, a look whether dQ's sum may be added to."""
    load.load_keys(tile)
    if const_expr(clears_ahead(spec, tiles) and tiles.split is Split.KEYS):
        wait_cleared(load.q.statistics, tile.record, tiles_of(tile.k.length, tiles), tiles)


@cute.jit
def produce(
    load: Loads, tile: KeyTile, blocks: QueryBlocks, spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles]
):
    """Loads of one work tile, in the order in which they are read."""
    load_keys_of_cleared(load, tile, spec, tiles)
    for head in cutlass.range(spec.heads_per_kv, unroll=1):
        for i in cutlass.range(blocks.count(), unroll=1):
            load.load_queries(tile, head, block_at(blocks, i, spec, tiles, cutlass.min, cutlass.max))
    return load


@cute.jit
def produce_next(
    load: Loads,
    tile: KeyTile,
    blocks: QueryBlocks,
    work: KeyDispatcher,
    spec: cutlass.Constexpr[BackwardSpec],
    tiles: cutlass.Constexpr[BackwardTiles],
):
    """Loads of one of many tiles. The ticket for the next one is taken before the last of them, so that it is there in time, and no
    earlier: a block with a long tile must not sit on a reserved one."""
    load_keys_of_cleared(load, tile, spec, tiles)
    for head in cutlass.range(spec.heads_per_kv, unroll=1):
        for i in cutlass.range(blocks.count(), unroll=1):
            if head == spec.heads_per_kv - 1 and i == blocks.count() - 1:
                work.prefetch()
            load.load_queries(tile, head, blocks.first + i)
    if blocks.count() == 0:
        work.prefetch()
    return load, work


@dataclass
class GradientStore:
    """dK or dV: registers → 64 rows of K's or V's place in shared memory → global, by TMA. For one consumer."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # extents.rows_view
    rows: cute.Tensor  # these 64 rows in shared memory
    copy: cute.TiledCopy
    to_smem: cute.Tensor
    consumer: Int32
    part: Int32  # which 64 rows of the tile
    first_warp: Boolean
    width: cutlass.Constexpr[int]
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @staticmethod
    def create(tma, sX, mma, thread, consumer, width, spec: BackwardSpec, tiles: BackwardTiles):
        """thread: number among the consumers' threads."""
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), storage.ELEMENTS[spec.dtype]), mma)
        part = consumer if tiles.split is Split.KEYS else Int32(0)
        rows = cute.local_tile(sX, (KEYS_PER_CONSUMER, width), (part, 0, None))
        within = thread if tiles.split is Split.KEYS else thread % WARPGROUP_THREADS
        to_smem, first_warp = copy.get_slice(within).partition_D(sX), Boolean(thread // 32 % 4 == 0)
        return GradientStore(tma.atom, tma.tma_tensor, rows, copy, to_smem, consumer, part, first_warp, width, spec, tiles)

    @cute.jit
    def write(self, acc: cute.Tensor, tile: KeyTile, stage: Int32):
        out = cute.make_rmem_tensor_like(acc, storage.ELEMENTS[self.spec.dtype])
        convert(acc, out)
        cute.copy(self.copy, self.copy.retile(out), self.to_smem[None, None, None, stage])
        cute.arch.fence_view_async_shared()
        sync_gradient(self.consumer)
        sends = self.first_warp
        if const_expr(self.tiles.cluster > 1):
            sends = sends & (tile.kv_block * self.tiles.kv < tile.k.length)  # one of a cluster may be empty
        if sends:
            block = tile.kv_block * (self.tiles.kv // KEYS_PER_CONSUMER) + self.part
            rows = tile_of(self.tensor, (KEYS_PER_CONSUMER, self.width), block, 0, tile.kv_head, tile.k, self.spec.k_layout)
            source, target = cpasync.tma_partition(
                self.atom, 0, cute.make_layout(1), cute.group_modes(self.rows, 0, 2), cute.group_modes(rows, 0, 2)
            )
            cute.copy(self.atom, source[None, stage], target)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_read(self):
        """All of this consumer's threads: what was written has left shared memory."""
        if self.first_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_gradient(self.consumer)


@dataclass
class TileKeys:
    """Consumer end of K and V, a stage for each tile."""

    k: object
    v: object
    others: object  # the other block's keys; None without clusters

    @cute.jit
    def wait(self):
        self.v.wait()
        if const_expr(self.others is not None):
            self.others.wait()
        return self.k.wait().index

    @cute.jit
    def release(self):
        """And on to the next tile's."""
        self.k.release()
        self.k.advance()
        self.v.release()
        self.v.advance()
