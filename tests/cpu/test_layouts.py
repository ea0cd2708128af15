"""Packed, padded and paged storage: same results as the sequences alone, and nothing outside them is ever read into a result."""

from __future__ import annotations

import pytest
import torch

from flash3 import reference
from flash3.mask import Mask
from flash3.problem import Request
from flash3.sequences import Dense, Packed, Padded, Paged, extents
from tests.running import BACKENDS

CPU = BACKENDS["cpu"]
NAN = float("nan")
SINK = torch.tensor([0.5, -1.0, 0.0, 2.0])
MASKS = [Mask(), Mask(causal=True), Mask(left=5, right=2), Mask(causal=True, chunk=8)]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def poisoned(shape, layout, seed, dtype=torch.float32):
    """Random inside the sequences, NaN and Inf outside them."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.full(shape, NAN)
    x.view(-1)[::3] = float("inf")
    values = torch.randn(shape, generator=gen)
    for at in extents(layout, shape):
        slots = slice(at.start, at.start + at.length)
        if isinstance(layout, Packed):
            x[slots] = values[slots]
        elif isinstance(layout, Paged):
            for s in range(at.start, at.start + at.length):
                page = int(layout.page_table[at.row, s // shape[1]])
                x[page, s % shape[1]] = values[page, s % shape[1]]
        else:
            x[at.row, slots] = values[at.row, slots]
    return x.to(dtype)


Q_LAYOUTS = {
    "packed": (Packed(cu_seqlens=ints(0, 0, 7, 12, 17, 18, 18)), (20, 4, 16)),
    "packed used": (Packed(cu_seqlens=ints(0, 8, 16, 24, 32, 40, 48), used=ints(5, 5, 5, 0, 8, 1)), (50, 4, 16)),
    "dense": (Dense(), (6, 3, 4, 16)),
    "padded": (Padded(lengths=ints(4, 4, 2, 0, 5, 1), leftpad=ints(1, 1, 0, 0, 0, 0)), (6, 5, 4, 16)),
}
K_LAYOUTS = {
    "packed": (Packed(cu_seqlens=ints(0, 9, 20, 25, 30, 30, 41)), (45, 2)),
    "packed used": (Packed(cu_seqlens=ints(0, 8, 16, 24, 32, 40, 48), used=ints(5, 5, 5, 0, 8, 1)), (48, 2)),
    "dense": (Dense(), (6, 11, 2)),
    "padded": (Padded(lengths=ints(9, 9, 3, 0, 12, 5), leftpad=ints(2, 2, 0, 0, 1, 0), batch_index=ints(1, 2, 0, 5, 7, 4)), (9, 14, 2)),
    "shared rows": (Padded(lengths=ints(9, 9, 3, 0, 12, 5), batch_index=ints(1, 1, 1, 0, 2, 0)), (3, 14, 2)),
}
TABLE = torch.tensor([[3, 1, 7, -5], [0, 9, 2, 1 << 20], [4, 12, -1, -1], [-7, -1, -1, -1], [5, 6, 8, 10], [11, 13, -1, 1 << 30]]).int()
K_LAYOUTS |= {
    "paged": (Paged(page_table=TABLE, lengths=ints(9, 9, 5, 0, 13, 5)), (14, 4, 2)),
    "paged leftpad": (Paged(page_table=TABLE, lengths=ints(9, 9, 5, 2, 13, 5), leftpad=ints(5, 5, 1, 2, 0, 4)), (14, 4, 2)),
    "paged rows": (Paged(page_table=TABLE, lengths=ints(9, 9, 5, 2, 9, 5), batch_index=ints(4, 4, 2, 5, 0, 0)), (14, 4, 2)),
    "one-slot pages": (Paged(page_table=torch.arange(60).view(6, 10).flip(1).int(), lengths=ints(9, 9, 5, 0, 10, 1)), (60, 1, 2)),
}


@pytest.mark.parametrize("k_name", K_LAYOUTS)
@pytest.mark.parametrize("q_name", Q_LAYOUTS)
def test_layouts(q_name, k_name):
    (q_layout, q_shape), (k_layout, k_shape) = Q_LAYOUTS[q_name], K_LAYOUTS[k_name]
    for mask, sink in zip(MASKS, (None, SINK, None, SINK), strict=True):
        request = Request(
            q=poisoned(q_shape, q_layout, 1),
            k=poisoned((*k_shape, 16), k_layout, 2),
            v=poisoned((*k_shape, 24), k_layout, 3),
            q_sequences=q_layout,
            k_sequences=k_layout,
            mask=mask,
            sink=sink,
        )
        out, lse = CPU.forward(request)
        d_out = poisoned(out.shape, q_layout, 4)
        d_lse = poisoned(lse.transpose(-1, -2).shape, q_layout, 5).transpose(-1, -2)
        want_out, want_lse = reference.attention(request)
        want_grads = reference.gradients(request, d_out, d_lse)
        torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-6)
        for got, want in zip(CPU.backward(request, d_out, d_lse), want_grads, strict=True):
            if want is not None:
                torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)


def test_extreme_page_tables_and_strides():
    """Pages of another stride order, an expanded K (stride 0), outputs written through a transposed view."""
    layout = Paged(page_table=ints(2, 0, 1).view(1, 3), lengths=ints(10))
    k = torch.randn(2, 3, 4, 16).permute(1, 2, 0, 3)
    q, v = torch.randn(1, 2, 4, 16), torch.randn(3, 4, 1, 16).expand(3, 4, 2, 16)
    request = Request(q=q, k=k, v=v, k_sequences=layout, mask=Mask(causal=True))
    out, lse = CPU.forward(request)
    want_out, want_lse = reference.attention(request)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-6)
