"""FlashAttention-3's functions do what flash3's do, under their own names and shapes."""

import pytest
import torch

import flash3
from flash3 import Mask, reference
from flash3.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from flash3.problem import Request
from tests.regressions.oracle import int32, judge, random

WINDOWS = {
    "causal": ({"causal": True}, Mask(causal=True)),
    "window": ({"window_size": (9, 3)}, Mask(left=9, right=3)),
    "left": ({"window_size": (9, -1)}, Mask(left=9)),
    "causal window": ({"causal": True, "window_size": (9, 5)}, Mask(causal=True, left=9)),
    "chunk": ({"attention_chunk": 16}, Mask(chunk=16)),
    "causal chunk": ({"causal": True, "attention_chunk": 16}, Mask(causal=True, chunk=16)),
}


def _qkv(device, *lead, heads=(4, 2), dims=(64, 64), seed=0):
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    return [random(*lead, *s, device=device, seed=seed + i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize(("theirs", "ours"), WINDOWS.values(), ids=WINDOWS)
def test_masks_by_every_function(device, theirs, ours):
    q, k, v = _qkv(device, 2, 40)
    wanted, wanted_lse = flash3.attention(q, k, v, mask=ours, return_lse=True)
    judge(Request(q=q, k=k, v=v, mask=ours), wanted, wanted_lse)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    starts = int32(0, 40, 80, device=device)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*packed, starts, starts, 40, 40, return_attn_probs=True, **theirs)
    torch.testing.assert_close(out, wanted.flatten(0, 1))
    torch.testing.assert_close(lse, wanted_lse.transpose(0, 1).flatten(1))
    out, lse, *_ = flash_attn_with_kvcache(q, k, v, cache_seqlens=40, return_softmax_lse=True, **theirs)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_return_values(device):
    q, k, v = _qkv(device, 2, 10)
    starts = int32(0, 10, 20, device=device)
    assert flash_attn_func(q, k, v).shape == q.shape
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 10), torch.float32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*packed, starts, starts, 10, 10, return_attn_probs=True)
    assert (out.shape, lse.shape) == ((20, 4, 64), (4, 20))
    assert flash_attn_with_kvcache(q, k, v).shape == q.shape
    result = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    assert isinstance(result, tuple)
    assert len(result) == 4
    assert (result[0].shape, result[1].shape) == (q.shape, (2, 4, 10))
    ragged = flash_attn_with_kvcache(q.flatten(0, 1), k, v, cu_seqlens_q=starts, max_seqlen_q=10, return_softmax_lse=True)
    assert (ragged[0].shape, ragged[1].shape) == ((20, 4, 64), (4, 20))


