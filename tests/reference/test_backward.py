"""The closed-form gradients against finite differences, and against autograd of plain torch code in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash3 import reference
from flash3.mask import Mask
from flash3.problem import Request
from flash3.sequences import Packed
from tests.ragged import Batch, int32, pack, pad, page

MASKS = [Mask(), Mask(causal=True), Mask(left=2, right=1), Mask(causal=True, chunk=3), Mask(left=0, right=0, q_offset=3)]


class OracleFunction(torch.autograd.Function):
    """The oracle with its own gradients, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, request: Request, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, sink)
        ctx.request = request
        return reference.attention(replace(request, q=q, k=k, v=v, sink=sink))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink = ctx.saved_tensors
        return None, *reference.gradients(replace(ctx.request, q=q, k=k, v=v, sink=sink), d_out, d_lse)


def attend(request: Request) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = OracleFunction.apply(request, q, k, v, sink)
        return out, torch.where(lse == -torch.inf, 0.0, lse)  # the difference of two -inf is no difference quotient

    return call


def doubles(request: Request) -> Request:
    return replace(request, q=request.q.double(), k=request.k.double(), v=request.v.double())


def gradcheck(request: Request) -> None:
    leaves = [t.double().requires_grad_() for t in (request.q, request.k, request.v)]
    sink = None if request.sink is None else request.sink.double().requires_grad_()
    assert torch.autograd.gradcheck(attend(request), (*leaves, sink), eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sink", [None, torch.tensor([0.3, -1.0])])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_finite_differences(mask: Mask, sink: Tensor | None, softcap: float) -> None:
    """dQ, dK, dV, dsink of both out and LSE, with grouped heads and value_dim ≠ head_dim."""
    gradcheck(Batch.random([(4, 5)], heads=(2, 1), dims=(4, 3)).one(0, mask=mask, sink=sink, softcap=softcap, scale=0.8))


@pytest.mark.parametrize("page_size", [0, 2])
def test_finite_differences_in_storage(page_size: int) -> None:
    """Packed queries with unused rows; a cache with left padding whose row 1 two sequences share."""
    batch = Batch.random([(2, 3), (1, 4), (2, 4)], heads=(2, 1), dims=(4, 3))
    batch.k[2], batch.v[2] = batch.k[1], batch.v[1]
    q, q_sequences = pack(batch.q, room=1)
    k, layout = pad(batch.k, leftpad=(1, 0, 0), rows=(0, 1, 1), room=1)
    v, _ = pad(batch.v, leftpad=(1, 0, 0), rows=(0, 1, 1), room=1)
    request = Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=layout, mask=Mask(causal=True))
    if page_size:
        pages_v, _ = page(v, layout, page_size)
        pages_k, paged = page(k, layout, page_size)
        request = replace(request, k=pages_k, v=pages_v, k_sequences=paged)
    gradcheck(request)


