"""How far from exact a gradient may be: as far as plain torch in the same dtype (see `flash3.reference.error`), of which there are two.

Autograd of plain attention, and the paper's closed form. They differ where the result is a small difference of large terms: with one
visible key dS = P∘(dP − D) is 0, and autograd, which takes D from P itself, finds exactly 0; rowsum(dO∘O) can not. For float32 and
float64, where both compute as the kernels do, a gradient as good as either is good. For 16-bit types the first alone counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import reference
from flash3.problem import Request
from flash3.reference.backward import part_gradients
from flash3.reference.error import GRADIENT_FACTOR
from flash3.reference.parts import parts


def closed_form(request: Request, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, d_sink of one dense sequence (batch 1) by the paper's formulas, in the inputs' own dtype."""
    q, k, v, sink = request.q, request.k, request.v, request.sink
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    d_sink = None if sink is None else torch.zeros_like(sink)
    for part in parts(request, q.dtype):
        own = part_gradients(part, d_out[0, :, part.heads].transpose(0, 1), d_lse[0, part.heads].to(q.dtype))
        dq[0, :, part.heads] = own[0].transpose(0, 1)
        dk[0, :, part.kv_head], dv[0, :, part.kv_head] = own[1], own[2]
        if d_sink is not None:
            d_sink[part.heads] = own[3].to(d_sink.dtype)
    return dq, dk, dv, d_sink


def check_gradient(name: str, ours: Tensor, exact: Tensor, plain: Tensor, closed: Tensor | None) -> None:
    """Hold a gradient against the exact one. `closed`: by `closed_form`, None for 16-bit types."""
    by_formula = closed is not None and reference.compare(ours, exact, closed, factor=GRADIENT_FACTOR).ok
    if not by_formula:
        reference.check(name, ours, exact, plain, factor=GRADIENT_FACTOR)
