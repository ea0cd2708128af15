"""dQ = scale · (the float32 sum), in the inputs' dtype and in rows again.

roles       one block of 256 threads for each block of query rows and head: each thread reads the float32 numbers that the same thread of
            the main kernel's consumers had in registers (dq.py), stmatrix puts them into shared memory as rows, and 16 bytes a thread
            go out, rows past the end of a sequence left out
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from . import backward_storage, blocklist, budget, storage
from .backward_operands import FinishOperands
from .backward_tiles import CONSUMERS, BackwardSpec, BackwardTiles, converts_behind
from .dq import half_of, in_fours
from .extents import extent_of
from .fragments import convert
from .roles import WARPGROUP_THREADS
from .rows import PIECE, piece_at, row_of

THREADS = CONSUMERS * WARPGROUP_THREADS


class FinishKernel:
    """The kernel of one (BackwardSpec, BackwardTiles)."""

    def __init__(self, spec: BackwardSpec, tiles: BackwardTiles):
        self.spec, self.tiles = spec, tiles

    @cute.jit
    def launch(self, ops: FinishOperands, blocks: Int32, heads: Int32, stream):
        self.kernel(ops).launch(grid=[blocks, heads, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, ops: FinishOperands):
        spec, tiles, z = self.spec, self.tiles, ops.sizes
        thread, _, _ = cute.arch.thread_idx()
        index, head, _ = cute.arch.block_idx()
        blocks, heads, _ = cute.arch.grid_dim()
        index, head = blocks - 1 - index, heads - 1 - head  # what was added last may still be in the L2
        layout = backward_storage.q_layout(spec, tiles, 1)
        smem = SmemAllocator()
        rows = smem.allocate_tensor(storage.ELEMENTS[spec.dtype], layout.outer, budget.ALIGNMENT_BYTES, swizzle=layout.inner)
        batch = blocklist.sequence_of(index, ops.q_arrays, z.batch, z.q_rows, spec.q_layout, tiles.q)
        extent = extent_of(ops.q_arrays, spec.q_layout, batch, z.q_rows)
        first_row = (index - blocklist.first_block(spec.q_layout, ops.q_arrays, batch, z.q_rows, tiles.q)) * tiles.q
        is_left = Boolean(True)
        if const_expr(converts_behind(spec, tiles)):  # the grid holds the last heads only, and of the first of them some columns are done
            head = ops.dq.shape[-2] - heads + head
            is_left = head // spec.heads_per_kv * z.batch + batch + z.columns_ahead >= z.kv_heads * z.batch
        cute.arch.griddepcontrol_wait()
        if first_row < extent.length and is_left:
            self.gather(ops, head * z.q_blocks + index, rows, thread)
            cute.arch.sync_threads()
            self.write(ops, rows, extent, head, first_row, thread)

    @cute.jit
    def gather(self, ops: FinishOperands, record: Int32, rows: cute.Tensor, thread: Int32):
        """Registers of the main kernel → rows in shared memory."""
        spec, tiles = self.spec, self.tiles
        mma, shape = backward_storage.dq_mma(spec, tiles), backward_storage.dq_shape(spec, tiles)
        dQ = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C(shape), Float32)
        fours = in_fours(dQ)
        words = tiles.q * spec.qk_width
        start = half_of(ops.dq_sum, record, thread // WARPGROUP_THREADS, words) + 4 * (thread % WARPGROUP_THREADS)
        source = cute.make_tensor(start, cute.make_layout((4, cute.size(fours, mode=[1])), stride=(1, 4 * WARPGROUP_THREADS)))
        cute.autovec_copy(source, fours)
        for i in cutlass.range_constexpr(cute.size(dQ)):
            dQ[i] = dQ[i] * ops.scale
        out = cute.make_rmem_tensor_like(dQ, storage.ELEMENTS[spec.dtype])
        convert(dQ, out)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(tiles.dq_transposed, 4), storage.ELEMENTS[spec.dtype])
        copy = cute.make_tiled_copy_C(atom, mma)
        target = storage.transposed(rows, spec.qk_width, tiles.q, 1) if tiles.dq_transposed else rows
        cute.copy(copy, copy.retile(out), copy.get_slice(thread).partition_D(target)[None, None, None, 0])

    @cute.jit
    def write(self, ops: FinishOperands, rows: cute.Tensor, extent, head: Int32, first_row: Int32, thread: Int32):
        spec, tiles = self.spec, self.tiles
        pieces = spec.qk_width // PIECE
        width = ops.dq.shape[-1]
        values = cute.make_rmem_tensor(PIECE, storage.ELEMENTS[spec.dtype])
        for i in cutlass.range_constexpr(tiles.q * pieces // THREADS):
            at = thread + THREADS * i
            row, column = at // pieces, at % pieces * PIECE
            if first_row + row < extent.length and column < width:
                cute.autovec_copy(cute.local_tile(rows[row, None, 0], (PIECE,), (at % pieces,)), values)
                target = row_of(ops.dq, spec.q_layout, extent, head, first_row + row)
                cute.autovec_copy(values, piece_at(target, column))
