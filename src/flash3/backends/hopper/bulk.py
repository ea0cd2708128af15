"""Copies and reductions that the DSL has not in this form."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def bulk_load(target: cute.Pointer, source: cute.Pointer, barrier: cute.Pointer, num_bytes: cutlass.Constexpr[int]):
    """Contiguous global → shared memory, counted by the barrier. One thread; 16-byte aligned."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes), barrier.toint()],
    )


@cute.jit
def bulk_reduce_add(target: cute.Pointer, source: cute.Pointer, num_bytes: cutlass.Constexpr[int]):
    """Global += contiguous float32 in shared memory, in the current bulk group. One thread; 16-byte aligned."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes)],
    )


@cute.jit
def bulk_store(target: cute.Pointer, source: cute.Pointer, num_bytes: cutlass.Constexpr[int]):
    """Shared → contiguous global memory, in the current bulk group. One thread; 16-byte aligned."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes)],
    )


@cute.jit
def reduce_add(target: cute.Pointer, values: cute.Tensor):
    """Global += four float32, 16-byte aligned; no answer comes back."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target.toint(), values[0], values[1], values[2], values[3]],
    )


@cute.jit
def store_or_add(target: cute.Pointer, values: cute.Tensor, errand: Int32):
    """Four float32, 16-byte aligned, in global memory: += them with errand 0, = them with 1, else nothing. Not a branch, so that matmuls
    may be on their way meanwhile."""
    cute.arch.inline_ptx(
        "{ .reg .pred store, add; setp.eq.s32 add, {$r5}, 0; setp.eq.s32 store, {$r5}, 1;"
        " @store st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
        " @add red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[target.toint(), values[0], values[1], values[2], values[3], errand],
    )


@cute.jit
def copy_async(target: cute.Pointer, source: cute.Pointer):
    """16 aligned bytes, global → shared memory, past L1, in the thread's current group of copies."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target.toint(), source.toint()])


@cute.jit
def transposed_8x8(pair: Int32):
    """A warp's 8 × 8 matrix of 16-bit numbers, lane l with (row l/4, columns 2·(l mod 4) + {0, 1}), transposed."""
    return cute.arch.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair])


@cute.jit
def load_acquire(source: cute.Pointer):
    """An int32 in global memory that other blocks change."""
    return cute.arch.inline_ptx("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[source.toint()])


@cute.jit
def add_release(target: cute.Pointer, value: Int32):
    """Global int32 += value, after everything that this thread did before."""
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[target.toint(), value])
