"""(ForwardSpec, Tiles) → machine code, without a tensor and without a GPU; and the compiled function of a key, from the cache."""

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

import cutlass.cute as cute
from cutlass import Float32, Int32

from ... import mask, problem, sequences
from ...kernel_cache import KernelCache, default_folder
from ...sequences import SequenceKind
from ...settings import settings
from .forward import Forward
from .operands import Arrays, Numbers
from .storage import ELEMENTS
from .tiles import ForwardSpec, SequenceLayout, Tiles

TARGET = "--enable-tvm-ffi --gpu-arch sm_90a"
SYMBOL = "flash3_forward"
"""Name of the function in an object file."""


def _rows(element, layout: SequenceLayout, batch, rows, heads):
    """(batch, rows, heads, columns), packed (rows, heads, columns): any strides of multiples of 16 bytes, columns contiguous."""
    step = 128 // element.width
    shape = (rows, heads, cute.sym_int(divisibility=8))
    if layout.kind is not SequenceKind.PACKED:
        shape = (batch, *shape)
    strides = (*(cute.sym_int64(divisibility=step) for _ in shape[:-1]), 1)
    return cute.runtime.make_fake_tensor(element, shape, strides, assumed_align=16)


def _arrays(layout: SequenceLayout, batch) -> Arrays | None:
    if layout.kind is SequenceKind.DENSE:
        return None

    def numbers(n):
        return cute.runtime.make_fake_compact_tensor(Int32, (n,), assumed_align=4)

    packed = layout.kind is SequenceKind.PACKED
    return Arrays(
        numbers(cute.sym_int()) if packed else None,
        numbers(batch) if layout.used or layout.kind is SequenceKind.PADDED else None,
        numbers(batch) if layout.leftpad else None,
        numbers(batch) if layout.batch_index else None,
    )


def compile_forward(spec: ForwardSpec, tiles: Tiles, options: str = TARGET):
    """The compiled function, to be exported:

    f(q, k, v, out, lse, sink, counter, q_arrays, k_arrays, numbers), on the framework's current stream.

    q_arrays and k_arrays are operands.Arrays (None: dense), numbers is operands.Numbers; None where the spec has nothing.
    """
    batch, q_rows, k_rows, q_len, k_len, heads, kv_heads = (cute.sym_int() for _ in range(7))
    element, out = ELEMENTS[spec.dtype], ELEMENTS[spec.out_dtype]
    lse = sink = None
    if spec.lse:
        shape = (heads, q_len) if spec.q_layout.kind is SequenceKind.PACKED else (q_rows, heads, q_len)
        order = tuple(range(len(shape)))[::-1]
        lse = cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=4)
    if spec.sink:
        sink = cute.runtime.make_fake_compact_tensor(Float32, (heads,), assumed_align=4)
    numbers = Numbers(Float32(1.0), Float32(1.0), *(Int32(0) for _ in range(len(Numbers._fields) - 2)))
    return cute.compile(
        Forward(spec, tiles),
        _rows(element, spec.q_layout, q_rows, q_len, heads),
        _rows(element, spec.k_layout, k_rows, k_len, kv_heads),
        _rows(element, spec.k_layout, k_rows, k_len, kv_heads),
        _rows(out, spec.q_layout, q_rows, q_len, heads),
        lse,
        sink,
        cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4),
        _arrays(spec.q_layout, batch),
        _arrays(spec.k_layout, batch),
        numbers,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
        no_jit_engine=True,  # nothing is called here: without it the DSL, on a GPU machine, generates and links host code once more
    )


def build_object(spec: ForwardSpec, tiles: Tiles, path: Path, options: str = TARGET) -> None:
    """Write the object file of a key."""
    compile_forward(spec, tiles, options).export_to_c(str(path), SYMBOL)


def load_object(path: Path):
    """The function in an object file: a raw TVM-FFI function."""
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return getattr(module, SYMBOL)


@functools.cache
def source_hash() -> str:
    """Of every file that the generated code depends on: all of this folder but those that only choose among kernels and call them."""
    kernels = [f for f in sorted(Path(__file__).parent.glob("*.py")) if not f.name.endswith(("plan.py", "space.py"))]
    files = [*kernels, *(Path(m.__file__) for m in (mask, problem, sequences))]
    text = hashlib.sha256()
    for file in files:
        text.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return text.hexdigest()


def toolkit() -> str:
    """The CUDA toolkit inside of the DSL, cu12 or cu13: the newest installed one that the driver supports; without a driver, the newest."""
    from cutlass._mlir._mlir_libs import _cutlass_ir

    return Path(_cutlass_ir.__file__).name.split(".")[1]


def fingerprint() -> str:
    """What the code of a key depends on besides the key."""
    versions = [importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    # No Python version: an object holds machine code only. No driver version either: it decides about the toolkit, and nothing else.
    return " ".join([source_hash(), *versions, toolkit(), platform.machine(), TARGET])


@functools.cache
def _cache(folder: str | None) -> KernelCache:
    return KernelCache(Path(folder) if folder else default_folder(), fingerprint())


def kernel(spec: ForwardSpec, tiles: Tiles):
    """The function of a key, ready to launch: compiled once, then kept in memory and on disk."""
    return _cache(settings.cache_dir).get((spec, tiles), functools.partial(build_object, spec, tiles), load_object)


def is_compiled(spec, tiles) -> bool:
    """Whether the kernel of a key, forward or backward, is in the cache."""
    return _cache(settings.cache_dir).has((spec, tiles))


def warm(spec: ForwardSpec, tiles: Tiles) -> bool:
    """Have the kernel of a key on disk. False: it was there."""
    return _cache(settings.cache_dir).warm((spec, tiles), functools.partial(build_object, spec, tiles))
