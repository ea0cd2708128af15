"""The whole backward as one host function: prepare, the main kernel, finish, in a row on one stream."""

import cutlass.cute as cute
from cutlass import Int32

from ...sequences import SequenceKind
from . import backward_storage, blocklist, storage
from .backward import BackwardKernel
from .backward_finish import FinishKernel
from .backward_operands import BackwardNumbers, BackwardOperands, BackwardSizes, RowOperands
from .backward_prepare import PrepareKernel
from .backward_tiles import KEYS_PER_CONSUMER, BackwardSpec, BackwardTiles
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
        q_arrays: Arrays,
        k_arrays: Arrays,
        numbers: BackwardNumbers,
        stream,
    ):
        spec, tiles = self.spec, self.tiles
        heads, kv_heads = mQ.shape[-2], mK.shape[-2]
        batch = self.batch(mQ, mK, q_arrays, k_arrays)
        blocks = blocklist.num_blocks(spec.q_layout, mQ.shape[-3], batch, tiles.q)

        def common():
            """A kernel that is traced rebinds what it is given: each one gets its own."""
            return sequence_arrays(q_arrays), BackwardSizes(mQ.shape[-3], mK.shape[-3], batch, blocks)

        before = RowOperands(mO, mdO, mLSE, mdLSE, mSink, None, mStatistics, mSum, *common(), numbers.scale)
        PrepareKernel(spec, tiles).launch(before, blocks, heads, stream)
        main = self.main_operands(mQ, mK, mV, mdO, mdK, mdV, mStatistics, mSum, sequence_arrays(k_arrays), *common(), numbers)
        key_tiles = blocklist.num_blocks(spec.k_layout, mK.shape[-3], batch, tiles.kv)
        BackwardKernel(spec, tiles).launch(main, key_tiles, kv_heads, stream)
        after = RowOperands(None, None, None, None, None, mdQ, None, mSum, *common(), numbers.scale)
        FinishKernel(spec, tiles).launch(after, blocks, heads, stream)

    def main_operands(self, mQ, mK, mV, mdO, mdK, mdV, mStatistics, mSum, k_side, q_side, sizes, numbers) -> BackwardOperands:
        spec, tiles = self.spec, self.tiles
        q, do = (rows_view(m, spec.q_layout) for m in (mQ, mdO))
        k, v, dk, dv = (rows_view(m, spec.k_layout) for m in (mK, mV, mdK, mdV))
        qk, value = spec.qk_width, spec.v_width
        n = numbers
        return BackwardOperands(
            storage.tma_load(q, backward_storage.q_layout(spec, tiles, 1), (tiles.q, qk)),
            storage.tma_load(k, backward_storage.k_layout(spec, tiles), (tiles.kv, qk)),
            storage.tma_load(v, backward_storage.v_layout(spec, tiles), (tiles.kv, value)),
            storage.tma_load(do, backward_storage.do_layout(spec, tiles, 1), (tiles.q, value)),
            storage.tma_store(dk, backward_storage.gradient_layout(spec, qk), (KEYS_PER_CONSUMER, qk)),
            storage.tma_store(dv, backward_storage.gradient_layout(spec, value), (KEYS_PER_CONSUMER, value)),
            mStatistics,
            mSum,
            q_side,
            k_side,
            sizes,
            MaskNumbers(n.left, n.right, n.chunk, n.q_offset, n.k_offset, n.bottom_right),
            n.scale,
            n.scale_log2,
            n.tanh_scale,
        )

    def batch(self, mQ, mK, q_arrays, k_arrays) -> Int32:
        """How many sequences: from the side that says so by its shape or its arrays."""
        for m, arrays, layout in ((mQ, q_arrays, self.spec.q_layout), (mK, k_arrays, self.spec.k_layout)):
            if layout.kind is SequenceKind.DENSE:
                return m.shape[0]
            if layout.kind is SequenceKind.PADDED:
                return arrays.lengths.shape[0]
        return q_arrays.starts.shape[0] - 1
