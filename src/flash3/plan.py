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
    tiles: the backend's own configuration (None where it has none); notes: what a user should know, one sentence each.
    """

    backend: str
    problem: Problem
    run: Callable[..., None]
    tiles: Any = None
    notes: tuple[str, ...] = ()
