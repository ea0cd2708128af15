"""Plans remembered by metadata: a call like an earlier one skips description, validation and dispatch.

Everything that `Problem.of` looks at is in a key (shapes, strides, types, devices, options), so a hit means that the same checks passed
before and the same backend was chosen. Values (lengths, page tables) are no metadata: they are checked at every call.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...plan import Plan
from ...problem import Problem, Request
from ...settings import settings
from .describe import describe, dtype_of

MOST_PLANS = 4096
"""When so many different calls are remembered, all are forgotten: a program with ever new shapes must not grow without end."""


def undisturbed(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast stops here: a backend computes in the types that the request names."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Prepared:
    """A plan, and what its outputs look like."""

    plan: Plan
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    lse_shape: tuple[int, ...] | None

    def run(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """The forward: out, and the LSE if it was asked for."""
        device = request.q.device
        out = torch.empty(self.out_shape, dtype=self.out_dtype, device=device)
        lse = None if self.lse_shape is None else torch.empty(self.lse_shape, dtype=torch.float32, device=device)
        with undisturbed(device):
            self.plan.run(request, out, lse)
        return out, lse


_plans: dict[tuple[Any, ...], Prepared] = {}


def _surroundings() -> tuple[Any, ...]:
    """What decides besides the call. Another registry or dispatcher is another key."""
    return (settings.current("backend"), settings.current("tuned"), dispatch.choose, *dispatch.BACKENDS)


def prepared(a: Any, request: Request) -> Prepared:
    """The plan of a request, which came from `a`, an `operators.Arguments`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `Problem.of` and `dispatch.choose`.
    """
    metadata = [(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in a]
    key = (*metadata, request.lse, request.task, *_surroundings())
    found = _plans.get(key)
    if found is None:
        problem = Problem.of(request, describe)
        plan = dispatch.choose(problem, a.backend)
        lse_shape = problem.lse_shape if request.lse else None
        found = Prepared(plan, problem.out_shape, dtype_of(problem.spec.out_dtype), lse_shape)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = found
    return found
