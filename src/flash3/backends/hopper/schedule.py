"""Work tiles and the order in which persistent blocks take them.

A block's first tile is its own number; each further one comes from a counter in global memory. The producer's end (Dispatcher) turns
numbers into tiles and tells the consumers (Follower) through shared memory, so the divisions and the search are done once.

Heads come in groups whose K and V fit in L2; inside a group the query block is the slow index, the longest first. Where queries are
ragged the number of tiles is known to the device only: the producer warp walks over the batch, 32 sequences at a time. It walks several
times, first over the longest sequences: those of one level have as many key blocks to within a factor of two.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, pipeline

from ...mask import MaskKind
from ...sequences import SequenceKind
from .extents import Extent, SequenceArrays, extent_of
from .keyblocks import level_of
from .operands import Sizes
from .tiles import ForwardSpec, Tiles

LANES = 32


@dataclass
class WorkTile:
    """One tile of queries of one head, or of as many as share a tile: `head` counts these groups."""

    q_block: Int32
    head: Int32
    batch: Int32
    valid: Boolean


@dataclass
class RaggedTile(WorkTile):
    """With what a consumer must know of its sequence."""

    q_start: Int32
    q_len: Int32
    k_len: Int32


@dataclass
class Position:
    """How far the walks over a ragged batch have come: `tiles` tiles so far, at `batch` of the walk over sequences of `level`."""

    level: Int32  # 0: all are done
    batch: Int32
    tiles: Int32
    below: Int32  # the next level, as far as this walk has seen


def is_ragged(spec: ForwardSpec) -> bool:
    """Whether tiles must be searched for: the queries' lengths are known to the device only."""
    return spec.q_layout.kind is not SequenceKind.DENSE


def tile_in(index: Int32, num_q_blocks: Int32, heads: Int32, head_group: Int32, spec: ForwardSpec):
    """(q_block, head) of a number among num_q_blocks · heads. Heads of several sequences may be counted through."""
    per_group = num_q_blocks * head_group
    group = index // per_group
    within = index - group * per_group
    first = group * head_group
    size = cutlass.min(head_group, heads - first)
    q_block = within // size
    head = first + within - q_block * size
    if spec.mask_kind is not MaskKind.FULL:  # later rows see more keys
        q_block = num_q_blocks - 1 - q_block
    return q_block, head


def bit_length(n: Int32) -> Int32:
    return 32 - Int32(cute.arch.clz(n))


@cute.jit
def search(
    index: Int32,
    at: Position,
    lane: Int32,
    arrays: SequenceArrays,
    k_arrays: SequenceArrays,
    sizes: Sizes,
    spec: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
):
    """The sequence that holds tile `index`, and its number among the sequence's tiles. Past the end: batch = sizes.batch."""
    found = Boolean(False)
    batch, within, num_q_blocks = sizes.batch, Int32(0), Int32(1)
    while not found and at.level > 0:
        mine = at.batch + lane
        q_blocks, level = Int32(0), Int32(0)
        if mine < sizes.batch:
            q_len = extent_of(arrays, spec.q_layout, mine, sizes.q_len).length
            k_len = extent_of(k_arrays, spec.k_layout, mine, sizes.k_len).length
            q_blocks = (q_len + tiles.queries - 1) // tiles.queries
            level = cutlass.min(level_of(k_len, tiles, cutlass.max, bit_length), sizes.first_level) if q_blocks > 0 else Int32(0)
        q_blocks = q_blocks if level == at.level else Int32(0)
        upto = q_blocks * sizes.heads  # becomes the number of tiles of sequences at.batch … mine
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, 1 << step)
            upto = upto + below if lane >= 1 << step else upto
        total = cute.arch.shuffle_sync(upto, LANES - 1)
        ahead = index - at.tiles
        if ahead < total:
            found = Boolean(True)
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= ahead))
            batch = at.batch + owner
            num_q_blocks = cute.arch.shuffle_sync(q_blocks, owner)
            within = ahead - (cute.arch.shuffle_sync(upto, owner) - num_q_blocks * sizes.heads)
        else:
            next_level = cute.arch.warp_redux_sync(level if level < at.level else Int32(0), "max")
            at = Position(at.level, at.batch + LANES, at.tiles + total, cutlass.max(at.below, next_level))
            if at.batch >= sizes.batch:
                at = Position(at.below, Int32(0), at.tiles, Int32(0))
    return batch, within, num_q_blocks, at


