"""FP8 inputs, forward: exact for the values that they stand for, as far as FP8's own probabilities allow."""

import pytest
import torch

from flash3 import Mask, reference
from flash3.flash_attn_interface import flash_attn_func, flash_attn_with_kvcache
from flash3.problem import Request
from tests.conformance.storage import paged

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _inputs(dtype, q_len=70, k_len=150, batch=2, heads=(4, 2), dims=(64, 64)):
    g = torch.Generator().manual_seed(11)
    shapes = (q_len, heads[0], dims[0]), (k_len, heads[1], dims[0]), (k_len, heads[1], dims[1])
    tensors = [torch.randn(batch, *s, generator=g).to(dtype) for s in shapes]
    scales = [torch.rand(batch, heads[1], generator=g) * 2 + 0.25 for _ in range(3)]
    return tensors, scales


def _serve_with(backend, run):
    """FlashAttention-3's functions take no backend: the setting chooses it."""
    from flash3.settings import override

    with override(backend=backend.name):
        return backend.serve(run)


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", ""])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=31, right=0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_forward(dtype, mask, scaled, backend):
    (q, k, v), scales = _inputs(dtype)
    scales = scales if scaled else [None] * 3
    window = (-1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right)
    on_device = [None if x is None else x.to(backend.device) for x in (q, k, v, *scales)]
    q_, k_, v_, *descales = on_device
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out, lse = _serve_with(
        backend, lambda: flash_attn_func(q_, k_, v_, causal=mask.causal, window_size=window, return_attn_probs=True, **names)
    )
    assert out.dtype == torch.bfloat16
    request = Request(q=q, k=k, v=v, mask=mask, **dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)))
    for name, ours, exact, plain in zip(("out", "lse"), (out, lse), reference.attention(request), reference.plain(request), strict=True):
        reference.check(name, ours.cpu(), exact, plain)


def test_descales_of_every_sequence_and_head(backend):
    """A scale that belongs elsewhere would show: they differ by powers of ten."""
    (q, k, v), _ = _inputs(E4M3, batch=2, heads=(4, 2))
    v_scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    out = _serve_with(
        backend, lambda: flash_attn_func(*(x.to(backend.device) for x in (q, k, v)), v_descale=v_scale.to(backend.device)).float().cpu()
    )
    plain = _serve_with(backend, lambda: flash_attn_func(*(x.to(backend.device) for x in (q, k, v))).float().cpu())
    torch.testing.assert_close(out, plain * v_scale.repeat_interleave(2, 1)[:, None, :, None], rtol=2e-2, atol=1e-3)


def test_paged(backend):
    """Every sequence has its own scales, expanded with stride 0 as vLLM passes them."""
    (q, k, v), scales = _inputs(E4M3, q_len=1)
    scales = [s[:1, :1].expand(2, 2) for s in scales]
    at = paged((150, 150), 16)
    stored = [at.put([x.float() for x in t]).to(E4M3).to(backend.device) for t in (k, v)]
    names = {f"{n}_descale": s.to(backend.device) for n, s in zip("qkv", scales, strict=True)}
    table, lengths = (at.arguments[n].to(backend.device) for n in ("page_table", "lengths"))
    call = lambda: flash_attn_with_kvcache(  # noqa: E731
        q.to(backend.device), *stored, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True, **names
    )
    out, lse, *_ = _serve_with(backend, call)
    request = Request(q=q, k=k, v=v, mask=Mask(causal=True), **{f"{n}_scale": s for n, s in zip("qkv", scales, strict=True)})
    for name, ours, exact, plain in zip(("out", "lse"), (out, lse), reference.attention(request), reference.plain(request), strict=True):
        reference.check(name, ours.cpu(), exact, plain)
