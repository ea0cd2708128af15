"""What crosses the border into the backward's kernels, one dataclass for each; and the numbers that the host passes along."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from .extents import SequenceArrays
from .operands import MaskNumbers


class BackwardNumbers(NamedTuple):
    """Run-time numbers of a call, in the order in which the host passes them."""

    scale: Float32
    scale_log2: Float32  # scores (with a softcap: their tanh) times this are exponents of two
    tanh_scale: Float32  # with a softcap 2·log2(e)·scale/softcap, else unused
    left: Int32  # window widths, mask.UNBOUNDED where there is no edge
    right: Int32
    chunk: Int32
    q_offset: Int32  # position of query row 0, of the row that meets the last key when bottom_right is 1
    k_offset: Int32
    bottom_right: Int32  # 1: k_len - q_len of each sequence is added to q_offset
    multiprocessors: Int32


@dataclass
class BackwardSizes:
    """Of a launch. Rows: of a dense or padded sequence, of all packed ones together."""

    q_rows: Int32
    k_rows: Int32
    batch: Int32
    kv_heads: Int32
    q_blocks: Int32  # blocks of queries in the batch (blocklist), for each head
    columns_ahead: Int32  # backward_clear


@dataclass
class RowOperands:
    """Of backward_prepare. Tensors as the framework has them: (batch, rows, heads, columns), packed (rows, heads, columns)."""

    q: cute.Tensor
    k: cute.Tensor
    out: cute.Tensor
    d_out: cute.Tensor
    lse: cute.Tensor  # float32 (batch, heads, rows), packed (heads, rows)
    d_lse: object  # like lse, or None
    sink: object  # float32 (heads,) or None
    statistics: cute.Tensor  # float32 (heads · q_blocks, statistics_words)
    dq: cute.Tensor  # like q: second parts of L₂ until it is written
    dq_sum: cute.Tensor  # float32 (heads · q_blocks, q · qk_width): dQ / scale, in the order of the matmul's registers
    order: object  # int32 (key tiles,), or None: backward_rank
    q_arrays: SequenceArrays
    k_arrays: SequenceArrays
    sizes: BackwardSizes
    mask: MaskNumbers
    scale_log2: Float32
    tanh_scale: Float32


@dataclass
class FinishOperands:
    """Of backward_finish."""

    dq: cute.Tensor  # like q
    dq_sum: cute.Tensor
    q_arrays: SequenceArrays
    sizes: BackwardSizes
    scale: Float32


@dataclass
class BackwardOperands:
    """Of the main kernel. TMA tensors are extents.rows_view's."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    do: cpasync.TmaInfo
    half_of_k: object  # K in tiles of half its columns; None without clusters
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo
    dq: cute.Tensor  # like q
    statistics: cute.Tensor
    dq_sum: cute.Tensor
    order: object
    q_arrays: SequenceArrays
    k_arrays: SequenceArrays
    sizes: BackwardSizes
    mask: MaskNumbers
    scale: Float32
    scale_log2: Float32
    tanh_scale: Float32
