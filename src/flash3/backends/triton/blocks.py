"""What the kernels share: where a sequence lies, its tiles in registers, and scores."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Rows(NamedTuple):
    """A tensor (row, slot, head, column) as kernels see it; strides in elements. Packed storage has one row, pages are rows.

    For TMA it is (head, slot, column), slots of all rows: `row` begins tma_row slots after the one before.
    """

    start: Any
    row_stride: Any
    slot_stride: Any
    head_stride: Any
    tma_row: Any = 0


class Arrays(NamedTuple):
    """A layout's arrays (`flash3.sequences`); those that it lacks are None."""

    starts: Any
    lengths: Any
    leftpad: Any
    batch_index: Any
    page_table: Any
    page_table_stride: Any


class Extent(NamedTuple):
    """Slots first … first + length − 1 of `row`. (With pages `row` is one of the page table.)"""

    row: Any
    first: Any
    length: Any


class Scales(NamedTuple):
    """P = exp2(per_score · (S − row_max) …); top · S is a score in natural units; S is tanh(capped · Q Kᵀ) where scores are capped."""

    per_score: Any
    top: Any
    capped: Any


class Parts(NamedTuple):
    """What splits leave beside O: Rows of row_max, a pointer to row_sum (of the same strides), and strides from split to split."""

    start: Any
    row_stride: Any
    slot_stride: Any
    head_stride: Any
    row_sum: Any
    split_stride: Any
    out_stride: Any


class Statistics(NamedTuple):
    """What the backward knows of each query row: Rows of row_max, pointers to log_sum and delta (of the same strides),
    which lie part_stride and twice that behind it.
    """

    start: Any
    row_stride: Any
    slot_stride: Any
    head_stride: Any
    log_sum: Any
    delta: Any
    part_stride: Any


@triton.jit
def own_tile(blocks, heads, LAST_FIRST: tl.constexpr):
    """Tile, head and sequence of this program. LAST_FIRST: where a mask is, the last tile of queries sees most keys, and starts first."""
    block = tl.program_id(0) % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, tl.program_id(0) // blocks % heads, tl.program_id(0) // blocks // heads


@triton.jit
def extent_of(arrays, batch, dense_length):
    """Where sequence `batch` lies. dense_length: of sequences that fill their rows."""
    row = tl.cast(batch, tl.int64)
    first = tl.full((), 0, tl.int32)
    if arrays.starts is not None:
        row = tl.full((), 0, tl.int64)
        first = tl.load(arrays.starts + batch)
        if arrays.lengths is not None:
            length = tl.load(arrays.lengths + batch)
        else:
            length = tl.load(arrays.starts + batch + 1) - first
    elif arrays.lengths is not None:
        if arrays.leftpad is not None:
            first = tl.load(arrays.leftpad + batch)
        if arrays.batch_index is not None:
            row = tl.load(arrays.batch_index + batch).to(tl.int64)
        length = tl.maximum(tl.load(arrays.lengths + batch) - first, 0)
    else:
        length = tl.full((), dense_length, tl.int32)
    return Extent(row, first, length)


@triton.jit
def load_block(x, tma, arrays, own, head, first, exists, KIND: tl.constexpr, CUT: tl.constexpr):
    """Rows first … first + KIND.block − 1 of a sequence, (block, width). 0 past column KIND.dim, and where CUT but not `exists`.

    tma: a descriptor or None. It knows the end of the storage, not that of a sequence: it loads what needs no mask.
    """
    if tma is not None and not CUT:
        slot = tl.cast(own.row, tl.int32) * x.tma_row + own.first + first
        return tma.load([head, slot, 0]).reshape(KIND.block, KIND.width)
    else:
        return load_by_pointers(x, arrays, own, head, first, exists, KIND, CUT)


@triton.jit
def load_by_pointers(x, arrays, own, head, first, exists, KIND: tl.constexpr, CUT: tl.constexpr):
    """The same, whatever the strides, pages too."""
    local = tl.arange(0, KIND.block)
    columns = tl.arange(0, KIND.width)
    ALIGN: tl.constexpr = KIND.align
    base = x.start + tl.multiple_of(tl.cast(head, tl.int64) * x.head_stride, ALIGN)
    if KIND.page_size > 0:
        slot = own.first + first + local
        entry = arrays.page_table + own.row * arrays.page_table_stride + slot // KIND.page_size
        page = tl.load(entry, mask=exists, other=0).to(tl.int64)
        offsets = page * x.row_stride + (slot % KIND.page_size).to(tl.int64) * x.slot_stride
    else:
        base += tl.multiple_of(own.row * x.row_stride + tl.cast(own.first + first, tl.int64) * x.slot_stride, ALIGN)
        offsets = local * x.slot_stride
        if KIND.wide:
            offsets = local.to(tl.int64) * x.slot_stride
    offsets = tl.multiple_of(offsets, ALIGN)
    pointers = base + offsets[:, None] + columns[None, :]
    if CUT and KIND.dim < KIND.width:
        return tl.load(pointers, mask=exists[:, None] & (columns < KIND.dim)[None, :], other=0.0)
    elif CUT:
        return tl.load(pointers, mask=exists[:, None], other=0.0)
    elif KIND.dim < KIND.width:
        return tl.load(pointers, mask=(columns < KIND.dim)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def tile_pointers(x, own, rows, heads, KIND: tl.constexpr):
    """Pointers to a tile (rows, KIND.width) and where it exists. `heads` is one head or one for each row."""
    ALIGN: tl.constexpr = KIND.align
    columns = tl.arange(0, KIND.width)
    offsets = row_offsets(x, own, rows, heads, ALIGN)
    return x.start + offsets[:, None] + columns[None, :], (rows < own.length)[:, None] & (columns < KIND.dim)[None, :]


@triton.jit
def row_offsets(x, own, rows, heads, ALIGN: tl.constexpr = 1):
    """Where rows of a sequence begin, from x.start on. ALIGN divides them."""
    at = own.row * x.row_stride + (own.first + rows).to(tl.int64) * x.slot_stride
    offsets = at + tl.cast(heads, tl.int64) * x.head_stride
    if ALIGN > 1:
        offsets = tl.multiple_of(offsets, ALIGN)
    return offsets


@triton.jit
def tanh(x):
    """To float32's relative precision: a series near 0, elsewhere 1 − 2 / (1 + e²ˣ)."""
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2_E))))
