"""Named barriers of the backward, by event."""

import enum

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .backward_tiles import CONSUMERS
from .roles import WARPGROUP_THREADS


class BackwardBarrierId(enum.IntEnum):
    """Barrier 0 belongs to the whole block. GRADIENT, SLOT_FREE, SLOT_FULL, and TURN are families: id + consumer number. What consumers
    in turn, those with a sender and those with roles use for themselves may have the same numbers."""

    BLOCK = 0
    SCORE_GRADIENTS = 1  # dS of both consumers is in shared memory
    KEYS_READ = 2  # all consumers have read K for the last time
    GRADIENT = 3  # consumer i's threads, around its rows of dK and dV in shared memory
    SLOT_FREE = 5  # consumer i's half of dQ may be overwritten
    SLOT_FULL = 7  # consumer i's half of dQ is complete
    TURN = 5  # Order.IN_TURN, which has no sender: consumer i may issue its matmuls
    VALUES_READ = 1  # Split.ROLES: V has been read for the last time
    PROBABILITIES = 5  # Split.ROLES: P is in stage j of dS's place, id + j
    WRITTEN = 8  # Order.IN_TURN: consumer i has written its half of dS into stage j, id + 2i + j
    ADDED = 7  # without a sender: both consumers have added the last of a tile's dQ (backward_behind)
    READ = 12  # Order.IN_TURN: consumer i has read both halves in stage j, id + 2i + j


@cute.jit
def sync_consumers(event, consumers: cutlass.Constexpr[int] = CONSUMERS):
    """All threads of so many consumers."""
    cute.arch.barrier(barrier_id=event, number_of_threads=consumers * WARPGROUP_THREADS)


@cute.jit
def arrive_consumers(event, consumers: cutlass.Constexpr[int] = CONSUMERS):
    """sync_consumers for who need not wait."""
    cute.arch.barrier_arrive(barrier_id=event, number_of_threads=consumers * WARPGROUP_THREADS)


@cute.jit
def sync_gradient(consumer: Int32):
    """All 128 threads of one consumer."""
    cute.arch.barrier(barrier_id=BackwardBarrierId.GRADIENT + consumer, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def say_added():
    """A consumer's threads."""
    cute.arch.barrier_arrive(barrier_id=BackwardBarrierId.ADDED, number_of_threads=CONSUMERS * WARPGROUP_THREADS + 32)


@cute.jit
def wait_added():
    """The warp that waits for them."""
    cute.arch.barrier(barrier_id=BackwardBarrierId.ADDED, number_of_threads=CONSUMERS * WARPGROUP_THREADS + 32)
