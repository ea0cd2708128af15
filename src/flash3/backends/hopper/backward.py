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
consumer i  4(i+1) …   240            64 keys: all five matmuls, P and dS, dK and dV

pipes       cargo              stages            filled by   emptied by                     arrivals to empty
k, v        K, V tile          1                 TMA         nobody: one tile a block
q           Q block and L      tiles.q_stages    TMA, bulk   consumers, after dK += dSᵀ·Q   one per consumer warp
do          dO block and D     tiles.do_stages   TMA, bulk   consumers, after dV += Pᵀ·dO   one per consumer warp
dS has two buffers: who writes the next block's has passed the barrier of this one, so nobody reads that of the one before.

barriers    0 the block, once · 1 dS of both consumers is written · 2 both have read K for the last time (dK goes out in its place)
            3+i consumer i's threads, around its rows of dK, dV · 5+i, 7+i its half of dQ is free, full (dq.py)

timeline    one consumer, one block:   Sᵀ dPᵀ │ P under dPᵀ │ dS → shared memory │ barrier │ dQ dV dK, dQ leaves under dV and dK
            Nothing is in flight over a loop's edge, and S, dP, dQ are new tensors in every block: else ptxas serializes all matmuls.

limits      16-bit inputs; rows of 16 bytes; widths to 128; a tile's first query row fits 32 bits
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from ... import mask
from ...mask import MaskKind
from . import backward_storage, blocklist, budget, roles, storage
from .backward_barriers import BackwardBarrierId, sync_consumers, sync_gradient
from .backward_operands import BackwardOperands
from .backward_tiles import KEYS_PER_CONSUMER, STATISTICS_TAIL, BackwardSpec, BackwardTiles, DqPath, statistics_words
from .bulk import bulk_load
from .dq import HandOver, RegisterReduction, Sender, send_all
from .extents import Extent, extent_of, tile_of
from .fragments import LANES_PER_ROW, ROW_STEP, ROWS_PER_THREAD, as_rows, convert
from .masking import bounds_of
from .matmul import issue, wait_matmuls
from .pipes import StagedLoad, tma_pipe
from .queryblocks import QueryBlocks, query_blocks

UNSEEN = 1 << 30
"""First row that sees a key past the end of the keys."""
COLUMNS_AT_ONCE = 16
"""Of Sᵀ become P before the next ones: more would keep more of L in registers."""


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
        rows = tile_of(self.tensor, self.tile, block, 0, head, extent, self.layout)
        target, source = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.buffer, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(self.atom, source, target[None, slot.index], tma_bar_ptr=slot.barrier)
        if self.lane == 0:
            words = cute.size(self.box, mode=[0])
            start = self.statistics.iterator + (Int64(record) * self.statistics.shape[1] + self.word)
            bulk_load(self.box[None, slot.index].iterator, start, slot.barrier, 4 * words)


@dataclass
class StagedRowsRead:
    """Consumer end of Q or dO: the stage as operand of both products, and its rows' statistic. Given back later than waited for."""

    operand: cute.Tensor  # B of the scores: rows × columns
    transposed: cute.Tensor  # B of the gradients: columns × rows
    rows: cute.Tensor  # (words, stage)
    waiting: object
    releasing: object  # the same pipe, one step behind

    @cute.jit
    def wait(self):
        return self.waiting.wait_and_advance().index

    @cute.jit
    def release(self):
        self.releasing.release()
        self.releasing.advance()


