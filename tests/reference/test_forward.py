"""The oracle's forward against torch's own attention in float64, and by hand where torch has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash3 import reference
from flash3.mask import Mask
from flash3.problem import Request
from flash3.sequences import Packed
from tests.ragged import Batch, int32

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, q_offset=0),
    Mask(left=3, right=1),
    Mask(left=2, right=0, q_offset=5, k_offset=-2),
    Mask(chunk=4),
    Mask(causal=True, chunk=5, left=2),
]


def torch_attention(request: Request, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's math attention in float64; bias (k_len,) is added to every score."""
    q, k, v = (t.double().transpose(1, 2) for t in (request.q, request.k, request.v))
    seen = torch.from_numpy(request.mask.dense(q.shape[2], k.shape[2]))
    scores = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    if bias is not None:
        scores = scores + bias
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=scores, scale=request.scale, enable_gqa=True)
    return out.transpose(1, 2)


def same(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours, exact.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (3, 11), (11, 3)])
@pytest.mark.parametrize("scale", [None, 0.7, -0.4])
def test_as_torch(mask: Mask, size: tuple[int, int], scale: float | None) -> None:
    batch = Batch.random([size, size], heads=(6, 2), dims=(16, 24))
    request = Request(q=torch.stack(batch.q), k=torch.stack(batch.k), v=torch.stack(batch.v), mask=mask, scale=scale)
    out, lse = reference.attention(request)
    seen = torch.from_numpy(mask.dense(*size))
    has_keys = seen.any(1)
    same(out[:, has_keys], torch_attention(request)[:, has_keys])
    assert (out[:, ~has_keys] == 0).all()

    scores = torch.einsum("bqhd,bkhd->bhqk", request.q.double(), request.k.double().repeat_interleave(3, 2))
    scores = scores * (0.25 if scale is None else scale)
    same(lse, torch.log((torch.exp(scores) * seen).sum(-1)))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sink_is_a_key_without_value(mask: Mask) -> None:
    request = Batch.random([(7, 9)], heads=(1, 1)).one(0, mask=mask, sink=torch.tensor([0.7]))
    out, lse = reference.attention(request)
    # torch: one more key, far enough to the left to be hidden by no bias of ours, with score 0 and value 0.
    seen = torch.from_numpy(mask.dense(7, 9))
    scores = 0.25 * torch.einsum("qhd,khd->qk", request.q[0].double(), request.k[0].double()).masked_fill(~seen, -torch.inf)
    logits = torch.cat([scores, torch.full((7, 1), request.sink.item(), dtype=torch.float64)], dim=1)
    same(lse[0, 0], torch.logsumexp(logits, 1))
    same(out[0, :, 0], torch.softmax(logits, 1)[:, :9] @ request.v[0, :, 0].double())


def test_softcap() -> None:
    """c·tanh(S / c) of the scaled score, before the mask; the LSE is of capped scores. One key: its score is the LSE."""
    request = Batch.random([(5, 5)], heads=(2, 2)).one(0, mask=Mask(left=0, right=0), softcap=0.5)
    out, lse = reference.attention(request)
    scores = (request.q * request.k).double().sum(-1).mT / 4
    torch.testing.assert_close(lse, 0.5 * torch.tanh(scores / 0.5), rtol=1e-6, atol=1e-6)
    same(out, request.v)


def test_qv_widens_queries_and_keys() -> None:
    """Q Kᵀ + Qv Vᵀ = [Q Qv] [K V]ᵀ."""
    batch = Batch.random([(5, 9)], dims=(16, 24))
    qv = torch.randn(1, 5, 4, 24)
    request = batch.one(0, qv=qv, scale=0.2, mask=Mask(causal=True), softcap=3.0)
    wide = replace(request, q=torch.cat([request.q, qv], -1), k=torch.cat([request.k, request.v], -1), qv=None)
    for ours, exact in zip(reference.attention(request), reference.attention(wide), strict=True):
        same(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_stands_for_scaled_values(dtype: torch.dtype) -> None:
    """Each sequence and key head has its scale; query heads take that of their key head."""
    batch = Batch.random([(5, 9), (3, 4)])
    g = torch.Generator().manual_seed(1)
    scales = {f"{name}_scale": torch.rand(2, 2, generator=g) + 0.5 for name in "qkv"}
    small = batch.packed()
    small = replace(small, q=small.q.to(dtype), k=small.k.to(dtype), v=small.v.to(dtype), **scales)
    meant = Batch([], [], [])
    for rows_q, rows_k, i in ((slice(0, 5), slice(0, 9), 0), (slice(5, 8), slice(9, 13), 1)):
        meant.q.append(small.q[rows_q].double() * scales["q_scale"][i].repeat_interleave(2)[:, None])
        meant.k.append(small.k[rows_k].double() * scales["k_scale"][i][:, None])
        meant.v.append(small.v[rows_k].double() * scales["v_scale"][i][:, None])
    for ours, exact in zip(reference.attention(small), reference.attention(meant.packed()), strict=True):
        same(ours, exact)


def test_rows_outside_every_sequence() -> None:
    """Behind the last of cu_seqlens: 0 and -inf, with a sink too; what lies there is not read."""
    request = Batch.random([(3, 4)]).packed(sink=torch.ones(4))
    longer = replace(request, q=torch.cat([request.q, torch.full((2, 4, 16), torch.nan)]))
    out, lse = reference.attention(longer)
    assert (out[3:] == 0).all()
    assert (lse[:, 3:] == -torch.inf).all()
    assert torch.equal(out[:3], reference.attention(request)[0])


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -torch.inf])])
def test_nothing(sink: torch.Tensor | None) -> None:
    """No batch, no queries, no keys, no heads."""
    lse_of_nothing = torch.full((2,), -torch.inf) if sink is None else sink
    for batch, q_len, k_len in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        q, k, v = torch.zeros(batch, q_len, 2, 16), torch.zeros(batch, k_len, 1, 16), torch.zeros(batch, k_len, 1, 8)
        out, lse = reference.attention(Request(q=q, k=k, v=v, sink=sink))
        assert out.shape == (batch, q_len, 2, 8)
        assert lse.shape == (batch, 2, q_len)
        assert (out == 0).all()
        if k_len == 0:
            assert (lse == lse_of_nothing[:, None]).all()
    empty = Packed(cu_seqlens=int32([0]))
    out, lse = reference.attention(Request(q=torch.zeros(0, 2, 16), k=k[0], v=v[0], q_sequences=empty, k_sequences=empty))
    assert (out.shape, lse.shape) == ((0, 2, 8), (2, 0))
    out, lse = reference.attention(Request(q=torch.zeros(1, 3, 0, 16), k=torch.zeros(1, 3, 0, 16), v=torch.zeros(1, 3, 0, 8)))
    assert (out.shape, lse.shape) == ((1, 3, 0, 8), (1, 0, 3))


def test_any_strides() -> None:
    """Expanded heads (stride 0) and transposed storage."""
    request = Batch.random([(5, 9)], heads=(4, 1)).one(0)
    q = request.q.transpose(1, 2).contiguous().transpose(1, 2)
    other = replace(request, q=q, k=request.k.expand(-1, -1, 4, -1), v=request.v.expand(-1, -1, 4, -1))
    for ours, exact in zip(reference.attention(other), reference.attention(request), strict=True):
        same(ours, exact)
