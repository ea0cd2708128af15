"""From the caller's tensors and sequences to what compiled functions take of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...sequences import Dense, Packed, Padded, SequenceKind, Sequences
from ..base import ROW_ALIGNMENT_BYTES, starts_aligned
from .tiles import DENSE, SequenceLayout

BOX_BYTES = 128
"""The widest part of a row that TMA brings at once, where the tile's rows are a multiple of it."""


def layout_of(sequences: Sequences) -> SequenceLayout:
    """What the kernel must know of how sequences lie."""
    match sequences:
        case Dense():
            return DENSE
        case Packed():
            return SequenceLayout(kind=sequences.kind, used=sequences.used is not None)
        case Padded():
            pads, index = sequences.leftpad is not None, sequences.batch_index is not None
            return SequenceLayout(kind=sequences.kind, leftpad=pads, batch_index=index)
    raise NotImplementedError(f"no kernel reads {type(sequences).__name__} sequences")


def arrays_of(sequences: Sequences) -> tuple[Tensor | None, ...] | None:
    """operands.Arrays."""
    match sequences:
        case Packed():
            return sequences.cu_seqlens, sequences.used, None, None
        case Padded():
            return None, sequences.lengths, sequences.leftpad, sequences.batch_index
    return None


def is_straight(strides: tuple[int, ...], element_bytes: int) -> bool:
    """Whether TMA takes these strides as they are."""
    step = ROW_ALIGNMENT_BYTES // element_bytes
    return strides[-1] == 1 and all(stride % step == 0 for stride in strides[:-1])


def tma_ready(t: Tensor) -> Tensor:
    """As TMA can read it: a copy only where rows do not start at multiples of 16 bytes, or columns are apart (which only a hook on saved
    tensors can bring about)."""
    if t.stride(-1) != 1 or not starts_aligned(t):
        return t.clone(memory_format=torch.contiguous_format)
    if is_straight(t.stride(), t.element_size()):
        return t
    step = ROW_ALIGNMENT_BYTES // t.element_size()
    # Dimensions of size 1 may carry any stride; the kernel wants one that TMA could use.
    strides = [s if n > 1 else step * max(1, t.shape[-1]) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return t.as_strided(t.shape, (*strides, 1))


def refused(*given: Tensor) -> list[Tensor] | None:
    """Tensors that a compiled function has refused, as TMA can read them; None where nothing is wrong with them. It refuses pointers and
    strides that TMA cannot take before it launches anything, so nobody has to look first."""
    ready = [tma_ready(t) for t in given]
    return None if all(a is b for a, b in zip(ready, given, strict=True)) else ready


def needs_columns(columns: int, width: int, layout: SequenceLayout, element_bytes: int) -> bool:
    """Whether TMA must not read such rows in tiles `width` columns wide: some box of them would lie past the last column as a whole, and
    of ragged tensors it then reads where nothing is mapped (extents.py)."""
    box = BOX_BYTES // element_bytes
    return layout.kind is not SequenceKind.DENSE and width % box == 0 and columns <= width - box


def needs_zeros(columns: int, width: int, layouts: tuple[SequenceLayout, SequenceLayout], element_bytes: int) -> bool:
    """Whether queries and keys, of which both must have the same number of columns, get columns of zeros."""
    return any(needs_columns(columns, width, layout, element_bytes) for layout in layouts)


def with_columns(q: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Copies of queries and keys with zeros at the end of each row, whose rows TMA may read in tiles `width` columns wide."""
    more = width - q.shape[-1]
    return torch.nn.functional.pad(q, (0, more)), torch.nn.functional.pad(k, (0, more))


def packed(numbers: tuple[float | int, ...]) -> Any:
    """As TVM-FFI keeps a tuple, so that it need not be made at every call."""
    from tvm_ffi import convert

    return convert(numbers)
