"""Reported failures of other kernels in the backward pass. FA is Dao-AILab/flash-attention."""

import pytest
import torch

import flash3
from flash3 import Mask
from flash3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash3.problem import Request
from flash3.sequences import Packed
from tests.regressions.oracle import int32, judge, judge_gradients, random


def _packed(starts):
    return {"q_sequences": Packed(cu_seqlens=starts[0].cpu()), "k_sequences": Packed(cu_seqlens=starts[1].cpu())}


def test_packed_backward_with_unmatched_keys(device):
    """Row 9, FA#1254: varlen backward, q lengths [0, 0, 1023], k lengths [0, 1, 2045], d128 bf16: dK and dV of unmatched keys are 0.

    Reported with 32 heads; 2 here. K has 2046 rows.
    """
    starts = int32(0, 0, 0, 1023, device=device), int32(0, 0, 1, 2046, device=device)
    leaves = [random(n, 2, 128, device=device, seed=i).requires_grad_() for i, n in enumerate((1023, 2046, 2046))]
    out, lse = flash_attn_varlen_func(*leaves, *starts, 1023, 2045, return_attn_probs=True)
    d_out = random(1023, 2, 128, device=device, seed=5)
    grads = torch.autograd.grad(out, leaves, d_out)
    assert (grads[1][0] == 0).all()
    assert (grads[2][0] == 0).all()
    request = Request(q=leaves[0], k=leaves[1], v=leaves[2], **_packed(starts))
    judge(request, out, lse)
    judge_gradients(request, grads, d_out)


def test_packed_keys_that_are_too_few(device):
    """Row 9, FA#1254, as reported: the same lengths on a K of 2045 rows: a clear error, not a read past the end."""
    starts = int32(0, 0, 0, 1023, device=device), int32(0, 0, 1, 2046, device=device)
    q, k = random(1023, 2, 128, device=device), random(2045, 2, 128, device=device)
    with (
        flash3.settings.override(check_values=True),
        pytest.raises(ValueError, match="cu_seqlens_k ends at 2046, but k has only 2045 rows"),
    ):
        flash_attn_varlen_func(q, k, k, *starts, 1023, 2045)


def test_packed_causal_backward_with_one_key_each(device):
    """Row 10, FA#443: varlen causal backward, cu_q [0, 76, 110, 256], cu_k [0, 1, 2, 3], 1 head d32: no NaN in dQ."""
    starts = int32(0, 76, 110, 256, device=device), int32(0, 1, 2, 3, device=device)
    leaves = [random(n, 1, 32, dtype=torch.float16, device=device, seed=i).requires_grad_() for i, n in enumerate((256, 3, 3))]
    out, lse = flash_attn_varlen_func(*leaves, *starts, 146, 1, causal=True, return_attn_probs=True)
    d_out = random(256, 1, 32, dtype=torch.float16, device=device, seed=5)
    grads = torch.autograd.grad(out, leaves, d_out)
    assert all(g.isfinite().all() for g in grads)
    request = Request(q=leaves[0], k=leaves[1], v=leaves[2], mask=Mask(causal=True), **_packed(starts))
    judge(request, out, lse)
    judge_gradients(request, grads, d_out)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("length", [300, pytest.param(2048, marks=pytest.mark.slow)])
