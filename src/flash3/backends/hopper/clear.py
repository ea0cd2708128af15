"""Rows of no sequence: O = 0 and L = −inf.

Packed storage may be longer than its last sequence, a sequence may use fewer rows than it has, padded rows are rarely full. No work tile
writes there: the producer warpgroup's other three warps do, beside everything else. No launch, and no pass over what tiles write anyway.

What lies behind a sequence (and before it, where there is padding at the left) is a gap. Gaps go round among the spare warps of the
whole grid; where warps outnumber gaps, several share one, each row of it whole to one of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...sequences import SequenceKind
from .extents import SequenceArrays, extent_of
from .operands import Operands
from .tiles import ForwardSpec, SequenceLayout

SPARE_WARPS = 3
"""Of a block."""
CHUNK_BYTES = 16


def num_gaps(layout: SequenceLayout, batch):
    """Packed: one behind the last sequence, and where used lengths are given one behind each."""
    if layout.kind is SequenceKind.PADDED:
        return batch
    return batch + 1 if layout.used else 1


def shares_of(gaps, warps, maximum=max):
    """How many warps share a gap. Share number n is share n // gaps of gap n % gaps: every so many rows, beginning with that one."""
    return maximum(warps // gaps, 1)


def behind(arrays: SequenceArrays, layout: SequenceLayout, gap: Int32, batch: Int32, rows: Int32) -> tuple[Int32, Int32, Int32]:
    """Row of the batch, and the rows [begin, end) of it that make up a gap. `rows`: of the storage."""
    if layout.kind is SequenceKind.PADDED:
        extent = extent_of(arrays, layout, gap, rows)
        return gap, extent.start + extent.length, rows
    if not layout.used:
        return Int32(0), arrays.starts[batch], rows
    last = gap == batch
    used = cutlass.select_(last, Int32(0), arrays.lengths[cutlass.min(gap, batch - 1)])
    end = cutlass.select_(last, rows, arrays.starts[cutlass.min(gap + 1, batch)])
    return Int32(0), arrays.starts[gap] + used, end


@cute.jit
def clear_gaps(ops: Operands, worker: Int32, workers: Int32, lane: Int32, spec: cutlass.Constexpr[ForwardSpec]):
    """One spare warp's share; `worker` is its number among all `workers` of the grid."""
    layout = spec.q_layout
    batch, rows = ops.sizes.batch, ops.sizes.q_len
    gaps = num_gaps(layout, batch)
    shares = shares_of(gaps, workers, cutlass.max)
    for share in cutlass.range(worker, gaps * shares, workers, unroll=1):
        row, begin, end = behind(ops.q_arrays, layout, share % gaps, batch, rows)
        first = share // gaps
        clear_rows(ops, row, begin + first, end, shares, lane, spec)
        if const_expr(layout.leftpad):
            clear_rows(ops, row, first, ops.q_arrays.leftpad[row], shares, lane, spec)


@cute.jit
def clear_rows(ops: Operands, batch: Int32, begin: Int32, end: Int32, step: Int32, lane: Int32, spec: cutlass.Constexpr[ForwardSpec]):
    """Rows begin, begin + step, … of all heads."""
    packed = spec.q_layout.kind is SequenceKind.PACKED
    heads, columns = ops.out.shape[-2], ops.out.shape[-1]
    width = CHUNK_BYTES * 8 // ops.out.element_type.width
    chunks = columns // width
    nothing = cute.make_rmem_tensor(width, ops.out.element_type)
    nothing.fill(0.0)
    for row in cutlass.range(begin, end, step, unroll=1):
        at = (row, None, None) if const_expr(packed) else (batch, row, None, None)
        out = ops.out[at]
        for i in cutlass.range(lane, heads * chunks, 32, unroll=1):
            head = i // chunks
            cute.autovec_copy(nothing, cute.local_tile(out, (1, width), (head, i - head * chunks))[0, None])
        if const_expr(spec.lse):
            for head in cutlass.range(lane, heads, 32, unroll=1):
                if const_expr(packed):
                    ops.lse[head, row] = -Float32.inf
                else:
                    ops.lse[batch, head, row] = -Float32.inf
