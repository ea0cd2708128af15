"""From a request to kernels: tuples of pointers and strides, numbers, KernelSpecs, grids. Knows no framework by name."""

from __future__ import annotations

import functools
import math
from typing import Any

from ...problem import DType, Problem, Request
from ...sequences import Dense, Packed, Padded, Paged, SequenceKind, Sequences
from ..base import ROW_ALIGNMENT_BYTES, Gradients, Saved
from . import backward as backward_kernels
from . import forward as forward_kernels
from . import heuristics
from .blocks import Arrays, Parts, Rows, Scales, Statistics
from .tiles import Block, KernelSpec, MaskCode, Tiles

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-120
"""A smaller scale is 0: scores times it are, in float32."""
WITHOUT_SOFTCAP = 2.0**64
"""A softcap beyond this changes no score of 16-bit inputs: (s / c)² / 3 is lost in float32."""
LARGEST_FLOAT32 = 3.4e38
WIDE = 1 << 31
FIRST_WITH_TMA = (9, 0)
COARSE = {DType.FP32: 64.0, DType.FP16: 1024.0, DType.BF16: 8192.0}
"""Up to here float32 holds an LSE well enough for gradients of this type."""


def rows_of(x: Any, layout: Sequences) -> Rows:
    """A tensor ((row,) slot, head, column)."""
    row, slot, head = (0, *x.stride()[:2]) if isinstance(layout, Packed) else x.stride()[:3]
    return Rows(x, row, slot, head, row // slot if slot > 0 and row % slot == 0 else 0)


def descriptor(x: Rows, block: Block, problem: Problem) -> Any:
    """A TMA descriptor of a tensor as Rows say, which gives zeros past column block.dim, or None where TMA cannot read it so."""
    t, bytes_each = x.start, x.start.element_size()
    if capability_of(problem) < FIRST_WITH_TMA or block.page_size or t.numel() == 0 or t.data_ptr() % ROW_ALIGNMENT_BYTES:
        return None
    *rows, slots, heads, _ = t.shape
    strides = x.head_stride if heads > 1 else x.slot_stride, x.slot_stride
    slots += (math.prod(rows) - 1) * x.tma_row
    if min(strides) <= 0 or math.gcd(*strides) * bytes_each % ROW_ALIGNMENT_BYTES or (x.row_stride and not x.tma_row) or slots >= WIDE:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, [heads, slots, block.dim], [*strides, 1], [1, block.block, block.width])


def lse_rows(x: Any, layout: Sequences) -> Rows:
    """A tensor ((row,) head, slot): an LSE, and what has its shape."""
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


def capability_of(problem: Problem) -> tuple[int, int]:
    """Of the GPU; where kernels are interpreted, of the oldest one."""
    return problem.device.capability or heuristics.OLDEST


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


def kernel_spec(problem: Problem, tiles: Tiles, sign: int, tensors: tuple[Any, ...], pack: int = 1, splits: int = 1) -> KernelSpec:
    """tensors: all that the kernel reads or writes by tiles."""
    return _kernel_spec(problem, tiles, sign, is_wide(*tensors), alignment(*tensors), pack, splits)


@functools.lru_cache(maxsize=1024)
def _kernel_spec(problem: Problem, tiles: Tiles, sign: int, wide: bool, align: int, pack: int, splits: int) -> KernelSpec:
    """Kept: it would be a third of a launch's time on the host."""
    spec, page_size = problem.spec, problem.sizes.page_size
    d, dv = spec.head_dim, spec.value_dim
    width, value_width = heuristics.width_of(d), heuristics.width_of(dv)
    return KernelSpec(
        queries=Block(block=tiles.rows, dim=d, width=width, wide=wide, align=align),
        keys=Block(block=tiles.keys, dim=d, width=width, page_size=page_size, wide=wide, align=align),
        values=Block(block=tiles.keys, dim=dv, width=value_width, page_size=page_size, wide=wide, align=align),
        outputs=Block(block=tiles.rows, dim=dv, width=value_width, wide=wide, align=align),
        mask=MaskCode.of(problem.mask),
        heads_per_kv=spec.heads_per_kv,
        precision="ieee" if spec.dtype is DType.FP32 else "tf32",
        softcap=softcap_of(problem) > 0,
        even=is_even(problem, tiles),
        sign=sign,
        pack=pack,
        split=splits > 1,
        most_splits=1 << (splits - 1).bit_length(),
    )


