"""The consumers of the backward that share a tile by keys (Split.KEYS), and the walk over the blocks of queries."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...mask import MaskKind
from . import backward_storage
from .backward_barriers import BackwardBarrierId, sync_consumers
from .backward_tiles import BackwardSpec, BackwardTiles
from .fragments import convert
from .matmul import issue, wait_matmuls
from .queryblocks import QueryBlocks, block_at
from .weights import Weights, read_rows, to_score_gradients


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
    queries: StagedRowsRead
    douts: StagedRowsRead
    dK: cute.Tensor
    dV: cute.Tensor
    ds_copy: cute.TiledCopy
    ds_to: cute.Tensor  # this thread's part of dS in shared memory, over the stages
    ds_stage: Int32
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
        spec, tiles = self.spec, self.tiles
        S, dP = self.new_scores(), self.new_scores()
        P, dS = self.new_operand(self.dv_mma), self.new_operand(self.dk_mma)
        dQ = cute.make_rmem_tensor(self.dq_mma.get_slice(0).partition_shape_C(backward_storage.dq_shape(spec, tiles)), Float32)
        K, V = self.K[None, None, None, self.kv_stage], self.V[None, None, None, self.kv_stage]
        q = self.queries.wait()
        issue(self.scores_mma, S, K, self.queries.operand[None, None, None, q], accumulate=False)  # Sᵀ = K·Qᵀ
        do = self.douts.wait()
        if const_expr(not coarse):
            issue(self.scores_mma, dP, V, self.douts.operand[None, None, None, do], accumulate=False)  # dPᵀ = V·dOᵀ
            wait_matmuls(1)
        else:  # dP later: its registers are needed
            wait_matmuls(0)
        self.weights.apply(S, P, q, q_block, masked, coarse)  # under dPᵀ
        if const_expr(coarse):
            issue(self.scores_mma, dP, V, self.douts.operand[None, None, None, do], accumulate=False)
        delta = read_rows(self.douts.rows, do, self.weights.first_column, tiles)
        wait_matmuls(0)
        to_score_gradients(dP, S, delta)
        convert(dP, dS)
        cute.copy(self.ds_copy, self.ds_copy.retile(dS), self.ds_to[None, None, None, self.ds_stage])
        cute.arch.fence_view_async_shared()
        sync_consumers(BackwardBarrierId.SCORE_GRADIENTS)
        self.issue_dq(dQ)
        issue(self.dv_mma, self.dV, P, self.douts.transposed[None, None, None, do], accumulate=True)  # dV += Pᵀ·dO
        issue(self.dk_mma, self.dK, dS, self.queries.transposed[None, None, None, q], accumulate=True)  # dK += dSᵀ·Q
        wait_matmuls(2)
        self.dq.add(dQ, self.weights.record + q_block)  # under dV and dK
        wait_matmuls(0)
        self.douts.release()
        self.queries.release()
        self.ds_stage = self.ds_stage ^ 1

    def new_scores(self):
        """A tensor that lived across blocks would keep its registers for ever: a matmul's accumulator is also its input."""
        return cute.make_rmem_tensor(self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q)), Float32)

    def new_operand(self, mma: cute.TiledMma):
        return register_operand(mma, self.tiles)

    @cute.jit
    def issue_dq(self, dQ: cute.Tensor):
        K, dS = self.K_dq[None, None, None, self.kv_stage], self.dS_dq[None, None, None, self.ds_stage]
        if const_expr(self.tiles.dq_transposed):
            issue(self.dq_mma, dQ, K, dS, accumulate=False)
        else:
            issue(self.dq_mma, dQ, dS, K, accumulate=False)


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
        for i in cutlass.range(blocks.interior, unroll=1):
            c.block(block_at(blocks, done + i, c.spec, c.tiles, cutlass.min, cutlass.max), masked=False, coarse=False)
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
    if coarse:
        c = walk_heads(c, blocks, q_blocks, coarse=True)
    else:
        c = walk_heads(c, blocks, q_blocks, coarse=False)
    return c
