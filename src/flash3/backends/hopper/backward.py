"""FlashAttention-3 backward on Hopper: dK and dV of a tile of keys, and its share of dQ.

equations   P = 2^(c·Q·Kᵀ − L·log2 e)     dV = Pᵀ·dO     dP = dO·Vᵀ     dS = P ∘ (dP − D)     dK = scale·dSᵀ·Q     dQ = scale·dS·K
            c = scale·log2 e;  L and D = rowsum(dO ∘ O) − dL come from backward_prepare, dQ / scale is summed in float32 for
            backward_finish. With a softcap S = cap·tanh(scale·Q·Kᵀ/cap), and dS is times 1 − tanh².

A block owns a tile of keys and walks over the query blocks that see it, for every query head of its key head. Scores are computed
transposed (Sᵀ = K·Qᵀ, keys are rows), so that Pᵀ and dSᵀ already are the register operands of dV and dK; only dS for dQ goes through
shared memory.

roles       warps      registers      job
producer    0          24             TMA loads of K, V, Q, dO; bulk loads of L and D beside Q and dO
sender      1          24             DqPath.SHARED: adds dQ to global memory by bulk reduction
spare       1 2 3      24             DqPath.REGISTERS: clear dQ's sum for tiles that come later (backward_clear.py)
consumer i  4(i+1) …   240            Split.KEYS: 64 keys, all five matmuls (backward_consumer.py); Split.ROLES, for widths over 128: the
                                      same 64 keys, P and dV or dS and dK, half of dQ (backward_roles.py)

pipes       cargo              stages            filled by   emptied by                            arrivals to empty
k, v        K, V tile          tiles.kv_stages   TMA         consumers, after a tile: persistent    one per consumer warp
q           Q block and L      tiles.q_stages    TMA, bulk   consumers, after dK += dSᵀ·Q          one per consumer warp
do          dO block and D     tiles.do_stages   TMA, bulk   consumers, after dV += Pᵀ·dO          one per consumer warp
dS has two buffers: who writes the next block's has passed the barrier of this one, so nobody reads that of the one before. With Split.KEYS
Q, dO and dS of a block have the same place in their rings.

barriers    0 the block, once · 1 dS of both consumers is written · 2 both have read K for the last time (dK goes out in its place)
            3+i consumer i's threads, around its rows of dK, dV · 5+i, 7+i its half of dQ is free, full (dq.py)
            9 Split.ROLES: P is in shared memory · Order.IN_TURN: 5+i consumer i's turn, 8+2i+j it has written dS into stage j,
            12+2i+j it has read that

timeline    Split.KEYS, a block, both consumers in step:   Sᵀ dPᵀ │ P │ dS → shared memory │ barrier │ dQ │ dV dK, dQ leaves among them
            Order.IN_TURN, for each:   │ dQ₋₁ dV dK, Sᵀ dPᵀ of the next block │ its P, dS → shared memory, under the other's turn │
            Nothing is in flight over a loop's edge, and S, dP, dQ are new tensors in every block: else ptxas serializes all matmuls.

limits      16-bit inputs; rows of 16 bytes; a tile's first query row fits 32 bits
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from ...sequences import SequenceKind
from . import backward_budget, backward_order, backward_storage, blocklist, budget, roles, storage
from .backward_barriers import BackwardBarrierId, sync_consumers
from .backward_clear import FIRST_SPARE_WARP, clear_slice, clears_ahead
from .backward_consumer import Consumer, StagedRows, StagedRowsRead, TurnConsumer, walk_tile
from .backward_io import GradientStore, KeyTile, Loads, StagedRowsLoad, TileKeys, produce, produce_next
from .backward_operands import BackwardOperands
from .backward_order import Turns
from .backward_roles import GradientConsumer, HalfOfDq, ScoreConsumer
from .backward_schedule import KeyDispatcher, KeyFollower
from .backward_tiles import COUNTER_WORD, STATISTICS_TAIL, BackwardSpec, BackwardTiles, DqPath, Order, Split, is_ranked
from .dq import HandOver, RegisterReduction, Sender, send_all
from .extents import extent_of
from .fragments import LANES_PER_ROW
from .masking import bounds_of
from .pipes import StagedLoad, tma_pipe, work_pipe
from .queryblocks import QueryBlocks, query_blocks
from .weights import TransposedMask, Weights, some_are_coarse


@dataclass
class Buffers:
    """Shared memory."""

    Q: cute.Tensor  # (rows, columns, stage), and so are dO, K, V
    dO: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    dS: cute.Tensor  # (queries, keys, stage)
    dQ: object  # DqPath.SHARED: (half, consumer) float32
    P: object  # Split.ROLES: P as it lies in registers, words
    L: cute.Tensor  # (words, stage)
    D: cute.Tensor


class Parts:
    """What a consumer is put together from."""

    def __init__(self, kernel, ops: BackwardOperands, tile: KeyTile, buffers: Buffers, q_pipe, do_pipe, thread, me):
        self.spec, self.tiles = kernel.spec, kernel.tiles
        self.ops, self.tile, self.buffers, self.q_pipe, self.do_pipe = ops, tile, buffers, q_pipe, do_pipe
        self.all_thread, self.me = thread, me
        by_keys = self.tiles.split is Split.KEYS
        self.thread = thread if by_keys else thread % roles.WARPGROUP_THREADS
        # not the thread: descriptors then live in uniform registers
        self.at, self.dq_at = (me * roles.WARPGROUP_THREADS if by_keys else 0), me * roles.WARPGROUP_THREADS
        self.scores = backward_storage.scores_mma(self.spec, self.tiles)
        self.dk_mma, self.dv_mma = (
            backward_storage.gradient_mma(self.spec, self.tiles, w) for w in (self.spec.qk_width, self.spec.v_width)
        )
        self.dq_mma = backward_storage.dq_mma(self.spec, self.tiles)
        self.lane = thread % 32
        self.first_column = 2 * (self.lane % LANES_PER_ROW)

    def scores_a(self, sX):
        """K or V, over its stages."""
        return self.scores.make_fragment_A(self.scores.get_slice(self.at).partition_A(sX))

    def read(self, sX, mma, width, stages, rows, pipe) -> StagedRowsRead | StagedRows:
        part = self.scores.get_slice(self.at)
        transposed = mma.get_slice(self.at).partition_B(storage.transposed(sX, width, self.tiles.q, stages))
        operands = self.scores.make_fragment_B(part.partition_B(sX)), mma.make_fragment_B(transposed), rows
        if self.tiles.split is Split.KEYS:
            return StagedRows(*operands, pipe)
        consumer = pipe.make_consumer()
        return StagedRowsRead(*operands, consumer, consumer.clone())

    def queries(self) -> StagedRowsRead | StagedRows:
        return self.read(self.buffers.Q, self.dk_mma, self.spec.qk_width, self.tiles.q_stages, self.buffers.L, self.q_pipe)

    def douts(self) -> StagedRowsRead | StagedRows:
        return self.read(self.buffers.dO, self.dv_mma, self.spec.v_width, self.tiles.do_stages, self.buffers.D, self.do_pipe)

    def total(self, mma, width):
        """An accumulator of dK or dV."""
        return cute.make_rmem_tensor(mma.get_slice(self.at).partition_shape_C((self.tiles.kv, width)), Float32)

    def dq_operands(self):
        """K and dS as operands of dQ, over dS's stages."""
        part, mma = self.dq_mma.get_slice(self.dq_at), self.dq_mma
        sKt = storage.transposed(self.buffers.K, self.spec.qk_width, self.tiles.kv, self.tiles.kv_stages)
        if self.tiles.dq_transposed:
            K, dS = mma.make_fragment_A(part.partition_A(sKt)), mma.make_fragment_B(part.partition_B(self.buffers.dS))
        else:
            K, dS = mma.make_fragment_B(part.partition_B(sKt)), mma.make_fragment_A(part.partition_A(self.buffers.dS))
        return K, dS

    def dq_path(self):
        words = self.tiles.q * self.spec.qk_width
        thread = self.all_thread % roles.WARPGROUP_THREADS
        if self.tiles.dq_path is DqPath.REGISTERS:
            return RegisterReduction(self.ops.dq_sum, self.me, thread, words)
        fours = words // 2 // (4 * roles.WARPGROUP_THREADS)
        place = (self.buffers.dQ[None, self.me].iterator + 4 * thread).align(16)
        return HandOver(cute.make_tensor(place, cute.make_layout((4, fours), stride=(1, 4 * roles.WARPGROUP_THREADS))), self.me)

    def ds_store(self):
        """The copy of dS to shared memory, and this thread's part of the target."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), storage.ELEMENTS[self.spec.dtype])
        copy = cute.make_tiled_copy_C(atom, self.scores)
        target = storage.transposed(self.buffers.dS, self.tiles.kv, self.tiles.q, self.tiles.ds_stages)
        return copy, copy.get_slice(self.thread).partition_D(target)

    def weights(self) -> Weights:
        tile, ops, spec, tiles = self.tile, self.ops, self.spec, self.tiles
        first_key = self.thread // 32 * 16 + self.lane // LANES_PER_ROW
        bounds = bounds_of(replace(ops.mask), tile.q.length, tile.k.length)
        mask = TransposedMask(tile.kv_block * tiles.kv, first_key, self.first_column, tile.k.length, bounds, spec)
        record = tile.record + Int32(0)
        return Weights(self.buffers.L, ops.statistics, record, mask, self.first_column, ops.scale_log2, ops.tanh_scale, spec, tiles)

    def consumer(self) -> Consumer:
        K_dq, dS_dq = self.dq_operands()
        ds_copy, ds_to = self.ds_store()
        fields = dict(
            K=self.scores_a(self.buffers.K),
            V=self.scores_a(self.buffers.V),
            K_dq=K_dq,
            dS_dq=dS_dq,
            queries=self.queries(),
            douts=self.douts(),
            dK=self.total(self.dk_mma, self.spec.qk_width),
            dV=self.total(self.dv_mma, self.spec.v_width),
            ds_copy=ds_copy,
            ds_to=ds_to,
            at=pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tiles.q_stages),
            kv_stage=Int32(0),
            dq=self.dq_path(),
            weights=self.weights(),
            scores_mma=self.scores,
            dk_mma=self.dk_mma,
            dv_mma=self.dv_mma,
            dq_mma=self.dq_mma,
            spec=self.spec,
            tiles=self.tiles,
        )
        if self.tiles.order is Order.TOGETHER:
            return Consumer(**fields)
        return TurnConsumer(**fields, me=self.me, late_record=Int32(0), ds_words=self.ds_words())

    def ds_words(self):
        """This thread's part of dS in shared memory, to clear it."""
        fours = self.tiles.q * self.tiles.kv // 2 // (4 * 2 * roles.WARPGROUP_THREADS)
        threads = 2 * roles.WARPGROUP_THREADS
        place = (cute.recast_ptr(self.buffers.dS.iterator, dtype=Int32) + 4 * self.all_thread).align(16)
        shape, stride = ((4, fours), self.tiles.ds_stages), ((1, 4 * threads), self.tiles.q * self.tiles.kv // 2)
        return cute.make_tensor(place, cute.make_layout(shape, stride=stride))

    def half_of_dq(self) -> HalfOfDq:
        K, dS = self.dq_operands()
        return HalfOfDq(K[None, None, None, 0], dS, self.dq_path(), self.dq_mma, self.spec, self.tiles)

    def box(self):
        """This thread's words of P: float4 by float4, beside its neighbours'."""
        fours = self.tiles.q * self.tiles.kv // 2 // (4 * roles.WARPGROUP_THREADS)
        place = (self.buffers.P.iterator + 4 * self.thread).align(16)
        return cute.make_tensor(place, cute.make_layout((4, fours), stride=(1, 4 * roles.WARPGROUP_THREADS)))

    def score_consumer(self) -> ScoreConsumer:
        return ScoreConsumer(
            K=self.scores_a(self.buffers.K)[None, None, None, 0],
            queries=self.queries(),
            douts=self.douts(),
            total=self.total(self.dv_mma, self.spec.v_width),
            weights=self.weights(),
            box=self.box(),
            stage=Int32(0),
            dq=self.half_of_dq(),
            scores_mma=self.scores,
            total_mma=self.dv_mma,
            spec=self.spec,
            tiles=self.tiles,
        )

    def gradient_consumer(self) -> GradientConsumer:
        ds_copy, ds_to = self.ds_store()
        return GradientConsumer(
            V=self.scores_a(self.buffers.V)[None, None, None, 0],
            queries=self.queries(),
            douts=self.douts(),
            total=self.total(self.dk_mma, self.spec.qk_width),
            record=self.tile.record + Int32(0),
            first_column=self.first_column,
            box=self.box(),
            stage=Int32(0),
            ds_copy=ds_copy,
            ds_to=ds_to,
            dq=self.half_of_dq(),
            scores_mma=self.scores,
            total_mma=self.dk_mma,
            spec=self.spec,
            tiles=self.tiles,
        )

    def dv_store(self) -> GradientStore:
        return GradientStore.create(
            self.ops.dv, self.buffers.V, self.dv_mma, self.all_thread, self.me, self.spec.v_width, self.spec, self.tiles
        )

    def dk_store(self) -> GradientStore:
        return GradientStore.create(
            self.ops.dk, self.buffers.K, self.dk_mma, self.all_thread, self.me, self.spec.qk_width, self.spec, self.tiles
        )


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
            grid=[tiles, kv_heads, 1], block=[self.tiles.threads, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
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
            return tma_pipe(smem, tiles.consumers, stages, stage_bytes)

        q_pipe = pipe(tiles.q_stages, size * tiles.q * spec.qk_width + 4 * (tiles.q + STATISTICS_TAIL))
        do_pipe = pipe(tiles.do_stages, size * tiles.q * spec.v_width + 4 * tiles.q)
        k_in, k_out = pipe(tiles.kv_stages, size * tiles.kv * spec.qk_width).make_participants()
        v_in, v_out = pipe(tiles.kv_stages, size * tiles.kv * spec.v_width).make_participants()
        box = work_in = work_out = None
        if const_expr(tiles.persistent):
            box, work_in, work_out = work_pipe(smem, tiles, backward_budget.WORK_WORDS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # for backward_prepare
        cute.arch.griddepcontrol_launch_dependents()
        if warpgroup == roles.PRODUCER_WARPGROUP:
            cute.arch.setmaxregister_decrease(roles.producer_registers(tiles))
            if warp_number == 0:
                load = self.loads(ops, buffers, q_pipe.make_producer(), do_pipe.make_producer(), k_in, v_in, thread)
                if const_expr(tiles.persistent):
                    self.produce_tiles(ops, load, box, work_in, thread)
                else:
                    self.produce_tile(ops, load)
            if const_expr(tiles.has_sender):
                if warp_number == 1:
                    self.send_tile(ops, buffers, thread % 32)
            if const_expr(clears_ahead(spec, tiles)):
                if warp_number >= FIRST_SPARE_WARP:
                    self.clear_column_ahead(ops, thread - 32 * FIRST_SPARE_WARP)
        else:
            cute.arch.setmaxregister_increase(roles.consumer_registers(tiles))
            me = warpgroup - roles.FIRST_CONSUMER_WARPGROUP
            keys = TileKeys(k_out, v_out)
            parts = Parts(self, ops, self.tile(ops), buffers, q_pipe, do_pipe, thread - roles.WARPGROUP_THREADS, me)
            if const_expr(tiles.persistent):
                self.consume_tiles(parts, keys, KeyFollower(Int32(0), box, work_out))
            else:
                self.consume_tile(parts, keys, me)
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def produce_tile(self, ops, load: Loads):
        """The block's only tile."""
        tile = self.tile(ops)
        if self.exists(tile):
            load = produce(load, tile, self.blocks(ops, tile), self.spec, self.tiles)
            load.q.producer.tail()
            load.do.producer.tail()

    @cute.jit
    def produce_tiles(self, ops, load: Loads, box, work_in, lane):
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        counter = (ops.statistics.iterator + (self.tiles.q + COUNTER_WORD)).align(4)
        counter = cute.recast_ptr(counter, dtype=Int32)
        work = KeyDispatcher(Int32(0), Int32(0), box, work_in, counter, grid, lane)
        work.send(block)
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

    @cute.jit
    def clear_column_ahead(self, ops, thread):
        """thread: among the spare warps."""
        spec, tiles, z, tile = self.spec, self.tiles, ops.sizes, self.tile(ops)
        column = tile.kv_head * z.batch + tile.batch + z.columns_ahead
        kv_head = column // z.batch
        if kv_head < z.kv_heads:
            blocks, num_tiles = z.q_blocks // z.batch, (tile.k.length + tiles.kv - 1) // tiles.kv
            record = kv_head * spec.heads_per_kv * z.q_blocks + (column - kv_head * z.batch) * blocks
            clear_slice(ops.statistics, ops.dq_sum, record, z.q_blocks, blocks, tile.kv_block, num_tiles, thread, spec, tiles)

    @cute.jit
    def consume_tile(self, parts, keys, me: Int32):
        """The block's only tile."""
        ops, tile = parts.ops, parts.tile
        if self.exists(tile):
            blocks = self.blocks(ops, tile)
            coarse = self.is_coarse(ops, tile, blocks)
            keys.wait()
            if const_expr(self.tiles.split is Split.KEYS):
                self.by_keys(parts, blocks, coarse)
            else:
                if me == 0:
                    self.scores_role(parts, blocks, coarse)
                else:
                    self.gradients_role(parts, blocks, coarse)

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
        self.store(c, parts.dv_store(), parts.dk_store(), tile, parts.ops.scale)

    @cute.jit
    def store(self, c: Consumer, dv_store: GradientStore, dk_store: GradientStore, tile: KeyTile, scale: Float32):
        dv_store.write(c.dV, tile, c.kv_stage)  # these rows of V were read by this consumer alone
        sync_consumers(BackwardBarrierId.KEYS_READ)
        scale_all(c.dK, scale)
        dk_store.write(c.dK, tile, c.kv_stage)

    def exists(self, tile: KeyTile):
        """Where lengths are ragged a block may have no tile."""
        return tile.kv_block * self.tiles.kv < tile.k.length

    def is_coarse(self, ops, tile: KeyTile, blocks: QueryBlocks):
        first, count = tile.record + blocks.first, blocks.count()
        return some_are_coarse(ops.statistics, first, count, self.spec.heads_per_kv, tile.q_blocks, self.tiles)

    def num_tiles(self, ops) -> Int32:
        return self.tiles_of_a_head(ops) * ops.sizes.kv_heads

    def tiles_of_a_head(self, ops) -> Int32:
        return blocklist.num_blocks(self.spec.k_layout, ops.sizes.k_rows, ops.sizes.batch, self.tiles.kv)

    @cute.jit
    def scores_role(self, parts, blocks: QueryBlocks, coarse: Boolean):
        c = parts.score_consumer()
        c.total.fill(0.0)
        c = walk_tile(c, blocks, parts.tile.q_blocks, coarse)
        sync_consumers(BackwardBarrierId.KEYS_READ)
        parts.dv_store().write(c.total, parts.tile, Int32(0))

    @cute.jit
    def gradients_role(self, parts, blocks: QueryBlocks, coarse: Boolean):
        c = parts.gradient_consumer()
        c.total.fill(0.0)
        c = walk_tile(c, blocks, parts.tile.q_blocks, coarse)
        sync_consumers(BackwardBarrierId.KEYS_READ)
        scale_all(c.total, parts.ops.scale)
        parts.dk_store().write(c.total, parts.tile, Int32(0))

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
        sdQ = None
        if tiles.has_sender:
            sdQ = smem.allocate_tensor(Float32, cute.make_layout((tiles.q * spec.qk_width // 2, 2)), 128)
        sL = smem.allocate_tensor(Float32, cute.make_layout((tiles.q + STATISTICS_TAIL, tiles.q_stages)), 128)
        sD = smem.allocate_tensor(Float32, cute.make_layout((tiles.q, tiles.do_stages)), 128)
        sP = None
        if tiles.split is Split.ROLES:
            sP = smem.allocate_tensor(Int32, cute.make_layout(tiles.q * tiles.kv // 2), 128)
        return Buffers(sQ, sdO, sK, sV, sdS, sdQ, sP, sL, sD)

    def place(self, ops: BackwardOperands):
        """(number among the key tiles of the batch, key head) of this block."""
        index, kv_head, _ = cute.arch.block_idx()
        if const_expr(is_ranked(self.spec, self.tiles)):
            return self.ranked(ops, index)
        if const_expr(not launched_by_groups(self.spec, self.tiles)):
            return index, kv_head
        z = ops.sizes
        num_tiles = (z.k_rows + self.tiles.kv - 1) // self.tiles.kv
        kv_block, column = backward_order.place(index, num_tiles, z.kv_heads * z.batch, cutlass.min)
        batch = column // z.kv_heads
        return batch * num_tiles + kv_block, column - batch * z.kv_heads

    def ranked(self, ops: BackwardOperands, index):
        """Tiles in backward_rank's order, the heads of each one side by side."""
        rank = index // ops.sizes.kv_heads
        return ops.order[rank], index - rank * ops.sizes.kv_heads

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
        batch = blocklist.sequence_of(index, ops.k_arrays, z.batch, z.k_rows, spec.k_layout, tiles.kv)
        q = extent_of(ops.q_arrays, spec.q_layout, batch, z.q_rows)
        k = extent_of(ops.k_arrays, spec.k_layout, batch, z.k_rows)
        kv_block = index - blocklist.first_block(spec.k_layout, ops.k_arrays, batch, z.k_rows, tiles.kv)
        first = blocklist.first_block(spec.q_layout, ops.q_arrays, batch, z.q_rows, tiles.q)
        return KeyTile(kv_block, kv_head, batch, q, k, kv_head * spec.heads_per_kv * z.q_blocks + first, z.q_blocks)

    def turns(self, ops: BackwardOperands, tile: KeyTile) -> Turns:
        kv_blocks, q_blocks = (n // size for n, size in self.padded_lengths(tile))
        return Turns(tile.kv_block, kv_blocks, q_blocks, tile.k.length, bounds_of(ops.mask, tile.q.length, tile.k.length))

    def padded_lengths(self, tile: KeyTile):
        kv, q = self.tiles.kv, self.tiles.q
        return (tile.k.length + kv - 1, kv), (tile.q.length + q - 1, q)

    def blocks(self, ops: BackwardOperands, tile: KeyTile) -> QueryBlocks:
        bounds = bounds_of(ops.mask, tile.q.length, tile.k.length)
        shift = Int32(0)
        if self.tiles.dq_path is DqPath.ORDERED:
            shift = self.turns(ops, tile).shift(self.spec.mask_kind, cutlass.min)
        b = query_blocks(self.spec, self.tiles, tile.kv_block, tile.q.length, tile.k.length, bounds, cutlass.min, cutlass.max, shift)
        return QueryBlocks(Int32(b.first), Int32(b.left_edge), Int32(b.interior), Int32(b.right_edge), Int32(b.shift))

    def loads(self, ops, buffers, q_in, do_in, k_in, v_in, thread) -> Loads:
        spec, tiles = self.spec, self.tiles
        q_tile, do_tile = (tiles.q, spec.qk_width), (tiles.q, spec.v_width)
        k_tile, v_tile = (tiles.kv, spec.qk_width), (tiles.kv, spec.v_width)
        after_l = tiles.q + STATISTICS_TAIL
        return Loads(
            StagedRowsLoad(ops.q.atom, ops.q.tma_tensor, buffers.Q, q_in, q_tile, spec.q_layout, ops.statistics, buffers.L, 0, thread),
            StagedRowsLoad(
                ops.do.atom, ops.do.tma_tensor, buffers.dO, do_in, do_tile, spec.q_layout, ops.statistics, buffers.D, after_l, thread
            ),
            StagedLoad(ops.k.atom, ops.k.tma_tensor, buffers.K, k_in, k_tile, spec.k_layout),
            StagedLoad(ops.v.atom, ops.v.tma_tensor, buffers.V, v_in, v_tile, spec.k_layout),
            spec,
        )
