"""Plain torch attention in the inputs' own dtype: the yardstick for what a backend's error may be (see `error`).

What someone would write in torch: matmuls, softmax, matmul, each result rounded to the dtype; the softmax itself inside in float32.
FP8 has no such torch code: its matmuls are exact products in float32, and P is rounded to E4M3 as the tensor cores would take it (with V
in E5M2 too: they multiply the one by the other, and P needs E4M3's digits, not E5M2's range).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..problem import Request
from .forward import scores
from .parts import Part, Result, parts

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
P_MAX_LOG2 = 8
"""E4M3 holds a row's probabilities scaled so that the largest is 2**8 (it reaches 448): few exponents, all of them used."""


def output_dtype(request: Request) -> torch.dtype:
    """The request's out_dtype; by default q's, bfloat16 for FP8."""
    if request.out_dtype is not None:
        dtype: torch.dtype = getattr(torch, request.out_dtype.value)
        return dtype
    return torch.bfloat16 if request.q.dtype in FLOAT8 else request.q.dtype


def plain(request: Request) -> tuple[Tensor, Tensor]:
    """Attention as plain torch code computes it, differentiable (except FP8).

    Returns:
        out in the request's output dtype and lse float32 (float64 for float64 inputs), shapes as `attention`'s.
    """
    dtype = request.q.dtype
    compute = torch.float32 if dtype in FLOAT8 else dtype
    result = Result.empty(request, output_dtype(request), torch.promote_types(torch.float32, compute))
    for part in parts(request, compute):
        p, lse = _softmax(part, result.lse.dtype)
        p = _through_float8(p) if dtype in FLOAT8 else p.to(dtype)
        result.put(part, p @ part.v, lse)
    return result.shaped(request)


def _softmax(part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """P (group, m, n) and L (group, m) in `dtype`, from scores in the part's own. The softmax of an empty row is NaN, its P is 0."""
    s = scores(part).to(dtype).masked_fill(~part.seen, -torch.inf)
    if part.sink is not None:
        s = torch.cat([s, part.sink.to(dtype)[:, None, None].expand(-1, s.shape[1], 1)], dim=-1)
    p = torch.softmax(s, dim=-1)[..., : part.seen.shape[1]].masked_fill(~part.seen, 0.0)
    return p, torch.logsumexp(s, dim=-1)


def _through_float8(p: Tensor) -> Tensor:
    if p.shape[-1] == 0:
        return p
    up = 2.0**P_MAX_LOG2 / p.amax(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return (p * up).to(torch.float8_e4m3fn).to(p.dtype) / up


def plain_gradients(request: Request, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Autograd's gradients of `plain`, in the inputs' dtypes: dq, dk, dv, d_sink (None without a sink). Not for FP8."""
    leaves = [t.detach().clone().requires_grad_() for t in (request.q, request.k, request.v)]
    sink = None if request.sink is None else request.sink.detach().clone().requires_grad_()
    out, lse = plain(replace(request, q=leaves[0], k=leaves[1], v=leaves[2], sink=sink))
    outputs, arriving = [out], [d_out.to(out.dtype)]
    if d_lse is not None:
        outputs, arriving = [*outputs, lse], [*arriving, d_lse.to(lse.dtype)]
    if sink is not None:
        leaves.append(sink)
    if not out.requires_grad:  # no query or no key anywhere: nothing depends on anything
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    else:
        grads = torch.autograd.grad(outputs, leaves, arriving, allow_unused=True)
    dq, dk, dv, *rest = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]
    return dq, dk, dv, rest[0] if rest else None
