"""From a request to what kernels take: tuples of pointers and strides, numbers, and the KernelSpec. Knows no framework by name."""

from __future__ import annotations

import math
from typing import Any

from ...problem import DType, Problem
from ...sequences import Dense, Packed, Padded, Paged, Sequences
from . import heuristics
from .blocks import Arrays, Rows, Scales
from .tiles import Block, KernelSpec, MaskCode, Tiles

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-120
"""A smaller scale is 0: scores times it are, in float32."""
WITHOUT_SOFTCAP = 2.0**64
"""A softcap beyond this changes no score of 16-bit inputs: (s / c)² / 3 is lost in float32."""
LARGEST_FLOAT32 = 3.4e38
WIDE = 1 << 31
FIRST_WITH_TMA = (9, 0)
TMA_ALIGNMENT_BYTES = 16


def rows_of(x: Any, layout: Sequences | None) -> Rows:
    """A tensor ((row,) slot, head, column)."""
    row, slot, head = (0, *x.stride()[:2]) if isinstance(layout, Packed) else x.stride()[:3]
    if slot <= 0 or row % slot or (head % slot and head * (x.shape[-2] - 1) + x.shape[-1] > slot):
        return Rows(x, row, slot, head)
    return Rows(x, row, slot, head, row // slot, *((head // slot, 0) if head % slot == 0 else (0, head)))


def descriptor(x: Rows, block: Block, capability: tuple[int, int]) -> Any:
    """A TMA descriptor of a tensor as a matrix (Rows), or None where TMA cannot read it or there is none."""
    t, bytes_each = x.start, x.start.element_size()
    aligned = t.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and x.slot_stride * bytes_each % TMA_ALIGNMENT_BYTES == 0
    described = x.slot_stride > 0 and x.row_stride % x.slot_stride == 0 and (x.head_stride == 0 or x.tma_head + x.tma_column > 0)
    if capability < FIRST_WITH_TMA or block.page_size or block.dim < block.width or not (aligned and described) or t.numel() == 0:
        return None
    *rows, slots, heads, _ = t.shape
    count = (math.prod(rows) - 1) * x.tma_row + (heads - 1) * x.tma_head + slots
    if count >= WIDE:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    columns = (heads - 1) * x.tma_column + block.dim
    return TensorDescriptor(t, [count, columns], [x.slot_stride, 1], [block.block, block.width])


def lse_rows(x: Any, layout: Sequences) -> Rows:
    """A tensor ((row,) head, slot): an LSE."""
    row, head, slot = (0, *x.stride()) if isinstance(layout, Packed) else x.stride()
    return Rows(x, row, slot, head)


def arrays_of(layout: Sequences) -> Arrays:
    match layout:
        case Packed():
            return Arrays(layout.cu_seqlens, layout.used, None, None, None, 0)
        case Padded():
            return Arrays(None, layout.lengths, layout.leftpad, layout.batch_index, None, 0)
        case Paged():
            table = layout.page_table
            return Arrays(None, layout.lengths, layout.leftpad, layout.batch_index, table, table.stride(0))
        case Dense():
            return Arrays(None, None, None, None, None, 0)


def numbers_of(problem: Problem) -> tuple[int, ...]:
    """Lengths of dense sequences, and the mask's numbers. q_offset 0 may stand for "the last query meets the last key" (MaskCode)."""
    b = problem.mask.bounds(0, 0)
    return problem.sizes.q_len, problem.sizes.k_len, b.left, b.right, b.chunk, b.q_offset, b.k_offset


def softcap_of(problem: Problem) -> float:
    cap = problem.sizes.softcap
    return cap if 0 < cap < WITHOUT_SOFTCAP else 0.0


def forward_scales(problem: Problem) -> tuple[Scales, int]:
    """Scales, and the sign that Q takes. A scale of 0 sets the scores to 0 and counts as 1."""
    scale, cap = problem.sizes.scale, softcap_of(problem)
    if cap:
        return Scales(cap * LOG2_E, cap, _float32(scale / cap)), 1  # tanh takes the sign in
    if abs(scale) < SMALLEST_SCALE:
        return Scales(LOG2_E, 1.0, 0.0), 0
    return Scales(abs(scale) * LOG2_E, abs(scale), 0.0), 1 if scale > 0 else -1


def backward_scales(problem: Problem) -> tuple[Scales, int]:
    """Scales with the scale's own sign, which P takes in, and that sign (1 for 0: a factor to be multiplied with)."""
    scale, cap = problem.sizes.scale, softcap_of(problem)
    if cap:
        return Scales(cap * LOG2_E, cap, _float32(scale / cap)), 1
    return Scales(scale * LOG2_E, scale, 0.0), 1 if scale >= 0 else -1


def _float32(x: float) -> float:
    return max(-LARGEST_FLOAT32, min(LARGEST_FLOAT32, x))


def kernel_spec(problem: Problem, tiles: Tiles, sign: int, wide: bool, pack: int = 1, splits: int = 1) -> KernelSpec:
    spec, page_size = problem.spec, problem.sizes.page_size
    d, dv = spec.head_dim, spec.value_dim
    width, value_width = heuristics.width_of(d), heuristics.width_of(dv)
    return KernelSpec(
        queries=Block(block=tiles.rows, dim=d, width=width, wide=wide),
        keys=Block(block=tiles.keys, dim=d, width=width, page_size=page_size, wide=wide),
        values=Block(block=tiles.keys, dim=dv, width=value_width, page_size=page_size, wide=wide),
        outputs=Block(block=tiles.rows, dim=dv, width=value_width, wide=wide),
        mask=MaskCode.of(problem.mask),
        heads_per_kv=spec.heads_per_kv,
        precision="ieee" if spec.dtype is DType.FP32 else "tf32",
        softcap=softcap_of(problem) > 0,
        sign=sign,
        pack=pack,
        split=splits > 1,
        most_splits=1 << (splits - 1).bit_length(),
    )


def is_wide(*tensors: Any) -> bool:
    """Whether 256 rows of some tensor span 2³¹ elements or more."""
    return any(max(t.stride()) * 256 >= WIDE for t in tensors)