@pytest.mark.parametrize("shape", ["three", "heads"])
def test_qkvpacked(device, shape):
    q, k, v = _qkv(device, 2, 30, heads=(4, 4 if shape == "three" else 2))
    packed = (torch.stack([q, k, v], 2) if shape == "three" else torch.cat([q, k, v], 2)).requires_grad_()
    names = {} if shape == "three" else {"num_heads_q": 4}
    out, lse = flash_attn_qkvpacked_func(packed, causal=True, window_size=(7, 0), softcap=3.0, return_attn_probs=True, **names)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = flash3.attention(*leaves, mask=Mask(causal=True, left=7), softcap=3.0, return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    d_out = random(2, 30, 4, 64, device=device, seed=9)
    grad = torch.autograd.grad(out, packed, d_out)[0]
    grads = torch.autograd.grad(wanted, leaves, d_out)
    assert torch.equal(grad, torch.stack(grads, 2) if shape == "three" else torch.cat(grads, 2))


@pytest.mark.parametrize("qkv", [(2, 30, 4, 64), (2, 30, 2, 4, 64), (30, 3, 4, 64), (2, 3, 64)], ids=str)
def test_qkvpacked_of_another_shape(qkv):
    with pytest.raises(ValueError, match=r"qkv must have shape \(batch, seqlen, 3, heads, d\)"):
        flash_attn_qkvpacked_func(torch.randn(qkv))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_combine(device, packed, splits):
    """out_partial (splits, batch, seqlen, heads, d) and lse_partial (splits, batch, seqlen, heads): heads last, unlike attention's."""
    q, k, v = (x.float() for x in _qkv(device, 2, 30))
    pieces = [slice(i, None, splits) for i in range(splits)]
    outs, lses = zip(*(flash3.attention(q, k[:, p], v[:, p], return_lse=True) for p in pieces), strict=True)
    outs, lses = torch.stack(outs), torch.stack(lses).transpose(-1, -2)
    wanted, wanted_lse = flash3.attention(q, k, v, return_lse=True)
    wanted_lse = wanted_lse.transpose(-1, -2)
    if packed:
        outs, lses, wanted, wanted_lse = outs.flatten(1, 2), lses.flatten(1, 2), wanted.flatten(0, 1), wanted_lse.flatten(0, 1)
    out, lse = flash_attn_combine(outs, lses)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    half, _ = flash_attn_combine(outs, lses, out_dtype=torch.float16)
    assert half.dtype == torch.float16
    given = torch.full_like(wanted, torch.nan, dtype=torch.bfloat16)
    returned, _ = flash_attn_combine(outs, lses, out=given)
    assert returned is given
    torch.testing.assert_close(given, wanted.bfloat16())


def test_sinks(device):
    """s_aux and sinks are one argument, of any float dtype; by every function that has it."""
    q, k, v = _qkv(device, 2, 30)
    sink = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    wanted = flash3.attention(q, k, v, sink=sink)
    starts = int32(0, 30, 60, device=device)
    for name in ("s_aux", "sinks"):
        for given in (sink, sink.bfloat16()):
            extra = {name: given}
            assert torch.equal(flash_attn_func(q, k, v, **extra), wanted)
            out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 30, 30, **extra)
            torch.testing.assert_close(out, wanted.flatten(0, 1))
            torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, **extra), wanted)
    with pytest.raises(ValueError, match="s_aux and sinks are two names of one argument"):
        flash_attn_func(q, k, v, s_aux=sink, sinks=sink)


def test_gradient_of_s_aux(device):
    q, k, v = (x.float() for x in _qkv(device, 2, 30))
    sink = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device, requires_grad=True)
    grads = [
        torch.autograd.grad(out.square().sum(), sink)[0]
        for out in (flash_attn_func(q, k, v, s_aux=sink), flash3.attention(q, k, v, sink=sink))
    ]
    assert torch.equal(*grads)
    assert grads[0].abs().min() > 0


def test_out(device):
    q, k, v = _qkv(device, 2, 30)
    wanted, wanted_lse = flash3.attention(q, k, v, return_lse=True)
    given = torch.full_like(q, torch.nan)
    assert flash_attn_func(q, k, v, out=given) is given
    assert torch.equal(given, wanted)
    strided = torch.full((2, 4, 30, 64), torch.nan, device=device, dtype=q.dtype).transpose(1, 2)
    out, lse, *_ = flash_attn_with_kvcache(q, k, v, out=strided, return_softmax_lse=True)
    assert out is strided
    torch.testing.assert_close(strided, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    with pytest.raises(ValueError, match=r"out must have shape \(2, 30, 4, 64\), got \(2, 30, 4, 32\)"):
        flash_attn_func(q, k, v, out=given[..., :32])
    with pytest.raises(ValueError, match="out cannot be given where a gradient is wanted"):
        flash_attn_func(q.requires_grad_(), k, v, out=given)


def test_qv(device):
    """qv·vᵀ is added to the scores (DeepSeek's absorbed form); the default scale counts its width too."""
    q, k, v = _qkv(device, 2, 9, heads=(4, 1), dims=(64, 128))
    qv = random(2, 9, 4, 128, device=device, seed=7)
    for scale in (None, 0.05):
        used = (64 + 128) ** -0.5 if scale is None else scale
        request = Request(q=q, k=k, v=v, qv=qv, scale=used, mask=Mask(causal=True))
        out, lse = flash_attn_func(q, k, v, scale, causal=True, qv=qv, return_attn_probs=True)
        judge(request, out, lse)
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, qv=qv, softmax_scale=scale, causal=True, return_softmax_lse=True)
        judge(request, out, lse)
        together = Request(q=torch.cat([q, qv], -1), k=torch.cat([k, v], -1), v=v, scale=used, mask=Mask(causal=True))
        exact = reference.attention(together.map_tensors(lambda t: t.cpu()))[0]
        torch.testing.assert_close(out.double().cpu(), exact, rtol=2e-2, atol=2e-2)


