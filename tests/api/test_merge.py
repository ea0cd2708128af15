"""Merging partial results over parts of the keys gives attention over all of them."""

import itertools
import math

import pytest
import torch

import flash3
from flash3 import Mask, reference
from tests.regressions.oracle import random

NAMES = ["dense", "packed"]


def _partials(device, cuts, dtype=torch.float32, sink=None):
    """out and lse over the keys between the cuts, and over all; causal masks travel as offsets."""
    q, k, v = (random(2, n, h, d, dtype=dtype, device=device, seed=d) for n, h, d in ((30, 4, 32), (50, 2, 32), (50, 2, 24)))
    edges = [0, *cuts, 50]
    outs, lses = [], []
    for a, b in itertools.pairwise(edges):
        mask = Mask(causal=True, q_offset=20, k_offset=a)
        out, lse = flash3.attention(q, k[:, a:b], v[:, a:b], mask=mask, return_lse=True)
        outs.append(out)
        lses.append(lse)
    return outs, lses, flash3.attention(q, k, v, mask=Mask(causal=True), return_lse=True, sink=sink)


def _close(ours, wanted):
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("cuts", [(), (25,), (10, 20, 45), (0, 0, 50), (49,)], ids=str)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_split_and_merge_is_the_whole(cuts, layout, stacked, device):
    """Parts without visible keys included: the last one of many rows lies beyond their causal edge."""
    outs, lses, wanted = _partials(device, cuts)
    if layout == "packed":
        outs, wanted = [x.flatten(0, 1) for x in outs], (wanted[0].flatten(0, 1), wanted[1].transpose(0, 1).flatten(1))
        lses = [x.transpose(0, 1).flatten(1) for x in lses]
    parts = (torch.stack(outs), torch.stack(lses)) if stacked else (outs, lses)
    _close(flash3.merge(*parts), wanted)
    if not cuts:
        assert all(torch.equal(a, b) for a, b in zip(flash3.merge(*parts), wanted, strict=True))


def test_against_the_oracle(device):
    outs, lses, _ = _partials(device, (10, 20, 45))
    exact = reference.merge([x.cpu() for x in outs], [x.cpu() for x in lses])
    for ours, wanted in zip(flash3.merge(outs, lses), exact, strict=True):
        torch.testing.assert_close(ours.double().cpu(), wanted, rtol=1e-6, atol=1e-6)


def test_any_order_and_any_grouping(device):
    """Merging is associative and commutative: a ring may take its steps as they come."""
    outs, lses, wanted = _partials(device, (10, 20, 45))
    _close(flash3.merge(outs[::-1], lses[::-1]), wanted)
    state = outs[0], lses[0]
    for part in zip(outs[1:], lses[1:], strict=True):
        state = flash3.merge(*zip(state, part, strict=True))
    _close(state, wanted)
    left, right = flash3.merge(outs[:2], lses[:2]), flash3.merge(outs[2:], lses[2:])
    _close(flash3.merge(*zip(left, right, strict=True)), wanted)


def test_a_sink_is_one_more_part(device):
    """A part whose value is 0 and whose LSE is the sink: partial results exclude the sink, it is added once."""
    sink = torch.linspace(-1, 2, 4, device=device)
    outs, lses, wanted = _partials(device, (25,), sink=sink)
    part = torch.zeros_like(outs[0]), sink[None, :, None].expand_as(lses[0])
    _close(flash3.merge([*outs, part[0]], [*lses, part[1]]), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, device):
    """out keeps its dtype or takes out_dtype; sums are made in float32 at least."""
    outs, lses, _ = _partials(device, (10, 20), dtype=dtype)
    out, lse = flash3.merge(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    wide, _ = flash3.merge([x.double() for x in outs], [x.double() for x in lses])
    torch.testing.assert_close(out.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert flash3.merge(outs, lses, out_dtype=torch.float32)[0].dtype == torch.float32
    fine, _ = flash3.merge(outs, lses, out_dtype=torch.float32)
    torch.testing.assert_close(fine.double(), wide, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mark", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 0.0])
def test_empty_rows(mark, garbage, device):
    """Rows that are empty in one part, in the other, in both; whatever their outputs hold."""
    outs = random(2, 1, 4, 1, 8, dtype=torch.float32, device=device)
    lses = random(2, 1, 1, 4, dtype=torch.float32, device=device)
    for part, row in ((0, 0), (1, 1), (0, 2), (1, 2)):
        outs[part, 0, row], lses[part, 0, 0, row] = garbage, mark
    out, lse = flash3.merge(outs, lses)
    assert torch.equal(out[0, 0], outs[1, 0, 0])
    assert torch.equal(out[0, 1], outs[0, 0, 1])
    assert (out[0, 2] == 0).all()
    assert torch.isneginf(lse[0, 0, 2])
    torch.testing.assert_close(lse[0, 0, 3], torch.logaddexp(*lses[:, 0, 0, 3]))
    assert out[0, 3].isfinite().all()


def test_extreme_lses(device):
    """Nothing overflows: LSEs of ±1e5 and far apart."""
    outs = random(2, 1, 1, 1, 8, dtype=torch.float32, device=device)
    for a, b in ((1e5, 1e5), (-1e5, -1e5), (1e5, -1e5), (150.0, -150.0)):
        lses = torch.tensor([a, b], device=device).view(2, 1, 1, 1)
        out, lse = flash3.merge(outs, lses)
        exact = reference.merge(outs.cpu(), lses.cpu())
        torch.testing.assert_close(out.double().cpu(), exact[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(lse.double().cpu(), exact[1], rtol=1e-7, atol=0)


@pytest.mark.parametrize("empty", [False, True], ids=["", "with empty rows"])
def test_gradients(empty, device):
    """Through out and lse, to every part: autograd of the definition in float64 says the same. Empty rows get 0, never NaN."""
    outs = random(3, 1, 5, 2, 8, dtype=torch.float64, device=device)
    lses = random(3, 1, 2, 5, dtype=torch.float64, device=device)
    if empty:
        lses[0, :, :, :2], lses[:, :, :, 0] = -math.inf, -math.inf
    leaves = outs.clone().requires_grad_(), lses.clone().requires_grad_()
    out, lse = flash3.merge(*leaves)
    seen = lse > -math.inf
    weights = random(*out.shape, dtype=torch.float64, device=device, seed=3)
    d_outs, d_lses = torch.autograd.grad((out * weights).sum() + lse[seen].square().sum(), leaves)
    assert d_outs.isfinite().all()
    assert d_lses.isfinite().all()
    plain = outs.clone().requires_grad_(), lses.clone().clamp(min=-1e4).requires_grad_()
    total = torch.logsumexp(plain[1], 0)
    shares = (plain[1] - total).exp().where(seen, torch.zeros(())).transpose(-1, -2)[..., None]
    loss = ((plain[0] * shares).sum(0) * weights).sum() + total[seen].square().sum()
    for ours, theirs in zip((d_outs, d_lses), torch.autograd.grad(loss, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_compiled(device):
    outs, lses, _ = _partials(device, (10, 20))
    merged = torch.compile(flash3.merge, fullgraph=True, backend="aot_eager")
    _close(merged(torch.stack(outs), torch.stack(lses)), flash3.merge(outs, lses))


def test_inputs_are_not_changed(device):
    outs, lses, _ = _partials(device, (10,))
    kept = [x.clone() for x in (*outs, *lses)]
    flash3.merge(outs, lses)
    assert all(torch.equal(a, b) for a, b in zip((*outs, *lses), kept, strict=True))
