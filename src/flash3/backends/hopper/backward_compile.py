"""(BackwardSpec, BackwardTiles) → machine code of the three kernels, without a tensor and without a GPU."""

import functools
from pathlib import Path

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...sequences import SequenceKind
from ...settings import settings
from .backward_operands import BackwardNumbers
from .backward_tiles import BackwardSpec, BackwardTiles, is_ranked, statistics_words
from .compile import TARGET, _arrays, _cache, _rows
from .gradient import Gradient
from .storage import ELEMENTS

SYMBOL = "flash3_backward"
"""Name of the function in an object file."""


def compile_backward(spec: BackwardSpec, tiles: BackwardTiles, options: str = TARGET):
    """The compiled function: f(q, k, v, out, d_out, lse, d_lse, sink, dq, dk, dv, statistics, dq_sum, order, q_arrays, k_arrays, numbers),
    on the framework's current stream.

    statistics: float32 (records, statistics_words), dq_sum: float32 (records, q · qk_width), both without contents; a record for each
    query head and block of queries (blocklist.num_blocks). order: int32, without contents, a number for each key tile
    (blocklist.num_blocks) where they are ranked, else None. Arrays are operands.Arrays (None: dense), numbers is BackwardNumbers.
    """
    batch, q_rows, k_rows, q_len, k_len, heads, kv_heads, records = (cute.sym_int() for _ in range(8))
    element, out = ELEMENTS[spec.dtype], ELEMENTS[spec.out_dtype]

    def compact(*shape):
        return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=16)

    shape = (heads, q_len) if spec.q_layout.kind is SequenceKind.PACKED else (q_rows, heads, q_len)

    def per_row():
        return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=4)

    def q_side(kind):
        return _rows(kind, spec.q_layout, q_rows, q_len, heads)

    def k_side():
        return _rows(element, spec.k_layout, k_rows, k_len, kv_heads)

    return cute.compile(
        Gradient(spec, tiles),
        q_side(element),
        k_side(),
        k_side(),
        q_side(out),
        q_side(out),
        per_row(),
        per_row() if spec.lse_gradient else None,
        cute.runtime.make_fake_compact_tensor(Float32, (heads,), assumed_align=4) if spec.sink else None,
        q_side(element),
        k_side(),
        k_side(),
        compact(records, statistics_words(tiles)),
        compact(records, tiles.q * spec.qk_width),
        cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if is_ranked(spec, tiles) else None,
        _arrays(spec.q_layout, batch),
        _arrays(spec.k_layout, batch),
        BackwardNumbers(*(Float32(1.0) for _ in range(3)), *(Int32(0) for _ in range(len(BackwardNumbers._fields) - 3))),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
        no_jit_engine=True,  # as in compile.compile_forward
    )


def build_object(spec: BackwardSpec, tiles: BackwardTiles, path: Path, options: str = TARGET) -> None:
    """Write the object file of a key."""
    compile_backward(spec, tiles, options).export_to_c(str(path), SYMBOL)


def load_object(path: Path):
    """The function in an object file: a raw TVM-FFI function."""
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return getattr(module, SYMBOL)


def kernel(spec: BackwardSpec, tiles: BackwardTiles):
    """The function of a key, ready to launch: compiled once, then kept in memory and on disk."""
    return _cache(settings.cache_dir).get((spec, tiles), functools.partial(build_object, spec, tiles), load_object)


def warm(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Have the kernels of a key on disk. False: they were there."""
    return _cache(settings.cache_dir).warm((spec, tiles), functools.partial(build_object, spec, tiles))
