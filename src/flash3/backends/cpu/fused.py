"""torch's fused CPU attention, for calls without softcap and qv: whole for full and causal masks, by tiles of queries for others.

The operator knows three masks: none, causal from the top left, and an additive one. A tile of queries takes the keys that any of its rows
sees, and the additive mask covers what some of them do not: time goes with the visited area, and the mask is a tile wide, not a sequence.
Not for its eyes, as torch 2.13 stands: no queries, keys or heads (it divides by their number); rows that see no key (their LSE comes out
0, not −inf); `is_causal` with a scale <= 0 (it masks before it scales: NaN); a 16-bit forward, whose quick exponential puts the LSE off by
5e-5: q, k and v go in as float32 copies (what that costs or gains depends on the CPU's 16-bit units: `flash3 bench cpu --dtype bfloat16`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base import Gradients, Saved
from . import forward
from .backward import delta_of, lse_is_coarse
from .blocks import compute_dtype
from .tiles import Method
from .work import Work

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

MIN_ROWS, MAX_ROWS = 64, 512
MAX_BIAS = 1 << 22


@dataclass(frozen=True)
class Piece:
    """One call: rows, the keys they see, and which of the operator's masks."""

    rows: slice
    keys: slice
    causal: bool = False
    bias: Tensor | None = None


def fits(work: Work) -> bool:
    """Whether the operator can serve this work."""
    if work.sizes is not None and work.sizes.method is not Method.FUSED:
        return False
    return not work.softcap and work.qv is None and min(work.q.numel(), work.k.numel(), work.v.numel()) > 0


def attend(work: Work, out: Tensor, lse: Tensor | None) -> None:
    """As `forward.attend`."""
    first, stop = work.sees.live_rows()
    whole = whole_piece(work, first, stop)
    q, k, v = widened(compute_dtype(work.q.dtype), work.q, work.k, work.v)
    _fill_dead(out, lse, work.sink, (slice(0, first), slice(stop, None)))
    for piece in [whole] if whole else tiles(work, first, stop):
        rows, keys = piece.rows, piece.keys
        part, part_lse = _call(q[:, :, rows], k[:, :, keys], v[:, :, keys], piece, work.scale)
        if work.sink is not None:
            if lse_is_coarse(part_lse, work.q.dtype):  # rounded too far to tell the sink's share: Algorithm 1 keeps maximum and sum apart
                forward.attend(work, out, lse)
                return
            forward.add_sink(part, part_lse, work.sink[:, None])
        out[:, :, rows] = part[..., : out.shape[-1]]
        if lse is not None:
            lse[:, :, rows] = part_lse


def _call(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    if q.shape[2] > 1 or q.shape[1] == k.shape[1]:
        return _FORWARD(q, k, v, 0.0, piece.causal, attn_mask=piece.bias, scale=scale)
    # Decoding: the query heads that share a key head become its rows, so that K and V are read once.
    out, lse = _FORWARD(q.view(q.shape[0], k.shape[1], -1, q.shape[-1]), k, v, scale=scale)
    return out.flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None]


def _fill_dead(out: Tensor, lse: Tensor | None, sink: Tensor | None, dead: tuple[slice, slice]) -> None:
    """Rows without keys."""
    for rows in dead:
        if out[:, :, rows].numel() == 0:
            continue
        out[:, :, rows] = 0
        if lse is not None:
            lse[:, :, rows] = -torch.inf if sink is None else sink[:, None]


def whole_piece(work: Work, first: int, stop: int) -> Piece | None:
    """The one call that covers the rows first … stop - 1, where there is one."""
    if first == stop:
        return None
    rows, keys = slice(first, stop), slice(work.sees.visible(first)[0], work.sees.visible(stop - 1)[1])
    live = work.sees.for_rows(first, stop).narrowed(keys.start, keys.stop)
    if live.is_full():
        return Piece(rows, keys)
    return Piece(rows, keys, causal=True) if live.is_square_causal() and work.scale > 0 else None


