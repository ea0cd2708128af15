"""The consumers of the backward that share a tile by keys (Split.KEYS), and the walk over the blocks of queries.

A warpgroup that issues matmuls is held until about the last of them has begun (measured: docs/performance.md), so its exponentials are not
hidden by matmuls of its own, but by those of the other consumer: Order.IN_TURN.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline

from ...mask import MaskKind
from . import backward_storage
from .backward_barriers import BackwardBarrierId, arrive_consumers, sync_consumers
from .backward_tiles import BackwardSpec, BackwardTiles, Order, Split
from .bulk import wait_for_phase
from .fragments import convert
from .matmul import issue, wait_matmuls
from .queryblocks import QueryBlocks, block_at
from .weights import Weights, read_rows, to_score_gradients


@dataclass
class StagedRowsRead:
    """Consumer end of Q or dO: the stages as operand of both products, and their rows' statistic. Given back later than waited for."""

    operand: cute.Tensor  # B of the scores: rows × columns, over the stages
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
class StagedRows:
    """The same for who knows the place in the ring: registers are few, and Q, dO and dS of a block have one place."""

    operand: cute.Tensor  # B of the scores: rows × columns, over the stages
    transposed: cute.Tensor  # B of the gradients: columns × rows
    rows: cute.Tensor  # (words, stage)
    pipe: cutlass.Constexpr[pipeline.PipelineTmaAsync]

    @cute.jit
    def wait(self, at: pipeline.PipelineState):
        wait_for_phase(self.pipe.sync_object_full.get_barrier(at.index), at.phase)

    @cute.jit
    def release(self, at: pipeline.PipelineState):
        self.pipe.consumer_release(at)


def register_operand(mma: cute.TiledMma, tiles: BackwardTiles):
    """Pᵀ or dSᵀ as A of dV or dK: the registers of Sᵀ, in their order, once converted."""
    part = mma.get_slice(0)
    return part.make_fragment_A(part.partition_shape_A((tiles.kv, tiles.q)))


