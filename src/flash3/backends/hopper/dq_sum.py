"""The float32 sum of dQ without a kernel before or after it (DqSum.TILES).

A word of each record (block of queries and head) tells how far its sum is: backward_prepare writes how many key tiles will come. Whoever
comes first marks it TAKEN and stores; the others wait until it is STORED, and add. Every one counts itself off once its share is in memory,
and the last has the sum converted, while it still is in L2.

roles       gate       warp 1 of the producer warpgroup: comes to a block for this tile, tells the consumers what to do with their dQ,
                       counts them off, and hands the block over to the closers where nobody else will come. In a deterministic order
                       (DqPath.ORDERED) it is known who is first and last, and the sender (dq.py) sees to both
            closers    warps 2 and 3: dQ = scale · sum, in the inputs' dtype and in rows; each the half of one consumer

pipes       cargo                        stages     filled by            emptied by
open        what to do with this dQ      1          the gate             each consumer warp, once it is done (the barrier `added`)
closing     a finished block             CLOSINGS   the gate             both closers

Nobody waits in a circle. A tile takes its blocks in the order of its walk, one at a time, and waits only for a tile that took this block
before it did and has not come so far. That tile in turn waits at an earlier block of its own walk, which it took earlier still: along a
chain of tiles that wait the moment of taking goes back, and nobody is met twice.

A closer's lane copies the 16 bytes that it will convert itself: its shared memory is an extension of its registers, and nobody else looks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from . import storage
from .backward_budget import CLOSING_WORDS, CLOSINGS, closing_chunks
from .backward_tiles import CONSUMERS, KEYS_PER_CONSUMER, TURN_WORD, BackwardSpec, BackwardTiles, DqTime, Split, statistics_words
from .bulk import copy_async, load_acquire, store_or_add, transposed_8x8
from .dq import half_of, in_fours
from .extents import Extent
from .fragments import convert
from .queryblocks import QueryBlocks, block_at
from .roles import WARPGROUP_THREADS
from .rows import row_of

TAKEN, STORED, LEFT = 1 << 30, 1 << 29, (1 << 29) - 1
"""Marks in a record's word, and the part that counts the tiles still to come."""
ADD, STORE, NOTHING = 0, 1, 2
"""What a consumer does with its dQ."""
CONSUMER_WARPS = CONSUMERS * WARPGROUP_THREADS // 32
FIRST_CLOSER = 2
"""Warp number."""
CHUNK = 4 * 32
"""float32 numbers that a warp of closers reads at once."""


@dataclass
class GateMemory:
    """Shared memory of the roles."""

    open: cute.Pointer  # mbarriers
    added: cute.Pointer
    errand: cute.Tensor  # one word
    box: cute.Tensor  # (head and block, stage)
    closing: object  # the pipe's ends
    closed: object
    chunks: cute.Tensor  # (words, closer)


def gate_memory(smem, tiles: BackwardTiles) -> GateMemory:
    barriers = smem.allocate_array(cutlass.Int64, 2)
    ring = smem.allocate_array(cutlass.Int64, 2 * CLOSINGS)
    errand = smem.allocate_tensor(Int32, cute.make_layout(4), 16)
    box = smem.allocate_tensor(Int32, cute.make_layout((CLOSING_WORDS, CLOSINGS)), 16)
    chunks = smem.allocate_tensor(Float32, cute.make_layout((closing_chunks(tiles) * CHUNK, CONSUMERS)), 128)
    pipe = pipeline.PipelineAsync.create(
        barrier_storage=ring,
        num_stages=CLOSINGS,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * CONSUMERS),
        defer_sync=True,
    )
    return GateMemory(barriers, barriers + 1, errand, box, *pipe.make_participants(), chunks)


@cute.jit
def init_gate(memory: GateMemory, thread: Int32):
    if thread == 0:
        cute.arch.mbarrier_init(memory.open, 1)
        cute.arch.mbarrier_init(memory.added, CONSUMER_WARPS)


