"""What crosses the border into the kernel, as one dataclass; and the numbers that the host passes along."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from .extents import SequenceArrays


class Numbers(NamedTuple):
    """Run-time numbers of a call, in the order in which the host passes them."""

    scale_log2: Float32  # scores times this are exponents of two: |scale|·log2(e), with a softcap softcap·log2(e)
    tanh_scale: Float32  # with a softcap 2·log2(e)·scale/softcap, else unused
    left: Int32  # window widths, mask.UNBOUNDED where there is no edge
    right: Int32
    chunk: Int32
    q_offset: Int32  # position of query row 0, of the row that meets the last key when bottom_right is 1
    k_offset: Int32
    bottom_right: Int32  # 1: k_len - q_len of each sequence is added to q_offset
    head_group: Int32  # of Sizes.heads, how many are visited together, so that their K and V stay in L2
    multiprocessors: Int32
    first_level: Int32  # heuristics.first_level


class Arrays(NamedTuple):
    """One side's arrays in host order: extents.SequenceArrays. None where the layout has none."""

    starts: cute.Tensor | None
    lengths: cute.Tensor | None
    leftpad: cute.Tensor | None
    batch_index: cute.Tensor | None


@dataclass
class Sizes:
    """Of a launch."""

    q_len: Int32  # of a dense sequence
    k_len: Int32
    heads: Int32  # query heads, or groups of those that share a tile
    batch: Int32
    head_group: Int32
    first_level: object  # of queries whose lengths only the device knows; else None


@dataclass
class MaskNumbers:
    left: Int32
    right: Int32
    chunk: Int32
    q_offset: Int32
    k_offset: Int32
    bottom_right: Int32


@dataclass
class Operands:
    """The one argument of the kernel. TMA tensors are extents.rows_view's."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    o: cpasync.TmaInfo
    out: object  # O itself, where rows of no sequence are to be cleared; else None
    lse: object  # float32 tensor (batch, heads, q_len), packed (heads, rows); None where not asked for
    sink: object  # float32 tensor (heads,) or None
    counter: cute.Tensor  # int32, 0 at launch and again at its end
    q_arrays: SequenceArrays
    k_arrays: SequenceArrays
    sizes: Sizes
    mask: MaskNumbers
    scale_log2: Float32
    tanh_scale: Float32
