"""Views of accumulators, and their conversion. An accumulator of wgmma is ((2, 2, N/8), M, N'): a thread holds two rows, eight apart,
and of each the columns 8j, 8j+1 from its first."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

ROWS_PER_THREAD = 2
ROW_STEP = 8
"""Between a thread's two rows."""
LANES_PER_ROW = 4


def as_rows(acc):
    """The accumulator as (rows, columns)."""
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], shape[0][2], shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], stride[0][2], stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def accumulator(registers, column: int, columns: int):
    """So many columns of 64 rows, from a multiple of eight, as an accumulator of wgmma. Its registers, in their order, also are those
    of an A operand once converted: P is S."""
    return cute.make_tensor(registers.iterator + column // 2, cute.make_layout(((2, 2, columns // 8), 1, 1)))


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor):
    """float32 → 16 bit, two at a time: TensorSSA.to() does not always pack."""
    op = "cvt.rn.bf16x2.f32" if const_expr(target.element_type is BFloat16) else "cvt.rn.f16x2.f32"
    packed = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(source) // 2):
        packed[i] = cute.arch.inline_ptx(
            op + " {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[source[2 * i], source[2 * i + 1]]
        )


@cute.jit
def scale_rows(acc: cute.Tensor, factor: cute.Tensor):
    rows = as_rows(acc)
    for r in cutlass.range_constexpr(cute.size(factor)):
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] = rows[r, c] * factor[r]


@cute.jit
def rescale(acc: cute.Tensor, factor: cute.Tensor):
    """Skipped where no row of the warp needs it."""
    if not cute.arch.vote_all_sync(factor[0] == Float32(1.0) and factor[1] == Float32(1.0)):
        scale_rows(acc, factor)


@cute.jit
def scale_rows_or_clear(acc: cute.Tensor, factor: cute.Tensor):
    """Where the factor is 0, whatever was there becomes 0."""
    rows = as_rows(acc)
    for r in cutlass.range_constexpr(cute.size(factor)):
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] = Float32(0.0) if factor[r] == Float32(0.0) else rows[r, c] * factor[r]