@dataclass
class GatedReduction:
    """A consumer's end: straight from the registers into the sum, as the gate says."""

    sum: cute.Tensor
    consumer: Int32
    thread: Int32  # of the warpgroup
    open: cute.Pointer
    added: cute.Pointer
    errand: cute.Tensor
    phase: Int32
    words: cutlass.Constexpr[int]

    @cute.jit
    def add(self, dQ: cute.Tensor, record: Int32):
        cute.arch.mbarrier_wait(self.open, self.phase)
        self.phase = self.phase ^ 1
        errand, fours = self.errand[0], in_fours(dQ)
        target = half_of(self.sum, record, self.consumer, self.words) + 4 * self.thread
        for i in cutlass.range_constexpr(cute.size(fours, mode=[1])):
            store_or_add(target + 4 * WARPGROUP_THREADS * i, fours[None, i], errand)
        cute.arch.sync_warp()
        if self.thread % 32 == 0:
            cute.arch.mbarrier_arrive(self.added)


@dataclass
class Closing:
    """Finished blocks on their way to the closers. A warp."""

    box: cute.Tensor
    producer: pipeline.PipelineProducer
    lane: Int32

    @cute.jit
    def send(self, head: Int32, q_block: Int32):
        slot = self.producer.acquire_and_advance()
        if self.lane == 0:
            self.box[0, slot.index], self.box[1, slot.index] = head, q_block
        cute.arch.sync_warp()
        slot.commit()

    @cute.jit
    def end(self):
        self.send(Int32(-1), Int32(0))


@dataclass
class Gate:
    """What one tile does at a block of queries."""

    statistics: cute.Tensor
    open: cute.Pointer
    added: cute.Pointer
    errand: cute.Tensor
    closing: Closing
    phase: Int32
    lane: Int32
    tiles: cutlass.Constexpr[BackwardTiles]

    def word(self, record: Int32):
        words = self.statistics.iterator + (Int64(record) * statistics_words(self.tiles) + (self.tiles.q + TURN_WORD))
        return cute.recast_ptr(words.align(4), dtype=Int32)

    @cute.jit
    def take(self, record: Int32):
        """The record's word as it was before (lane 0)."""
        found = Int32(0)
        if self.lane == 0:
            found = cute.arch.atomic_or(self.word(record), Int32(TAKEN), sem="acquire", scope="gpu")
        return found

    @cute.jit
    def let_in(self, found: Int32, record: Int32):
        """Once this tile may touch the sum, the consumers do. The answer: their errand."""
        found = cute.arch.shuffle_sync(found, 0)
        errand = Int32(STORE)
        if found & TAKEN != 0:
            errand = Int32(ADD)
            while found & STORED == 0:
                found = load_acquire(self.word(record))
        self.send(errand)
        return errand

    @cute.jit
    def send(self, errand: Int32):
        if self.lane == 0:
            self.errand[0] = errand
            cute.arch.mbarrier_arrive(self.open)

    @cute.jit
    def wait_added(self):
        cute.arch.mbarrier_wait(self.added, self.phase)
        self.phase = self.phase ^ 1

    @cute.jit
    def count_off(self, errand: Int32, record: Int32):
        """The consumers' shares are in memory. The answer: whether nobody else will come."""
        left = Int32(0)
        if self.lane == 0:
            less = Int32(STORED - 1) if errand == STORE else Int32(-1)
            # A release of the consumers' stores too, which the barrier has ordered before it.
            left = cute.arch.atomic_add(self.word(record), less, sem="acq_rel", scope="gpu") & LEFT
        return cute.arch.shuffle_sync(left, 0) == 1


@cute.jit
def keep_gate(
    gate: Gate, record: Int32, blocks: QueryBlocks, heads: Int32, q_blocks: Int32,
    spec: cutlass.Constexpr[BackwardSpec], tiles: cutlass.Constexpr[BackwardTiles],
):  # fmt: skip
    """Every block of every query head of a tile; record: of the first head's block 0."""
    count = blocks.count()
    if count > 0:
        if const_expr(tiles.dq_time is DqTime.LATE):  # the block before the first has nothing to add
            gate.send(Int32(NOTHING))
            gate.wait_added()
        total, at = heads * count, record + block_at(blocks, Int32(0), spec, tiles, cutlass.min, cutlass.max)
        found = gate.take(at)
        for i in cutlass.range(total, unroll=1):
            errand = gate.let_in(found, at)
            gate.wait_added()
            next_head = (i + 1) // count
            q_block = block_at(blocks, i + 1 - next_head * count, spec, tiles, cutlass.min, cutlass.max)
            here, at = at, record + next_head * q_blocks + q_block
            if i + 1 < total:
                found = gate.take(at)  # before the fence, which takes as long
            if gate.count_off(errand, here):
                head = i // count
                gate.closing.send(head, here - record - head * q_blocks)
    gate.closing.end()
    return gate