def tiles(work: Work, first: int, stop: int) -> Iterator[Piece]:
    """Calls that cover the rows first … stop - 1, each of which sees a key. Equal neighbours share their mask.

    Tiles are an eighth as tall as a row is wide: then little is computed in vain, and calls are few.
    """
    begin, end = work.sees.rows()
    widths = (end - begin)[first:stop]
    if first == stop:
        return
    if work.sizes is not None:
        height = work.sizes.rows
    else:
        height = max(MIN_ROWS, min(int(widths.sum()) // len(widths) // 8 // 32 * 32, MAX_BIAS // int(widths.max()), MAX_ROWS))
    last: tuple[Tensor, Tensor, Tensor] | None = None
    for row in range(first, stop, height):
        rows = slice(row, min(row + height, stop))
        keys = slice(int(begin[rows.start]), int(end[rows.stop - 1]))
        own_begin, own_end = begin[rows] - keys.start, end[rows] - keys.start
        if last is None or not (torch.equal(own_begin, last[0]) and torch.equal(own_end, last[1])):
            last = own_begin, own_end, _bias(own_begin, own_end, keys.stop - keys.start, compute_dtype(work.q.dtype))
        yield Piece(rows, keys, bias=last[2])


def _bias(begin: Tensor, end: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """0 where visible, −inf elsewhere, (rows, width). Only the edges, where rows differ, are compared."""
    bias = torch.zeros(len(begin), width, dtype=dtype)
    left, right = int(begin[-1]), int(end[0])
    keys = torch.arange(width)
    bias[:, :left].masked_fill_(keys[:left] < begin, -torch.inf)
    bias[:, right:].masked_fill_(keys[right:] >= end, -torch.inf)
    return bias


def widened(dtype: torch.dtype, *tensors: Tensor, extra: int = 0) -> list[Tensor]:
    """All in one dtype and with one width (the operator wants head_dim == value_dim), filled up with zeros; no copy where they are so."""
    width = max(t.shape[-1] for t in tensors) + extra
    return [t if t.dtype == dtype and t.shape[-1] == width else pad(t.to(dtype), (0, width - t.shape[-1])) for t in tensors]


def fits_backward(work: Work, saved: Saved) -> bool:
    """LSEs that float32 does not hold well enough are for the blocks, which refine them; so is float64, always."""
    return fits(work) and not lse_is_coarse(saved.lse, work.q.dtype)


def gradients(work: Work, saved: Saved, grads: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `backward.gradients`; in the dtype of q where one call does it all.

    The operator makes delta = rowsum(dO ∘ O) itself. One more column, dO ← dLSE, O ← −1, V ← 0, makes it rowsum(dO ∘ O) − dLSE
    and leaves dO Vᵀ as it is.
    """
    first, stop = work.sees.live_rows()
    whole = whole_piece(work, first, stop)
    dtype = work.q.dtype if whole and grads.d_lse is None else compute_dtype(work.q.dtype)
    q, k, v, d_out, out = widened(dtype, work.q, work.k, work.v, grads.d_out, saved.out, extra=0 if grads.d_lse is None else 8)
    if grads.d_lse is not None:
        d_out[..., -1], out[..., -1] = grads.d_lse, -1
    if whole and (whole.rows, whole.keys) == (slice(0, q.shape[2]), slice(0, k.shape[2])):
        dq, dk, dv = _BACKWARD(d_out, q, k, v, out, saved.lse, 0.0, whole.causal, scale=work.scale)
    else:
        dq, dk, dv = (torch.zeros(t.shape, dtype=dtype) for t in (q, k, v))
        for piece in [whole] if whole else tiles(work, first, stop):
            rows, keys = piece.rows, piece.keys
            operands = d_out[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], saved.lse[:, :, rows]
            parts = _BACKWARD(*operands, 0.0, piece.causal, attn_mask=piece.bias, scale=work.scale)
            for total, at, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                total[:, :, at] += part
    widths = work.q.shape[-1], work.k.shape[-1], work.v.shape[-1]
    d_sink = None if work.sink is None else _sink_gradient(work.sink, saved, grads)
    return dq[..., : widths[0]], dk[..., : widths[1]], dv[..., : widths[2]], d_sink


def _sink_gradient(sink: Tensor, saved: Saved, grads: Gradients) -> Tensor:
    share = (sink[:, None] - saved.lse).exp_().mul_(delta_of(grads.d_out.float(), saved.out, grads.d_lse))
    return -share.masked_fill_(saved.lse == -torch.inf, 0).sum((0, 2), dtype=torch.float64)
