"""The whole backward as one host function: prepare, the main kernel, finish, in a row on one stream."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...sequences import SequenceKind
from . import backward_storage, blocklist, storage
from .backward import BackwardKernel
from .backward_behind import heads_left
from .backward_clear import columns_ahead
from .backward_finish import FinishKernel
from .backward_operands import BackwardNumbers, BackwardOperands, BackwardSizes, FinishOperands, RowOperands
from .backward_prepare import PrepareKernel
from .backward_tiles import KEYS_PER_CONSUMER, BackwardSpec, BackwardTiles, converts_behind, tiles_of
from .extents import rows_view, sequence_arrays
from .operands import Arrays, MaskNumbers


class Gradient:
    """Host side of one (BackwardSpec, BackwardTiles)."""

    def __init__(self, spec: BackwardSpec, tiles: BackwardTiles):
        self.spec, self.tiles = spec, tiles

    @cute.jit
    def __call__(
        self,
        mQ,
        mK,
        mV,
        mO,
        mdO,
        mLSE,
        mdLSE,
        mSink,
        mdQ,
        mdK,
        mdV,
        mStatistics,
        mSum,
        mOrder,
        q_arrays: Arrays,
        k_arrays: Arrays,
        numbers: BackwardNumbers,
        stream,
    ):
        spec, tiles = self.spec, self.tiles
        heads, kv_heads = mQ.shape[-2], mK.shape[-2]
        batch = self.batch(mQ, mK, q_arrays, k_arrays)
        blocks = blocklist.num_blocks(spec.q_layout, mQ.shape[-3], batch, tiles.q)

        ahead = columns_ahead(tiles_of(mK.shape[-3], tiles), numbers.multiprocessors, cutlass.max)

        def sides():
            """A kernel that is traced rebinds what it is given: each one gets its own."""
            sizes = BackwardSizes(mQ.shape[-3], mK.shape[-3], batch, kv_heads, blocks, ahead)
            return sequence_arrays(q_arrays), sequence_arrays(k_arrays), sizes, self.mask_numbers(numbers)

        scales = numbers.scale_log2, numbers.tanh_scale
        before = RowOperands(mQ, mK, mO, mdO, mLSE, mdLSE, mSink, mStatistics, mdQ, mSum, mOrder, *sides(), *scales)
        PrepareKernel(spec, tiles).launch(before, blocks, heads, stream)
        loads = self.loads(mQ, mK, mV, mdO)
        main = BackwardOperands(*loads, *self.stores(mdK, mdV), mdQ, mStatistics, mSum, mOrder, *sides(), numbers.scale, *scales)
        key_tiles = blocklist.num_blocks(spec.k_layout, mK.shape[-3], batch, tiles.walk_keys) * tiles.cluster
        BackwardKernel(spec, tiles).launch(main, key_tiles, kv_heads, numbers.multiprocessors, stream)
        q_side, _, sizes, _ = sides()
        if const_expr(converts_behind(spec, tiles)):
            heads = heads_left(heads, kv_heads, batch, ahead, cutlass.min)
        FinishKernel(spec, tiles).launch(FinishOperands(mdQ, mSum, q_side, sizes, numbers.scale), blocks, heads, stream)

    def mask_numbers(self, n: BackwardNumbers) -> MaskNumbers:
        return MaskNumbers(n.left, n.right, n.chunk, n.q_offset, n.k_offset, n.bottom_right)

    def loads(self, mQ, mK, mV, mdO):
        spec, tiles = self.spec, self.tiles
        q, do = (rows_view(m, spec.q_layout) for m in (mQ, mdO))
        k, v = (rows_view(m, spec.k_layout) for m in (mK, mV))
        return (
            storage.tma_load(q, backward_storage.q_layout(spec, tiles, 1), (tiles.q, spec.qk_width)),
            storage.tma_load(k, backward_storage.k_layout(spec, tiles, 1), (tiles.kv, spec.qk_width)),
            storage.tma_load(v, backward_storage.v_layout(spec, tiles, 1), (tiles.kv, spec.v_width)),
            storage.tma_load(do, backward_storage.do_layout(spec, tiles, 1), (tiles.q, spec.v_width)),
            self.half_of_k(k),
        )

    def half_of_k(self, k):
        spec, tiles = self.spec, self.tiles
        if tiles.cluster == 1:
            return None
        return storage.tma_load(k, backward_storage.half_of_k_layout(spec, tiles), (tiles.kv, spec.qk_width // 2))

    def stores(self, mdK, mdV):
        spec = self.spec
        dk, dv = (rows_view(m, spec.k_layout) for m in (mdK, mdV))
        return (
            storage.tma_store(dk, backward_storage.gradient_layout(spec, spec.qk_width), (KEYS_PER_CONSUMER, spec.qk_width)),
            storage.tma_store(dv, backward_storage.gradient_layout(spec, spec.v_width), (KEYS_PER_CONSUMER, spec.v_width)),
        )

    def batch(self, mQ, mK, q_arrays, k_arrays) -> Int32:
        """How many sequences: from the side that says so by its shape or its arrays."""
        for m, arrays, layout in ((mQ, q_arrays, self.spec.q_layout), (mK, k_arrays, self.spec.k_layout)):
            if layout.kind is SequenceKind.DENSE:
                return m.shape[0]
            if layout.kind is SequenceKind.PADDED:
                return arrays.lengths.shape[0]
        return q_arrays.starts.shape[0] - 1
