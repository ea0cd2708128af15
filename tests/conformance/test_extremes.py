"""Softmax is shift invariant: scores of any size, in forward and backward. And the same call twice gives the same bits."""

import pytest
import torch

import flash3
from flash3 import Mask
from tests.conformance.cases import Case, check_gradients


def _scored(backend, scores, requires_grad=True):
    """q, k whose scores at scale 1 are exactly `scores` (q_len, k_len), and random values: each q row picks its own column of k."""
    q_len, k_len = scores.shape
    assert q_len <= 8
    q = torch.eye(q_len, 64)[None, :, None]
    k = torch.zeros(1, k_len, 1, 64)
    k[0, :, 0, :q_len] = scores.T
    v = torch.randn(1, k_len, 1, 64, generator=torch.Generator().manual_seed(1))
    return [x.to(backend.device, backend.dtype).requires_grad_(requires_grad) for x in (q, k, v)]


def _attend(backend, leaves, scale=1.0, **options):
    call = lambda: flash3.attention(*leaves, scale=scale, return_lse=True, backend=backend.name, **options)  # noqa: E731
    return backend.serve(call)


@pytest.mark.parametrize("shift", [150.0, -150.0, 102400.0, -102400.0])
def test_shifted_scores(shift, backend):
    """All scores moved by one number: the same output and gradient of V, the LSE moved with them. Every score is exact in 16 bits."""
    far = abs(shift) > 1000
    factor = 128.0 if far else 1.0
    pattern = [0.0, -3.0, 0.0, 0.0, -1.0] if far else [0.0, -1.0, 2.0, 0.5, -3.0]
    near = torch.tensor([pattern * 40, pattern[::-1] * 40])
    moved, plain = _scored(backend, near + shift / factor), _scored(backend, near)
    assert torch.equal(moved[1].detach().float().cpu()[0, :, 0, :2].T, near + shift / factor)
    (out, lse), (wanted, wanted_lse) = _attend(backend, moved, factor), _attend(backend, plain, factor)
    torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, wanted_lse + shift, rtol=3e-7, atol=0)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    dv, wanted_dv = (torch.autograd.grad(o, x[2], d_out)[0] for o, x in ((out, moved), (wanted, plain)))
    torch.testing.assert_close(dv, wanted_dv, rtol=2e-3, atol=2e-3)


def test_all_scores_far_below(backend):
    """All at −1e5: every key counts the same, and the gradients are those of a mean."""
    leaves = _scored(backend, torch.full((3, 200), -1000.0))
    out, lse = _attend(backend, leaves, 100.0)
    mean = leaves[2].detach().float().mean(1, keepdim=True)
    torch.testing.assert_close(out.float(), mean.expand_as(out), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 1, 3), -1e5 + 5.2983), rtol=1e-6, atol=0)
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.testing.assert_close(dv.float().cpu(), torch.full((1, 200, 1, 64), 3 / 200), rtol=1e-2, atol=1e-6)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


def test_one_score_far_below_the_rest(backend):
    """One key at −5e5, the others at −1e5: it does not count, and it does no harm."""
    scores = torch.full((2, 150), -100.0)
    scores[:, 77] = -500.0
    leaves = _scored(backend, scores)
    out, lse = _attend(backend, leaves, 1000.0)
    v = leaves[2].detach().float()
    mean = (v.sum(1, keepdim=True) - v[:, 77:78]) / 149
    torch.testing.assert_close(out.float(), mean.expand_as(out), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 1, 2), -1e5 + 5.0039), rtol=1e-6, atol=0)
    dv = torch.autograd.grad(out, leaves[2], torch.ones_like(out))[0]
    assert (dv[:, 77] == 0).all()


def test_one_score_far_above_the_rest(backend):
    """One key at +5e4, the others around 0, in the last block and in the first: the output is its value. With 16-bit weights to one
    rounding: c·score − c·maximum, fused, leaves what the rounding of c·maximum took, so the weight is 1 to that type's precision."""
    for where in (0, 149, 299):
        scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
        scores[:, where] = 500.0
        leaves = _scored(backend, scores)
        out, lse = _attend(backend, leaves, 100.0)
        rounding = torch.finfo(out.dtype).eps if out.dtype.itemsize == 2 else 0.0
        torch.testing.assert_close(out, leaves[2][:, where : where + 1].expand_as(out), rtol=rounding, atol=0)
        torch.testing.assert_close(lse.cpu(), torch.full((1, 1, 2), 5e4), rtol=torch.finfo(lse.dtype).eps, atol=0)


def test_a_masked_key_may_be_anything(backend):
    """Hidden keys hold the largest scores of the row: no trace of them."""
    for hidden in (6e4, -6e4):
        q, k, v = (x.detach() for x in _scored(backend, torch.zeros(4, 130)))
        k[:, 100:] = hidden
        v[:, 100:] = hidden
        out, lse = _attend(backend, [q, k, v], 30.0, mask=Mask(causal=True, q_offset=90))
        wanted, wanted_lse = _attend(backend, [q, k[:, :100], v[:, :100]], 30.0, mask=Mask(causal=True, q_offset=90))
        torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("scale", [1.0, -1.0, 3.0, -3.0])
def test_large_lses(scale, backend):
    """LSEs near 150 and 500: exp(LSE) overflows float32, and exp(−LSE) underflows: the backward must not form either."""
    check_gradients(Case(q_lens=(64,), k_lens=(192,), spread=6.0, scale=scale, mask=Mask(causal=True)), backend)


def test_the_same_bits_twice(backend):
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, n, h, 64, generator=g).to(backend.device, backend.dtype) for n, h in ((200, 4), (300, 2), (300, 2)))
    first, *others = (
        _results(backend, [x.clone().requires_grad_() for x in (q, k, v)]) for _ in range(3)
    )  # fmt: skip
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _results(backend, leaves):
    out, lse = _attend(backend, leaves, 0.125, mask=Mask(causal=True), deterministic=True)
    return [out, lse, *backend.serve(lambda: torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)]))]
