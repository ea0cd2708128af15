"""Nothing to attend to, or nothing that attends: legal everywhere, with results of the right shape."""

import pytest
import torch

import flash3
from flash3 import Mask
from tests.conformance.cases import Case, check_forward, check_gradients

SINK = (0.5, -1.0)
CAUSAL = Mask(causal=True)


@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(left=3, right=2), Mask(chunk=4)], ids=["full", "causal", "window", "chunk"])
@pytest.mark.parametrize("sink", [None, SINK], ids=["", "sink"])
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)], ids=str)
def test_dense(shape, sink, mask, backend):
    batch, q_len, k_len = shape
    q = torch.randn(batch, q_len, 2, 64, device=backend.device).to(backend.dtype).requires_grad_()
    k = torch.randn(batch, k_len, 1, 64, device=backend.device).to(backend.dtype).requires_grad_()
    v = torch.randn(batch, k_len, 1, 32, device=backend.device).to(backend.dtype).requires_grad_()
    extra = None if sink is None else torch.tensor(sink, device=backend.device).requires_grad_()
    call = lambda: flash3.attention(q, k, v, mask=mask, sink=extra, return_lse=True, backend=backend.name)  # noqa: E731
    out, lse = backend.serve(call)
    assert out.shape == (batch, q_len, 2, 32)
    assert lse.shape == (batch, 2, q_len)
    assert (out == 0).all()
    wanted = torch.full_like(lse, -torch.inf) if extra is None else extra.detach()[:, None].expand_as(lse)
    assert torch.equal(lse, wanted)
    leaves = [q, k, v] if extra is None else [q, k, v, extra]
    d_lse = torch.ones_like(lse)
    grads = backend.serve(lambda: torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), d_lse]))
    assert all((g == 0).all() and g.shape == x.shape for g, x in zip(grads[:3], leaves[:3], strict=True))
    if extra is not None:  # the row's LSE is the sink itself
        assert grads[3].tolist() == [batch * q_len] * 2


@pytest.mark.parametrize("layout", [("packed", "packed"), ("padded", "padded"), ("packed used", "padded")], ids=" and ".join)
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [((0, 0), (0, 0)), ((0, 0), (9, 4)), ((5, 3), (0, 0)), ((0, 5, 0), (3, 0, 0)), ((1, 0, 1), (3, 0, 5))], ids=str
)
def test_sequences(q_lens, k_lens, layout, backend):
    check_gradients(Case(q_lens=q_lens, k_lens=k_lens, heads=(2, 1), layout=layout, mask=CAUSAL, dtype=torch.bfloat16), backend)


@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize(("q_lens", "k_lens"), [((5, 3), (0, 0)), ((0, 0), (0, 7)), ((0, 5, 0), (3, 0, 0))], ids=str)
def test_caches(q_lens, k_lens, page_size, backend):
    layout = ("packed", "paged" if page_size else "cache")
    case = Case(q_lens=q_lens, k_lens=k_lens, heads=(2, 1), layout=layout, page_size=page_size or 16, mask=CAUSAL, dtype=torch.bfloat16)
    check_forward(case, backend)


def test_packed_of_no_sequence(backend):
    """A batch of none: cu_seqlens is [0], or there is nothing but rows that no sequence claims."""
    starts = torch.zeros(1, dtype=torch.int32, device=backend.device)
    for rows in (0, 3):
        q = torch.randn(rows, 2, 64, device=backend.device).to(backend.dtype)
        call = lambda q=q: flash3.attention_varlen(q, q, q, starts, starts, 0, 0, return_lse=True, backend=backend.name)  # noqa: E731
        out, lse = backend.serve(call)
        assert out.shape == (rows, 2, 64)
        assert lse.shape == (2, rows)
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


def test_leftpad_beyond_the_length(backend):
    """A sequence that ends before its left padding does is empty."""
    q = torch.randn(2, 3, 2, 64, device=backend.device).to(backend.dtype)
    k = torch.full((2, 8, 1, 64), torch.nan, device=backend.device).to(backend.dtype)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=backend.device)  # noqa: E731
    cache = flash3.KVCache(k, k, ints(3, 5), leftpad=ints(3, 6))
    out, lse = backend.serve(lambda: flash3.attention_kvcache(q, cache, return_lse=True, backend=backend.name))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_no_heads(backend):
    q, k = (
        torch.randn(2, 3, 0, 64, device=backend.device).to(backend.dtype),
        torch.randn(2, 4, 0, 64, device=backend.device).to(backend.dtype),
    )
    out, lse = backend.serve(lambda: flash3.attention(q, k, k, return_lse=True, backend=backend.name))
    assert out.shape == (2, 3, 0, 64)
    assert lse.shape == (2, 0, 3)
