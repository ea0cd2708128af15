"""The CPU backend against the oracle: every feature, forward and backward, by the fused path and by blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash3 import reference
from flash3.backends.cpu import backward, blocks, forward, fused, plan
from flash3.backends.cpu.tiles import Method, Tiles
from flash3.mask import Mask
from flash3.problem import DType, Problem, Request, Task
from flash3.reference.error import check
from flash3.reference.plain import plain, plain_gradients
from tests.running import BACKENDS, describe

CPU = BACKENDS["cpu"]
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(left=70, right=3),
    "left only": Mask(left=9),
    "one key": Mask(left=0, right=0),
    "chunk": Mask(chunk=64, causal=True),
    "offsets": Mask(causal=True, left=100, q_offset=-5, k_offset=20),
    "far right": Mask(causal=True, q_offset=400),
    "nothing": Mask(causal=True, q_offset=-1000),
}
LENGTHS = [(1, 1), (1, 300), (130, 130), (63, 65), (257, 129), (130, 700), (5, 0), (0, 5)]


def request_of(q_len: int, k_len: int, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (16, 16), **options: Any) -> Request:
    gen = torch.Generator().manual_seed(q_len * 1000 + k_len)
    heads = options.pop("heads", (4, 2))
    q = torch.randn(2, q_len, heads[0], dims[0], generator=gen)
    k, v = (torch.randn(2, k_len, heads[1], d, generator=gen) for d in dims)
    return Request(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), **options)


def arriving(request: Request) -> tuple[Tensor, Tensor]:
    """d_out and d_lse."""
    gen = torch.Generator().manual_seed(7)
    d_out = torch.randn(*request.q.shape[:-1], request.v.shape[-1], generator=gen)
    return d_out.to(request.q.dtype), torch.randn(request.q.shape[0], request.q.shape[2], request.q.shape[1], generator=gen)


def hold(request: Request, d_lse: bool = False, keys: float = 1.0) -> None:
    """Forward and backward: 16-bit within the project's tolerance beside plain torch; float32 and float64 to their own rounding.

    `keys` is the magnitude of K: dQ is a sum of numbers that large, whatever it comes to.
    """
    narrow = request.q.dtype.itemsize == 2
    yardsticks = plain(request) if narrow else (None, None)
    for name, ours, exact, other in zip(("out", "lse"), CPU.forward(request), reference.attention(request), yardsticks, strict=True):
        near(name, ours, exact, other, 2.0)
    d_out, given = arriving(request)
    given = given if d_lse else None
    yardsticks = plain_gradients(request, d_out, given) if narrow else (None,) * 4
    results = CPU.backward(request, d_out, given), reference.gradients(request, d_out, given), yardsticks
    for name, ours, exact, other in zip(("dq", "dk", "dv", "d_sink"), *results, strict=True):
        if exact is not None:
            near(name, ours, exact, other, 3.0 * keys if name == "dq" else 3.0)


def near(name: str, ours: Tensor, exact: Tensor, other: Tensor | None, factor: float) -> None:
    if other is not None:
        check(name, ours, exact, other, factor=factor)
        return
    largest = float(exact[exact.isfinite()].abs().max()) if exact.isfinite().any() else 0.0
    size = max(1.0, largest) * (factor - 1)
    tolerance = size * (1e-12 if ours.dtype == torch.float64 else 3e-6)
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "sink": torch.linspace(-1, 3, 4)}], ids=["fused", "blocks"])
def test_masks(mask: Mask, lengths: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "TILE_ROWS", 32)
    monkeypatch.setattr(blocks, "TILE_KEYS", 48)
    hold(request_of(*lengths, mask=mask, **options), d_lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=40, right=0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sink": torch.linspace(-1, 3, 4)}], ids=["plain", "softcap", "sink"])
def test_dtypes(dtype: torch.dtype, mask: Mask, options: dict[str, Any]) -> None:
    hold(request_of(150, 150, dtype, (64, 64), mask=mask, **options))
    hold(request_of(150, 210, dtype, (64, 32), mask=mask, **options), d_lse=True)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3), (300, 1)], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (24, 128), (128, 24)], ids=str)
def test_heads_and_widths(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    for softcap in (0.0, 5.0):
        hold(request_of(9, 33, dims=dims, heads=heads, softcap=softcap, mask=Mask(left=12, right=1)), d_lse=True)
        hold(request_of(1, 33, dims=dims, heads=heads, softcap=softcap))


@pytest.mark.parametrize("scale", [0.0, -0.25, 1e-3])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=20, right=0)], ids=["full", "causal", "window"])
def test_scales(scale: float, mask: Mask) -> None:
    hold(request_of(70, 70, mask=mask, scale=scale), d_lse=True)
    hold(request_of(70, 70, mask=mask, scale=scale, softcap=2.0), d_lse=True)


def test_sink_alone() -> None:
    """Rows without keys: out 0, LSE the sink, whose gradient is then dLSE."""
    request = request_of(5, 3, mask=Mask(causal=True), sink=torch.tensor([0.5, -200.0, 0.0, -torch.inf]))
    out, lse = CPU.forward(request)
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert torch.equal(lse[:, :, :2], request.sink[None, :, None].expand(2, 4, 2))
    hold(replace(request, sink=request.sink.clamp(min=-200)), d_lse=True)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_qv(softcap: float) -> None:
    request = request_of(40, 90, dims=(16, 32), mask=Mask(causal=True), softcap=softcap)
    request = replace(request, qv=torch.randn(2, 40, 4, 32))
    for ours, exact, other in zip(CPU.forward(request), reference.attention(request), plain(request), strict=True):
        check("qv", ours, exact, other)
    with pytest.raises(NotImplementedError, match="qv"):
        CPU.backward(request, torch.zeros(2, 40, 4, 32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mask", [Mask(), Mask(left=30, right=0)], ids=["full", "window"])
def test_float8(dtype: torch.dtype, mask: Mask) -> None:
    request = request_of(70, 90, dtype, (32, 32), mask=mask)
    scales = {name: torch.rand(2, 2) + 0.5 for name in ("q_scale", "k_scale", "v_scale")}
    for given in ({}, scales, {"k_scale": scales["k_scale"]}):
        for out_dtype in (None, DType.FP32):
            scaled = replace(request, **given, out_dtype=out_dtype)
            out, lse = CPU.forward(scaled)
            assert out.dtype == (torch.float32 if out_dtype else torch.bfloat16)
            exact, exact_lse = reference.attention(scaled)
            torch.testing.assert_close(out.double(), exact, rtol=1e-5 if out_dtype else 8e-3, atol=1e-5 if out_dtype else 4e-3)
            torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    refusal = plan.CpuBackend().support(Problem.of(replace(request, task=Task.BACKWARD), describe))
    assert "backward" in refusal.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_results_are_float32(dtype: torch.dtype) -> None:
    """out_dtype float32 for 16-bit inputs: as exact as float32 arithmetic on the same values."""
    for options in ({}, {"mask": Mask(causal=True)}, {"softcap": 2.0}):
        request = request_of(100, 100, dtype, out_dtype=DType.FP32, **options)
        out, _ = CPU.forward(request)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), reference.attention(request)[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("level", [-1e5, -150.0, 150.0, 1e5])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=20, right=0)], ids=["full", "causal", "window"])
def test_extreme_scores(level: float, mask: Mask) -> None:
    """All scores near `level`: softmax and its gradients as at 0, though a float32 LSE at 1e5 is off by 4e-3."""
    request = request_of(40, 40, dims=(8, 8), mask=mask, scale=1.0)
    request.q[..., 0], request.k[..., 0] = 1.0, level
    request.q[..., 1:], request.k[..., 1:] = 0.0, 0.0
    for options in ({}, {"sink": torch.full((4,), level)}, {"softcap": 1e6}):
        hold(replace(request, **options), d_lse=True, keys=abs(level))


def test_a_part_of_the_keys_takes_the_whole_rows_lse() -> None:
    """Ring attention: gradients over a slice of the keys, from the output and LSE of all of them, add up to the whole; at large LSE too."""
    for dtype, level in ((torch.float32, 0.0), (torch.float32, 200.0), (torch.float64, 0.0)):
        request = request_of(50, 90, dtype, mask=Mask(causal=True, q_offset=40))
        request.k[..., 0] = level
        request.q[..., 0] = 1.0
        out, lse = CPU.forward(request)
        d_out, d_lse = arriving(request)
        saved = plan.Saved(out=out, lse=lse)
        parts = []
        for first, stop in ((0, 30), (30, 90)):
            part = replace(request, k=request.k[:, first:stop], v=request.v[:, first:stop], task=Task.BACKWARD)
            part = replace(part, mask=replace(request.mask, k_offset=first))
            grads = plan.Gradients(d_out=d_out, d_lse=d_lse, **{f"d{n}": torch.empty_like(getattr(part, n)) for n in "qkv"})
            plan.CpuBackend().plan(Problem.of(part, describe)).run(part, saved, grads)
            parts.append(grads)
        exact = reference.gradients(request, d_out, d_lse)
        ours = parts[0].dq + parts[1].dq, *(torch.cat([getattr(p, n) for p in parts], 1) for n in ("dk", "dv"))
        for got, want in zip(ours, exact, strict=False):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 if level else 1e-5)


def test_strided_tensors() -> None:
    """Expanded K and V (stride 0), heads before tokens, gradients and outputs in any layout; d_out expanded from one number."""
    base = request_of(60, 60, mask=Mask(causal=True))
    v = base.v.transpose(1, 2).repeat(1, 2, 1, 1).transpose(1, 2)
    request = replace(base, k=base.k[:, :, :1].expand(2, 60, 4, 16), v=v)
    problem = Problem.of(replace(request, lse=True), describe)
    out, lse = torch.empty(2, 4, 60, 16).transpose(1, 2), torch.empty(60, 4, 2).permute(2, 1, 0)
    plan.CpuBackend().plan(problem).run(request, out, lse)
    exact, exact_lse = reference.attention(request)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-6)
    d_out = torch.ones(()).expand(out.shape)
    for got, want in zip(CPU.backward(request, d_out)[:3], reference.gradients(request, d_out)[:3], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_only_wanted_gradients() -> None:
    request = request_of(30, 30)
    out, lse = CPU.forward(request)
    request = replace(request, task=Task.BACKWARD)
    d_out, _ = arriving(request)
    dk = torch.empty_like(request.k)
    plan.CpuBackend().plan(Problem.of(request, describe)).run(request, plan.Saved(out=out, lse=lse), plan.Gradients(d_out=d_out, dk=dk))
    assert torch.equal(dk, CPU.backward(replace(request, task=Task.FORWARD), d_out)[1])


@pytest.mark.parametrize("shape", [(0, 3, 4, 16), (2, 0, 4, 16), (2, 3, 0, 16)], ids=str)
def test_empty_calls(shape: tuple[int, ...]) -> None:
    request = Request(q=torch.empty(shape), k=torch.empty(shape), v=torch.empty(shape))
    out, lse = CPU.forward(request)
    assert out.shape == shape
    assert lse.shape == (shape[0], shape[2], shape[1])
    assert all(g.shape == shape for g in CPU.backward(request, out)[:3])


def test_fused_and_blocks_agree() -> None:
    """One function in two ways."""
    for mask in MASKS.values():
        request = request_of(200, 260, mask=mask, sink=torch.linspace(-1, 2, 4))
        work, _ = plan.work_of(request, *plan.runs(request)[0])
        if not fused.fits(work):
            continue
        results = []
        for attend in (fused.attend, forward.attend):
            out, lse = torch.empty(2, 4, 200, 16), torch.empty(2, 4, 200)
            attend(work, out, lse)
            results.append((out, lse))
        torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)
        d_out, d_lse = arriving(request)
        saved = plan.Saved(out=results[0][0], lse=results[0][1])
        grads = plan.Gradients(d_out=d_out.transpose(1, 2), d_lse=d_lse)
        pair = [f(work, saved, grads) for f in (fused.gradients, backward.gradients)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_same_inputs_same_bits() -> None:
    for options in ({}, {"mask": Mask(left=30, right=0)}, {"softcap": 2.0}):
        request = request_of(300, 300, torch.float16, **options)
        d_out, d_lse = arriving(request)
        first = [*CPU.forward(request), *CPU.backward(request, d_out, d_lse)[:3]]
        for _ in range(5):
            again = [*CPU.forward(request), *CPU.backward(request, d_out, d_lse)[:3]]
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Tiles(method=Method.FUSED, rows=0), "rows must be from 1"),
        (Tiles(method=Method.BLOCKS, rows=64), "keys must be from 1"),
    ],
)
def test_wrong_tiles_are_refused(wrong: Tiles, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.CpuBackend().plan(Problem.of(request_of(3, 3), describe), wrong)


def test_every_tile_size_gives_the_same() -> None:
    request = replace(request_of(300, 333), mask=Mask(left=100, right=7), lse=True)
    problem = Problem.of(request, describe)
    backend, results = plan.CpuBackend(), []
    for tiles in [*backend.tuning_space(problem), Tiles(method=Method.BLOCKS, rows=7, keys=11)]:
        out, lse = torch.full(problem.out_shape, torch.nan), torch.full(problem.lse_shape, torch.nan)
        backend.plan(problem, tiles).run(request, out, lse)
        results.append((out, lse))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(lse, results[0][1], rtol=2e-5, atol=2e-6)


def test_support_says_how() -> None:
    backend = plan.CpuBackend()
    assert "fused" in backend.support(Problem.of(request_of(3, 3), describe)).note
    assert "blocks" in backend.support(Problem.of(request_of(3, 3, softcap=2.0), describe)).note