@dataclass
class Consumer:
    """64 keys of one warpgroup."""

    K: cute.Tensor  # A of Sᵀ, over its stages, and so are the next ones
    V: cute.Tensor  # A of dPᵀ
    K_dq: cute.Tensor  # operands of dQ
    dS_dq: cute.Tensor
    queries: StagedRows
    douts: StagedRows
    at: pipeline.PipelineState  # the block's place in the rings of Q, dO and dS
    dK: cute.Tensor
    dV: cute.Tensor
    ds_copy: cute.TiledCopy
    ds_to: cute.Tensor  # this thread's part of dS in shared memory, over the stages
    kv_stage: Int32
    dq: object  # RegisterReduction or HandOver
    weights: Weights
    scores_mma: cute.TiledMma
    dk_mma: cute.TiledMma
    dv_mma: cute.TiledMma
    dq_mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def begin(self, kv_block: Int32, record: Int32, kv_stage: Int32):
        """A tile."""
        self.weights.mask.tile_key = kv_block * self.tiles.kv
        self.weights.record = record
        self.kv_stage = kv_stage
        self.dK.fill(0.0)
        self.dV.fill(0.0)

    @cute.jit
    def next_head(self, q_blocks: Int32):
        self.weights.record = self.weights.record + q_blocks

    @cute.jit
    def block(self, q_block: Int32, masked: cutlass.Constexpr[bool], coarse: cutlass.Constexpr[bool]):
        S, dP, dQ = self.new_scores(), self.new_scores(), self.new_dq()
        P, dS = self.new_operand(self.dv_mma), self.new_operand(self.dk_mma)
        self.issue_scores(S, dP, coarse)
        self.weigh(S, dP, P, dS, q_block, masked, coarse)
        self.store_ds(dS)
        sync_consumers(BackwardBarrierId.SCORE_GRADIENTS)
        self.issue_dq(dQ, self.at.index)
        if const_expr(self.tiles.has_sender):
            self.issue_gradients(P, dS)
            wait_matmuls(2)
            self.dq.add(dQ, self.weights.record + q_block)
        else:  # reductions are slow to issue: they go among the matmuls
            wait_matmuls(0)
            self.dq.add(dQ, self.weights.record + q_block)
            self.issue_gradients(P, dS)
        wait_matmuls(0)
        self.release()

    @cute.jit
    def release(self):
        """Q and dO of this block; and on to the next one."""
        self.douts.release(self.at)
        self.queries.release(self.at)
        self.at.advance()

    @cute.jit
    def issue_scores(self, S: cute.Tensor, dP: cute.Tensor, coarse: cutlass.Constexpr[bool]):
        """Sᵀ = K·Qᵀ, and dPᵀ = V·dOᵀ but in the rare walk, which has not the registers for both."""
        self.queries.wait(self.at)
        K = self.K[None, None, None, self.kv_stage]
        issue(self.scores_mma, S, K, self.queries.operand[None, None, None, self.at.index], accumulate=False)
        self.douts.wait(self.at)
        if const_expr(not coarse):
            self.issue_dp(dP)

    @cute.jit
    def issue_dp(self, dP: cute.Tensor):
        V = self.V[None, None, None, self.kv_stage]
        issue(self.scores_mma, dP, V, self.douts.operand[None, None, None, self.at.index], accumulate=False)

    @cute.jit
    def weigh(
        self,
        S: cute.Tensor,
        dP: cute.Tensor,
        P: cute.Tensor,
        dS: cute.Tensor,
        q_block: Int32,
        masked: cutlass.Constexpr[bool],
        coarse: cutlass.Constexpr[bool],
    ):
        """Scores become P, and dP becomes dS."""
        wait_matmuls(0 if coarse else 1)
        self.weights.apply(S, P, self.at.index, q_block, masked, coarse)
        if const_expr(coarse):
            self.issue_dp(dP)
        delta = read_rows(self.douts.rows, self.at.index, self.weights.first_column, self.tiles)
        wait_matmuls(0)
        to_score_gradients(dP, S, delta)
        convert(dP, dS)

    @cute.jit
    def issue_gradients(self, P: cute.Tensor, dS: cute.Tensor):
        """dV += Pᵀ·dO, dK += dSᵀ·Q."""
        issue(self.dv_mma, self.dV, P, self.douts.transposed[None, None, None, self.at.index], accumulate=True)
        issue(self.dk_mma, self.dK, dS, self.queries.transposed[None, None, None, self.at.index], accumulate=True)

    @cute.jit
    def store_ds(self, dS: cute.Tensor):
        cute.copy(self.ds_copy, self.ds_copy.retile(dS), self.ds_to[None, None, None, self.at.index])
        cute.arch.fence_view_async_shared()

    def new_dq(self):
        shape = backward_storage.dq_shape(self.spec, self.tiles)
        return cute.make_rmem_tensor(self.dq_mma.get_slice(0).partition_shape_C(shape), Float32)

    def new_scores(self):
        """A tensor that lived across blocks would keep its registers for ever: a matmul's accumulator is also its input."""
        return cute.make_rmem_tensor(self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q)), Float32)

    def new_operand(self, mma: cute.TiledMma):
        return register_operand(mma, self.tiles)

    @cute.jit
    def issue_dq(self, dQ: cute.Tensor, stage: Int32):
        K, dS = self.K_dq[None, None, None, self.kv_stage], self.dS_dq[None, None, None, stage]
        if const_expr(self.tiles.dq_transposed):
            issue(self.dq_mma, dQ, K, dS, accumulate=False)
        else:
            issue(self.dq_mma, dQ, dS, K, accumulate=False)


