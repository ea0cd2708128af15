"""Named barriers, by event, and the turns that consumers take."""

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .roles import WARPGROUP_THREADS


class BarrierId(enum.IntEnum):
    """Barrier 0 belongs to the whole block. The others are families: id + consumer number."""

    BLOCK = 0
    TURN = 1  # consumer i may issue its matmuls
    OUTPUT = 8  # consumer i's threads, around its rows of O in shared memory
    AGREE = 12  # consumer i's threads: whether one of them has found something


@dataclass
class Turn:
    """Ping-pong: consumers issue matmuls in a fixed cycle. Who waits and who arrives are two warpgroups."""

    me: Int32
    next: Int32

    @cute.jit
    def take(self):
        cute.arch.barrier(barrier_id=BarrierId.TURN + self.me, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def pass_on(self):
        cute.arch.barrier_arrive(barrier_id=BarrierId.TURN + self.next, number_of_threads=2 * WARPGROUP_THREADS)


@dataclass
class NoTurn:
    """Everybody issues when ready."""

    me: Int32
    next: Int32

    @cute.jit
    def take(self):
        pass

    @cute.jit
    def pass_on(self):
        pass


@cute.jit
def sync_output(consumer: Int32):
    """All 128 threads of one consumer."""
    cute.arch.barrier(barrier_id=BarrierId.OUTPUT + consumer, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def any_above(consumer: Int32, x: Float32, limit: cutlass.Constexpr[float]):
    """Whether x > limit, or x is not a number, in any thread of a consumer."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.gtu.f32 p, {$r0}, {$r1}; barrier.cta.red.or.pred q, {$r2}, {$r3}, p; selp.s32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[x, Float32(limit), BarrierId.AGREE + consumer, Int32(WARPGROUP_THREADS)],
    )
    return cute.arch.vote_any_sync(found != 0)  # tells ptxas that warps do not split here
