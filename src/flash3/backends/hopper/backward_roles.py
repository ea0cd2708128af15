"""The three consumers of the backward that share a tile by roles (Split.ROLES), for wide head dims.

One makes Sᵀ, P and dV, one dPᵀ, dS and dK, one dQ, all for the same 64 keys. So K and V are read once for the scores, Pᵀ and dSᵀ still are
register operands, and each of the first two holds one wide accumulator. P goes over through shared memory, and then dS lies in its place
(backward_exchange.py). Nobody waits for who comes later but for room: the consumer of scores may be so many blocks ahead as dS has stages.

timeline    scores      Sᵀ │ P → shared memory │ dV │ next block …
            gradients   dPᵀ │ P │ dS → shared memory │ dK │ next block …
            dQ          dQ of half the columns │ leaves │ the other half; in a cluster the one half, for the keys of both blocks
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from . import storage
from .backward_barriers import BackwardBarrierId, arrive_consumers, sync_consumers
from .backward_consumer import StagedRowsRead, register_operand
from .backward_exchange import WARPS, Exchange
from .backward_order import Turns
from .backward_tiles import BackwardSpec, BackwardTiles, DqPath
from .bulk import add_release, load_acquire, reduce_add, store
from .dq import RegisterReduction, counter_of, wait_for_at_least
from .fragments import convert
from .matmul import issue, wait_matmuls
from .queryblocks import QueryBlocks, block_at
from .weights import Weights, read_rows, to_score_gradients


@dataclass
class ScoreConsumer:
    """Sᵀ, P and dV."""

    K: cute.Tensor  # A of Sᵀ
    queries: StagedRowsRead
    douts: StagedRowsRead
    total: cute.Tensor  # dV
    weights: Weights
    exchange: Exchange
    copy: cute.TiledCopy
    to_smem: cute.Tensor  # this thread's part of dS's place, over the stages
    scores_mma: cute.TiledMma
    total_mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def next_head(self, q_blocks: Int32):
        self.weights.record = self.weights.record + q_blocks

    @cute.jit
    def block(self, q_block: Int32, masked: cutlass.Constexpr[bool], coarse: cutlass.Constexpr[bool]):
        shape = self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q))
        S, P = cute.make_rmem_tensor(shape, Float32), register_operand(self.total_mma, self.tiles)
        q = self.queries.wait()
        issue(self.scores_mma, S, self.K, self.queries.operand[None, None, None, q], accumulate=False)
        wait_matmuls(0)
        self.weights.apply(S, P, q, q_block, masked, coarse)
        self.hand_over(S, P)
        self.queries.release()  # not before: P in its place proves that L has been read
        do = self.douts.wait()
        issue(self.total_mma, self.total, P, self.douts.transposed[None, None, None, do], accumulate=True)  # dV += Pᵀ·dO
        wait_matmuls(0)
        self.douts.release()

    @cute.jit
    def hand_over(self, S: cute.Tensor, P: cute.Tensor):
        factor = P
        if const_expr(self.spec.softcap):
            factor = cute.make_rmem_tensor_like(P)
            convert(S, factor)
        self.exchange.wait_free()
        stage = self.exchange.at.index
        cute.copy(self.copy, self.copy.retile(factor), self.to_smem[None, None, None, stage])
        arrive_consumers(BackwardBarrierId.PROBABILITIES + stage)
        self.exchange.advance()


@dataclass
class GradientConsumer:
    """dPᵀ, dS and dK."""

    V: cute.Tensor  # A of dPᵀ
    queries: StagedRowsRead
    douts: StagedRowsRead
    total: cute.Tensor  # dK
    first_column: Int32
    first_thread: Boolean
    exchange: Exchange
    read: cute.TiledCopy
    from_smem: cute.Tensor  # this thread's part of P
    copy: cute.TiledCopy
    to_smem: cute.Tensor
    scores_mma: cute.TiledMma
    total_mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def block(self):
        shape = self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q))
        dP, dS = cute.make_rmem_tensor(shape, Float32), register_operand(self.total_mma, self.tiles)
        do = self.douts.wait()
        issue(self.scores_mma, dP, self.V, self.douts.operand[None, None, None, do], accumulate=False)
        delta = read_rows(self.douts.rows, do, self.first_column, self.tiles)
        wait_matmuls(0)
        to_score_gradients(dP, self.factor(dP), delta)
        convert(dP, dS)
        cute.copy(self.copy, self.copy.retile(dS), self.to_smem[None, None, None, self.exchange.at.index])
        self.exchange.send(self.first_thread, 1)
        self.exchange.advance()
        self.douts.release()  # not before: dS in its place proves that D has been read
        q = self.queries.wait()
        issue(self.total_mma, self.total, dS, self.queries.transposed[None, None, None, q], accumulate=True)  # dK += dSᵀ·Q
        wait_matmuls(0)
        self.queries.release()

    @cute.jit
    def factor(self, like: cute.Tensor):
        """P (with a softcap times the slope), as the other consumer's registers held it: what a warp reads it writes dS over."""
        stage = self.exchange.at.index
        sync_consumers(BackwardBarrierId.PROBABILITIES + stage)
        packed = cute.make_rmem_tensor_like(like, storage.ELEMENTS[self.spec.dtype])
        cute.copy(self.read, self.from_smem[None, None, None, stage], self.read.retile(packed))
        found = cute.make_rmem_tensor_like(like)
        for i in cutlass.range_constexpr(cute.size(found)):
            found[i] = packed[i].to(Float32)
        return found


