"""Where the rows of a sequence lie, and TMA tensors that end where a sequence ends.

Sequences of a batch follow each other in memory (packed) or fill part of a row (padded), so the end of a tensor is not the end of a
sequence. TMA checks bounds per dimension; so a ragged tensor gets a row dimension of `SEQUENCE_LIMIT` and a second one, `end`, with the
same stride, and its pointer moves back by SEQUENCE_LIMIT rows. Row r of a sequence is (SEQUENCE_LIMIT − length + r, end = start + length):

    address = pointer − LIMIT·stride + (LIMIT − length + r)·stride + (start + length)·stride = pointer + (start + r)·stride

and r ≥ length is out of bounds: loads give zeros there and stores leave alone what belongs to others, at no cost in the kernel.

One thing TMA does not forgive: a load of which not a single row is in bounds reads at the pointer itself, where nothing is mapped. So a
sequence without keys loads one row of its neighbours (`loadable`); the mask hides it, and O is set to 0, not multiplied by it. And a
consumer whose rows all lie past the end of the queries loads the last rows there are (`last_block`); its own store leaves nothing. The
same holds for columns: a tile far wider than its tensor gets columns of zeros first (arguments.with_columns).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...sequences import SequenceKind
from .tiles import SEQUENCE_LIMIT, SequenceLayout

MOST_ROWS = (1 << 31) - 1


@dataclass
class SequenceArrays:
    """One side's arrays on the device; those that its SequenceLayout lacks are None."""

    starts: object  # packed: cu_seqlens (batch + 1,)
    lengths: object  # packed: used lengths; padded: lengths, leftpad included
    leftpad: object
    batch_index: object


def sequence_arrays(arrays) -> SequenceArrays:
    """From what the host passes: operands.Arrays, or None for a dense side."""
    return SequenceArrays(None, None, None, None) if arrays is None else SequenceArrays(*arrays)


@dataclass
class Extent:
    """Rows start … start + length − 1 of `row`."""

    row: Int32
    start: Int32
    length: Int32


def extent_of(arrays: SequenceArrays, layout: SequenceLayout, batch: Int32, dense_length: Int32) -> Extent:
    """Of one sequence of the batch. Reads the arrays."""
    zero = Int32(0)
    if layout.kind is SequenceKind.DENSE:
        return Extent(batch, zero, dense_length)
    if layout.kind is SequenceKind.PACKED:
        start = arrays.starts[batch]
        return Extent(zero, start, arrays.lengths[batch] if layout.used else arrays.starts[batch + 1] - start)
    start = arrays.leftpad[batch] if layout.leftpad else zero
    row = arrays.batch_index[batch] if layout.batch_index else batch
    return Extent(row, start, cutlass.max(arrays.lengths[batch] - start, zero))


def loadable(extent: Extent) -> Extent:
    """The extent, or for an empty sequence one row that is surely there."""
    some = cutlass.min(extent.length, Int32(1))
    return Extent(extent.row, extent.start * some, cutlass.max(extent.length, Int32(1)))


def last_block(length, rows: int):
    """The last block of so many rows that holds one of the sequence's, of which there is at least one."""
    return (length - 1) // rows


def rows_view(m, layout: SequenceLayout, heads: int = 1):
    """A tensor as TMA is told of it: (rows, columns, heads, batch), packed (rows, columns, heads, end), padded (…, batch, end).

    Where several heads share a tile, ((heads, rows), columns, …): a row of the tile is a pair.
    """
    if layout.kind is SequenceKind.DENSE:
        view, back = cute.select(m.layout, mode=[1, 3, 2, 0]), 0
    elif layout.kind is SequenceKind.PACKED:
        _, num_heads, columns = m.shape
        row, head, column = m.stride
        view = cute.make_layout((SEQUENCE_LIMIT, columns, num_heads, MOST_ROWS), stride=(row, column, head, row))
        back = -SEQUENCE_LIMIT
    else:
        batch, _, num_heads, columns = m.shape
        first, row, head, column = m.stride
        view = cute.make_layout((SEQUENCE_LIMIT, columns, num_heads, batch, MOST_ROWS), stride=(row, column, head, first, row))
        back = -SEQUENCE_LIMIT
    tensor = cute.make_tensor(m.iterator, view)
    if back:
        tensor = cute.domain_offset((back, *(0 for _ in view.shape[1:])), tensor)
    if heads == 1:
        return tensor
    shape, stride = view.shape, view.stride
    pairs = cute.make_layout(((shape[2], shape[0]), shape[1], *shape[3:]), stride=((stride[2], stride[0]), stride[1], *stride[3:]))
    return cute.make_tensor(tensor.iterator, pairs)


def tile_of(tensor, tile, block, column, head, extent: Extent, layout: SequenceLayout):
    """A tile of a TMA tensor: rows from block·tile of the sequence, columns from column·tile. Where the tile's rows are pairs, `head`
    counts groups of heads."""
    pairs = isinstance(tile[0], tuple)
    at = ((head, block), column) if pairs else (block, column, head)
    if layout.kind is SequenceKind.DENSE:
        return cute.local_tile(tensor, tile, (*at, extent.row))
    end = extent.start + extent.length
    at = (*at, end) if layout.kind is SequenceKind.PACKED else (*at, extent.row, end)
    offset = SEQUENCE_LIMIT - extent.length
    first = ((0, offset) if pairs else offset, *(0 for _ in at[1:]))
    return cute.local_tile(cute.domain_offset(first, tensor), tile, at)
