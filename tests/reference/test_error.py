"""The error bound that all tests use has to let good results pass, and nothing else; and its yardstick has to be sound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash3 import reference
from flash3.mask import Mask
from flash3.problem import DType, Request
from flash3.reference.error import ulp
from tests.ragged import Batch

EXACT = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64)
NOISE = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLAIN = EXACT + 1e-3 * NOISE / NOISE.abs().max()


def faults(ours: Tensor, plain: Tensor = PLAIN, exact: Tensor = EXACT, factor: float = 2.0) -> str:
    return "; ".join(reference.compare(ours, exact, plain, factor=factor).faults)


def off_at(place: int, by: float) -> Tensor:
    ours = EXACT.clone()
    ours[place] += by
    return ours


def test_plain_itself_passes() -> None:
    report = reference.compare(PLAIN, EXACT, PLAIN)
    assert report.ok
    assert report.max_error == pytest.approx(1e-3)
    assert report.max_allowed == pytest.approx(2e-3)
    assert report.rms_allowed == pytest.approx(1.5 * report.rms_error)


def test_one_entry_too_far() -> None:
    assert not faults(off_at(3, 1.99e-3))
    assert "max error 0.00201 > 0.002 (2 × plain's 0.001 + 2 ulp)" in faults(off_at(3, 2.01e-3))
    assert not faults(off_at(3, 2.9e-3), factor=3.0)
    assert "max error" in faults(off_at(3, 3.1e-3), factor=3.0)


def test_many_entries_a_little_off() -> None:
    """Every entry within the maximum, but too many near it."""
    rms = (PLAIN - EXACT).square().mean().sqrt().item()
    assert not faults(EXACT + 1.49 * rms)
    assert faults(EXACT + 1.51 * rms).startswith("RMS error")


def test_exact_yardstick_leaves_two_ulp() -> None:
    """Of ours' dtype, at the largest exact value."""
    exact = torch.tensor([0.75], dtype=torch.float64)
    step = 2.0**-9
    assert not faults(exact.bfloat16(), exact, exact)
    report = reference.compare((exact + 2 * step).bfloat16(), exact, exact)
    assert report.max_allowed == 2 * 2.0**-8
    assert report.rms_allowed == 2.0**-8
    assert report.ok
    assert "max error" in faults((exact + 6 * step).bfloat16(), exact, exact)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_has_its_place(value: float) -> None:
    exact, moved = EXACT.clone(), EXACT.clone()
    exact[5], moved[6] = value, value
    assert not faults(exact, exact=exact)
    assert "in 1 wrong places, first (5,)" in faults(EXACT, exact=exact)
    assert "in 1 wrong places, first (6,)" in faults(moved)
    assert "in 2 wrong places, first (5,)" in faults(moved, exact=exact)
    assert "-inf in 1 wrong places" in faults(-EXACT.where(EXACT < 1, torch.inf), exact=EXACT.where(EXACT < 1, torch.inf))


def test_a_broken_yardstick_allows_nothing() -> None:
    """Where plain overflows it says nothing about what is possible."""
    plain = PLAIN.clone()
    plain[3] = torch.inf
    assert not faults(EXACT, plain)
    assert "max error" in faults(off_at(3, 1.0), plain)
    assert "max error" in faults(off_at(3, 1.0), torch.full_like(EXACT, torch.nan))


def test_shapes() -> None:
    assert faults(EXACT[:-1]) == "shapes (63,), (64,), (64,) differ"
    assert not faults(*(torch.zeros(0, dtype=torch.float64),) * 3)


def test_check_raises() -> None:
    reference.check("out", PLAIN, EXACT, PLAIN)
    with pytest.raises(AssertionError, match=r"^dq of causal: max error"):
        reference.check("dq of causal", off_at(0, 1.0), EXACT, PLAIN, factor=3.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0, 1.999, 0.3, 1e5, 3e-5])
def test_ulp(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor(value, dtype=dtype)
    if x.isfinite():
        step = torch.nextafter(x, torch.tensor(torch.inf, dtype=dtype)).double() - x.double()
        assert ulp(x.item(), dtype) == step.item()
    assert ulp(0.0, dtype) == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


# ---------------------------------------------------------------- the yardstick


def request_in(dtype: torch.dtype, **options: object) -> Request:
    request = Batch.random([(17, 40)], dims=(32, 16)).one(0, **options)
    return replace(request, q=request.q.to(dtype), k=request.k.to(dtype), v=request.v.to(dtype))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, q_offset=-5), Mask(left=3, right=0)], ids=str)
@pytest.mark.parametrize("sink", [None, torch.tensor([0.0, 1.0, -1.0, 4.0])])
def test_plain_in_float64_is_the_oracle(mask: Mask, sink: Tensor | None) -> None:
    request = request_in(torch.float64, mask=mask, sink=sink, softcap=3.0)
    for plain, exact in zip(reference.plain(request), reference.attention(request), strict=True):
        torch.testing.assert_close(plain, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.float32, 1e-8, 2e-6), (torch.float16, 1e-4, 3e-3), (torch.bfloat16, 1e-3, 3e-2), (torch.float8_e4m3fn, 3e-3, 1e-1)],
)
def test_plain_errs_by_its_dtype(dtype: torch.dtype, low: float, high: float) -> None:
    """A yardstick that errs more would let anything pass; one that errs less is not of its dtype."""
    request = request_in(dtype, mask=Mask(causal=True))
    out, lse = reference.plain(request)
    exact, exact_lse = reference.attention(request)
    assert low < (out.double() - exact).abs().max() < high
    assert (lse.double() - exact_lse).abs().max() < high
    assert lse.dtype == torch.float32


def test_plain_of_extreme_scores() -> None:
    """Through softmax, not exp(S - LSE): no error of the LSE's size."""
    request = replace(request_in(torch.float32), scale=0.0)
    request.q[..., 0], request.k[..., 0] = 1.0, -1e5
    for one in (request, replace(request, scale=1.0, q=torch.eye(32)[0].expand(1, 17, 4, 32))):
        out, _ = reference.plain(one)
        torch.testing.assert_close(out, request.v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out), rtol=1e-5, atol=1e-6)


def test_plain_output_dtype() -> None:
    assert reference.plain(request_in(torch.float8_e5m2))[0].dtype == torch.bfloat16
    assert reference.plain(request_in(torch.float8_e5m2, out_dtype=DType.FP16))[0].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_gradients(dtype: torch.dtype) -> None:
    """In the inputs' dtypes, near the exact ones, zero for rows without keys, and d_out and d_lse both count."""
    request = request_in(dtype, mask=Mask(causal=True, q_offset=-5), sink=torch.zeros(4))
    d_out, d_lse = torch.ones(1, 17, 4, 16, dtype=dtype), torch.ones(1, 4, 17)
    plain = reference.plain_gradients(request, d_out, d_lse)
    for grad, exact, like in zip(
        plain, reference.gradients(request, d_out, d_lse), (request.q, request.k, request.v, request.sink), strict=True
    ):
        assert grad is not None
        assert like is not None
        assert grad.dtype == like.dtype
        torch.testing.assert_close(grad.double(), exact, rtol=0.05, atol=0.05)
    assert (plain[0][:, :5] == 0).all()
    assert (plain[0][:, 5:] != 0).any()
