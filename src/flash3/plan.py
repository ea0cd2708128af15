"""What a backend intends to do with one problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .problem import Problem


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A chosen backend with its tiles, ready to run.

    run: forward, `run(request, out, lse)` fills out (problem.out_shape, out_dtype) and lse (problem.lse_shape, float32; None where not
    asked for). Backward, `run(request, saved, grads)`: see backends.base.
    prepare: where the backend has a way without a Request: `prepare(request)` decides once what no tensor's values can change, and returns
    a function for calls like this request in all but values; None: not for such requests. Forward it is launch(q, k, v, out, lse, sink,
    q_arrays, k_arrays), backward launch(q, k, v, out, d_out, lse, d_lse, sink, dq, dk, dv, d_sink, q_arrays, k_arrays): there d_out may
    have any strides but rows must be contiguous, and d_lse and d_sink may be None. Tensors are on the current device. q_arrays, k_arrays:
    None for a dense side, else (cu_seqlens, lengths, leftpad, batch_index), each a tensor or None.
    tiles: the backend's own configuration (None where it has none); notes: what a user should know, one sentence each.
    """

    backend: str
    problem: Problem
    run: Callable[..., None]
    prepare: Callable[..., Callable[..., None] | None] | None = None
    tiles: Any = None
    notes: tuple[str, ...] = ()
