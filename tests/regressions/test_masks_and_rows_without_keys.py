"""Reported failures of other kernels: rows without keys, windows, and fully masked tiles. FA is Dao-AILab/flash-attention."""

import pytest
import torch

import flash3
from flash3 import Mask
from flash3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash3.problem import Request
from flash3.sequences import Packed, Paged
from tests.regressions.oracle import int32, judge, judge_gradients, random


def test_first_tile_fully_masked(device):
    """Row 4, FA#2082: causal, seqlen_q 88, seqlen_k 448, 14/2 heads, logits about −200: the true row maximum, the right rows."""
    q, k, v = (random(1, n, h, 64, device=device, seed=i) for i, (n, h) in enumerate(((88, 14), (448, 2), (448, 2))))
    q, k = q * 0.3 + 5, k * 0.3 - 5  # q·k / 8 = −200 and a few
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse < -150).all()
    judge(Request(q=q, k=k, v=v, mask=Mask(causal=True)), out, lse)
    alone, lse_alone = flash_attn_func(q[:, :40], k[:, :400], v[:, :400], causal=True, return_attn_probs=True)
    torch.testing.assert_close(lse[..., :40], lse_alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(out[:, :40], alone, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_paged_causal_with_more_queries_than_keys(device, page_size):
    """Row 5, flashinfer#4452: paged causal, q_len > kv_len: output 0 and LSE −inf on rows without keys."""
    k, v = (random(128 // page_size, page_size, 2, 64, device=device, seed=i) for i in (1, 2))
    q, lengths = random(2, 90, 4, 64, device=device), int32(17, 50, device=device)
    table = torch.arange(128 // page_size, dtype=torch.int32, device=device).view(2, -1)
    out, lse, *_ = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True)
    for i, n in enumerate((17, 50)):
        assert (out[i, : 90 - n] == 0).all()
        assert torch.isneginf(lse[i, :, : 90 - n]).all()
    judge(Request(q=q, k=k, v=v, k_sequences=Paged(page_table=table, lengths=lengths), mask=Mask(causal=True)), out, lse)


def test_keys_of_length_zero(device):
    """Row 6, FA PR#978: K and V of length 0, packed beside others and in a cache: output 0, LSE −inf, not +inf."""
    q, k = random(10, 4, 64, device=device), random(9, 2, 64, device=device)
    starts = int32(0, 3, 7, 10, device=device), int32(0, 4, 4, 9, device=device)
    out, lse = flash_attn_varlen_func(q, k, k, *starts, 4, 5, return_attn_probs=True)
    assert (out[3:7] == 0).all()
    assert torch.isneginf(lse[:, 3:7]).all()
    judge(Request(q=q, k=k, v=k, q_sequences=Packed(cu_seqlens=starts[0]), k_sequences=Packed(cu_seqlens=starts[1])), out, lse)
    cache = random(2, 16, 2, 64, device=device)
    out, lse, *_ = flash_attn_with_kvcache(
        q.view(2, 5, 4, 64), cache, cache, cache_seqlens=int32(0, 3, device=device), return_softmax_lse=True
    )
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("q_len", [1, 64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_keys_of_length_zero(device, q_len, head_dim, causal):
    """Row 11, FA PR#2470: dense K of length 0; seqlen_q 1, 64, 128, 256; d128 and d192. Forward and backward."""
    q = random(2, q_len, 2, head_dim, device=device).requires_grad_()
    k, v = (torch.empty(2, 0, 1, d, dtype=q.dtype, device=device, requires_grad=True) for d in (head_dim, 128))
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert out.shape == (2, q_len, 2, 128)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (dq == 0).all()
    assert dk.shape == k.shape
    assert dv.shape == v.shape


def test_empty_batches_and_queries(device):
    """Row 12, FA PR#2515: batch 0; seqlen_q 0; packed total_q 0 with seqlen_k 4096. An empty result."""
    for batch, q_len, k_len in ((0, 128, 128), (2, 0, 4096), (0, 0, 0)):
        q, k = random(batch, q_len, 2, 64, device=device), random(batch, k_len, 1, 64, device=device)
        out, lse = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
        assert out.shape == q.shape
        assert lse.shape == (batch, 2, q_len)
    q, k = random(0, 2, 64, device=device).requires_grad_(), random(4096, 1, 64, device=device)
    starts = int32(0, 0, device=device), int32(0, 4096, device=device)
    out, lse = flash_attn_varlen_func(q, k, k, *starts, 0, 4096, causal=True, return_attn_probs=True)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_packed_single_queries_around_an_empty_one(device):
    """Row 13, FA#1537: packed q lengths [1, 0, 1], k lengths [3, 0, 5], max_seqlen_q 1, 9/3 heads, d64."""
    q, k, v = (random(n, h, 64, device=device, seed=i) for i, (n, h) in enumerate(((2, 9), (8, 3), (8, 3))))
    starts = int32(0, 1, 1, 2, device=device), int32(0, 3, 3, 8, device=device)
    for causal in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn_varlen_func(*leaves, *starts, 1, 5, causal=causal, return_attn_probs=True)
        layouts = {"q_sequences": Packed(cu_seqlens=starts[0]), "k_sequences": Packed(cu_seqlens=starts[1])}
        request = Request(q=q, k=k, v=v, mask=Mask(causal=causal), **layouts)
        judge(request, out, lse)
        d_out = random(2, 9, 64, device=device, seed=7)
        judge_gradients(request, torch.autograd.grad(out, leaves, d_out), d_out)


def test_window_of_minus_one_and_of_none(device):
    """Row 15, TransformerEngine#3528: causal with window −1 against None: both accepted, the same result."""
    q, k = random(1, 40, 2, 64, device=device), random(1, 70, 2, 64, device=device)
    wanted = flash_attn_func(q, k, k, causal=True)
    for window in ((-1, -1), (None, None), (-1, 0), (None, 0), (-1, None), None):
        assert torch.equal(flash_attn_func(q, k, k, causal=True, window_size=window), wanted)
    assert Mask(left=-1, right=-1) == Mask() == Mask(left=None, right=None)


@pytest.mark.parametrize("length", [1024, pytest.param(16384, marks=pytest.mark.slow)])
def test_windows_as_wide_as_the_sequence(device, length):
    """Row 16, FA#1133: S = 16384: causal, and windows (−1, 0), (S, 0), (S−1, 0) are equal. (Reduced to 1024; whole with -m slow.)"""
    q, k, v = (random(1, length, 1, 64, device=device, seed=i) for i in range(3))
    wanted = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for window in ((-1, 0), (length, 0), (length - 1, 0)):
        for ours, theirs in zip(flash_attn_func(q, k, v, window_size=window, return_attn_probs=True), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    _, shorter = flash_attn_func(q, k, v, window_size=(length - 2, 0), return_attn_probs=True)  # the last row alone misses a key
    torch.testing.assert_close(shorter[..., :-1], wanted[1][..., :-1], rtol=1e-6, atol=1e-6)
    assert shorter[0, 0, -1] < wanted[1][0, 0, -1]


def test_window_with_more_queries_than_keys(device):
    """Row 17, FA#2199: window (32, 64), seqlen_q 129 > seqlen_k: zeros and −inf where no key is seen."""
    for k_len in (1, 20, 64, 100):
        q, k = random(1, 129, 2, 64, device=device).requires_grad_(), random(1, k_len, 2, 64, device=device).requires_grad_()
        out, lse = flash_attn_func(q, k, k, window_size=(32, 64), return_attn_probs=True)
        blind = ~Mask(left=32, right=64).dense(129, k_len).any(1)
        assert (out[:, blind] == 0).all()
        assert torch.isneginf(lse[:, :, blind]).all()
        mask = Mask(left=32, right=64)
        judge(Request(q=q, k=k, v=k, mask=mask), out, lse)
        d_out = random(1, 129, 2, 64, device=device, seed=3)
        dq, dk = torch.autograd.grad(out, (q, k), d_out)
        assert (dq[:, blind] == 0).all()
        assert dk.isfinite().all()


@pytest.mark.parametrize("window", [1, 2, 7, 64])
def test_a_window_of_w_tokens_sees_w_keys(device, window):
    """Row 18, transformers#39408: a window of W tokens was passed as left=W. W tokens are left = W − 1: count the visible keys."""
    k_len, dim = 100, 104
    q, k = random(1, 90, 1, 64, device=device), random(1, k_len, 1, 64, device=device)
    v = torch.eye(k_len, dim, device=device, dtype=q.dtype)[None, :, None]
    ours = flash3.attention(q, k, v, mask=Mask(causal=True, left=window - 1), scale=0.0)
    theirs = flash_attn_func(q, k, v, softmax_scale=0.0, causal=True, window_size=(window - 1, 0))
    for out in (ours, theirs):
        rows = torch.arange(90) + k_len - 90
        assert torch.equal((out[0, :, 0] > 0).sum(-1).cpu(), torch.minimum(rows + 1, torch.tensor(window)))
        assert (out[0, torch.arange(90), 0, rows] > 0).all()
