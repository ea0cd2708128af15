"""dS on its way from the consumer that makes it to those of its cluster that make dQ (Split.ROLES), and before it P, in the same place.

A stage has three mbarriers. `full`: dS of this block is written. `come`: in a cluster that of the other block has come, by a bulk copy out
of its shared memory. `free`: dQ's consumers of all blocks have read it; the other's has then read what came from here, so the copy is over.

No block may end while another one may still reach into its shared memory: all threads meet at the cluster's barrier first.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, pipeline

from .backward_barriers import sync_gradient
from .backward_tiles import BackwardSpec, BackwardTiles
from .bulk import arrive_at, bulk_send

WARPS = 4
"""Of dQ's consumer, each of which says when it has read dS."""


@dataclass
class Exchange:
    """The stages. at: the place of its holder."""

    dS: cute.Tensor  # (queries, keys, stage): this block's, then the other's
    full: cute.Pointer  # mbarriers, one for each stage
    come: cute.Pointer
    free: cute.Pointer
    rank: Int32  # of this block in its cluster
    at: pipeline.PipelineState
    spec: cutlass.Constexpr[BackwardSpec]
    tiles: cutlass.Constexpr[BackwardTiles]

    @cute.jit
    def advance(self):
        self.at.advance()

    @cute.jit
    def wait_free(self):
        cute.arch.mbarrier_wait(self.free + self.at.index, self.at.phase)

    @cute.jit
    def wait_full(self):
        cute.arch.mbarrier_wait(self.full + self.at.index, self.at.phase)

    @cute.jit
    def wait_come(self):
        cute.arch.mbarrier_wait(self.come + self.at.index, self.at.phase)

    @cute.jit
    def send(self, first_thread: Boolean, consumer: cutlass.Constexpr[int]):
        """All threads of the consumer that has written its dS into the stage."""
        size = self.tiles.q * self.tiles.kv * self.spec.dtype.bytes
        cute.arch.fence_view_async_shared()
        sync_gradient(consumer)
        if first_thread:
            if const_expr(self.tiles.cluster > 1):
                come = self.come + self.at.index
                mine, theirs = self.place(self.at.index), self.place(self.at.index + self.tiles.ds_stages)
                bulk_send(theirs, mine, come, self.rank ^ 1, size)
                cute.arch.mbarrier_arrive_and_expect_tx(come, size)
            cute.arch.mbarrier_arrive(self.full + self.at.index)

    def place(self, stage):
        return self.dS[None, None, stage].iterator

    @cute.jit
    def release(self):
        """All threads of dQ's consumer, which have read the stage."""
        free = self.free + self.at.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(free)
            if const_expr(self.tiles.cluster > 1):
                arrive_at(free, self.rank ^ 1)


def exchange_barriers(smem, tiles: BackwardTiles):
    """`full`, `come` and `free`; the first thread prepares them."""
    return tuple(smem.allocate_array(cutlass.Int64, tiles.ds_stages) for _ in range(3))


@cute.jit
def init_exchange(full: cute.Pointer, come: cute.Pointer, free: cute.Pointer, tiles: cutlass.Constexpr[BackwardTiles]):
    """One thread, before the block's barrier."""
    for i in cutlass.range_constexpr(tiles.ds_stages):
        cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init(come + i, 1)
        cute.arch.mbarrier_init(free + i, WARPS * tiles.cluster)
