"""Shared memory of the backward, and what its consumers are put together from: each thread's parts of the operands, copies and pipes."""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warp

from . import backward_storage, roles, storage
from .backward_consumer import Consumer, StagedRows, StagedRowsRead, TurnConsumer
from .backward_exchange import Exchange
from .backward_io import GradientStore, KeyTile
from .backward_operands import BackwardOperands
from .backward_roles import DqConsumer, GradientConsumer, ScoreConsumer, TakenInOrder
from .backward_tiles import Order, Split
from .dq import HandOver, RegisterReduction
from .fragments import LANES_PER_ROW
from .masking import bounds_of
from .weights import TransposedMask, Weights


@dataclass
class Buffers:
    """Shared memory."""

    Q: cute.Tensor  # (rows, columns, stage), and so are dO, K, V
    dO: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    dS: cute.Tensor  # (queries, keys, stage)
    half_of_k: object  # (keys, columns, 1), of the cluster's other block; None without clusters
    dQ: object  # DqPath.SHARED: (half, consumer) float32
    L: cute.Tensor  # (words, stage)
    D: cute.Tensor
    zeros: object = None  # clears_ahead: float32
    pieces: object = None  # converts_behind: (words, stage, spare warp) float32, and their mbarriers
    pieces_full: object = None


class Parts:
    """What a consumer is put together from."""

    def __init__(self, kernel, ops: BackwardOperands, tile: KeyTile, buffers: Buffers, q_pipe, do_pipe, exchange, thread, me):
        self.spec, self.tiles = kernel.spec, kernel.tiles
        self.ops, self.tile, self.buffers, self.q_pipe, self.do_pipe, self.barriers = ops, tile, buffers, q_pipe, do_pipe, exchange
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
        if not self.tiles.has_sender:
            return RegisterReduction(self.ops.dq_sum, self.me, thread, words)
        fours = words // 2 // (4 * roles.WARPGROUP_THREADS)
        place = (self.buffers.dQ[None, self.me].iterator + 4 * thread).align(16)
        slot = cute.make_tensor(place, cute.make_layout((4, fours), stride=(1, 4 * roles.WARPGROUP_THREADS)))
        return HandOver(slot, self.me)

    def ds_store(self):
        """The copy of dS to shared memory, and this thread's part of the target."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), storage.ELEMENTS[self.spec.dtype])
        copy = cute.make_tiled_copy_C(atom, self.scores)
        return copy, copy.get_slice(self.thread).partition_D(self.ds_place())

    def ds_place(self):
        """dSᵀ, over its stages."""
        return storage.transposed(self.buffers.dS, self.tiles.kv, self.tiles.q, self.tiles.cluster * self.tiles.ds_stages)

    def weights(self) -> Weights:
        tile, ops, spec, tiles = self.tile, self.ops, self.spec, self.tiles
        first_key = self.thread // 32 * 16 + self.lane // LANES_PER_ROW
        bounds = bounds_of(replace(ops.mask), tile.q.length, tile.k.length)
        mask = TransposedMask(tile.kv_block * tiles.kv, first_key, self.first_column, tile.k.length, bounds, spec)
        record = tile.record + Int32(0)  # what a role rebinds under its branch must not be what the others read
        fixed = mask, self.first_column, ops.scale_log2, ops.tanh_scale, spec, tiles
        return Weights(self.buffers.L, ops.dq, replace(tile.q), replace(ops.sizes), record, *fixed)

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

    def exchange(self, user) -> Exchange:
        """dS's stages, for who fills them or who reads them."""
        at = pipeline.make_pipeline_state(user, self.tiles.ds_stages)
        return Exchange(self.buffers.dS, *self.barriers, self.tile.rank(self.tiles), at, self.spec, self.tiles)

    def score_consumer(self) -> ScoreConsumer:
        copy, to_smem = self.ds_store()
        return ScoreConsumer(
            K=self.scores_a(self.buffers.K)[None, None, None, 0],
            queries=self.queries(),
            douts=self.douts(),
            total=self.total(self.dv_mma, self.spec.v_width),
            weights=self.weights(),
            exchange=self.exchange(pipeline.PipelineUserType.Producer),
            copy=copy,
            to_smem=to_smem,
            scores_mma=self.scores,
            total_mma=self.dv_mma,
            spec=self.spec,
            tiles=self.tiles,
        )

    def gradient_consumer(self) -> GradientConsumer:
        copy, to_smem = self.ds_store()
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), storage.ELEMENTS[self.spec.dtype])
        read = cute.make_tiled_copy_C(atom, self.scores)
        return GradientConsumer(
            V=self.scores_a(self.buffers.V)[None, None, None, 0],
            queries=self.queries(),
            douts=self.douts(),
            total=self.total(self.dk_mma, self.spec.qk_width),
            first_column=self.first_column,
            first_thread=Boolean(self.thread == 0),
            exchange=self.exchange(pipeline.PipelineUserType.Producer),
            read=read,
            from_smem=read.get_slice(self.thread).partition_S(self.ds_place()),
            copy=copy,
            to_smem=to_smem,
            scores_mma=self.scores,
            total_mma=self.dk_mma,
            spec=self.spec,
            tiles=self.tiles,
        )

    def dq_consumer(self, turns) -> DqConsumer:
        spec, tiles, buffers, mma = self.spec, self.tiles, self.buffers, backward_storage.half_dq_mma(self.spec, self.tiles)
        half = spec.qk_width // 2
        mine, other = (0, 1) if tiles.cluster == 1 else (self.tile.rank(tiles), None)
        K = storage.transposed(buffers.K, spec.qk_width, tiles.kv, 1)
        more = storage.transposed(buffers.half_of_k, half, tiles.kv, 1) if other is None else self.columns(K, other)
        part = mma.get_slice(0)
        return DqConsumer(
            K=mma.make_fragment_B(part.partition_B(self.columns(K, mine)))[None, None, None, 0],
            K_more=mma.make_fragment_B(part.partition_B(more))[None, None, None, 0],
            dS=mma.make_fragment_A(part.partition_A(buffers.dS)),
            exchange=self.exchange(pipeline.PipelineUserType.Consumer),
            sum=self.dq_path(),
            order=TakenInOrder(self.ops.statistics, turns, spec, tiles),
            mma=mma,
            spec=spec,
            tiles=tiles,
        )

    def columns(self, K, half):
        """Half of Kᵀ."""
        return cute.local_tile(K, (self.spec.qk_width // 2, self.tiles.kv), (half, 0, None))

    def dv_store(self) -> GradientStore:
        return GradientStore.create(
            self.ops.dv, self.buffers.V, self.dv_mma, self.all_thread, self.me, self.spec.v_width, self.spec, self.tiles
        )

    def dk_store(self) -> GradientStore:
        return GradientStore.create(
            self.ops.dk, self.buffers.K, self.dk_mma, self.all_thread, self.me, self.spec.qk_width, self.spec, self.tiles
        )