def test_latent_attention_of_512(device):
    """DeepSeek's decode: rope part 64, latent part 512 as qv and v, one key head, pages."""
    q, k, v = _qkv(device, 2, 1, heads=(16, 1), dims=(64, 512))
    qv = random(2, 1, 16, 512, device=device, seed=7)
    k, v = (random(6, 16, 1, d, device=device, seed=d) for d in (64, 512))
    table, lengths = int32(4, 0, 3, 1, 5, 2, device=device).view(2, 3), int32(40, 17, device=device)
    out = flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=lengths, page_table=table, causal=True)
    for i, n in enumerate((40, 17)):
        own_k, own_v = (x[table[i].long()].flatten(0, 1)[None, :n] for x in (k, v))
        judge(Request(q=q[i : i + 1], k=own_k, v=own_v, qv=qv[i : i + 1], scale=576**-0.5), out[i : i + 1])


def test_tuning_arguments_change_nothing(device):
    q, k, v = _qkv(device, 2, 30)
    wanted = flash_attn_func(q, k, v, causal=True)
    for tuning in ({"num_splits": 4}, {"pack_gqa": True}, {"pack_gqa": False}, {"sm_margin": 8}):
        torch.testing.assert_close(flash_attn_func(q, k, v, causal=True, **tuning), wanted)
        metadata = get_scheduler_metadata(2, 30, 30, 4, 2, 64, int32(30, 30, device=device), **tuning)
        torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, causal=True, scheduler_metadata=metadata, **tuning), wanted)


def test_descales_of_other_types_are_ignored(device):
    """Serving engines pass descales always; FlashAttention-3 reads them for float8 only."""
    q, k, v = _qkv(device, 2, 30)
    one = torch.full((1, 1), 7.0, device=device).expand(2, 2)
    assert torch.equal(flash_attn_func(q, k, v, q_descale=one, k_descale=one, v_descale=one), flash_attn_func(q, k, v))


def test_padded_keys_under_packed_queries(device):
    """cu_seqlens_k None with seqused_k: K is (batch, seqlen, heads, d)."""
    q, k, v = random(7, 4, 64, device=device), random(2, 20, 2, 64, device=device, seed=1), random(2, 20, 2, 64, device=device, seed=2)
    starts, used = int32(0, 3, 7, device=device), int32(20, 6, device=device)
    out = flash_attn_varlen_func(q, k, v, starts, None, 4, 20, seqused_k=used, causal=True)
    for i, (a, b, n) in enumerate(((0, 3, 20), (3, 7, 6))):
        judge(Request(q=q[None, a:b], k=k[i : i + 1, :n], v=v[i : i + 1, :n], mask=Mask(causal=True)), out[None, a:b])


def test_gradients_reach_through(device):
    """flash_attn_func and flash_attn_varlen_func are differentiable; a cache is not, and passes none on."""
    leaves = [x.requires_grad_() for x in _qkv(device, 2, 12)]
    d_out = random(2, 12, 4, 64, device=device, seed=5)
    wanted = torch.autograd.grad(flash3.attention(*leaves, mask=Mask(causal=True)), leaves, d_out)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, d_out), wanted, strict=True)
    )
    starts = int32(0, 12, 24, device=device)
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in leaves), starts, starts, 12, 12, causal=True)
    for a, b in zip(torch.autograd.grad(out, leaves, d_out.flatten(0, 1)), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert not flash_attn_with_kvcache(*leaves).requires_grad
