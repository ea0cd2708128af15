"""How far from exact a result may be: no further than plain torch code in the same dtype, within a factor.

    max|ours - exact| <= factor · max|plain - exact| + 2 ulp        factor 2, gradients 3
    RMS(ours - exact) <= 1.5 · RMS(plain - exact) + 1 ulp

An ulp is that of ours' dtype at the largest (for RMS: at the root-mean-square) magnitude of the exact result. NaN and Inf have to be
where exact has them, before anything else is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENT_FACTOR = 3.0
RMS_FACTOR = 1.5


@dataclass(frozen=True)
class Report:
    """Errors against the exact result, and what was allowed. `faults` is empty when all is well."""

    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of `dtype` at `magnitude` (its smallest step at 0)."""
    info = torch.finfo(dtype)
    if magnitude < info.tiny:
        return float(info.smallest_normal * info.eps)
    return float(2.0 ** math.floor(math.log2(magnitude)) * info.eps)


def compare(ours: Tensor, exact: Tensor, plain: Tensor, *, factor: float = 2.0) -> Report:
    """Hold `ours` against `exact` (float64), with `plain` as the yardstick; all of one shape, any float dtype.

    Entries that are not finite in `exact` count by position only; entries of `plain` that are not finite are no yardstick.
    """
    dtype = ours.dtype
    ours, exact, plain = (t.detach().double() for t in (ours, exact, plain))
    if not ours.shape == exact.shape == plain.shape:
        return Report(math.inf, 0.0, math.inf, 0.0, (f"shapes {tuple(ours.shape)}, {tuple(exact.shape)}, {tuple(plain.shape)} differ",))
    faults = _misplaced(ours, exact)
    finite = exact.isfinite() & ours.isfinite()
    error, largest, rms = _errors(ours[finite], exact[finite])
    usable = finite & plain.isfinite()
    yardstick, _, _ = _errors(plain[usable], exact[usable])
    max_allowed = factor * yardstick[0] + 2 * ulp(largest, dtype)
    rms_allowed = RMS_FACTOR * yardstick[1] + ulp(rms, dtype)
    if error[0] > max_allowed:
        faults.append(f"max error {error[0]:.3g} > {max_allowed:.3g} ({factor:g} × plain's {yardstick[0]:.3g} + 2 ulp)")
    if error[1] > rms_allowed:
        faults.append(f"RMS error {error[1]:.3g} > {rms_allowed:.3g} ({RMS_FACTOR:g} × plain's {yardstick[1]:.3g} + 1 ulp)")
    return Report(error[0], max_allowed, error[1], rms_allowed, tuple(faults))


def _misplaced(ours: Tensor, exact: Tensor) -> list[str]:
    faults = []
    for name, here in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (here(ours) != here(exact)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            faults.append(f"{name} in {len(wrong)} wrong places, first {at}: {ours[at].item()} for {exact[at].item()}")
    return faults


def _errors(t: Tensor, exact: Tensor) -> tuple[tuple[float, float], float, float]:
    """(max, RMS) of the error, then the exact values' largest magnitude and RMS."""
    if t.numel() == 0:
        return (0.0, 0.0), 0.0, 0.0
    error = (t - exact).abs()
    return (error.max().item(), error.square().mean().sqrt().item()), exact.abs().max().item(), exact.square().mean().sqrt().item()


def check(name: str, ours: Tensor, exact: Tensor, plain: Tensor, *, factor: float = 2.0) -> Report:
    """`compare`, raising.

    Raises:
        AssertionError: `ours` is further from `exact` than allowed; the message starts with `name` and says how far.
    """
    report = compare(ours, exact, plain, factor=factor)
    if not report.ok:
        raise AssertionError(f"{name}: " + "; ".join(report.faults))
    return report