@dataclass
class Dispatcher:
    """The producer's end.

    A launch takes exactly as many tickets as there are tiles (one for every tile that is not some block's first, and one refusal per
    block that had a tile), so whoever gets the last one sets the counter back to zero: no memset between launches. `prefetch` takes
    the ticket as late as the load of a tile's last V, so that a block with a long tile does not sit on a reserved one.
    """

    tile: WorkTile
    ticket: Int32
    at: Position
    box: cute.Tensor  # (word, stage) in shared memory
    producer: pipeline.PipelineProducer
    grid: Int32
    lane: Int32
    counter: cute.Tensor
    arrays: SequenceArrays  # of the queries
    k_arrays: SequenceArrays
    sizes: Sizes
    spec: cutlass.Constexpr[ForwardSpec]
    tiles: cutlass.Constexpr[Tiles]

    @cute.jit
    def prefetch(self):
        ticket = Int32(0)
        if self.lane == 0:
            ticket = cute.arch.atomic_add(self.counter.iterator, Int32(1))
        self.ticket = ticket

    @cute.jit
    def advance(self):
        ticket = cute.arch.shuffle_sync(self.ticket, 0)
        self.send(ticket + self.grid)
        if not self.tile.valid:
            if ticket == self.num_tiles() - 1 and self.lane == 0:
                self.counter[0] = Int32(0)

    @cute.jit
    def send(self, index: Int32):
        self.tile = self.tile_at(index)
        slot = self.producer.acquire_and_advance()
        if self.lane == 0:
            self.box[0, slot.index] = self.tile.q_block
            self.box[1, slot.index] = self.tile.head
            self.box[2, slot.index] = self.tile.batch
            self.box[3, slot.index] = Int32(self.tile.valid)
            if const_expr(self.spec.is_ragged):
                self.box[4, slot.index] = self.tile.q_start
                self.box[5, slot.index] = self.tile.q_len
                self.box[6, slot.index] = self.tile.k_len
        cute.arch.sync_warp()
        slot.commit()

    def num_tiles(self) -> Int32:
        """Known once the last walk has come to the end of the batch."""
        if is_ragged(self.spec):
            return self.at.tiles
        return self.q_blocks() * self.sizes.heads * self.sizes.batch

    def q_blocks(self) -> Int32:
        return (self.sizes.q_len + self.tiles.queries - 1) // self.tiles.queries

    @cute.jit
    def tile_at(self, index: Int32):
        z = self.sizes
        if const_expr(is_ragged(self.spec)):
            batch, within, q_blocks, self.at = search(index, self.at, self.lane, self.arrays, self.k_arrays, z, self.spec, self.tiles)
            q_block, head = tile_in(within, q_blocks, z.heads, cutlass.min(z.head_group, z.heads), self.spec)
            valid = batch < z.batch
        else:
            valid = index < self.num_tiles()
            q_block, counted = tile_in(index, self.q_blocks(), z.heads * z.batch, z.head_group, self.spec)
            batch = counted // z.heads
            head = counted - batch * z.heads
        tile = WorkTile(q_block, head, batch, valid)
        if const_expr(self.spec.is_ragged):
            q, k = self.extents(cutlass.min(batch, z.batch - 1))
            tile = RaggedTile(q_block, head, batch, valid, q.start, q.length, k.length)
        return tile

    def extents(self, batch: Int32) -> tuple[Extent, Extent]:
        """Of queries and keys."""
        z = self.sizes
        return (
            extent_of(self.arrays, self.spec.q_layout, batch, z.q_len),
            extent_of(self.k_arrays, self.spec.k_layout, batch, z.k_len),
        )


@dataclass
class Follower:
    """A consumer's end."""

    tile: WorkTile
    box: cute.Tensor
    consumer: pipeline.PipelineConsumer
    spec: cutlass.Constexpr[ForwardSpec]

    @staticmethod
    def create(box, consumer, spec: ForwardSpec):
        nothing = [Int32(0) for _ in range(3)]
        tile = RaggedTile(*nothing, Boolean(False), *nothing) if spec.is_ragged else WorkTile(*nothing, Boolean(False))
        return Follower(tile, box, consumer, spec)

    @cute.jit
    def advance(self):
        slot = self.consumer.wait_and_advance()
        words = [self.box[i, slot.index] for i in range(7 if self.spec.is_ragged else 4)]
        if const_expr(self.spec.is_ragged):
            self.tile = RaggedTile(words[0], words[1], words[2], words[3] != 0, words[4], words[5], words[6])
        else:
            self.tile = WorkTile(words[0], words[1], words[2], words[3] != 0)
        slot.release()
