"""The two consumers of the backward that share a tile by roles (Split.ROLES), for wide head dims.

One makes Sᵀ, P and dV, the other dPᵀ, dS and dK, both for the same 64 keys; each makes half of dQ's columns. So K and V are read by one
consumer each, Pᵀ and dSᵀ still are register operands, and each holds one wide accumulator. P goes over through shared memory as it lies in
the registers, two 16-bit numbers a word.

timeline    score consumer     Sᵀ │ P → shared memory │ dV … │ barrier │ dQ, left half
            gradient consumer  dPᵀ │ P │ dS → shared memory  │ barrier │ dQ, right half, dK
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import backward_storage, storage
from .backward_barriers import BackwardBarrierId, arrive_consumers, sync_consumers
from .backward_consumer import StagedRowsRead, register_operand
from .backward_tiles import BackwardSpec, BackwardTiles
from .fragments import convert
from .matmul import issue, wait_matmuls
from .weights import Weights, read_rows, to_score_gradients


@dataclass
class HalfOfDq:
    """One consumer's columns of dQ = dS·K."""

    K: cute.Tensor
    dS: cute.Tensor  # over its stages
    path: object  # RegisterReduction or HandOver
    mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def issue(self, stage: Int32):
        shape = backward_storage.dq_shape(self.spec, self.tiles)
        dQ = cute.make_rmem_tensor(self.mma.get_slice(0).partition_shape_C(shape), Float32)
        issue(self.mma, dQ, self.dS[None, None, None, stage], self.K, accumulate=False)
        return dQ


@dataclass
class ScoreConsumer:
    """Sᵀ, P and dV."""

    K: cute.Tensor  # A of Sᵀ
    queries: StagedRowsRead
    douts: StagedRowsRead
    total: cute.Tensor  # dV
    weights: Weights
    box: cute.Tensor  # this thread's words of P: (4, n)
    stage: Int32  # of dS
    dq: HalfOfDq
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
        self.queries.release()  # not before: P in the box proves that L has been read
        do = self.douts.wait()
        issue(self.total_mma, self.total, P, self.douts.transposed[None, None, None, do], accumulate=True)  # dV += Pᵀ·dO
        sync_consumers(BackwardBarrierId.SCORE_GRADIENTS)
        dQ = self.dq.issue(self.stage)
        wait_matmuls(0)
        self.douts.release()
        self.dq.path.add(dQ, self.weights.record + q_block)
        self.stage = self.stage ^ 1

    @cute.jit
    def hand_over(self, S: cute.Tensor, P: cute.Tensor):
        """The box is free: its last reader has written dS since, and this consumer has waited for that."""
        factor = P
        if const_expr(self.spec.softcap):
            factor = cute.make_rmem_tensor_like(P)
            convert(S, factor)
        words = cute.recast_tensor(factor, Int32)
        cute.autovec_copy(cute.make_tensor(words.iterator, cute.make_layout((4, cute.size(words) // 4))), self.box)
        arrive_consumers(BackwardBarrierId.PROBABILITIES)


@dataclass
class GradientConsumer:
    """dPᵀ, dS and dK."""

    V: cute.Tensor  # A of dPᵀ
    queries: StagedRowsRead
    douts: StagedRowsRead
    total: cute.Tensor  # dK
    record: Int32
    first_column: Int32
    box: cute.Tensor
    stage: Int32
    ds_copy: cute.TiledCopy
    ds_to: cute.Tensor
    dq: HalfOfDq
    scores_mma: cute.TiledMma
    total_mma: cute.TiledMma
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def next_head(self, q_blocks: Int32):
        self.record = self.record + q_blocks

    @cute.jit
    def block(self, q_block: Int32, masked: cutlass.Constexpr[bool], coarse: cutlass.Constexpr[bool]):
        shape = self.scores_mma.get_slice(0).partition_shape_C((self.tiles.kv, self.tiles.q))
        dP, dS = cute.make_rmem_tensor(shape, Float32), register_operand(self.total_mma, self.tiles)
        do = self.douts.wait()
        issue(self.scores_mma, dP, self.V, self.douts.operand[None, None, None, do], accumulate=False)
        delta = read_rows(self.douts.rows, do, self.first_column, self.tiles)
        wait_matmuls(0)
        to_score_gradients(dP, self.factor(dP), delta)
        convert(dP, dS)
        cute.copy(self.ds_copy, self.ds_copy.retile(dS), self.ds_to[None, None, None, self.stage])
        cute.arch.fence_view_async_shared()
        sync_consumers(BackwardBarrierId.SCORE_GRADIENTS)
        self.douts.release()
        q = self.queries.wait()
        dQ = self.dq.issue(self.stage)
        issue(self.total_mma, self.total, dS, self.queries.transposed[None, None, None, q], accumulate=True)  # dK += dSᵀ·Q
        wait_matmuls(1)
        self.dq.path.add(dQ, self.record + q_block)
        wait_matmuls(0)
        self.queries.release()
        self.stage = self.stage ^ 1

    @cute.jit
    def factor(self, like: cute.Tensor):
        """P (with a softcap times the slope), as the other consumer's registers held it."""
        sync_consumers(BackwardBarrierId.PROBABILITIES)
        packed = cute.make_rmem_tensor_like(like, storage.ELEMENTS[self.spec.dtype])
        words = cute.recast_tensor(packed, Int32)
        cute.autovec_copy(self.box, cute.make_tensor(words.iterator, cute.make_layout((4, cute.size(words) // 4))))
        found = cute.make_rmem_tensor_like(like)
        for i in cutlass.range_constexpr(cute.size(found)):
            found[i] = packed[i].to(Float32)
        return found