@dataclass
class TakenInOrder:
    """The turns of dQ's consumer in a deterministic order. The counter of a record counts warps, of all blocks of a cluster."""

    statistics: cute.Tensor
    turns: Turns
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def look(self, record: Int32):
        """How many have added, in time for `wait`."""
        seen = Int32(0)
        if const_expr(self.tiles.dq_path is DqPath.ORDERED):
            seen = load_acquire(counter_of(self.statistics, record, self.tiles))
        return seen

    @cute.jit
    def wait(self, record: Int32, q_block: Int32, seen: Int32):
        """Each warp waits until all warps before it in the order have added. Whether there are none."""
        rank = Int32(1)
        if const_expr(self.tiles.dq_path is DqPath.ORDERED):
            tiles = self.tiles
            rank = Int32(self.turns.rank(q_block, tiles.q, tiles.walk_keys, self.spec.mask_kind, cutlass.min, cutlass.max))
            wait_for_at_least(counter_of(self.statistics, record, tiles), rank * (WARPS * tiles.cluster), seen)
        return rank == 0

    @cute.jit
    def pass_on(self, record: Int32):
        if const_expr(self.tiles.dq_path is DqPath.ORDERED):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                add_release(counter_of(self.statistics, record, self.tiles), Int32(1))


@dataclass
class DqConsumer:
    """dQ = dS·K, by halves of its columns: both, or in a cluster that of the block's rank, of the keys of both blocks."""

    K: cute.Tensor  # B of dQ: the block's keys, the first half or its own
    K_more: cute.Tensor  # the other half; the other block's keys
    dS: cute.Tensor  # A of dQ, over the stages
    exchange: Exchange
    sum: RegisterReduction
    order: TakenInOrder
    mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def block(self, record: Int32, q_block: Int32):
        dQ, stage = self.new_dq(), self.exchange.at.index
        seen = self.order.look(record)
        self.exchange.wait_full()
        self.issue(dQ, stage, self.K, accumulate=False)
        if const_expr(self.tiles.cluster > 1):
            self.exchange.wait_come()
            self.issue(dQ, stage + self.tiles.ds_stages, self.K_more, accumulate=True)
        wait_matmuls(0)
        if const_expr(self.tiles.cluster > 1):
            self.exchange.release()
            self.add(dQ, record, self.exchange.rank, self.order.wait(record, q_block, seen))
        else:
            first = self.order.wait(record, q_block, seen)
            self.add(dQ, record, Int32(0), first)
            self.issue(dQ, stage, self.K_more, accumulate=False)  # not into a new one: there are no registers for both
            wait_matmuls(0)
            self.exchange.release()
            self.add(dQ, record, Int32(1), first)
        self.order.pass_on(record)
        self.exchange.advance()

    def new_dq(self):
        shape = self.tiles.q, self.spec.qk_width // 2
        return cute.make_rmem_tensor(self.mma.get_slice(0).partition_shape_C(shape), Float32)

    @cute.jit
    def issue(self, dQ: cute.Tensor, stage: Int32, K: cute.Tensor, accumulate: cutlass.Constexpr[bool]):
        issue(self.mma, dQ, self.dS[None, None, None, stage], K, accumulate=accumulate)

    @cute.jit
    def add(self, dQ: cute.Tensor, record: Int32, half: Int32, first: Boolean):
        if const_expr(self.tiles.dq_path is DqPath.ORDERED):
            if first:  # nobody has cleared it
                self.sum.put(dQ, record, half, store)
            else:
                self.sum.put(dQ, record, half, reduce_add)
        else:
            self.sum.put(dQ, record, half, reduce_add)


@cute.jit
def walk_gradients(c: GradientConsumer, blocks: QueryBlocks):
    """So many blocks as the consumer of scores walks over: which ones need not be known."""
    for _ in cutlass.range(blocks.count() * c.spec.heads_per_kv, unroll=1):
        c.block()
    return c


@cute.jit
def walk_dq(c: DqConsumer, record: Int32, blocks: QueryBlocks, q_blocks: Int32):
    """Every block of every query head of a tile; record: of the first head's block 0."""
    count = blocks.count()
    for head in cutlass.range(c.spec.heads_per_kv, unroll=1):
        for i in cutlass.range(count, unroll=1):
            q_block = block_at(blocks, i, c.spec, c.tiles, cutlass.min, cutlass.max)
            c.block(record + head * q_blocks + q_block, q_block)
    return c
