"""Calls of built kernels on torch tensors, through the backend's own plan: only the compiler is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flash3.backends.base import Gradients, Saved
from flash3.backends.hopper.backward_tiles import BackwardSpec
from flash3.backends.hopper.plan import HopperBackend
from flash3.backends.hopper.tiles import ForwardSpec, Tiles
from flash3.frameworks.torch.describe import describe, dtype_of
from flash3.problem import Problem, Request

from .backward_configurations import BACKWARD
from .configurations import CONFIGURATIONS, name_of
from .objects import kernel


def built(spec: ForwardSpec | BackwardSpec, tiles: Any) -> Callable[..., None]:
    if isinstance(spec, BackwardSpec):
        name = next((name for name, found in BACKWARD.items() if found == (spec, tiles)), None)
        if name is None:
            raise LookupError(f"not in the list: {spec} {tiles}")
    else:
        name = name_of(spec, tiles)
    return kernel(name)  # type: ignore[no-any-return]


BACKEND = HopperBackend(built)


def prepare(request: Request, tiles: Tiles) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor | None]:
    """A function that launches once, and the outputs that it fills; they are full of NaN, so that what is not written shows."""
    problem = Problem.of(request, describe)
    out = torch.full(problem.out_shape, torch.nan, device=request.q.device, dtype=dtype_of(problem.spec.out_dtype))
    lse = torch.full(problem.lse_shape, torch.nan, device=request.q.device) if request.lse else None
    plan = BACKEND.plan(problem, tiles)
    return functools.partial(plan.run, request, out, lse), out, lse


def prepare_named(request: Request, name: str) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor | None]:
    """With the tiles of a configuration."""
    spec, tiles = CONFIGURATIONS[name]
    return prepare(replace(request, lse=spec.lse), tiles)


def prepare_backward(request: Request, saved: Saved, gradients: Gradients, name: str) -> Callable[[], None]:
    """A function that runs the whole backward once, with the tiles of a configuration."""
    plan = BACKEND.plan(Problem.of(request, describe), BACKWARD[name][1])
    return functools.partial(plan.run, request, saved, gradients)
