"""FlashAttention-3 backward on Hopper: dK and dV of a tile of keys, and its share of dQ.

equations   P = 2^(c·Q·Kᵀ − L·log2 e)     dV = Pᵀ·dO     dP = dO·Vᵀ     dS = P ∘ (dP − D)     dK = scale·dSᵀ·Q     dQ = scale·dS·K
            c = scale·log2 e;  L and D = rowsum(dO ∘ O) − dL come from backward_prepare, dQ / scale is summed in float32 for
            backward_finish. With a softcap S = cap·tanh(scale·Q·Kᵀ/cap), and dS is times 1 − tanh².

A block owns a tile of keys and walks over the query blocks that see it, for every query head of its key head. Scores are computed
transposed (Sᵀ = K·Qᵀ, keys are rows), so that Pᵀ and dSᵀ already are the register operands of dV and dK; only dS for dQ goes through
shared memory.

roles       warps      registers      job
producer    0          24             TMA loads of K, V, Q, dO; bulk loads of L and D beside Q and dO
sender      1          24             Split.KEYS but DqPath.REGISTERS: adds dQ to global memory by bulk reduction
spare       1 … 3      24             one clears dQ's sum for tiles that come later (backward_clear.py); in turn all convert that of tiles
                                      that came earlier (backward_behind.py). Not in a deterministic order, not where lengths are ragged
consumer i  4(i+1) …   240            Split.KEYS, two of them: 64 keys, all five matmuls (backward_consumer.py)
                       200, 192, 96   Split.ROLES, for widths over 128, three: the same 64 keys, P and dV, dS and dK, dQ
                                      (backward_roles.py)

pipes       cargo              stages            filled by   emptied by                            arrivals to empty
k, v        K, V tile          tiles.kv_stages   TMA         consumers, after a tile: persistent    one per consumer warp
q           Q block and L      tiles.q_stages    TMA, bulk   consumers, after dK += dSᵀ·Q          one per consumer warp
do          dO block and D     tiles.do_stages   TMA, bulk   consumers, after dV += Pᵀ·dO          one per consumer warp
half of K   other block's K   1, in a cluster   TMA         nobody
Readers of Q and dO are two consumers. Where a block starts early (backward_tiles), K has no barrier of its own but that of the first Q, V
that of the first dO.
Split.KEYS: dS has two buffers: who writes the next block's has passed the barrier of this one, so nobody reads that of the one before; Q,
dO and dS of a block have the same place in their rings. Split.ROLES: mbarriers of its own (backward_exchange.py).

barriers    0 the block, once · 1 dS of both consumers is written · 2 all have read K for the last time (dK goes out in its place)
            3+i consumer i's threads, around its rows of dK, dV · 5+i, 7+i its half of dQ is free, full (dq.py)
            Split.ROLES: 1 V is read for the last time, 5+j P is in stage j · Order.IN_TURN: 5+i consumer i's turn, 8+2i+j it has
            written dS into stage j, 12+2i+j it has read that · 7 both have added the last of a tile's dQ (backward_behind.py)

timeline    Split.KEYS, a block, both consumers in step:   Sᵀ dPᵀ │ P │ dS → shared memory │ barrier │ dQ │ dV dK, dQ leaves among them
            Order.IN_TURN, for each:   │ dQ₋₁ dV dK, Sᵀ dPᵀ of the next block │ its P, dS → shared memory, under the other's turn │
            Nothing is in flight over a loop's edge, and S, dP, dQ are new tensors in every block: else ptxas serializes all matmuls.

limits      16-bit inputs; rows of 16 bytes; a tile's first query row fits 32 bits
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ...sequences import SequenceKind
from . import backward_budget, backward_order, backward_storage, blocklist, budget, roles, storage
from .backward_barriers import BackwardBarrierId, arrive_consumers, say_added, sync_consumers, wait_added
from .backward_behind import Converter, say_done
from .backward_clear import clear_slice, make_zeros, say_cleared, slice_of, wait_cleared
from .backward_consumer import Consumer, walk_tile
from .backward_exchange import exchange_barriers, init_exchange
from .backward_io import (
    FirstStage,
    GradientStore,
    KeyTile,
    Loads,
    OthersKeys,
    StagedRowsLoad,
    TileKeys,
    begin_tile,
    produce,
    produce_begun,
    produce_next,
)
from .backward_operands import BackwardOperands
from .backward_order import Turns
from .backward_parts import Buffers, Parts
from .backward_roles import walk_dq, walk_gradients
from .backward_schedule import KeyDispatcher, KeyFollower
from .backward_tiles import (
    CONSUMERS,
    COUNTER_WORD,
    PIECE_STAGES,
    PIECE_WORDS,
    STATISTICS_TAIL,
    ZERO_WORDS,
    BackwardSpec,
    BackwardTiles,
    DqPath,
    Split,
    clears_ahead,
    converts_behind,
    is_ranked,
    starts_early,
    tiles_of,
)
from .dq import Sender, send_all
from .extents import Extent, extent_of
from .masking import bounds_of
from .pipes import StagedLoad, tma_pipe, work_pipe
from .queryblocks import QueryBlocks, query_blocks
from .weights import some_are_coarse


@cute.jit
def scale_all(acc: cute.Tensor, factor: Float32):
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor


def launched_by_groups(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Whether the grid is one row of blocks in backward_order's order: it needs to know how many tiles a sequence has."""
    return tiles.dq_path is DqPath.ORDERED and spec.k_layout.kind is SequenceKind.DENSE


