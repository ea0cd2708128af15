"""What the regression tests share: random tensors on a device, and the oracle's verdict."""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import reference
from flash3.problem import Request


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, device=None, seed: int = 0) -> Tensor:
    """Normally distributed, the same on every device."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g).to(device, dtype)


def int32(*values: int, device=None) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def judge(request: Request, out: Tensor, lse: Tensor | None = None) -> None:
    """Hold out and lse against the oracle; the request may live on any device."""
    request = request.map_tensors(lambda t: t.detach().cpu())
    exact, plain = reference.attention(request), reference.plain(request)
    reference.check("out", out.detach().cpu(), exact[0], plain[0])
    if lse is not None:
        reference.check("lse", lse.detach().cpu(), exact[1], plain[1])


def judge_gradients(request: Request, grads, d_out: Tensor, d_lse: Tensor | None = None) -> None:
    """Hold dq, dk, dv against the oracle."""
    request = request.map_tensors(lambda t: t.detach().cpu())
    arriving = d_out.detach().cpu(), None if d_lse is None else d_lse.detach().cpu()
    exact, plain = reference.gradients(request, *arriving), reference.plain_gradients(request, *arriving)
    for name, ours, e, p in zip(("dq", "dk", "dv"), grads, exact, plain, strict=False):
        reference.check(name, ours.cpu(), e, p, factor=reference.error.GRADIENT_FACTOR)
