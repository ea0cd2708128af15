"""Work tiles and the order in which persistent blocks take them.

A block's first tile is its own number; each further one comes from a counter in global memory. The producer's end (Dispatcher)
takes tickets, turns them into tiles and tells the consumers (Follower) through shared memory, so the divisions are done once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline

from ...mask import MaskKind
from .operands import Sizes
from .tiles import ForwardSpec


@dataclass
class WorkTile:
    """One tile of queries of one head."""

    q_block: Int32
    head: Int32
    batch: Int32
    valid: Boolean


def tile_at(index: Int32, sizes: Sizes, spec: ForwardSpec) -> WorkTile:
    """Groups of heads whose K and V fit in L2; inside a group the query block is the slow index, the longest first."""
    heads = sizes.heads * sizes.batch
    per_group = sizes.num_q_blocks * sizes.head_group
    group = index // per_group
    within = index - group * per_group
    first = group * sizes.head_group
    size = cutlass.min(sizes.head_group, heads - first)
    q_block = within // size
    head = first + within - q_block * size
    if spec.mask_kind is not MaskKind.FULL:  # later rows see more keys
        q_block = sizes.num_q_blocks - 1 - q_block
    batch = head // sizes.heads
    return WorkTile(q_block, head - batch * sizes.heads, batch, index < sizes.num_tiles)


@dataclass
class Dispatcher:
    """The producer's end.

    A launch takes exactly num_tiles tickets (one for every tile that is not some block's first, and one refusal per block), so
    whoever gets the last one sets the counter back to zero: no memset between launches. `prefetch` takes the ticket as late as the
    load of a tile's last V, so that a block with a long tile does not sit on a reserved one.
    """

    tile: WorkTile
    ticket: Int32
    box: cute.Tensor  # (word, stage) in shared memory
    producer: pipeline.PipelineProducer
    grid: Int32
    lane: Int32
    counter: cute.Tensor
    sizes: Sizes
    spec: cutlass.Constexpr[ForwardSpec]

    @cute.jit
    def prefetch(self):
        ticket = Int32(0)
        if self.lane == 0:
            ticket = cute.arch.atomic_add(self.counter.iterator, Int32(1))
            if ticket == self.sizes.num_tiles - 1:
                self.counter[0] = Int32(0)
        self.ticket = ticket

    @cute.jit
    def advance(self):
        self.tile = tile_at(cute.arch.shuffle_sync(self.ticket, 0) + self.grid, self.sizes, self.spec)
        slot = self.producer.acquire_and_advance()
        if self.lane == 0:
            self.box[0, slot.index] = self.tile.q_block
            self.box[1, slot.index] = self.tile.head
            self.box[2, slot.index] = self.tile.batch
            self.box[3, slot.index] = Int32(self.tile.valid)
        cute.arch.sync_warp()
        slot.commit()


@dataclass
class Follower:
    """A consumer's end."""

    tile: WorkTile
    box: cute.Tensor
    consumer: pipeline.PipelineConsumer

    @cute.jit
    def advance(self):
        slot = self.consumer.wait_and_advance()
        i = slot.index
        self.tile = WorkTile(self.box[0, i], self.box[1, i], self.box[2, i], self.box[3, i] != 0)
        slot.release()