@dataclass
class Closer:
    """dQ's rows out of one consumer's half of the sum."""

    sum: cute.Tensor
    dq: cute.Tensor
    chunks: cute.Tensor  # this lane's words: (4, closing_chunks)
    scale: Float32
    half: Int32
    lane: Int32
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def close(self, record: Int32, extent: Extent, head: Int32, first_row: Int32):
        words = self.tiles.q * self.spec.qk_width
        source = half_of(self.sum, record, self.half, words) + 4 * self.lane
        row, column = self.corner()
        target = row_of(self.dq, self.spec.q_layout, extent, head, first_row + row).iterator + column
        rows, columns = extent.length - first_row - row, self.dq.shape[-1] - column
        pairs, ahead = words // (4 * CHUNK), closing_chunks(self.tiles) // 2 - 1
        for n in cutlass.range_constexpr(ahead):
            self.fetch(source, Int32(n))
        for n in cutlass.range(pairs, unroll=1):
            cute.arch.cp_async_wait_group(ahead - 1)
            for e in cutlass.range_constexpr(2):
                self.write(2 * n + e, target, rows, columns)
            if n + ahead < pairs:
                self.fetch(source, n + ahead)
            else:
                cute.arch.cp_async_commit_group()

    def corner(self):
        """Row and column of the block that a lane's first number of the first chunk goes to."""
        row, column = self.lane // 4, 2 * (self.lane % 4)
        if self.tiles.dq_transposed:
            return row, KEYS_PER_CONSUMER * self.half + column
        if self.tiles.split is Split.ROLES:
            return row, self.spec.qk_width // CONSUMERS * self.half + column
        return KEYS_PER_CONSUMER * self.half + row, column

    @cute.jit
    def fetch(self, source: cute.Pointer, pair: Int32):
        for e in cutlass.range_constexpr(2):
            chunk = 2 * pair + e
            copy_async(self.chunks[None, chunk % closing_chunks(self.tiles)].iterator, source + CHUNK * chunk)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def write(self, chunk: Int32, target: cute.Pointer, rows: Int32, columns: Int32):
        """A chunk is 16 rows and 8 columns of the accumulator; a lane has (row, row + 8) × (column, column + 1)."""
        values = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(self.chunks[None, chunk % closing_chunks(self.tiles)], values)
        for e in cutlass.range_constexpr(4):
            values[e] = values[e] * self.scale
        pairs = cute.make_rmem_tensor(4, storage.ELEMENTS[self.spec.dtype])
        convert(values, pairs)
        packed = cute.recast_tensor(pairs, Int32)
        for r in cutlass.range_constexpr(2):
            row, column, pair = chunk % 4 * 16 + 8 * r, chunk // 4 * 8, packed[r]
            if const_expr(self.tiles.dq_transposed):
                row, column, pair = column, row, transposed_8x8(pair)
            if row < rows and column < columns:
                at = target + (Int64(row) * self.dq.stride[-3] + column)
                cute.make_tensor(cute.recast_ptr(at.align(4), dtype=Int32), cute.make_layout(1))[0] = pair


@cute.jit
def close_all(
    closer: Closer, closed: pipeline.PipelineConsumer, box: cute.Tensor, record: Int32, q_blocks: Int32, extent: Extent, first_head: Int32
):
    """What the gate or the sender hands over, until it says that there is no more. record, first_head: as in keep_gate."""
    head = Int32(0)
    while head >= 0:
        slot = closed.wait_and_advance()
        head = box[0, slot.index]
        q_block = box[1, slot.index]
        slot.release()
        if head >= 0:
            closer.close(record + head * q_blocks + q_block, extent, first_head + head, q_block * closer.tiles.q)
    return closer
