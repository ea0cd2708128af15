"""Q as the A operand of Q·Kᵀ: read from shared memory by every matmul, or copied to registers once per tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import warp

from . import storage
from .tiles import ForwardSpec, QuerySource, Tiles


@dataclass
class SharedQueries:
    """Given back after the tile's last Q·Kᵀ."""

    fragment: cute.Tensor
    waiting: pipeline.PipelineConsumer
    releasing: pipeline.PipelineConsumer  # the same stage, one round behind
    consumers: cutlass.Constexpr[int]

    @cute.jit
    def take(self):
        self.waiting.wait()
        self.waiting.advance(self.consumers)

    @cute.jit
    def first_scores_done(self):
        pass

    @cute.jit
    def last_scores_done(self):
        self.releasing.release()
        self.releasing.advance(self.consumers)


@dataclass
class RegisterQueries:
    """Given back after the tile's first Q·Kᵀ, so that the next tile's Q is on its way while this one runs.

    Not before: only a finished matmul proves that the copy has been read. An arrival right after ldmatrix can overtake it, and then TMA
    writes the next tile's first rows under it (seen on an H200: a row in a million).
    """

    fragment: cute.Tensor
    waiting: pipeline.PipelineConsumer
    releasing: pipeline.PipelineConsumer
    consumers: cutlass.Constexpr[int]
    copy: cute.TiledCopy
    source: cute.Tensor

    @cute.jit
    def take(self):
        self.waiting.wait()
        self.waiting.advance(self.consumers)
        cute.copy(self.copy, self.source, self.copy.retile(self.fragment))

    @cute.jit
    def first_scores_done(self):
        self.releasing.release()
        self.releasing.advance(self.consumers)

    @cute.jit
    def last_scores_done(self):
        pass


def make_queries(mma, sQ, stage, thread, spec: ForwardSpec, tiles: Tiles):
    part = mma.get_slice(thread)
    if tiles.query_source is QuerySource.SHARED:
        fragment = mma.make_fragment_A(part.partition_A(sQ))[None, None, None, 0]
        return SharedQueries(fragment, stage, stage.clone(), tiles.consumers)
    fragment = part.make_fragment_A(part.partition_shape_A((tiles.q, spec.qk_width)))
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), storage.ELEMENTS[spec.dtype])
    copy = cute.make_tiled_copy_A(atom, mma)
    source = copy.get_slice(thread).partition_S(sQ)[None, None, None, 0]
    return RegisterQueries(fragment, stage, stage.clone(), tiles.consumers, copy, source)
