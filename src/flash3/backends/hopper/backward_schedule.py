"""Tiles of keys for persistent blocks: their numbers come from a counter in global memory. The first one too, so that whoever runs has none
behind one that waits for room: tiles wait for those before them (backward_clear).

The producer's end takes the tickets and tells the consumers through shared memory. The counter is a word of the first statistics record:
backward_prepare leaves it at 0.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline


@dataclass
class KeyDispatcher:
    """The producer's end. `prefetch` takes the ticket before the last loads of a tile, so that it is there when they are issued."""

    index: Int32
    ticket: Int32
    box: cute.Tensor  # (word, stage) in shared memory
    producer: pipeline.PipelineProducer
    counter: cute.Pointer
    lane: Int32

    @cute.jit
    def prefetch(self):
        ticket = Int32(0)
        if self.lane == 0:
            ticket = cute.arch.atomic_add(self.counter, Int32(1))
        self.ticket = ticket

    @cute.jit
    def advance(self):
        self.send(cute.arch.shuffle_sync(self.ticket, 0))

    @cute.jit
    def send(self, index: Int32):
        self.index = index
        slot = self.producer.acquire_and_advance()
        if self.lane == 0:
            self.box[0, slot.index] = index
        cute.arch.sync_warp()
        slot.commit()


@dataclass
class KeyFollower:
    """A consumer's end."""

    index: Int32
    box: cute.Tensor
    consumer: pipeline.PipelineConsumer

    @cute.jit
    def advance(self):
        slot = self.consumer.wait_and_advance()
        self.index = self.box[0, slot.index]
        slot.release()