@dataclass
class TransposedMask:
    """For one thread: keys `first_key` and `first_key + 8`, query columns first_column + 8j + {0, 1} of a block."""

    first_key: Int32
    first_column: Int32
    k_len: Int32
    bounds: mask.Bounds
    spec: cutlass.Constexpr[BackwardSpec]

    def limits(self, first_row: Int32):
        """For each of the two keys: columns [first, end) that see it; None: no end."""
        found = []
        for r in range(ROWS_PER_THREAD):
            key = self.first_key + ROW_STEP * r
            begin, end = mask.visible_rows(key, self.bounds, self.spec.mask_kind, cutlass.min, cutlass.max)
            here = first_row + self.first_column
            first = -here if begin is None else begin - here
            found.append((cutlass.select_(key < self.k_len, first, Int32(UNSEEN)), None if end is None else end - here))
        return found

    def sees(self, limits, r: int, c: int):
        first, end = limits[r]
        column = (c // 2) * 8 + c % 2
        return column >= first if end is None else (column >= first) & (column < end)


@dataclass
class Consumer:
    """64 keys of one warpgroup."""

    K: cute.Tensor  # A of Sᵀ
    V: cute.Tensor  # A of dPᵀ
    K_dq: cute.Tensor  # operands of dQ; dS over its stages
    dS_dq: cute.Tensor
    queries: StagedRowsRead
    douts: StagedRowsRead
    dK: cute.Tensor
    dV: cute.Tensor
    ds_copy: cute.TiledCopy
    ds_to: cute.Tensor  # this thread's part of dS in shared memory, over the stages
    ds_stage: Int32
    dq: object  # RegisterReduction or HandOver
    mask: TransposedMask
    statistics: cute.Tensor
    record: Int32  # of the head's block 0
    first_column: Int32
    scale_log2: Float32
    tanh_scale: Float32
    scores_mma: cute.TiledMma
    dk_mma: cute.TiledMma
    dv_mma: cute.TiledMma
    dq_mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def block(self, q_block: Int32, masked: cutlass.Constexpr[bool]):
        spec, tiles = self.spec, self.tiles
        S, dP = self.new_scores(), self.new_scores()
        P, dS = self.new_operand(), self.new_operand()
        dQ = cute.make_rmem_tensor(self.dq_mma.get_slice(0).partition_shape_C(backward_storage.dq_shape(spec, tiles)), Float32)
        q = self.queries.wait()
        issue(self.scores_mma, S, self.K, self.queries.operand[None, None, None, q], accumulate=False)  # Sᵀ = K·Qᵀ
        do = self.douts.wait()
        issue(self.scores_mma, dP, self.V, self.douts.operand[None, None, None, do], accumulate=False)  # dPᵀ = V·dOᵀ
        wait_matmuls(1)
        if const_expr(spec.softcap):
            self.to_capped_probabilities(S, P, q, q_block, masked)
        else:
            self.to_probabilities(S, P, q, q_block, masked)  # under dPᵀ
        delta = self.read_rows(self.douts.rows, do)
        wait_matmuls(0)
        self.to_score_gradients(dP, S, delta)
        convert(dP, dS)
        cute.copy(self.ds_copy, self.ds_copy.retile(dS), self.ds_to[None, None, None, self.ds_stage])
        cute.arch.fence_view_async_shared()
        sync_consumers(BackwardBarrierId.SCORE_GRADIENTS)
        self.issue_dq(dQ)
        issue(self.dv_mma, self.dV, P, self.douts.transposed[None, None, None, do], accumulate=True)  # dV += Pᵀ·dO
        issue(self.dk_mma, self.dK, dS, self.queries.transposed[None, None, None, q], accumulate=True)  # dK += dSᵀ·Q
        wait_matmuls(2)
        self.dq.add(dQ, self.record + q_block)  # under dV and dK
        wait_matmuls(0)
        self.douts.release()
        self.queries.release()
        self.ds_stage = self.ds_stage ^ 1

    def new_scores(self):
        """A tensor that lived across blocks would keep its registers for ever: a matmul's accumulator is also its input."""
        return cute.make_rmem_tensor(self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q)), Float32)

    def new_operand(self):
        shape = self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q))
        return cute.make_rmem_tensor(shape, storage.ELEMENTS[self.spec.dtype])

    @cute.jit
    def issue_dq(self, dQ: cute.Tensor):
        dS = self.dS_dq[None, None, None, self.ds_stage]
        if const_expr(self.tiles.dq_transposed):
            issue(self.dq_mma, dQ, self.K_dq, dS, accumulate=False)
        else:
            issue(self.dq_mma, dQ, dS, self.K_dq, accumulate=False)

    @cute.jit
    def read_rows(self, rows: cute.Tensor, stage: Int32):
        """The statistic of this thread's query columns, first_column + 8j + {0, 1}."""
        eighths = self.tiles.q // 8
        mine = cute.make_rmem_tensor(2 * eighths, Float32)
        source = cute.make_tensor((rows[None, stage].iterator + self.first_column).align(8), cute.make_layout((2, eighths), stride=(1, 8)))
        cute.autovec_copy(source, cute.make_tensor(mine.iterator, cute.make_layout((2, eighths))))
        return mine

    @cute.jit
    def to_probabilities(self, S: cute.Tensor, P: cute.Tensor, stage: Int32, q_block: Int32, masked: cutlass.Constexpr[bool]):
        """S becomes P in place; its 16-bit copy is the operand of dV."""
        rows, lse = as_rows(S), self.read_rows(self.queries.rows, stage)
        columns = cute.size(rows, mode=[1])
        limits, rest = self.mask.limits(q_block * self.tiles.q), self.rest_of(q_block)
        coarse = self.is_coarse(stage)
        for first in cutlass.range_constexpr(0, columns, COLUMNS_AT_ONCE):
            for c in cutlass.range_constexpr(first, first + COLUMNS_AT_ONCE):
                for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
                    exponent = rows[r, c] * self.scale_log2 - lse[c]
                    if const_expr(masked):
                        exponent = cutlass.select_(self.mask.sees(limits, r, c), exponent, -Float32.inf)
                    rows[r, c] = exponent
            if coarse:
                for c in cutlass.range_constexpr(first, first + COLUMNS_AT_ONCE):
                    for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
                        rows[r, c] = rows[r, c] - rest[c % 2, c // 2]
            for c in cutlass.range_constexpr(first, first + COLUMNS_AT_ONCE):
                for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
                    rows[r, c] = cute.math.exp2(rows[r, c], fastmath=True)
        convert(S, P)

    def is_coarse(self, stage: Int32):
        """Whether some L of the block has a second part, which only very large ones have."""
        return self.queries.rows[self.tiles.q, stage] != Float32(0.0)

    def rest_of(self, q_block: Int32):
        """The second part of L, in global memory: column first_column + 8j + e at (e, j)."""
        start = Int64(self.record + q_block) * statistics_words(self.tiles) + (2 * self.tiles.q + STATISTICS_TAIL) + self.first_column
        return cute.make_tensor((self.statistics.iterator + start).align(8), cute.make_layout((2, self.tiles.q // 8), stride=(1, 8)))

    @cute.jit
    def to_capped_probabilities(self, S: cute.Tensor, P: cute.Tensor, stage: Int32, q_block: Int32, masked: cutlass.Constexpr[bool]):
        """P goes to the operand of dV, and S becomes P times the slope of the cap, 1 − tanh²: all that dS wants of it."""
        for i in cutlass.range_constexpr(cute.size(S)):  # r = 1 / (1 + e^2x): tanh x = 1 − 2r, and the slope is 4r·(1 − r)
            S[i] = cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(S[i] * self.tanh_scale, fastmath=True))
        if self.is_coarse(stage):
            self.cap(S, P, stage, q_block, masked, coarse=True)
        else:
            self.cap(S, P, stage, q_block, masked, coarse=False)

    @cute.jit
    def cap(
        self, S: cute.Tensor, P: cute.Tensor, stage: Int32, q_block: Int32, masked: cutlass.Constexpr[bool], coarse: cutlass.Constexpr[bool]
    ):
        rows, lse, limits, rest = (
            as_rows(S),
            self.read_rows(self.queries.rows, stage),
            self.mask.limits(q_block * self.tiles.q),
            self.rest_of(q_block),
        )
        pair = cute.make_rmem_tensor(2, Float32)
        for c in cutlass.range_constexpr(0, cute.size(rows, mode=[1]), 2):
            for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
                for e in cutlass.range_constexpr(2):
                    x = rows[r, c + e]
                    exponent = (Float32(1.0) - Float32(2.0) * x) * self.scale_log2 - lse[c + e]
                    if const_expr(coarse):
                        exponent = exponent - rest[e, c // 2]
                    p = cute.math.exp2(exponent, fastmath=True)
                    if const_expr(masked):
                        p = cutlass.select_(self.mask.sees(limits, r, c + e), p, Float32(0.0))
                    pair[e] = p
                    rows[r, c + e] = p * (Float32(4.0) * x * (Float32(1.0) - x))
                convert(pair, cute.make_tensor(P.iterator + 2 * (c + r), cute.make_layout(2)))

    @cute.jit
    def to_score_gradients(self, dP: cute.Tensor, P: cute.Tensor, delta: cute.Tensor):
        """dP becomes dS = P ∘ (dP − D) in place."""
        out, p = as_rows(dP), as_rows(P)
        for r in cutlass.range_constexpr(cute.size(out, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = p[r, c] * (out[r, c] - delta[c])


@cute.jit
def walk(c: Consumer, blocks: QueryBlocks):
    """Every block of queries of one head that sees the tile."""
    block = blocks.first
    for i in cutlass.range(blocks.left_edge, unroll=1):
        c.block(block + i, masked=True)
    block = block + blocks.left_edge
    for i in cutlass.range(blocks.interior, unroll=1):
        c.block(block + i, masked=False)
    block = block + blocks.interior
    if const_expr(c.spec.mask_kind is MaskKind.WINDOW or c.spec.mask_kind is MaskKind.CHUNK):
        for i in cutlass.range(blocks.right_edge, unroll=1):
            c.block(block + i, masked=True)
    return c


@dataclass
class Loads:
    q: StagedRowsLoad
    do: StagedRowsLoad
    k: StagedLoad
    v: StagedLoad


@dataclass
class KeyTile:
    """What a block works on."""

    kv_block: Int32
    kv_head: Int32
    q: Extent
    k: Extent
    record: Int32  # of the first query head's block 0
    q_blocks: Int32  # records from a head to the next


@cute.jit
def produce(load: Loads, tile: KeyTile, blocks: QueryBlocks, heads: cutlass.Constexpr[int]):
    """Loads of one work tile, in the order in which they are read."""
    count = blocks.count()
    head, block, record = tile.kv_head * heads, blocks.first, tile.record
    load.k.load(tile.kv_block, tile.kv_head, tile.k)
    load.v.load(tile.kv_block, tile.kv_head, tile.k)
    for _ in cutlass.range(heads, unroll=1):
        for i in cutlass.range(count, unroll=1):
            load.q.load_with_rows(block + i, head, tile.q, record + block + i)
            load.do.load_with_rows(block + i, head, tile.q, record + block + i)
        head = head + 1
        record = record + tile.q_blocks
    return load


@dataclass
class GradientStore:
    """dK or dV: registers → this consumer's 64 rows of K's or V's place in shared memory → global, by TMA."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # extents.rows_view
    rows: cute.Tensor  # this consumer's rows in shared memory
    copy: cute.TiledCopy
    to_smem: cute.Tensor
    consumer: Int32
    first_warp: Boolean
    width: cutlass.Constexpr[int]
    spec: cutlass.Constexpr[BackwardSpec]

    @staticmethod
    def create(tma, sX, mma, thread, consumer, width, spec: BackwardSpec):
        element = storage.ELEMENTS[spec.dtype]
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element), mma)
        rows = cute.local_tile(sX, (KEYS_PER_CONSUMER, width), (consumer, 0, None))
        first_warp = Boolean(thread // 32 % 4 == 0)
        return GradientStore(
            tma.atom, tma.tma_tensor, rows, copy, copy.get_slice(thread).partition_D(sX), consumer, first_warp, width, spec
        )

    @cute.jit
    def write(self, acc: cute.Tensor, tile: KeyTile):
        out = cute.make_rmem_tensor_like(acc, storage.ELEMENTS[self.spec.dtype])
        convert(acc, out)
        cute.copy(self.copy, self.copy.retile(out), self.to_smem[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        sync_gradient(self.consumer)
        if self.first_warp:
            block = tile.kv_block * 2 + self.consumer
            rows = tile_of(self.tensor, (KEYS_PER_CONSUMER, self.width), block, 0, tile.kv_head, tile.k, self.spec.k_layout)
            source, target = cpasync.tma_partition(
                self.atom, 0, cute.make_layout(1), cute.group_modes(self.rows, 0, 2), cute.group_modes(rows, 0, 2)
            )
            cute.copy(self.atom, source[None, 0], target)
            cute.arch.cp_async_bulk_commit_group()


class BackwardKernel:
    """The kernel of one (BackwardSpec, BackwardTiles)."""

    def __init__(self, spec: BackwardSpec, tiles: BackwardTiles):
        self.spec, self.tiles = spec, tiles

    @cute.jit
    def launch(self, ops: BackwardOperands, tiles: Int32, kv_heads: Int32, stream):
        # Without min_blocks_per_mp ptxas ignores setmaxnreg.
        self.kernel(ops).launch(grid=[tiles, kv_heads, 1], block=[self.tiles.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, ops: BackwardOperands):
        spec, tiles = self.spec, self.tiles
        thread, _, _ = cute.arch.thread_idx()
        warpgroup = cute.arch.make_warp_uniform(thread // roles.WARPGROUP_THREADS)
        warp_number = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sQ, sdO, sK, sV, sdS, sdQ, sL, sD = self.buffers(smem)
        size = spec.dtype.bytes
        q_in, q_out = tma_pipe(smem, tiles, tiles.q_stages, size * tiles.q * spec.qk_width + 4 * (tiles.q + STATISTICS_TAIL))
        do_in, do_out = tma_pipe(smem, tiles, tiles.do_stages, size * tiles.q * spec.v_width + 4 * tiles.q)
        k_in, k_out = tma_pipe(smem, tiles, 1, size * tiles.kv * spec.qk_width)
        v_in, v_out = tma_pipe(smem, tiles, 1, size * tiles.kv * spec.v_width)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tile = self.tile(ops)
        blocks = self.blocks(ops, tile)
        exists = tile.kv_block * tiles.kv < tile.k.length
        if warpgroup == roles.PRODUCER_WARPGROUP:
            cute.arch.setmaxregister_decrease(roles.producer_registers(tiles))
            if exists:
                if warp_number == 0:
                    load = self.loads(ops, sQ, sdO, sK, sV, sL, sD, q_in, do_in, k_in, v_in, thread)
                    load = produce(load, tile, blocks, spec.heads_per_kv)
                    load.q.producer.tail()
                    load.do.producer.tail()
                if const_expr(tiles.dq_path is DqPath.SHARED):
                    if warp_number == 1:
                        sender = Sender(ops.dq_sum, sdQ, thread % 32, spec, tiles)
                        send_all(sender, tile.record, blocks.first, blocks.count(), Int32(spec.heads_per_kv), tile.q_blocks)
        else:
            cute.arch.setmaxregister_increase(roles.consumer_registers(tiles))
            if exists:
                me = warpgroup - roles.FIRST_CONSUMER_WARPGROUP
                buffers = sQ, sdO, sK, sV, sdS, sdQ, sL, sD
                c = self.consumer(ops, tile, buffers, q_out, do_out, thread - roles.WARPGROUP_THREADS, me)
                c.dK.fill(0.0)
                c.dV.fill(0.0)
                k_out.wait_and_advance()
                v_out.wait_and_advance()
                if const_expr(spec.heads_per_kv == 1):
                    c = walk(c, blocks)
                else:
                    for _ in cutlass.range(spec.heads_per_kv, unroll=1):
                        c = walk(c, blocks)
                        c.record = c.record + tile.q_blocks
                self.store(ops, c, tile, sK, sV, thread - roles.WARPGROUP_THREADS, me)

    def store(self, ops, c: Consumer, tile: KeyTile, sK, sV, thread, me):
        spec = self.spec
        dv_store = GradientStore.create(ops.dv, sV, c.dv_mma, thread, me, spec.v_width, spec)
        dk_store = GradientStore.create(ops.dk, sK, c.dk_mma, thread, me, spec.qk_width, spec)
        dv_store.write(c.dV, tile)  # these rows of V were read by this consumer alone
        sync_consumers(BackwardBarrierId.KEYS_READ)
        for i in range(cute.size(c.dK)):
            c.dK[i] = c.dK[i] * ops.scale
        dk_store.write(c.dK, tile)
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def buffers(self, smem: SmemAllocator):
        spec, tiles = self.spec, self.tiles
        element = storage.ELEMENTS[spec.dtype]

        def buffer(layout):
            return smem.allocate_tensor(element, layout.outer, budget.ALIGNMENT_BYTES, swizzle=layout.inner)

        sQ = buffer(backward_storage.q_layout(spec, tiles, tiles.q_stages))
        sdO = buffer(backward_storage.do_layout(spec, tiles, tiles.do_stages))
        sK, sV = buffer(backward_storage.k_layout(spec, tiles)), buffer(backward_storage.v_layout(spec, tiles))
        sdS = buffer(backward_storage.ds_layout(spec, tiles))
        sdQ = None
        if tiles.dq_path is DqPath.SHARED:
            sdQ = smem.allocate_tensor(Float32, cute.make_layout((tiles.q * spec.qk_width // 2, 2)), 128)
        sL = smem.allocate_tensor(Float32, cute.make_layout((tiles.q + STATISTICS_TAIL, tiles.q_stages)), 128)
        sD = smem.allocate_tensor(Float32, cute.make_layout((tiles.q, tiles.do_stages)), 128)
        return sQ, sdO, sK, sV, sdS, sdQ, sL, sD

    def tile(self, ops: BackwardOperands) -> KeyTile:
        """This block's work; its keys may be none where lengths are ragged."""
        spec, tiles, z = self.spec, self.tiles, ops.sizes
        index, kv_head, _ = cute.arch.block_idx()
        batch = blocklist.sequence_of(index, ops.k_arrays, z.batch, z.k_rows, spec.k_layout, tiles.kv)
        q = extent_of(ops.q_arrays, spec.q_layout, batch, z.q_rows)
        k = extent_of(ops.k_arrays, spec.k_layout, batch, z.k_rows)
        kv_block = index - blocklist.first_block(spec.k_layout, ops.k_arrays, batch, z.k_rows, tiles.kv)
        first = blocklist.first_block(spec.q_layout, ops.q_arrays, batch, z.q_rows, tiles.q)
        return KeyTile(kv_block, kv_head, q, k, kv_head * spec.heads_per_kv * z.q_blocks + first, z.q_blocks)

    def blocks(self, ops: BackwardOperands, tile: KeyTile) -> QueryBlocks:
        bounds = bounds_of(ops.mask, tile.q.length, tile.k.length)
        b = query_blocks(self.spec, self.tiles, tile.kv_block, tile.q.length, tile.k.length, bounds, cutlass.min, cutlass.max)
        return QueryBlocks(Int32(b.first), Int32(b.left_edge), Int32(b.interior), Int32(b.right_edge))

    def loads(self, ops, sQ, sdO, sK, sV, sL, sD, q_in, do_in, k_in, v_in, thread) -> Loads:
        spec, tiles = self.spec, self.tiles
        q_tile, do_tile = (tiles.q, spec.qk_width), (tiles.q, spec.v_width)
        k_tile, v_tile = (tiles.kv, spec.qk_width), (tiles.kv, spec.v_width)
        after_l = tiles.q + STATISTICS_TAIL
        return Loads(
            StagedRowsLoad(ops.q.atom, ops.q.tma_tensor, sQ, q_in, q_tile, spec.q_layout, ops.statistics, sL, 0, thread),
            StagedRowsLoad(ops.do.atom, ops.do.tma_tensor, sdO, do_in, do_tile, spec.q_layout, ops.statistics, sD, after_l, thread),
            StagedLoad(ops.k.atom, ops.k.tma_tensor, sK, k_in, k_tile, spec.k_layout),
            StagedLoad(ops.v.atom, ops.v.tma_tensor, sV, v_in, v_tile, spec.k_layout),
        )

    def consumer(self, ops, tile: KeyTile, buffers, q_out, do_out, thread, me) -> Consumer:
        spec, tiles = self.spec, self.tiles
        sQ, sdO, sK, sV, sdS, sdQ, sL, sD = buffers
        scores = backward_storage.scores_mma(spec, tiles)
        dk_mma, dv_mma = (backward_storage.gradient_mma(spec, w) for w in (spec.qk_width, spec.v_width))
        dq_mma = backward_storage.dq_mma(spec, tiles)
        at = me * roles.WARPGROUP_THREADS  # not the thread: descriptors then live in uniform registers
        part, dq_part = scores.get_slice(at), dq_mma.get_slice(at)

        def read(sX, mma, width, stages, rows, pipe):
            transposed = storage.transposed(sX, width, tiles.q, stages)
            b = mma.get_slice(at).partition_B(transposed)
            return StagedRowsRead(scores.make_fragment_B(part.partition_B(sX)), mma.make_fragment_B(b), rows, pipe, pipe.clone())

        sKt = storage.transposed(sK, spec.qk_width, tiles.kv, 1)
        if tiles.dq_transposed:
            K_dq, dS_dq = dq_mma.make_fragment_A(dq_part.partition_A(sKt)), dq_mma.make_fragment_B(dq_part.partition_B(sdS))
        else:
            K_dq, dS_dq = dq_mma.make_fragment_B(dq_part.partition_B(sKt)), dq_mma.make_fragment_A(dq_part.partition_A(sdS))
        element = storage.ELEMENTS[spec.dtype]
        ds_copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), element), scores)
        ds_to = ds_copy.get_slice(thread).partition_D(storage.transposed(sdS, tiles.kv, tiles.q, tiles.ds_stages))
        lane = thread % 32
        first_key = tile.kv_block * tiles.kv + thread // 32 * 16 + lane // LANES_PER_ROW
        first_column = 2 * (lane % LANES_PER_ROW)

        def accumulator(mma, width):
            return cute.make_rmem_tensor(mma.get_slice(at).partition_shape_C((tiles.kv, width)), Float32)

        return Consumer(
            K=scores.make_fragment_A(part.partition_A(sK))[None, None, None, 0],
            V=scores.make_fragment_A(part.partition_A(sV))[None, None, None, 0],
            K_dq=K_dq[None, None, None, 0],
            dS_dq=dS_dq,
            queries=read(sQ, dk_mma, spec.qk_width, tiles.q_stages, sL, q_out),
            douts=read(sdO, dv_mma, spec.v_width, tiles.do_stages, sD, do_out),
            dK=accumulator(dk_mma, spec.qk_width),
            dV=accumulator(dv_mma, spec.v_width),
            ds_copy=ds_copy,
            ds_to=ds_to,
            ds_stage=Int32(0),
            dq=self.dq_path(ops, sdQ, thread, me),
            mask=TransposedMask(first_key, first_column, tile.k.length, bounds_of(replace(ops.mask), tile.q.length, tile.k.length), spec),
            statistics=ops.statistics,
            record=tile.record + Int32(0),
            first_column=first_column,
            scale_log2=ops.scale_log2,
            tanh_scale=ops.tanh_scale,
            scores_mma=scores,
            dk_mma=dk_mma,
            dv_mma=dv_mma,
            dq_mma=dq_mma,
            spec=spec,
            tiles=tiles,
        )

    def dq_path(self, ops, sdQ, thread, me):
        words = self.tiles.q * self.spec.qk_width
        thread = thread % roles.WARPGROUP_THREADS
        if self.tiles.dq_path is DqPath.REGISTERS:
            return RegisterReduction(ops.dq_sum, me, thread, words)
        fours = words // 2 // (4 * roles.WARPGROUP_THREADS)
        place = (sdQ[None, me].iterator + 4 * thread).align(16)
        return HandOver(cute.make_tensor(place, cute.make_layout((4, fours), stride=(1, 4 * roles.WARPGROUP_THREADS))), me)
