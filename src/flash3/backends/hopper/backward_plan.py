"""The backward half of the Hopper backend: what it supports, and how a call becomes one launch of its three kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...problem import Problem, Request
from ...sequences import Packed, SequenceKind, Sequences
from ..base import Gradients, Saved
from . import backward_launch
from .arguments import arrays_of, layout_of, tma_ready, with_columns
from .backward_tiles import BackwardSpec, BackwardTiles, is_ranked, statistics_words
from .tiles import SequenceLayout

MOST_HEADS = 65535
"""The second dimension of a grid."""
Kernel = Callable[..., None]
Layouts = tuple[SequenceLayout, SequenceLayout]


def unsupported(problem: Problem) -> list[str]:
    """Why the backward cannot run, besides the reasons that hold for the forward too."""
    spec = problem.spec
    found = []
    if spec.out_dtype is not spec.dtype:
        found.append(f"its backward takes outputs of the inputs' dtype, got {spec.out_dtype.value} for {spec.dtype.value}")
    if spec.k_sequences is SequenceKind.PAGED:
        found.append("its backward has no paged keys")
    if problem.sizes.heads_q > MOST_HEADS:
        found.append(f"its backward has up to {MOST_HEADS} query heads, got {problem.sizes.heads_q}")
    return found


def spec_of(problem: Problem, q_layout: SequenceLayout, k_layout: SequenceLayout, lse_gradient: bool = False) -> BackwardSpec:
    return backward_launch.backward_spec(problem.spec, q_layout, k_layout, lse_gradient)


@dataclass
class Backward:
    """A plan's `run(request, saved, gradients)`, for requests of the plan's own problem, on the current stream."""

    problem: Problem
    tiles: BackwardTiles
    kernels: Callable[[BackwardSpec, BackwardTiles], Kernel]
    ready: dict[tuple[Layouts, bool], Kernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        self.nothing = math.prod(p.out_shape) == 0 or p.sizes.batch == 0 or math.prod(p.k.shape) == 0
        self.numbers = backward_launch.numbers(p.sizes, p.mask, p.device.multiprocessors)

    def __call__(self, request: Request, saved: Saved, gradients: Gradients) -> None:
        index = saved.out.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(request, saved, gradients)
            return
        layouts = layout_of(request.q_sequences), layout_of(request.k_sequences)
        self._clear(gradients, layouts)
        if self.nothing:
            self._sink_alone(request, saved, gradients)
            return
        spec = spec_of(self.problem, *layouts)
        q, k = with_columns(request.q, request.k, spec.qk_width, layouts)
        statistics, words = self._workspace(request, spec.qk_width)
        dq, dk, dv = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if g is None else g
            for t, g in ((request.q, gradients.dq), (request.k, gradients.dk), (request.v, gradients.dv))
        )
        d_lse = gradients.d_lse
        self._kernel(layouts, d_lse is not None)(
            *(tma_ready(t) for t in (q, k, request.v, saved.out, gradients.d_out)),
            saved.lse.contiguous(),
            None if d_lse is None else d_lse.float().contiguous(),
            request.sink,
            *(dq, dk, dv, statistics, words, self._order(request, spec)),
            *(arrays_of(s) for s in (request.q_sequences, request.k_sequences)),
            self.numbers,
        )
        if gradients.d_sink is not None:
            shares = statistics.view(self.problem.sizes.heads_q, -1, statistics.shape[-1])[:, :, self.tiles.q + 1]
            gradients.d_sink.copy_(shares.sum(1))

    def _kernel(self, layouts: Layouts, lse_gradient: bool) -> Kernel:
        found = self.ready.get((layouts, lse_gradient))
        if found is None:
            spec = spec_of(self.problem, *layouts, lse_gradient)
            found = self.ready[layouts, lse_gradient] = self.kernels(spec, self.tiles)
        return found

    def _clear(self, gradients: Gradients, layouts: Layouts) -> None:
        """What no kernel writes: rows of no sequence, or everything where there is nothing to do."""
        for grad, layout in ((gradients.dq, layouts[0]), (gradients.dk, layouts[1]), (gradients.dv, layouts[1])):
            if grad is not None and (self.nothing or layout.kind is not SequenceKind.DENSE):
                grad.zero_()

    def _sink_alone(self, request: Request, saved: Saved, gradients: Gradients) -> None:
        """No keys: O is 0 and L is the sink, so that only L's gradient reaches the sink."""
        if gradients.d_sink is None:
            return
        gradients.d_sink.zero_()
        if gradients.d_lse is not None and gradients.d_lse.numel():
            seen = gradients.d_lse.masked_fill(saved.lse == -torch.inf, 0)
            heads = seen.movedim(-2, 0).flatten(1)
            gradients.d_sink.copy_(heads.sum(1, dtype=torch.float64))

    def _blocks(self, rows: Tensor, sequences: Sequences, size: int) -> int:
        """blocklist.num_blocks, on the host."""
        batch = self.problem.sizes.batch
        return rows.shape[0] // size + batch if isinstance(sequences, Packed) else -(-rows.shape[1] // size) * batch

    def _order(self, request: Request, spec: BackwardSpec) -> Tensor | None:
        """Room for the ranks of the key tiles."""
        if not is_ranked(spec, self.tiles):
            return None
        num_tiles = self._blocks(request.k, request.k_sequences, self.tiles.kv)
        return torch.empty(num_tiles, dtype=torch.int32, device=request.k.device)

    def _workspace(self, request: Request, width: int) -> tuple[Tensor, Tensor]:
        """Statistics and the float32 sum of dQ, `width` columns of it: a record for each head and block of queries."""
        q, tiles = request.q, self.tiles
        records = self._blocks(q, request.q_sequences, tiles.q) * self.problem.sizes.heads_q
        statistics = torch.empty(records, statistics_words(tiles), dtype=torch.float32, device=q.device)
        return statistics, torch.empty(records, tiles.q * width, dtype=torch.float32, device=q.device)