@dataclass
class TurnConsumer(Consumer):
    """A turn is dQ, dV and dK of a block and S and dP of the next one; the softmax lies under the other consumer's turn.

    dQ is that of the block before: it wants dS of both consumers, and the other's has long been written then. Before a tile's first block a
    stage of dS is cleared, so that there is a block before it, whose dQ is 0.
    """

    me: Int32
    late_record: Int32  # of the block whose dQ is still to come
    ds_words: cute.Tensor  # (words, stage): dS in shared memory as this thread clears it

    @cute.jit
    def first_steps(self, record: Int32):
        """Of a tile."""
        self.late_record = record
        before = self.at.index ^ 1
        self.ds_words[None, before].fill(0)
        cute.arch.fence_view_async_shared()
        arrive_consumers(BackwardBarrierId.WRITTEN + 2 * self.me + before)
        arrive_consumers(BackwardBarrierId.READ + 2 * self.me + self.at.index)
        if self.me == 1:
            self.take_turn()

    @cute.jit
    def last_steps(self):
        """Of a tile."""
        if self.me == 0:
            self.pass_turn()
        dQ = self.new_dq()
        self.issue_late_dq(dQ)
        wait_matmuls(0)
        self.dq.add(dQ, self.late_record)
        sync_consumers(BackwardBarrierId.READ + 2 * (1 - self.me) + self.at.index)

    @cute.jit
    def take_turn(self):
        sync_consumers(BackwardBarrierId.TURN + self.me)

    @cute.jit
    def pass_turn(self):
        arrive_consumers(BackwardBarrierId.TURN + (1 - self.me))

    @cute.jit
    def issue_late_dq(self, dQ: cute.Tensor):
        before = self.at.index ^ 1
        sync_consumers(BackwardBarrierId.WRITTEN + 2 * (1 - self.me) + before)
        self.issue_dq(dQ, before)

    @cute.jit
    def block(self, q_block: Int32, masked: cutlass.Constexpr[bool], coarse: cutlass.Constexpr[bool]):
        S, dP, dQ = self.new_scores(), self.new_scores(), self.new_dq()
        P, dS = self.new_operand(self.dv_mma), self.new_operand(self.dk_mma)
        self.issue_scores(S, dP, coarse)
        self.pass_turn()
        self.weigh(S, dP, P, dS, q_block, masked, coarse)
        sync_consumers(BackwardBarrierId.READ + 2 * (1 - self.me) + self.at.index)
        self.store_ds(dS)
        arrive_consumers(BackwardBarrierId.WRITTEN + 2 * self.me + self.at.index)
        self.take_turn()
        self.issue_late_dq(dQ)
        wait_matmuls(0)
        arrive_consumers(BackwardBarrierId.READ + 2 * self.me + (self.at.index ^ 1))
        self.dq.add(dQ, self.late_record)  # among dV and dK
        self.issue_gradients(P, dS)
        wait_matmuls(0)
        self.release()
        self.late_record = self.weights.record + q_block


@cute.jit
def walk(c, blocks: QueryBlocks, coarse: cutlass.Constexpr[bool]):
    """Every block of queries of one head that sees the tile. Where some L has a second part, which is rare, all go the same slower way."""
    if const_expr(coarse):
        for i in cutlass.range(blocks.count(), unroll=1):
            c.block(block_at(blocks, i, c.spec, c.tiles, cutlass.min, cutlass.max), masked=True, coarse=True)
    else:
        for i in cutlass.range(blocks.left_edge, unroll=1):
            c.block(block_at(blocks, i, c.spec, c.tiles, cutlass.min, cutlass.max), masked=True, coarse=False)
        done = blocks.left_edge
        masked = c.spec.softcap and c.tiles.split is Split.KEYS  # needed by nobody, but ptxas then spills less
        for i in cutlass.range(blocks.interior, unroll=1):
            c.block(block_at(blocks, done + i, c.spec, c.tiles, cutlass.min, cutlass.max), masked=masked, coarse=False)
        done = done + blocks.interior
        if const_expr(c.spec.mask_kind is MaskKind.WINDOW or c.spec.mask_kind is MaskKind.CHUNK):
            for i in cutlass.range(blocks.right_edge, unroll=1):
                c.block(block_at(blocks, done + i, c.spec, c.tiles, cutlass.min, cutlass.max), masked=True, coarse=False)
    return c


@cute.jit
def walk_heads(c, blocks: QueryBlocks, q_blocks: Int32, coarse: cutlass.Constexpr[bool]):
    """Every query head of the tile's key head."""
    if const_expr(c.spec.heads_per_kv == 1):
        c = walk(c, blocks, coarse)
    else:
        for _ in cutlass.range(c.spec.heads_per_kv, unroll=1):
            c = walk(c, blocks, coarse)
            c.next_head(q_blocks)
    return c


@cute.jit
def walk_tile(c, blocks: QueryBlocks, q_blocks: Int32, coarse: Boolean):
    if const_expr(c.tiles.order is Order.IN_TURN):
        if blocks.count() > 0:
            c.first_steps(c.weights.record + blocks.first)
            c = walk_either(c, blocks, q_blocks, coarse)
            c.last_steps()
    else:
        c = walk_either(c, blocks, q_blocks, coarse)
    return c


@cute.jit
def walk_either(c, blocks: QueryBlocks, q_blocks: Int32, coarse: Boolean):
    if coarse:
        c = walk_heads(c, blocks, q_blocks, coarse=True)
    else:
        c = walk_heads(c, blocks, q_blocks, coarse=False)
    return c
