"""One request through one backend, as tests want it: tensors in, tensors out, buffers poisoned before the backend fills them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash3 import dispatch, reference
from flash3.backends.base import Gradients, Saved
from flash3.backends.triton.plan import interpreted
from flash3.problem import DType, Problem, Request, Task, TensorInfo

DTYPES = {d.value: d for d in DType}


def describe(t: Tensor) -> TensorInfo:
    """A CPU tensor without its data."""
    return TensorInfo(DTYPES[str(t.dtype).removeprefix("torch.")], tuple(t.shape), tuple(t.stride()))


@dataclass(frozen=True)
class Oracle:
    """The oracle as if it were a backend."""

    name: str = "reference"

    def forward(self, request: Request) -> tuple[Tensor, Tensor]:
        Problem.of(request, describe)  # what tests ask of backends has to be a legal call
        return reference.attention(request)

    def backward(self, request: Request, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return reference.gradients(request, d_out, d_lse)


@dataclass(frozen=True)
class Planned:
    """A backend by its name in `dispatch`."""

    name: str

    def forward(self, request: Request) -> tuple[Tensor, Tensor]:
        request = replace(request, lse=True)
        problem = Problem.of(request, describe)
        out = torch.full(problem.out_shape, torch.nan, dtype=getattr(torch, problem.spec.out_dtype.value))
        lse = torch.full(problem.lse_shape, torch.nan)
        dispatch.choose(problem, self.name).run(request, out, lse)
        return out, lse

    def backward(self, request: Request, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        out, lse = self.forward(request)
        request = replace(request, task=Task.BACKWARD)
        dq, dk, dv = (torch.full_like(t, torch.nan) for t in (request.q, request.k, request.v))
        d_sink = None if request.sink is None else torch.full_like(request.sink, torch.nan)
        grads = Gradients(d_out=d_out, d_lse=d_lse, dq=dq, dk=dk, dv=dv, d_sink=d_sink)
        dispatch.choose(Problem.of(request, describe), self.name).run(request, Saved(out=out, lse=lse), grads)
        return dq, dk, dv, d_sink


BACKENDS: dict[str, Oracle | Planned] = {"reference": Oracle(), "cpu": Planned("cpu")}
if interpreted():
    BACKENDS = {"triton": Planned("triton")}