@pytest.mark.parametrize("mask", [*MASKS, Mask(causal=True, q_offset=-3)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (9, 17), (17, 9), (5, 0)])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0, "sink": torch.tensor([0.3, -1.0, 2.0, -torch.inf])}], ids=["", "softcap,sink"])
def test_as_autograd(mask: Mask, size: tuple[int, int], extras: dict[str, Any]) -> None:
    if "sink" in extras and (size[1] == 0 or not mask.dense(*size).any(1).all()):
        extras = extras | {"sink": extras["sink"].clamp_min(-5)}  # autograd of a row without any term is NaN
    request = doubles(Batch.random([size]).one(0, mask=mask, **extras))
    request = replace(request, sink=None if request.sink is None else request.sink.double())
    g = torch.Generator().manual_seed(0)
    d_out = torch.randn(1, size[0], 4, 8, generator=g, dtype=torch.float64)
    d_lse = torch.randn(1, 4, size[0], generator=g, dtype=torch.float64)
    for arriving in ((d_out, None), (d_out, d_lse), (torch.zeros_like(d_out), d_lse)):
        ours = reference.gradients(request, *arriving)
        for name, grad, exact in zip(("dq", "dk", "dv", "d_sink"), ours, reference.plain_gradients(request, *arriving), strict=True):
            if exact is None:
                assert grad is None
            else:
                torch.testing.assert_close(grad, exact, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_of_the_lse_alone() -> None:
    """loss = lse.mean() (FA#1817): dQ = scale·P K / count."""
    request = doubles(Batch.random([(6, 9)], heads=(2, 2)).one(0))
    d_lse = torch.full((1, 2, 6), 1 / 12, dtype=torch.float64)
    dq, _, dv, _ = reference.gradients(request, torch.zeros(1, 6, 2, 8), d_lse)
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", request.q, request.k) / 4, -1)
    torch.testing.assert_close(dq, torch.einsum("bhqk,bkhd->bqhd", p, request.k) / 4 / 12)
    assert (dv == 0).all()


def test_rows_without_keys_have_no_gradient() -> None:
    """FA#443: 76, 34 and 146 queries on one key each, causal: only the last query of each sees it."""
    cu_q, cu_k = [0, 76, 110, 256], [0, 1, 2, 3]
    g = torch.Generator().manual_seed(0)
    request = Request(
        q=torch.randn(256, 1, 32, generator=g),
        k=torch.randn(3, 1, 32, generator=g),
        v=torch.randn(3, 1, 32, generator=g),
        q_sequences=Packed(cu_seqlens=int32(cu_q)),
        k_sequences=Packed(cu_seqlens=int32(cu_k)),
        mask=Mask(causal=True),
    )
    d_out = torch.randn(256, 1, 32, generator=g)
    dq, dk, dv, d_sink = reference.gradients(request, d_out, torch.ones(1, 256))
    last = torch.tensor(cu_q[1:]) - 1
    torch.testing.assert_close(dv, d_out[last].double())
    torch.testing.assert_close(dq[last], request.k.double() / 32**0.5)
    torch.testing.assert_close(dk, request.q[last].double() / 32**0.5)
    dq[last] = 0
    assert (dq == 0).all()
    assert d_sink is None


def test_a_sink_that_is_switched_off() -> None:
    """-inf, for a head without one: as without a sink, rows without keys included."""
    without = Batch.random([(5, 3)]).one(0, mask=Mask(causal=True))
    g = torch.Generator().manual_seed(0)
    d_out, d_lse = torch.randn(1, 5, 4, 8, generator=g), torch.randn(1, 4, 5, generator=g)
    *grads, d_sink = reference.gradients(replace(without, sink=torch.full((4,), -torch.inf)), d_out, d_lse)
    for grad, exact in zip(grads, reference.gradients(without, d_out, d_lse)[:3], strict=True):
        assert torch.equal(grad, exact)
    assert torch.equal(d_sink, torch.zeros(4, dtype=torch.float64))


def test_qv_has_no_gradient() -> None:
    request = Batch.random([(2, 3)]).one(0, qv=torch.zeros(1, 2, 4, 8))
    with pytest.raises(ValueError, match="attention with qv has no gradient"):
        reference.gradients(request, torch.zeros(1, 2, 4, 8))


def test_gradients_by_a_rounded_output() -> None:
    """One query, one key and a sink: dS is one number, and the rounding of O decides it. All that changes is D."""
    g = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 1, 2, 128, generator=g).bfloat16() for _ in range(4))
    request = Request(q=q, k=k, v=v, sink=torch.tensor([-3.0, 0.5]))
    out, lse = reference.attention(request)
    saved = out.bfloat16()
    exact = reference.gradients(request, d_out)
    for grad, again in zip(exact, reference.gradients(request, d_out, out=out), strict=True):
        torch.testing.assert_close(again, grad)
    shift = ((saved.double() - out) * d_out.double()).sum(-1)  # of D: (1, 1, heads)
    p = torch.exp((q.double() * k.double()).sum(-1) / 128**0.5 - lse.transpose(1, 2).double())
    dq, dk, dv, d_sink = reference.gradients(request, d_out, out=saved)
    torch.testing.assert_close(dq, exact[0] - (p * shift / 128**0.5)[..., None] * k.double())
    torch.testing.assert_close(dk, exact[1] - (p * shift / 128**0.5)[..., None] * q.double())
    torch.testing.assert_close(dv, exact[2])
    p_sink = torch.exp(request.sink.double() - lse[0, :, 0].double())
    torch.testing.assert_close(d_sink, exact[3] - p_sink * shift[0, 0])
