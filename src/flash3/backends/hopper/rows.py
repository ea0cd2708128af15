"""Rows of global tensors, read and written 16 bytes a thread."""

import cutlass.cute as cute

from ...sequences import SequenceKind
from .extents import Extent
from .tiles import SequenceLayout

PIECE = 8
"""Columns of a 16-bit row that a thread reads at once: 16 bytes."""


def row_of(m, layout: SequenceLayout, extent: Extent, head, row):
    """A row of (batch, rows, heads, columns), packed (rows, heads, columns)."""
    if layout.kind is SequenceKind.PACKED:
        return m[extent.start + row, head, None]
    return m[extent.row, extent.start + row, head, None]


def rows_of(m, layout: SequenceLayout, extent: Extent, head):
    """A sequence's (rows, columns) of such a tensor, from its first row."""
    if layout.kind is SequenceKind.PACKED:
        return cute.domain_offset((extent.start, 0), m[None, head, None])
    return cute.domain_offset((extent.start, 0), m[extent.row, None, head, None])


def statistic_of(m, layout: SequenceLayout, extent: Extent, head, row):
    """An entry of (batch, heads, rows), packed (heads, rows)."""
    if layout.kind is SequenceKind.PACKED:
        return m[head, extent.start + row]
    return m[extent.row, head, extent.start + row]


def piece_at(row, column):
    """16 bytes of a row, where they lie."""
    return cute.make_tensor((row.iterator + column).align(16), cute.make_layout(PIECE))


def piece_of(row, column):
    """16 bytes of a row, in registers."""
    values = cute.make_rmem_tensor(PIECE, row.element_type)
    cute.autovec_copy(piece_at(row, column), values)
    return values
