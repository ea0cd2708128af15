"""Merging partial results of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .functions import check_tensors


def merge(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from its results over parts of them: out = Σ exp(lseᵢ − lse)·outᵢ, lse = log Σ exp(lseᵢ).

    Args:
        outs: n partial results, stacked (n, batch, seqlen_q, heads, d) or packed (n, total_q, heads, d), or a sequence of n tensors.
        lses: their log-sum-exps as the attention functions return them, (n, batch, heads, seqlen_q) or (n, heads, total_q). A part
            whose lse is −inf (or +inf, another library's mark of the same) saw no key and does not count, whatever its out holds.
        out_dtype: dtype of the merged result; default that of outs. Sums run in float32 (float64 for float64 outs).

    Returns:
        (out, lse): one result like each part. Where every part is empty: out 0, lse −inf. Differentiable.

    Raises:
        TypeError: not tensors, or lses not float32 or float64, or outs or out_dtype not floating point.
        ValueError: shapes or devices that do not go together, or nothing to merge.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    _check(outs, lses)
    out_dtype = outs.dtype if out_dtype is None else out_dtype
    if not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point:
        raise TypeError(f"out_dtype must be a floating point torch.dtype or None, got {out_dtype!r}")
    high = torch.float64 if outs.dtype == torch.float64 else torch.float32
    lses = lses.to(high)
    lses = torch.where(torch.isposinf(lses), -torch.inf, lses)
    top = lses.amax(0)
    top = torch.where(torch.isneginf(top), 0.0, top).detach()  # an anchor: it cancels, and −inf − −inf must not happen
    weights = (lses - top).exp()
    total = weights.sum(0)
    empty = total == 0
    shares = (weights / torch.where(empty, 1.0, total)).transpose(-1, -2).unsqueeze(-1)
    out = torch.where(shares == 0, 0.0, outs.to(high)).mul(shares).sum(0)
    lse = torch.where(empty, -torch.inf, top + torch.where(empty, 1.0, total).log())
    return out.to(out_dtype), lse


def _stacked(name: str, parts: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(parts, Tensor):
        return parts
    if not isinstance(parts, Sequence):
        raise TypeError(f"{name} must be a torch.Tensor or a sequence of them, got {type(parts).__name__}")
    check_tensors(**{f"{name}[{i}]": part for i, part in enumerate(parts)})
    shapes = sorted({tuple(part.shape) for part in parts})
    if len(shapes) != 1:
        raise ValueError(f"{name} must be n >= 1 tensors of one shape, got {len(parts)} of shapes {', '.join(map(str, shapes)) or 'none'}")
    return torch.stack(tuple(parts))


def _check(outs: Tensor, lses: Tensor) -> None:
    if not outs.is_floating_point():
        raise TypeError(f"outs must be floating point, got {outs.dtype}")
    if lses.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lses must be float32 or float64, got {lses.dtype}")
    if outs.dim() not in (4, 5) or outs.shape[0] == 0:
        raise ValueError(
            f"outs must have shape (n, batch, seqlen_q, heads, d) or (n, total_q, heads, d) with n >= 1, got {tuple(outs.shape)}"
        )
    *batch, rows, heads, _ = outs.shape
    wanted = (*batch, heads, rows)
    if lses.device != outs.device:
        raise ValueError(f"lses are on {lses.device}, outs on {outs.device}: all tensors must be on one device")
    if tuple(lses.shape) != wanted:
        raise ValueError(f"lses must have shape {wanted}, heads before queries as attention returns them, got {tuple(lses.shape)}")
