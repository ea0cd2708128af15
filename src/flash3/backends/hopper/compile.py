"""(ForwardSpec, Tiles) → machine code, without a tensor and without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from .forward import Forward
from .operands import Numbers
from .storage import ELEMENTS
from .tiles import ForwardSpec, Tiles

TARGET = "--enable-tvm-ffi --gpu-arch sm_90a"


def _rows(element, batch, rows, heads):
    """(batch, rows, heads, columns) with any strides that are multiples of 16 bytes, columns contiguous."""
    step = 128 // element.width
    columns = cute.sym_int(divisibility=8)
    strides = tuple(cute.sym_int64(divisibility=step) for _ in range(3))
    return cute.runtime.make_fake_tensor(element, (batch, rows, heads, columns), (*strides, 1), assumed_align=16)


def compile_forward(spec: ForwardSpec, tiles: Tiles, options: str = TARGET):
    """The compiled function: f(q, k, v, out, lse, sink, counter, numbers), on torch's current stream."""
    batch, q_len, k_len, heads, kv_heads = (cute.sym_int() for _ in range(5))
    element, out = ELEMENTS[spec.dtype], ELEMENTS[spec.out_dtype]
    lse = sink = None
    if spec.lse:
        lse = cute.runtime.make_fake_compact_tensor(Float32, (batch, heads, q_len), stride_order=(2, 1, 0), assumed_align=4)
    if spec.sink:
        sink = cute.runtime.make_fake_compact_tensor(Float32, (heads,), assumed_align=4)
    numbers = Numbers(Float32(1.0), Float32(1.0), *(Int32(0) for _ in range(len(Numbers._fields) - 2)))
    return cute.compile(
        Forward(spec, tiles),
        _rows(element, batch, q_len, heads),
        _rows(element, batch, k_len, kv_heads),
        _rows(element, batch, k_len, kv_heads),
        _rows(out, batch, q_len, heads),
        lse,
        sink,
        cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4),
        numbers,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
