"""Rings of shared memory between producer and consumers. The handles carry index and phase."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from .budget import WORK_STAGES
from .extents import Extent, tile_of
from .roles import WARPGROUP_THREADS
from .tiles import SequenceLayout, Tiles


def _threads(n: int):
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, n)


def tma_pipe(smem, consumers: int, stages: int, stage_bytes: int):
    """A stage is full when its bytes have arrived, empty when every warp of so many consumers has said so."""
    barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=_threads(1),
        consumer_group=_threads(4 * consumers),
        tx_count=stage_bytes,
        defer_sync=True,
    )


def own_stage(pipe, consumers: int, me: Int32):
    """Consumer end of a pipe with one stage for each consumer: always stage `me`, of which advance(consumers) is the next round."""
    return pipeline.PipelineConsumer(pipe, pipeline.PipelineState(consumers, Int32(0), me, Int32(0)), pipe.sync_object_empty.cg)


def work_pipe(smem, tiles: Tiles, words: int, spare_threads: int = 0):
    """The box of work tiles, its producer end (one warp) and its consumer end (all consumer threads, and so many others)."""
    box = smem.allocate_tensor(Int32, cute.make_layout((words, WORK_STAGES)), 16)
    barriers = smem.allocate_array(cutlass.Int64, 2 * WORK_STAGES)
    pipe = pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=WORK_STAGES,
        producer_group=_threads(32),
        consumer_group=_threads(WARPGROUP_THREADS * tiles.consumers + spare_threads),
        defer_sync=True,
    )
    return box, *pipe.make_participants()


@dataclass
class StagedLoad:
    """Producer end of a tile of rows: TMA into the next free stage."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # extents.rows_view
    buffer: cute.Tensor  # (rows, columns, stage)
    producer: pipeline.PipelineProducer
    tile: cutlass.Constexpr[tuple]
    layout: cutlass.Constexpr[SequenceLayout]

    @cute.jit
    def load(self, block: Int32, head: Int32, extent: Extent):
        slot = self.producer.acquire_and_advance()
        self.load_into(slot.index, slot.barrier, block, head, extent)

    @cute.jit
    def load_into(self, stage: Int32, barrier: cute.Pointer, block: Int32, head: Int32, extent: Extent):
        """Into a stage that is free; the barrier expects the bytes."""
        rows = tile_of(self.tensor, self.tile, block, 0, head, extent, self.layout)
        target, source = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.buffer, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(self.atom, source, target[None, stage], tma_bar_ptr=barrier)


@dataclass
class StagedRead:
    """Consumer end: a matmul operand over the stages, and the pipe that says when one is full."""

    operand: cute.Tensor
    consumer: pipeline.PipelineConsumer

    @cute.jit
    def wait(self):
        return self.consumer.wait_and_advance()