def is_even(problem: Problem, tiles: Tiles) -> bool:
    """KernelSpec.even. (If the first and the last row see a key, all do: the interval of visible keys moves with the row.)"""
    spec, z = problem.spec, problem.sizes
    if (
        {spec.q_sequences, spec.k_sequences} != {SequenceKind.DENSE}
        or z.q_len % tiles.rows
        or z.k_len % tiles.keys
        or z.q_len * z.k_len == 0
    ):
        return False
    return all(begin < end for begin, end in (problem.mask.visible(row, z.q_len, z.k_len) for row in (0, z.q_len - 1)))


def is_wide(*tensors: Any) -> bool:
    """Whether the rows of a tile of some tensor span 2³¹ elements or more."""
    return any(max(t.stride()) * heuristics.LARGEST_TILE >= WIDE for t in tensors)


def alignment(*tensors: Any) -> int:
    """What divides every stride of all of them, but the columns': the largest power of two of elements up to ROW_ALIGNMENT_BYTES."""
    strides = (stride for t in tensors for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return math.gcd(ROW_ALIGNMENT_BYTES // min(t.element_size() for t in tensors), *strides)


def _numbers(request: Request, problem: Problem) -> tuple[Any, ...]:
    """Both layouts, the lengths of dense sequences, and the mask's numbers (q_offset 0 may stand for MaskCode.ends_meet)."""
    b, z = problem.mask.bounds(0, 0), problem.sizes
    layouts = arrays_of(request.q_sequences), arrays_of(request.k_sequences)
    return (*layouts, z.q_len, z.k_len, b.left, b.right, b.chunk, b.q_offset, b.k_offset)


def _options(tiles: Tiles) -> dict[str, int]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def programs(problem: Problem, tiles: Tiles, pack: int) -> tuple[int, int]:
    """Tiles of the longest sequence, and heads that have tiles of their own."""
    return math.ceil(problem.sizes.q_len * pack / tiles.rows), problem.sizes.heads_q // pack


def forward(problem: Problem, tiles: Tiles, pack: int, request: Request, out: Any, lse: Any) -> None:
    """One launch."""
    at = request.q_sequences
    _forward(problem, tiles, pack, 1, request, rows_of(out, at), None if lse is None else lse_rows(lse, at), None)


def split_forward(problem: Problem, tiles: Tiles, pack: int, splits: int, request: Request, out: Any, lse: Any, scratch: Any) -> None:
    """Two launches. scratch: float32, O (splits, *out.shape), row_max and row_sum (splits, *lse_shape)."""
    at, z = request.q_sequences, problem.sizes
    O, row_max, row_sum = scratch
    parts = Parts(*lse_rows(row_max[0], at)[:4], row_sum, row_max.stride(0), O.stride(0))
    spec, scales = _forward(problem, tiles, pack, splits, request, rows_of(O[0], at), None, parts)
    forward_kernels.combine_kernel[(z.q_len * z.heads_q * z.batch,)](
        rows_of(O[0], at),
        parts,
        rows_of(out, at),
        None if lse is None else lse_rows(lse, at),
        request.sink,
        arrays_of(at),
        z.q_len,
        scales,
        z.heads_q,
        splits,
        spec,
    )


def _forward(
    problem: Problem, tiles: Tiles, pack: int, splits: int, request: Request, out: Rows, lse: Rows | None, parts: Parts | None
) -> tuple[KernelSpec, Scales]:
    scales, sign = forward_scales(problem)
    spec = kernel_spec(problem, tiles, sign, (request.q, request.k, request.v, out.start), pack, splits)
    k, v = rows_of(request.k, request.k_sequences), rows_of(request.v, request.k_sequences)
    blocks, heads = programs(problem, tiles, pack)
    forward_kernels.forward_kernel[(blocks * heads * problem.sizes.batch, splits)](
        rows_of(request.q, request.q_sequences),
        k,
        v,
        descriptor(k, spec.keys, problem),
        descriptor(v, spec.values, problem),
        out,
        lse,
        request.sink,
        parts,
        *_numbers(request, problem),
        scales,
        heads,
        blocks,
        spec,
        **_options(tiles),
    )
    return spec, scales


def prepare(problem: Problem, tiles: Tiles, request: Request, saved: Saved, gradients: Gradients, stats: Any) -> None:
    """Fill stats: row_max, log_sum and delta, (3, *lse_shape)."""
    at, z = request.q_sequences, problem.sizes
    scales, sign = backward_scales(problem)
    spec = kernel_spec(problem, tiles, sign, (request.q, request.k, saved.out, gradients.d_out))
    blocks, heads = programs(problem, tiles, pack=1)
    backward_kernels.prepare_kernel[(blocks * heads * z.batch,)](
        rows_of(request.q, at),
        rows_of(request.k, request.k_sequences),
        rows_of(saved.out, at),
        rows_of(gradients.d_out, at),
        lse_rows(saved.lse, at),
        None if gradients.d_lse is None else lse_rows(gradients.d_lse, at),
        request.sink,
        _statistics(stats, at),
        *_numbers(request, problem),
        scales,
        heads,
        blocks,
        COARSE[problem.spec.dtype],
        spec,
        num_warps=4,
        num_stages=1,
    )


def dkdv(problem: Problem, tiles: Tiles, request: Request, gradients: Gradients, stats: Any) -> None:
    """dK and dV, those that are wanted."""
    at, at_keys, z = request.q_sequences, request.k_sequences, problem.sizes
    (q, k, v, d_out), spec, scales = _operands(problem, tiles, request, gradients)
    blocks = math.ceil(z.k_len / tiles.keys)
    backward_kernels.dkdv_kernel[(blocks * z.heads_kv * z.batch,)](
        q,
        k,
        v,
        d_out,
        descriptor(q, spec.queries, problem),
        descriptor(d_out, spec.outputs, problem),
        *(None if x is None else rows_of(x, at_keys) for x in (gradients.dk, gradients.dv)),
        _statistics(stats, at),
        *_numbers(request, problem),
        scales,
        z.scale,
        z.heads_kv,
        blocks,
        spec,
        **_options(tiles),
    )


def dq(problem: Problem, tiles: Tiles, request: Request, gradients: Gradients, stats: Any) -> None:
    at, z = request.q_sequences, problem.sizes
    (q, k, v, d_out), spec, scales = _operands(problem, tiles, request, gradients)
    blocks, heads = programs(problem, tiles, pack=1)
    backward_kernels.dq_kernel[(blocks * heads * z.batch,)](
        q,
        k,
        v,
        d_out,
        descriptor(k, spec.keys, problem),
        descriptor(v, spec.values, problem),
        rows_of(gradients.dq, at),
        _statistics(stats, at),
        *_numbers(request, problem),
        scales,
        z.scale,
        heads,
        blocks,
        spec,
        **_options(tiles),
    )


def _operands(problem: Problem, tiles: Tiles, request: Request, gradients: Gradients) -> tuple[tuple[Rows, ...], KernelSpec, Scales]:
    """q, k, v and d_out, the KernelSpec and the scales of a backward kernel."""
    at, at_keys = request.q_sequences, request.k_sequences
    scales, sign = backward_scales(problem)
    made = (x for x in (gradients.dq, gradients.dk, gradients.dv) if x is not None)
    spec = kernel_spec(problem, tiles, sign, (request.q, request.k, request.v, gradients.d_out, *made))
    queries, keys = (rows_of(request.q, at), rows_of(gradients.d_out, at)), (rows_of(request.k, at_keys), rows_of(request.v, at_keys))
    return (queries[0], *keys, queries[1]), spec, scales


def _statistics(stats: Any, at: Sequences) -> Statistics:
    return Statistics(*lse_rows(stats[0], at)[:4], stats[1], stats[2], stats.stride(0))
