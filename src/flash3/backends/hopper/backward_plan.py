"""The backward half of the Hopper backend: what it supports, and how a call becomes one launch of its three kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...problem import Problem, Request
from ...sequences import Packed, SequenceKind, Sequences
from ..base import Gradients, Saved
from . import backward_launch
from .arguments import arrays_of, layout_of, needs_zeros, packed, refused, with_columns
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


Launch = Callable[..., None]
"""launch(q, k, v, out, d_out, lse, d_lse, sink, dq, dk, dv, d_sink, q_arrays, k_arrays), see flash3.plan.Plan."""


@dataclass
class Backward:
    """A plan's `run(request, saved, gradients)`, for requests of the plan's own problem, on the current stream."""

    problem: Problem
    tiles: BackwardTiles
    kernels: Callable[[BackwardSpec, BackwardTiles], Kernel]
    launches: dict[Layouts, Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        self.nothing = math.prod(p.out_shape) == 0 or p.sizes.batch == 0 or math.prod(p.k.shape) == 0

    def __call__(self, request: Request, saved: Saved, gradients: Gradients) -> None:
        g = gradients
        if self.nothing:
            _clear(g.dq, g.dk, g.dv)
            self._sink_alone(request, saved, g)
            return
        arrays = arrays_of(request.q_sequences), arrays_of(request.k_sequences)
        with torch.cuda.device_of(saved.out):
            dq, dk, dv = (
                torch.empty(t.shape, dtype=t.dtype, device=t.device) if grad is None else grad
                for t, grad in ((request.q, g.dq), (request.k, g.dk), (request.v, g.dv))
            )
            given = request.q, request.k, request.v, saved.out, g.d_out, saved.lse, g.d_lse, request.sink
            self._launch(request)(*given, dq, dk, dv, g.d_sink, *arrays)

    def prepare(self, request: Request) -> Launch | None:
        """See flash3.plan.Plan."""
        return None if self.nothing else self._launch(request)

    def _launch(self, request: Request) -> Launch:
        layouts = layout_of(request.q_sequences), layout_of(request.k_sequences)
        if layouts not in self.launches:
            self.launches[layouts] = self._make_launch(request, layouts)
        return self.launches[layouts]

    def _make_launch(self, request: Request, layouts: Layouts) -> Launch:
        """Microseconds count in what this returns: what the problem and the layouts decide is decided here."""
        p, tiles = self.problem, self.tiles
        spec = spec_of(p, *layouts)
        widened = needs_zeros(request.q.shape[-1], spec.qk_width, layouts, request.q.element_size())
        ragged_q, ragged_k = (layout.kind is not SequenceKind.DENSE for layout in layouts)
        records = self._blocks(request.q, request.q_sequences, tiles.q) * p.sizes.heads_q
        key_tiles = self._blocks(request.k, request.k_sequences, tiles.walk_keys)
        numbers = packed(backward_launch.numbers(p.sizes, p.mask, p.device.multiprocessors))
        on_device = {"device": request.q.device}
        new_statistics = partial(torch.empty, (records, statistics_words(tiles)), dtype=torch.float32, **on_device)
        new_sum = partial(torch.empty, (records, tiles.q * spec.qk_width), dtype=torch.float32, **on_device)
        new_order = partial(torch.empty, key_tiles, dtype=torch.int32, **on_device) if is_ranked(spec, tiles) else _nothing
        compiled: dict[bool, Kernel] = {}

        def kernel_for(lse_gradient: bool) -> Kernel:
            if lse_gradient not in compiled:
                compiled[lse_gradient] = self.kernels(replace(spec, lse_gradient=lse_gradient), tiles)
            return compiled[lse_gradient]

        def run(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None, sink: Tensor | None,
            dq: Tensor, dk: Tensor, dv: Tensor, d_sink: Tensor | None, q_arrays: Any, k_arrays: Any,
        ) -> None:  # fmt: skip
            if ragged_q:
                dq.zero_()  # rows of no sequence, which no kernel writes
            if ragged_k:
                dk.zero_()
                dv.zero_()
            if widened:
                q, k = with_columns(q, k, spec.qk_width)
            if d_lse is not None:
                d_lse = d_lse.float().contiguous()
            kernel, statistics = kernel_for(d_lse is not None), new_statistics()
            rest = lse.contiguous(), d_lse, sink, dq, dk, dv, statistics, new_sum(), new_order(), q_arrays, k_arrays, numbers
            try:
                kernel(q, k, v, out, d_out, *rest)
            except Exception:
                ready = refused(q, k, v, out, d_out)
                if ready is None:
                    raise
                kernel(*ready, *rest)
            if d_sink is not None:
                shares = statistics.view(p.sizes.heads_q, -1, statistics.shape[-1])[:, :, tiles.q + 1]
                d_sink.copy_(shares.sum(1))

        return run

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


def _clear(*grads: Tensor | None) -> None:
    for grad in grads:
        if grad is not None:
            grad.zero_()


def _nothing() -> None:
    """Stands where there is nothing to allocate."""
