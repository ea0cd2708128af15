"""Attention over all keys from attention over parts of them: O = Σ exp(L_i - L) O_i with L = log Σ exp(L_i)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def merge(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge n partial results over disjoint sets of keys.

    Args:
        outs: (n, batch, q_len, heads, value_dim) or packed (n, total_q, heads, value_dim), any float dtype; or n such tensors.
        lses: as `attention` returns them, (n, batch, heads, q_len) or (n, heads, total_q), natural logarithm.
            -inf marks an empty partial, and so does +inf (what FlashAttention-2 writes for a row without keys): its out is not read.

    Returns:
        out and lse in float64, without the first dimension. All partials empty, or n = 0: 0 and -inf.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if not isinstance(outs, Tensor):
        outs = torch.stack(list(outs))
    if not isinstance(lses, Tensor):
        lses = torch.stack(list(lses))
    if outs.ndim < 3 or lses.mT.shape != outs.shape[:-1]:
        raise ValueError(
            f"outs must be (n, …, length, heads, value_dim) and lses (n, …, heads, length), got {tuple(outs.shape)} and {tuple(lses.shape)}"
        )
    parts = lses.double()
    parts = parts.masked_fill(parts == torch.inf, -torch.inf)
    lse = torch.logsumexp(parts, dim=0)
    empty = parts == -torch.inf
    weights = torch.exp(parts - lse).masked_fill(empty, 0.0).mT[..., None]
    values = outs.double().masked_fill(empty.mT[..., None], 0.0)
    return (weights * values).sum(0), lse
