"""A workload with tensors: what a provider gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..frameworks.torch.describe import dtype_of
from ..problem import Request, Task
from .workloads import Workload


@dataclass(frozen=True)
class Case:
    """Normally distributed q, k and v (and the gradient of out), the same for every provider."""

    workload: Workload
    task: Task
    request: Request
    d_out: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.request.q, self.request.k, self.request.v

    @property
    def device(self) -> torch.device:
        device: torch.device = self.request.q.device
        return device


def make(workload: Workload, task: Task, device: torch.device, seed: int = 0) -> Case:
    """Tensors of a workload."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wide = dtype if dtype.itemsize > 1 else torch.bfloat16
        return torch.randn(shape, generator=gen, device=device, dtype=wide).to(dtype)

    dtype = dtype_of(workload.dtype)
    q, k, v = (normal(shape, dtype) for shape in workload.shapes())
    arrays = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in workload.storage().items()}
    sink = normal((workload.heads_q,), torch.float32) if workload.sink else None
    request = workload.request(q, k, v, sink, arrays, task)
    d_out = normal((*q.shape[:-1], v.shape[-1]), dtype) if task is Task.BACKWARD else None
    return Case(workload, task, request, d_out)


def forward_of(case: Case) -> Request:
    """The forward call of any case."""
    return replace(case.request, task=Task.FORWARD)
