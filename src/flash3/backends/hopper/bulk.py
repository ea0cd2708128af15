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
def bulk_send(target: cute.Pointer, source: cute.Pointer, barrier: cute.Pointer, block: Int32, num_bytes: cutlass.Constexpr[int]):
    """Contiguous shared memory → that of a block of the cluster, counted by its barrier. target and barrier: where they lie in this block.
    One thread; 16-byte aligned."""
    cute.arch.inline_ptx(
        "{ .reg .b32 there, counted; mapa.shared::cluster.u32 there, {$r0}, {$r3}; mapa.shared::cluster.u32 counted, {$r2}, {$r3};"
        " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [{$r1}], {$r4}, [counted]; }",
        read_only_args=[target.toint(), source.toint(), barrier.toint(), block, Int32(num_bytes)],
    )


@cute.jit
def arrive_at(barrier: cute.Pointer, block: Int32):
    """An arrival at the barrier of a block of the cluster. barrier: where it lies in this block. It says what has been read, not what was
    written: with cluster scope it would wait for all of the thread's reductions in global memory."""
    cute.arch.inline_ptx(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; mbarrier.arrive.shared::cluster.b64 _, [there]; }",
        read_only_args=[barrier.toint(), block],
    )


@cute.jit
def store(target: cute.Pointer, values: cute.Tensor):
    """Four float32 to global memory, 16-byte aligned."""
    cute.arch.inline_ptx(
        "st.relaxed.gpu.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target.toint(), values[0], values[1], values[2], values[3]],
    )


@cute.jit
def reduce_add(target: cute.Pointer, values: cute.Tensor):
    """Global += four float32, 16-byte aligned; no answer comes back."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target.toint(), values[0], values[1], values[2], values[3]],
    )


@cute.jit
def load_acquire(source: cute.Pointer):
    """An int32 in global memory that other blocks change."""
    return cute.arch.inline_ptx("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[source.toint()])


@cute.jit
def add_release(target: cute.Pointer, value: Int32):
    """Global int32 += value, after everything that this thread did before."""
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[target.toint(), value])


@cute.jit
def wait_for_phase(barrier: cute.Pointer, parity: Int32):
    """Until a phase of an mbarrier is complete. As PTX: what the compiler makes of its own wait it lays into the loop around, or not."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; @done bra end; bra again; end: }",
        read_only_args=[barrier.toint(), parity],
    )