def test_expanded_keys(device, packed, length):
    """Row 24, FA PR#2189 and #2194: k, v (1, 2048, 1, 128) expanded to q's 4 heads, then varlen. (300 tokens here; whole with -m slow.)"""
    q = random(1, length, 4, 128, device=device).requires_grad_()
    one_k, one_v = (random(1, length, 1, 128, device=device, seed=i).requires_grad_() for i in (1, 2))
    k, v = (x.expand(1, length, 4, 128) for x in (one_k, one_v))
    assert k.stride(2) == 0
    d_out = random(1, length, 4, 128, device=device, seed=5)
    if packed:
        starts = int32(0, length // 3, length, device=device)
        out, lse = flash_attn_varlen_func(
            q[0], k[0], v[0], starts, starts, length, length, causal=True, return_attn_probs=True
        )  # fmt: skip
        layouts = _packed((starts, starts))
        request = Request(q=q[0], k=one_k[0], v=one_v[0], mask=Mask(causal=True), **layouts)
        grads = [g[0] for g in torch.autograd.grad(out, (q, one_k, one_v), d_out[0])]
        d_out = d_out[0]
    else:
        out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        request = Request(q=q, k=one_k, v=one_v, mask=Mask(causal=True))
        grads = torch.autograd.grad(out, (q, one_k, one_v), d_out)
    judge(request, out, lse)  # four query heads on one key head: the same thing said in another way
    judge_gradients(request, grads, d_out)


def test_arriving_gradient_that_is_not_contiguous(device):
    """Row 25, FA#355: b2 s32 4/1 heads d128, the arriving gradient transposed in memory."""
    leaves = [random(2, 32, h, 128, device=device, seed=h).requires_grad_() for h in (4, 1, 1)]
    d_out = random(2, 4, 32, 128, device=device, seed=5).transpose(1, 2)
    assert not d_out.is_contiguous()
    judge_gradients(Request(q=leaves[0], k=leaves[1], v=leaves[2]), torch.autograd.grad(flash_attn_func(*leaves), leaves, d_out), d_out)


def test_arriving_gradient_that_is_expanded(device):
    """Row 25, pytorch#138529: the gradient of sum() is one number with strides 0."""
    leaves = [random(2, 32, h, 128, device=device, seed=h).requires_grad_() for h in (4, 1, 1)]
    out = flash_attn_func(*leaves)
    grads = torch.autograd.grad(out.sum(), leaves)
    judge_gradients(Request(q=leaves[0], k=leaves[1], v=leaves[2]), grads, torch.ones_like(out))


def test_gradient_of_the_lse(device):
    """Row 30, FA#1817: loss = lse.mean(), b4 s2048 h16 d64: the true gradients. (b2 s200 h4 here.)"""
    leaves = [random(2, 200, 4, 64, device=device, seed=i).requires_grad_() for i in range(3)]
    for causal in (False, True):
        _, lse = flash_attn_func(*leaves, causal=causal, return_attn_probs=True)
        dq, dk, dv = torch.autograd.grad(lse.mean(), leaves, allow_unused=True)
        assert dv is None or (dv == 0).all()
        d_lse = torch.full_like(lse, 1 / lse.numel())
        request = Request(q=leaves[0], k=leaves[1], v=leaves[2], mask=Mask(causal=causal))
        judge_gradients(request, (dq, dk), torch.zeros(2, 200, 4, 64), d_lse)
        assert dq.abs().max() > 0


def test_deterministic_backward(device):
    """Row 31, FA#2244: deterministic, fp16 b2 s1024 h12 d64, 200 times: bitwise equal. (On the CPU s200 h3, 20 times.)"""
    length, heads, times = (1024, 12, 200) if device.type == "cuda" else (200, 3, 20)
    leaves = [random(2, length, heads, 64, dtype=torch.float16, device=device, seed=i).requires_grad_() for i in range(3)]
    d_out = random(2, length, heads, 64, dtype=torch.float16, device=device, seed=5)
    run = lambda: torch.autograd.grad(flash_attn_func(*leaves, causal=True, deterministic=True), leaves, d_out)  # noqa: E731
    first = run()
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_float64_where_every_lse_is_zero(device):
    """One key each and scores of 0: no LSE was too large for float32, and a float64 backward met a float32 LSE."""
    q, k, v = (random(1, 3, 1, 8, dtype=torch.float64, device=device, seed=i).requires_grad_() for i in range(3))
    out = flash3.attention(q, k, v, mask=Mask(left=0, right=0), scale=0.0)
    d_out = random(1, 3, 1, 8, dtype=torch.float64, device=device, seed=5)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    judge_gradients(Request(q=q, k=k, v=v, mask=Mask(left=0, right=0), scale=0.0), grads, d_out)
