"""Attention by its definition, in float64 (FlashAttention-3 paper, section 2.1, with the LSE that its Algorithm 1 returns):

S = scale·Q Kᵀ        S = c·tanh(S / c) with a softcap c        S = -inf where the mask hides the key
L = log Σ_j exp(S_j)      (a sink is one more term of the sum, and has no value)
O = P V,  P = exp(S - L)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Request
from .parts import Part, Result, parts


def scores(part: Part) -> Tensor:
    """S (group, m, n) before the mask: scaled and capped."""
    products = part.q @ part.k.mT
    if part.qv is not None:
        products = products + part.qv @ part.v.mT
    s = part.scale * products
    return part.softcap * torch.tanh(s / part.softcap) if part.softcap else s


def probabilities(part: Part) -> tuple[Tensor, Tensor]:
    """P (group, m, n) and L (group, m). A row without keys: P = 0 and L = -inf (with a sink, L = sink)."""
    s = scores(part).masked_fill(~part.seen, -torch.inf)
    terms = s if part.sink is None else torch.cat([s, part.sink[:, None, None].expand(-1, s.shape[1], 1)], dim=-1)
    lse = torch.logsumexp(terms, dim=-1)
    return torch.exp(s - lse[..., None]).masked_fill(~part.seen, 0.0), lse


@torch.no_grad()
def attention(request: Request) -> tuple[Tensor, Tensor]:
    """Exact attention of one request, every layout and option of `Request`; nothing is checked here (`Problem.of` does).

    FP8 inputs count as the values they stand for: q·q_scale, k·k_scale, v·v_scale, qv·q_scale, with the scale of the sequence and key head.

    Returns:
        out float64, q's shape with value_dim, and lse float64, natural logarithm, (batch, heads_q, q_len) or packed (heads_q, total_q).
        Rows outside every sequence: 0 and -inf.
    """
    result = Result.empty(request, torch.float64, torch.float64)
    for part in parts(request, torch.float64):
        p, lse = probabilities(part)
        result.put(part, p @ part.v, lse)
    return result.shaped(request)
