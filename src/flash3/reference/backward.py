"""The gradients of attention in closed form, in float64.

FlashAttention-3 paper, section 2.1 and appendix B.1, with what an LSE in the loss, a softcap c and a sink add:

    dV = Pᵀ dO                      dP = dO Vᵀ
    D  = rowsum(dO ∘ O) - dL        (dL: the gradient that arrives at the LSE; ∂L/∂S = P)
    dS = P ∘ (dP - D)               dS = dS ∘ (1 - (S / c)²) with a softcap: tanh' = 1 - tanh²
    dQ = scale·dS K                 dK = scale·dSᵀ Q
    dsink = -Σ_rows exp(sink - L) D     (the sink's probability, whose dP is 0)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Request
from .forward import probabilities, scores
from .parts import Part, lse_by_token, parts, tokens


@torch.no_grad()
def gradients(
    request: Request, d_out: Tensor, d_lse: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exact gradients of sum(out·d_out) + sum(lse·d_lse).

    Args:
        request: as for `attention`. FP8 inputs: the gradients are those of the values they stand for.
        d_out: out's shape, any float dtype; rows outside every sequence are not read.
        d_lse: lse's shape, or None for zero.
        out: the O of which D is made, as a forward left it, rounded; None: the exact one. With few keys D decides all, and then the
            formulas of a rounded O are further from the gradients than plain torch is.

    Returns:
        dq, dk, dv float64 in the shapes of q, k, v, zero outside every sequence; d_sink float64 (heads_q,), None without a sink.

    Raises:
        ValueError: the request has qv, which has no gradient.
    """
    if request.qv is not None:
        raise ValueError("attention with qv has no gradient")
    dq, dk, dv = (torch.zeros_like(tokens(t), dtype=torch.float64) for t in (request.q, request.k, request.v))
    d_sink = None if request.sink is None else torch.zeros_like(request.sink, dtype=torch.float64)
    d_out = tokens(d_out)
    d_lse = torch.zeros(dq.shape[:2], dtype=torch.float64, device=dq.device) if d_lse is None else lse_by_token(d_lse)
    for part in parts(request, torch.float64):
        rows = part.q_tokens, part.heads
        saved = None if out is None else tokens(out)[rows].double().transpose(0, 1)
        of_part = part_gradients(part, d_out[rows].double().transpose(0, 1), d_lse[rows].double().T, saved)
        dq[rows] = of_part[0].transpose(0, 1)
        # Sequences may share keys (batch_index, page tables): what they give is added up.
        dk[:, part.kv_head].index_add_(0, part.k_tokens, of_part[1])
        dv[:, part.kv_head].index_add_(0, part.k_tokens, of_part[2])
        if d_sink is not None:
            d_sink[part.heads] += of_part[3]
    return dq.reshape(request.q.shape), dk.reshape(request.k.shape), dv.reshape(request.v.shape), d_sink


def part_gradients(part: Part, d_out: Tensor, d_lse: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (group, m, d), dk (n, d), dv (n, value_dim), d_sink (group,; 0 without a sink). d_out, out (group, m, value_dim), d_lse
    (group, m)."""
    p, lse = probabilities(part)
    out = p @ part.v if out is None else out
    delta = (d_out * out).sum(-1) - d_lse  # D
    dv = (p.mT @ d_out).sum(0)
    dp = d_out @ part.v.mT
    ds = p * (dp - delta[..., None])
    if part.softcap:
        ds = ds * (1 - (scores(part) / part.softcap) ** 2)
    dq = part.scale * ds @ part.k
    dk = part.scale * (ds.mT @ part.q).sum(0)
    if part.sink is None:
        return dq, dk, dv, lse.new_zeros(lse.shape[0])
    p_sink = torch.exp(part.sink[:, None] - lse).masked_fill(part.sink[:, None] == -torch.inf, 0.0)
    return dq, dk, dv, -(p_sink * delta).sum(-1)
