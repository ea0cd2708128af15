"""Reported failures of other libraries when partial results are merged."""

import math

import pytest
import torch

import flash3
from flash3 import Mask
from flash3.flash_attn_interface import flash_attn_combine, flash_attn_func, flash_attn_with_kvcache
from flash3.problem import Request
from tests.regressions.oracle import int32, judge, random


@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf])
def test_two_empty_partials(device, garbage):
    """Row 7, flashinfer#4051: two partials with LSE −inf merge to 0 and −inf; one of them with +inf; whatever their outputs hold."""
    outs = torch.full((2, 1, 3, 2, 8), garbage, device=device)
    for lses in ((-math.inf, -math.inf), (-math.inf, math.inf), (math.inf, math.inf)):
        lse = torch.tensor(lses, device=device).view(2, 1, 1, 1).expand(2, 1, 2, 3)
        out, merged = flash3.merge(outs, lse)
        assert (out == 0).all()
        assert torch.isneginf(merged).all()
        out, merged = flash_attn_combine(outs, lse.transpose(-1, -2))
        assert (out == 0).all()
        assert torch.isneginf(merged).all()


@pytest.mark.parametrize("mark", [-math.inf, math.inf])
def test_an_empty_partial_beside_a_full_one(device, mark):
    """Row 7, flashinfer#4051: the full one comes out unchanged, though the empty one's output is NaN."""
    full = random(1, 3, 2, 8, dtype=torch.float32, device=device)
    lse = random(1, 2, 3, dtype=torch.float32, device=device)
    outs, lses = torch.stack([torch.full_like(full, torch.nan), full]), torch.stack([torch.full_like(lse, mark), lse])
    out, merged = flash3.merge(outs, lses)
    assert torch.equal(out, full)
    assert torch.equal(merged, lse)


def test_every_lse_is_a_natural_logarithm(device):
    """Row 8, sglang PR#35045: a base-2 LSE met a natural one. Partials from any two functions, merged by either, are the whole."""
    q, k, v = (random(1, n, 2, 64, device=device, seed=i) for i, n in enumerate((9, 100, 100)))
    q = q * 3
    lengths = int32(60, device=device)
    ways = {
        "attention": lambda k, v: flash3.attention(q, k, v, return_lse=True),
        "flash_attn_func": lambda k, v: flash_attn_func(q, k, v, return_attn_probs=True),
        "attention_kvcache": lambda k, v: flash3.attention_kvcache(
            q, flash3.KVCache(k, v, lengths * 0 + k.shape[1]), return_lse=True
        ),
        "flash_attn_with_kvcache": lambda k, v: flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)[:2],
    }  # fmt: skip
    request = Request(q=q, k=k, v=v, mask=Mask())
    for first in ways.values():
        for second in ways.values():
            outs, lses = zip(first(k[:, :60], v[:, :60]), second(k[:, 60:], v[:, 60:]), strict=True)
            judge(request, *flash3.merge(outs, lses))
            out, lse = flash_attn_combine(torch.stack(outs).float(), torch.stack(lses).transpose(-1, -2), out_dtype=q.dtype)
            judge(request, out, lse.transpose(-1, -2))
    one_key = flash3.attention(q, k[:, :1], v[:, :1], scale=1.0, return_lse=True)[1]
    dots = torch.einsum("bqhd,bkhd->bhqk", q.float(), k[:, :1].float())[..., 0]
    torch.testing.assert_close(one_key, dots, rtol=1e-4, atol=1e-4)