class BackwardKernel:
    """The kernel of one (BackwardSpec, BackwardTiles)."""

    def __init__(self, spec: BackwardSpec, tiles: BackwardTiles):
        self.spec, self.tiles = spec, tiles

    @cute.jit
    def launch(self, ops: BackwardOperands, tiles: Int32, kv_heads: Int32, multiprocessors: Int32, stream):
        if const_expr(self.tiles.persistent):
            tiles, kv_heads = cutlass.min(tiles * kv_heads, multiprocessors), 1
        elif const_expr(launched_by_groups(self.spec, self.tiles) or is_ranked(self.spec, self.tiles)):
            tiles, kv_heads = tiles * kv_heads, 1
        # Without min_blocks_per_mp ptxas ignores setmaxnreg.
        self.kernel(ops).launch(
            grid=[tiles, kv_heads, 1],
            block=[self.tiles.threads, 1, 1],
            cluster=[self.tiles.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ops: BackwardOperands):
        spec, tiles = self.spec, self.tiles
        thread, _, _ = cute.arch.thread_idx()
        warpgroup = cute.arch.make_warp_uniform(thread // roles.WARPGROUP_THREADS)
        warp_number = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        buffers = self.buffers(smem)
        size = spec.dtype.bytes

        def pipe(stages, stage_bytes):
            return tma_pipe(smem, CONSUMERS, stages, stage_bytes)

        q_pipe = pipe(tiles.q_stages, size * tiles.q * spec.qk_width + 4 * (tiles.q + STATISTICS_TAIL))
        do_pipe = pipe(tiles.do_stages, size * tiles.q * spec.v_width + 4 * tiles.q)
        k_in = k_out = v_in = v_out = None
        if const_expr(not starts_early(spec, tiles)):
            k_in, k_out = pipe(tiles.kv_stages, size * tiles.kv * spec.qk_width).make_participants()
            v_in, v_out = pipe(tiles.kv_stages, size * tiles.kv * spec.v_width).make_participants()
        others_in = others_out = exchange = None
        if const_expr(tiles.split is Split.ROLES):
            exchange = exchange_barriers(smem, tiles)
            if thread == 0:
                init_exchange(*exchange, tiles)
        if const_expr(tiles.cluster > 1):
            others_in, others_out = pipe(1, size * tiles.kv * spec.qk_width // 2).make_participants()
        box = work_in = work_out = None
        if const_expr(tiles.persistent):
            box, work_in, work_out = work_pipe(smem, tiles, backward_budget.WORK_WORDS, 32)
        if const_expr(buffers.pieces is not None):
            if thread == 0:
                for i in cutlass.range_constexpr(PIECE_STAGES * tiles.spare_warps):
                    cute.arch.mbarrier_init(buffers.pieces_full + i, 1)
        cute.arch.mbarrier_init_fence()
        first = FirstStage(*(p.sync_object_full.get_barrier(0) for p in (q_pipe, do_pipe)))
        self.sync_cluster()
        cute.arch.griddepcontrol_wait()  # for backward_prepare
        cute.arch.griddepcontrol_launch_dependents()
        if warpgroup == roles.PRODUCER_WARPGROUP:
            cute.arch.setmaxregister_decrease(backward_budget.producer_registers(tiles))
            if warp_number == 0:
                load = self.loads(ops, buffers, q_pipe.make_producer(), do_pipe.make_producer(), k_in, v_in, others_in, thread)
                if const_expr(tiles.persistent):
                    self.produce_tiles(ops, load, box, work_in, thread)
                else:
                    self.produce_tile(ops, load, first)
            if const_expr(tiles.has_sender):
                if warp_number == 1:
                    self.send_tile(ops, buffers, thread % 32)
            if const_expr(clears_ahead(spec, tiles)):
                if warp_number >= tiles.first_spare_warp:
                    spare_warp = warp_number - tiles.first_spare_warp
                    if const_expr(tiles.persistent):
                        self.help_tiles(ops, buffers, KeyFollower(Int32(0), box, work_out.clone()), spare_warp)
                    else:
                        self.help_tile(ops, buffers, self.tile(ops), spare_warp)
        else:
            me = warpgroup - roles.FIRST_CONSUMER_WARPGROUP
            keys = TileKeys(k_out, v_out, others_out)
            if const_expr(tiles.split is Split.KEYS):
                cute.arch.setmaxregister_increase(backward_budget.consumer_registers(tiles)[0])
            parts = Parts(self, ops, self.tile(ops), buffers, q_pipe, do_pipe, exchange, thread - roles.WARPGROUP_THREADS, me)
            if const_expr(tiles.persistent):
                self.consume_tiles(parts, keys, KeyFollower(Int32(0), box, work_out))
            elif const_expr(tiles.split is Split.KEYS):
                self.consume_tile(parts, keys)
            else:
                self.consume_by_roles(parts, keys, me)
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        if const_expr(tiles.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def sync_cluster(self):
        """Or the block."""
        if const_expr(self.tiles.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def produce_tile(self, ops, load: Loads, first: FirstStage):
        """The block's only tile."""
        tile = self.tile(ops)
        if self.exists(tile):
            if const_expr(starts_early(self.spec, self.tiles)):
                blocks = self.blocks(ops, tile)
                begin_tile(load, tile, blocks, first, self.spec, self.tiles)
                load = produce_begun(load, tile, blocks, first, self.spec, self.tiles)
            else:
                load = produce(load, tile, self.blocks(ops, tile), self.spec, self.tiles)
            load.q.producer.tail()
            load.do.producer.tail()

    @cute.jit
    def produce_tiles(self, ops, load: Loads, box, work_in, lane):
        counter = (ops.statistics.iterator + (self.tiles.q + COUNTER_WORD)).align(4)
        counter = cute.recast_ptr(counter, dtype=Int32)
        work = KeyDispatcher(Int32(0), Int32(0), box, work_in, counter, lane)
        work.prefetch()
        work.advance()
        num_tiles = self.num_tiles(ops)
        while work.index < num_tiles:
            tile = self.tile_at(ops, work.index)
            blocks = self.blocks(ops, tile)
            load, work = produce_next(load, tile, blocks, work, self.spec, self.tiles)
            work.advance()
        load.q.producer.tail()
        load.do.producer.tail()

    @cute.jit
    def send_tile(self, ops, buffers, lane):
        tile = self.tile(ops)
        if self.exists(tile):
            sender = Sender(ops.dq_sum, ops.statistics, buffers.dQ, lane, self.turns(ops, tile), self.spec, self.tiles)
            send_all(sender, tile.record, self.blocks(ops, tile), Int32(self.spec.heads_per_kv), tile.q_blocks)
            self.say_sent(ops, tile, lane)

    @cute.jit
    def say_sent(self, ops, tile: KeyTile, lane):
        if const_expr(converts_behind(self.spec, self.tiles)):
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                say_done(ops.statistics, tile.record, self.tiles)

    @cute.jit
    def help_tiles(self, ops, buffers, work: KeyFollower, spare_warp):
        """Beside tile after tile: the first spare warp alone."""
        if spare_warp == 0:
            lane, num_tiles = cute.arch.lane_idx(), self.num_tiles(ops)
            make_zeros(buffers.zeros, lane)
            work.advance()
            while work.index < num_tiles:
                tile = self.tile_at(ops, work.index)
                self.clear_column_ahead(ops, buffers, tile, lane)
                self.say_cleared(ops, tile, lane)
                work.advance()

    @cute.jit
    def help_tile(self, ops, buffers, tile: KeyTile, spare_warp):
        lane = cute.arch.lane_idx()
        if spare_warp == 0:
            make_zeros(buffers.zeros, lane)
            self.clear_column_ahead(ops, buffers, tile, lane)
        if const_expr(converts_behind(self.spec, self.tiles)):
            self.convert_column_behind(ops, buffers, tile, spare_warp, lane)
        if spare_warp == 0:
            self.say_cleared(ops, tile, lane)

    def column_ahead(self, ops, tile: KeyTile):
        """(key head, first record) of the column that a tile clears; the head may be one too many."""
        z = ops.sizes
        column = tile.kv_head * z.batch + tile.batch + z.columns_ahead
        kv_head = column // z.batch
        blocks = z.q_blocks // z.batch
        return kv_head, kv_head * self.spec.heads_per_kv * z.q_blocks + (column - kv_head * z.batch) * blocks

    @cute.jit
    def clear_column_ahead(self, ops, buffers, tile: KeyTile, lane):
        z = ops.sizes
        kv_head, record = self.column_ahead(ops, tile)
        if kv_head < z.kv_heads:
            blocks, num_tiles = z.q_blocks // z.batch, tiles_of(tile.k.length, self.tiles)
            clear_slice(buffers.zeros, ops.dq_sum, record, z.q_blocks, blocks, tile.kv_block, num_tiles, lane, self.spec, self.tiles)

    @cute.jit
    def say_cleared(self, ops, tile: KeyTile, lane):
        kv_head, record = self.column_ahead(ops, tile)
        if kv_head < ops.sizes.kv_heads:
            say_cleared(ops.statistics, record, lane, self.tiles)

    @cute.jit
    def convert_column_behind(self, ops, buffers, tile: KeyTile, warp_number, lane):
        """One spare warp's part; the last of them says at the end that this tile has added to its own column."""
        spec, tiles, z = self.spec, self.tiles, ops.sizes
        column = tile.kv_head * z.batch + tile.batch - z.columns_ahead
        if column >= 0:
            kv_head = column // z.batch
            batch = column - kv_head * z.batch
            blocks, num_tiles = z.q_blocks // z.batch, tiles_of(tile.k.length, tiles)
            record = kv_head * spec.heads_per_kv * z.q_blocks + batch * blocks
            first, end = slice_of(tile.kv_block, blocks, num_tiles, spec.mask_kind, cutlass.min)
            pieces, full = buffers.pieces[None, None, warp_number], buffers.pieces_full + PIECE_STAGES * warp_number
            converter = Converter(pieces, full, ops.dq, ops.dq_sum, ops.scale, warp_number, lane, spec, tiles)
            extent = Extent(batch, Int32(0), tile.q.length)
            converter.take_over(ops.statistics, record, extent, kv_head * spec.heads_per_kv, z.q_blocks, first, end, num_tiles)
        if const_expr(not tiles.has_sender):
            if warp_number == tiles.spare_warps - 1:
                wait_added()
                if lane == 0:
                    say_done(ops.statistics, tile.record, tiles)

    @cute.jit
    def consume_tile(self, parts, keys):
        """The block's only tile."""
        ops, tile = parts.ops, parts.tile
        if self.exists(tile):
            blocks = self.blocks(ops, tile)
            coarse = self.is_coarse(ops, tile, blocks)
            if const_expr(not starts_early(self.spec, self.tiles)):
                keys.wait()
            self.by_keys(parts, blocks, coarse)

    @cute.jit
    def consume_by_roles(self, parts, keys, me: Int32):
        """The same."""
        scores, gradients, dq = backward_budget.consumer_registers(self.tiles)
        if me == 0:
            cute.arch.setmaxregister_increase(scores)
            if self.exists(parts.tile):
                self.scores_role(parts, keys)
        elif me == 1:
            cute.arch.setmaxregister_increase(gradients)
            if self.exists(parts.tile):
                self.gradients_role(parts, keys)
        else:
            cute.arch.setmaxregister_decrease(dq)
            if self.exists(parts.tile):
                self.dq_role(parts, keys)

    @cute.jit
    def consume_tiles(self, parts, keys: TileKeys, work: KeyFollower):
        """Tile after tile, until there is none."""
        ops = parts.ops
        c, dv_store, dk_store = parts.consumer(), parts.dv_store(), parts.dk_store()
        num_tiles = self.num_tiles(ops)
        work.advance()
        while work.index < num_tiles:
            tile = self.tile_at(ops, work.index)
            blocks = self.blocks(ops, tile)
            coarse = self.is_coarse(ops, tile, blocks)
            c.begin(tile.kv_block, tile.record, keys.wait())
            c = walk_tile(c, blocks, tile.q_blocks, coarse)
            self.store(c, dv_store, dk_store, tile, ops.scale)
            dk_store.wait_read()
            keys.release()
            work.advance()

    @cute.jit
    def by_keys(self, parts, blocks: QueryBlocks, coarse: Boolean):
        c, tile = parts.consumer(), parts.tile
        c.begin(tile.kv_block, tile.record, Int32(0))
        c = walk_tile(c, blocks, tile.q_blocks, coarse)
        if const_expr(converts_behind(self.spec, self.tiles) and not self.tiles.has_sender):
            say_added()
        self.store(c, parts.dv_store(), parts.dk_store(), tile, parts.ops.scale)

    @cute.jit
    def store(self, c: Consumer, dv_store: GradientStore, dk_store: GradientStore, tile: KeyTile, scale: Float32):
        dv_store.write(c.dV, tile, c.kv_stage)  # these rows of V were read by this consumer alone
        sync_consumers(BackwardBarrierId.KEYS_READ)
        scale_all(c.dK, scale)
        dk_store.write(c.dK, tile, c.kv_stage)

    def exists(self, tile: KeyTile):
        """Where lengths are ragged a block may have no tile."""
        return tile.walk * self.tiles.walk_keys < tile.k.length

    def is_coarse(self, ops, tile: KeyTile, blocks: QueryBlocks):
        first, count = tile.record + blocks.first, blocks.count()
        return some_are_coarse(ops.statistics, first, count, self.spec.heads_per_kv, tile.q_blocks, self.tiles)

    def num_tiles(self, ops) -> Int32:
        return self.tiles_of_a_head(ops) * ops.sizes.kv_heads

    def tiles_of_a_head(self, ops) -> Int32:
        return blocklist.num_blocks(self.spec.k_layout, ops.sizes.k_rows, ops.sizes.batch, self.tiles.kv)

    @cute.jit
    def scores_role(self, parts, keys: TileKeys):
        ops, tile = parts.ops, parts.tile
        blocks = self.blocks(ops, tile)
        c = parts.score_consumer()
        c.total.fill(0.0)
        coarse = self.is_coarse(ops, tile, blocks)
        keys.wait()
        c = walk_tile(c, blocks, tile.q_blocks, coarse)
        arrive_consumers(BackwardBarrierId.KEYS_READ, self.tiles.consumers)
        sync_consumers(BackwardBarrierId.VALUES_READ)
        parts.dv_store().write(c.total, tile, Int32(0))

    @cute.jit
    def gradients_role(self, parts, keys: TileKeys):
        ops, tile = parts.ops, parts.tile
        blocks = self.blocks(ops, tile)
        c = parts.gradient_consumer()
        c.total.fill(0.0)
        keys.wait()
        c = walk_gradients(c, blocks)
        arrive_consumers(BackwardBarrierId.VALUES_READ)
        scale_all(c.total, ops.scale)
        sync_consumers(BackwardBarrierId.KEYS_READ, self.tiles.consumers)
        parts.dk_store().write(c.total, tile, Int32(0))

    @cute.jit
    def dq_role(self, parts, keys: TileKeys):
        ops, tile = parts.ops, parts.tile
        c = parts.dq_consumer(self.turns(ops, tile))
        if const_expr(clears_ahead(self.spec, self.tiles)):
            wait_cleared(ops.statistics, tile.record, tiles_of(tile.k.length, self.tiles), self.tiles)
        keys.wait()
        c = walk_dq(c, tile.record, self.blocks(ops, tile), tile.q_blocks)
        arrive_consumers(BackwardBarrierId.KEYS_READ, self.tiles.consumers)

    def buffers(self, smem: SmemAllocator):
        spec, tiles = self.spec, self.tiles
        element = storage.ELEMENTS[spec.dtype]

        def buffer(layout):
            return smem.allocate_tensor(element, layout.outer, budget.ALIGNMENT_BYTES, swizzle=layout.inner)

        sQ = buffer(backward_storage.q_layout(spec, tiles, tiles.q_stages))
        sdO = buffer(backward_storage.do_layout(spec, tiles, tiles.do_stages))
        sK, sV = (
            buffer(backward_storage.k_layout(spec, tiles, tiles.kv_stages)),
            buffer(backward_storage.v_layout(spec, tiles, tiles.kv_stages)),
        )
        sdS = buffer(backward_storage.ds_layout(spec, tiles))
        sdQ = half_of_k = None
        if tiles.cluster > 1:
            half_of_k = buffer(backward_storage.half_of_k_layout(spec, tiles))
        if tiles.has_sender:
            sdQ = smem.allocate_tensor(Float32, cute.make_layout((tiles.q * spec.qk_width // 2, 2)), 128)
        sL = smem.allocate_tensor(Float32, cute.make_layout((tiles.q + STATISTICS_TAIL, tiles.q_stages)), 128)
        sD = smem.allocate_tensor(Float32, cute.make_layout((tiles.q, tiles.do_stages)), 128)
        zeros = pieces = pieces_full = None
        if clears_ahead(spec, tiles):
            zeros = smem.allocate_tensor(Float32, cute.make_layout(ZERO_WORDS), 128)
        if converts_behind(spec, tiles):
            pieces = smem.allocate_tensor(Float32, cute.make_layout((PIECE_WORDS, PIECE_STAGES, tiles.spare_warps)), 128)
            pieces_full = smem.allocate_array(cutlass.Int64, PIECE_STAGES * tiles.spare_warps)
        return Buffers(sQ, sdO, sK, sV, sdS, half_of_k, sdQ, sL, sD, zeros, pieces, pieces_full)

    def place(self, ops: BackwardOperands):
        """(number among the key tiles of the batch, key head) of this block."""
        index, kv_head, _ = cute.arch.block_idx()
        if const_expr(is_ranked(self.spec, self.tiles)):
            return self.ranked(ops, index)
        if const_expr(not launched_by_groups(self.spec, self.tiles)):
            return index, kv_head
        z, cluster = ops.sizes, self.tiles.cluster
        walks = tiles_of(z.k_rows, self.tiles) // cluster
        walk, column = backward_order.place(index // cluster, walks, z.kv_heads * z.batch, cutlass.min, cluster)
        batch = column // z.kv_heads
        return (batch * walks + walk) * cluster + index % cluster, column - batch * z.kv_heads

    def ranked(self, ops: BackwardOperands, index):
        """Tiles in backward_rank's order, the heads of each one (in a cluster: of those that walk together) side by side."""
        cluster, kv_heads = self.tiles.cluster, ops.sizes.kv_heads
        rank = index // cluster // kv_heads
        return ops.order[rank] * cluster + index % cluster, index // cluster - rank * kv_heads

    def tile(self, ops: BackwardOperands) -> KeyTile:
        """This block's work."""
        return self.key_tile(ops, *self.place(ops))

    def tile_at(self, ops: BackwardOperands, index: Int32) -> KeyTile:
        """Of persistent blocks: the longest first, or head by head, of each the longest first."""
        if const_expr(is_ranked(self.spec, self.tiles)):
            return self.key_tile(ops, *self.ranked(ops, index))
        of_a_head = self.tiles_of_a_head(ops)
        kv_head = index // of_a_head
        return self.key_tile(ops, index - kv_head * of_a_head, kv_head)

    def key_tile(self, ops: BackwardOperands, index, kv_head) -> KeyTile:
        spec, tiles, z = self.spec, self.tiles, ops.sizes
        walk = index // tiles.cluster
        batch = blocklist.sequence_of(walk, ops.k_arrays, z.batch, z.k_rows, spec.k_layout, tiles.walk_keys)
        q = extent_of(ops.q_arrays, spec.q_layout, batch, z.q_rows)
        k = extent_of(ops.k_arrays, spec.k_layout, batch, z.k_rows)
        walk = walk - blocklist.first_block(spec.k_layout, ops.k_arrays, batch, z.k_rows, tiles.walk_keys)
        kv_block = walk * tiles.cluster + index % tiles.cluster
        first = blocklist.first_block(spec.q_layout, ops.q_arrays, batch, z.q_rows, tiles.q)
        return KeyTile(kv_block, walk, kv_head, batch, q, k, kv_head * spec.heads_per_kv * z.q_blocks + first, z.q_blocks)

    def turns(self, ops: BackwardOperands, tile: KeyTile) -> Turns:
        kv_blocks, q_blocks = (n // size for n, size in self.padded_lengths(tile))
        bounds = bounds_of(ops.mask, tile.q.length, tile.k.length)
        return Turns(tile.walk, kv_blocks, q_blocks, tile.k.length, bounds, self.tiles.cluster)

    def padded_lengths(self, tile: KeyTile):
        kv, q = self.tiles.walk_keys, self.tiles.q
        return (tile.k.length + kv - 1, kv), (tile.q.length + q - 1, q)

    def blocks(self, ops: BackwardOperands, tile: KeyTile) -> QueryBlocks:
        bounds = bounds_of(ops.mask, tile.q.length, tile.k.length)
        shift = Int32(0)
        if self.tiles.dq_path is DqPath.ORDERED:
            shift = self.turns(ops, tile).shift(self.spec.mask_kind, cutlass.min)
        b = query_blocks(self.spec, self.tiles, tile.walk, tile.q.length, tile.k.length, bounds, cutlass.min, cutlass.max, shift)
        return QueryBlocks(Int32(b.first), Int32(b.left_edge), Int32(b.interior), Int32(b.right_edge), Int32(b.shift))

    def loads(self, ops, buffers, q_in, do_in, k_in, v_in, others_in, thread) -> Loads:
        spec, tiles = self.spec, self.tiles
        q_tile, do_tile = (tiles.q, spec.qk_width), (tiles.q, spec.v_width)
        k_tile, v_tile = (tiles.kv, spec.qk_width), (tiles.kv, spec.v_width)
        after_l, others = tiles.q + STATISTICS_TAIL, None
        if const_expr(tiles.cluster > 1):
            half, half_tile, info = self.tile(ops).rank(tiles), (tiles.kv, spec.qk_width // 2), ops.half_of_k
            others = OthersKeys(info.atom, info.tma_tensor, buffers.half_of_k, others_in, half_tile, spec.k_layout, half)
        return Loads(
            StagedRowsLoad(ops.q.atom, ops.q.tma_tensor, buffers.Q, q_in, q_tile, spec.q_layout, ops.statistics, buffers.L, 0, thread),
            StagedRowsLoad(
                ops.do.atom, ops.do.tma_tensor, buffers.dO, do_in, do_tile, spec.q_layout, ops.statistics, buffers.D, after_l, thread
            ),
            StagedLoad(ops.k.atom, ops.k.tma_tensor, buffers.K, k_in, k_tile, spec.k_layout),
            StagedLoad(ops.v.atom, ops.v.tma_tensor, buffers.V, v_in, v_tile, spec.k_layout),
            others,
            spec,
            tiles,
        )
