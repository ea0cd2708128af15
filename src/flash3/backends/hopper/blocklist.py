"""The blocks of rows of a whole batch, counted through.

Sequence i's first block has the number i·⌈capacity / size⌉, where sequences are packed ⌊starts[i] / size⌋ + i: nothing has to be summed
over the batch, and at most one number per sequence names no block.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...sequences import SequenceKind
from .extents import SequenceArrays
from .tiles import SequenceLayout

LANES = 32


def num_blocks(layout: SequenceLayout, rows, batch, size: int):
    """How many numbers there are. rows: of a dense or padded sequence, of all packed ones together."""
    if layout.kind is SequenceKind.PACKED:
        return rows // size + batch
    return (rows + size - 1) // size * batch


def first_block(layout: SequenceLayout, arrays: SequenceArrays, batch, rows, size: int):
    """The number of sequence `batch`'s first block."""
    if layout.kind is SequenceKind.PACKED:
        return arrays.starts[batch] // size + batch
    return (rows + size - 1) // size * batch


@cute.jit
def search(
    index: Int32, arrays: SequenceArrays, batch: Int32, rows: Int32, layout: cutlass.Constexpr[SequenceLayout], size: cutlass.Constexpr[int]
):
    """The sequence that number `index` belongs to. Each thread asks for its own."""
    if const_expr(layout.kind is not SequenceKind.PACKED):
        return index // ((rows + size - 1) // size)
    else:
        found, end = Int32(0), batch
        while end - found > 1:
            middle = (found + end) // 2
            begun = arrays.starts[middle] // size + middle <= index
            found = middle if begun else found
            end = end if begun else middle
        return found


@cute.jit
def sequence_of(
    index: Int32, arrays: SequenceArrays, batch: Int32, rows: Int32, layout: cutlass.Constexpr[SequenceLayout], size: cutlass.Constexpr[int]
):
    """The sequence that number `index` belongs to. The whole warp must ask."""
    if const_expr(layout.kind is not SequenceKind.PACKED):
        return index // ((rows + size - 1) // size)
    else:
        begun, first = Int32(0), Int32(0)
        while first < batch:
            mine = first + cute.arch.lane_idx()
            begin = index + 1
            if mine < batch:
                begin = arrays.starts[mine] // size + mine
            begun = begun + cute.arch.popc(cute.arch.vote_ballot_sync(begin <= index))
            first = first + LANES
        return begun - 1
