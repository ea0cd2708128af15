"""dQ on its way into the float32 sum in global memory. Two paths, chosen by type.

The sum has the order of the matmul's registers: of a block of queries first consumer 0's half, then consumer 1's; in a half float4 i of
thread t lies at 4·(128·i + t). So 16 bytes of a thread lie beside its neighbours', in shared memory and in global; `backward_finish` puts
the rows together again.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .backward_barriers import BackwardBarrierId
from .backward_order import Turns
from .backward_tiles import TURN_WORD, BackwardSpec, BackwardTiles, DqPath, statistics_words
from .bulk import add_release, bulk_reduce_add, bulk_store, load_acquire, reduce_add
from .queryblocks import QueryBlocks, block_at
from .roles import WARPGROUP_THREADS

HANDOVER_THREADS = WARPGROUP_THREADS + 32
"""One consumer and the sender warp."""


def half_of(sum_, record, consumer, words: int):
    """Pointer to one consumer's half of a block of queries in the sum: (heads · q_blocks, words) float32."""
    return (sum_.iterator + (Int64(record) * words + consumer * (words // 2))).align(16)


def in_fours(dQ):
    """The accumulator as (4, n): float4 by float4."""
    return cute.make_tensor(dQ.iterator, cute.make_layout((4, cute.size(dQ) // 4)))


@dataclass
class RegisterReduction:
    """Straight from the registers: nothing passes through shared memory, nobody waits."""

    sum: cute.Tensor
    consumer: Int32
    thread: Int32  # of the warpgroup
    words: cutlass.Constexpr[int]

    @cute.jit
    def add(self, dQ: cute.Tensor, record: Int32):
        self.put(dQ, record, self.consumer, reduce_add)

    @cute.jit
    def put(self, dQ: cute.Tensor, record: Int32, half: Int32, operation: cutlass.Constexpr):
        """By reduce_add, or by store."""
        fours = in_fours(dQ)
        target = half_of(self.sum, record, half, self.words) + 4 * self.thread
        for i in cutlass.range_constexpr(cute.size(fours, mode=[1])):
            operation(target + 4 * WARPGROUP_THREADS * i, fours[None, i])


@dataclass
class HandOver:
    """Consumer end of the way through shared memory."""

    slot: cute.Tensor  # this thread's part of its consumer's half: (4, n)
    consumer: Int32

    @cute.jit
    def add(self, dQ: cute.Tensor, record: Int32):
        cute.arch.barrier(barrier_id=BackwardBarrierId.SLOT_FREE + self.consumer, number_of_threads=HANDOVER_THREADS)
        cute.autovec_copy(in_fours(dQ), self.slot)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=BackwardBarrierId.SLOT_FULL + self.consumer, number_of_threads=HANDOVER_THREADS)


@dataclass
class Sender:
    """The warp that adds what the consumers hand over, by bulk reduction."""

    sum: cute.Tensor
    statistics: cute.Tensor
    slots: cute.Tensor  # (half, consumer) in shared memory
    lane: Int32
    turns: Turns
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def free(self):
        for w in cutlass.range_constexpr(self.tiles.consumers):
            cute.arch.barrier_arrive(barrier_id=BackwardBarrierId.SLOT_FREE + w, number_of_threads=HANDOVER_THREADS)

    @cute.jit
    def send(self, record: Int32, q_block: Int32):
        words, spec, tiles = self.tiles.q * self.spec.qk_width, self.spec, self.tiles
        rank = Int32(1)
        if const_expr(tiles.dq_path is DqPath.ORDERED):
            rank = Int32(self.turns.rank(q_block, tiles.q, tiles.kv, spec.mask_kind, cutlass.min, cutlass.max))
            wait_for(counter_of(self.statistics, record, tiles), rank)
        for w in cutlass.range_constexpr(self.tiles.consumers):
            cute.arch.barrier(barrier_id=BackwardBarrierId.SLOT_FULL + w, number_of_threads=HANDOVER_THREADS)
            if self.lane == 0:
                target, source = half_of(self.sum, record, w, words), self.slots[None, w].iterator
                if rank == 0:  # nobody has cleared it
                    bulk_store(target, source, 2 * words)
                else:
                    bulk_reduce_add(target, source, 2 * words)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def pass_turn(self, record: Int32):
        if const_expr(self.tiles.dq_path is DqPath.ORDERED):
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            if self.lane == 0:
                add_release(counter_of(self.statistics, record, self.tiles), Int32(1))


def counter_of(statistics: cute.Tensor, record: Int32, tiles: BackwardTiles) -> cute.Pointer:
    """A record's counter: of the key tiles that have added to its sum, or of the slices that are cleared (backward_clear)."""
    return statistics.iterator + (Int64(record) * statistics_words(tiles) + (tiles.q + TURN_WORD))


@cute.jit
def wait_for(counter: cute.Pointer, value: Int32):
    """Until a number in global memory is `value`."""
    seen = load_acquire(counter)
    while seen != value:
        seen = load_acquire(counter)


@cute.jit
def wait_for_at_least(counter: cute.Pointer, value: Int32, seen: Int32):
    """seen: at the last look."""
    while seen < value:
        seen = load_acquire(counter)


@cute.jit
def send_all(sender: Sender, record: Int32, blocks: QueryBlocks, heads: Int32, q_blocks: Int32):
    """Every block of every query head of a tile; record: of the first head's block 0."""
    count = blocks.count()
    if count > 0:
        sender.free()
    for head in cutlass.range(heads, unroll=1):
        for i in cutlass.range(count, unroll=1):
            q_block = block_at(blocks, i, sender.spec, sender.tiles, cutlass.min, cutlass.max)
            sender.send(record + head * q_blocks + q_block, q_block)
            if head * count + i + 1 < heads * count:
                sender.free()
            sender.pass_turn(record + head * q_blocks + q_block)
    return sender
