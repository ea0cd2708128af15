"""Numerics of one built backward kernel: gradients against the oracle, into outputs full of NaN, and repeated launches compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash3 import reference
from flash3.backends.base import Gradients, Saved
from flash3.backends.hopper.backward_tiles import BackwardSpec
from flash3.backends.hopper.tiles import ForwardSpec
from flash3.problem import Request, Task
from flash3.reference.error import GRADIENT_FACTOR
from flash3.sequences import Packed

from .backward_configurations import BACKWARD
from .calls import prepare_backward
from .cases import cases, large, part_of

REPEATS = 30
DETERMINISTIC_REPEATS = 200
ROUNDING = 2e-6
"""What dP − D may leave where it is exactly 0 (a row with one visible key): two sums of the same products in another order."""
NAMES = ("dq", "dk", "dv", "d_sink")


def requests_like(spec: BackwardSpec) -> ForwardSpec:
    """The forward whose requests have this gradient."""
    return ForwardSpec(
        dtype=spec.dtype,
        out_dtype=spec.out_dtype,
        qk_width=spec.qk_width,
        v_width=spec.v_width,
        heads_per_kv=spec.heads_per_kv,
        mask_kind=spec.mask_kind,
        q_layout=spec.q_layout,
        k_layout=spec.k_layout,
        softcap=spec.softcap,
        sink=spec.sink,
    )


def arriving(request: Request, spec: BackwardSpec) -> tuple[Tensor, Tensor | None]:
    """Gradients of out and, where the kernel takes it, of the LSE."""
    q, v = request.q, request.v
    d_out = torch.randn(*q.shape[:-1], v.shape[-1], device="cuda").to(q.dtype)
    if not spec.lse_gradient:
        return d_out, None
    rows, heads = q.shape[-3], q.shape[-2]
    shape = (heads, rows) if isinstance(request.q_sequences, Packed) else (q.shape[0], heads, rows)
    return d_out, torch.randn(shape, device="cuda")


def saved_by_oracle(request: Request) -> Saved:
    out, lse = reference.attention(request)
    return Saved(out=out.to(request.q.dtype), lse=lse.float())


def gradients_of(request: Request, name: str, saved: Saved, d_out: Tensor, d_lse: Tensor | None) -> Any:
    """A function that launches, and the tensors that it fills."""
    dq, dk, dv = (torch.full(t.shape, torch.nan, dtype=t.dtype, device=t.device) for t in (request.q, request.k, request.v))
    d_sink = None if request.sink is None else torch.full_like(request.sink, torch.nan)
    gradients = Gradients(d_out=d_out, d_lse=d_lse, dq=dq, dk=dk, dv=dv, d_sink=d_sink)
    return prepare_backward(request, saved, gradients, name), (dq, dk, dv, d_sink)


def check(name: str, request: Request, repeats: int) -> tuple[float, list[str]]:
    """Error over what is allowed, and what is wrong."""
    spec, _ = BACKWARD[name]
    request = replace(request, task=Task.BACKWARD, deterministic=spec.deterministic)
    d_out, d_lse = arriving(request, spec)
    saved = saved_by_oracle(request)
    launch, found = gradients_of(request, name, saved, d_out, d_lse)
    launch()
    torch.cuda.synchronize()
    first = [None if t is None else t.clone() for t in found]
    wrong = differing(launch, found, first, repeats, spec.deterministic)
    exact, want = (reference.gradients(request, d_out, d_lse, out) for out in (None, saved.out))
    plain = reference.plain_gradients(request, d_out, d_lse)
    worst = 0.0
    for title, ours, *yardstick in zip(NAMES, first, exact, want, plain, strict=True):
        if ours is None or not ours.numel():
            continue
        report = of_saved(ours, *yardstick)
        if report.max_error <= ROUNDING:
            continue
        worst = max(worst, report.max_error / max(report.max_allowed, 1e-12))
        wrong += [f"{title}: {fault}" for fault in report.faults]
    return worst, wrong


def of_saved(ours: Tensor, exact: Tensor, want: Tensor, plain: Tensor) -> Any:
    """`want`, the gradients by the saved O, is what a kernel is given to compute; it may be as far from them as plain torch from the exact
    ones. The way from one to the other is the rounding of O."""
    return reference.compare(ours, want, plain.double() + (want - exact), factor=GRADIENT_FACTOR)


def differing(launch: Any, found: Any, first: Any, repeats: int, deterministic: bool) -> list[str]:
    """dK and dV are the same every time; dQ where the kernel promises it."""
    for _ in range(repeats):
        for t in found[:3]:
            t.fill_(torch.nan)
        launch()
        for i in (0, 1, 2) if deterministic else (1, 2):
            if not torch.equal(found[i], first[i]):
                return [f"launches differ in {NAMES[i]} at {int((found[i] != first[i]).sum())} places"]
        if found[0].isnan().any() != first[0].isnan().any():
            return ["NaN in dq in some launches"]
    return []


def check_large(name: str) -> list[str]:
    """A larger request: two heads (ragged: all) against the oracle."""
    spec, _ = BACKWARD[name]
    request = large(requests_like(spec))
    if spec.is_ragged:
        return check(name, request, REPEATS)[1]
    request = replace(request, task=Task.BACKWARD, deterministic=spec.deterministic)
    group = spec.heads_per_kv
    d_out, d_lse = arriving(request, spec)
    heads = [(0, h) for h in range(group)]
    saved = saved_by_parts(request)
    launch, found = gradients_of(request, name, saved, d_out, d_lse)
    launch()
    torch.cuda.synchronize()
    first = [None if t is None else t.clone() for t in found]
    wrong = differing(launch, found, first, DETERMINISTIC_REPEATS if spec.deterministic else REPEATS, spec.deterministic)
    for batch, head in heads[:1]:
        part = part_of(request, batch, head)
        own_lse = None if d_lse is None else d_lse[batch : batch + 1, head : head + 1]
        exact = reference.gradients(part, d_out[batch : batch + 1, :, head : head + 1], own_lse)
        plain = reference.plain_gradients(part, d_out[batch : batch + 1, :, head : head + 1], own_lse)
        ours = [first[0][batch : batch + 1, :, head : head + 1]]
        if group == 1:
            ours += [t[batch : batch + 1, :, head : head + 1] for t in first[1:3]]
        for title, mine, want, yardstick in zip(NAMES, ours, exact, plain, strict=False):
            wrong += [f"{title}: {fault}" for fault in reference.compare(mine, want, yardstick, factor=GRADIENT_FACTOR).faults]
    return wrong


def saved_by_parts(request: Request) -> Saved:
    """Out and LSE head by head: the oracle's scores of all heads would not fit."""
    b, m, heads, _ = request.q.shape
    out = torch.empty(b, m, heads, request.v.shape[-1], device="cuda", dtype=request.q.dtype)
    lse = torch.empty(b, heads, m, device="cuda")
    for batch in range(b):
        for head in range(heads):
            o, part_lse = reference.attention(part_of(request, batch, head))
            out[batch : batch + 1, :, head : head + 1], lse[batch : batch + 1, head : head + 1] = o.to(out.dtype), part_lse.float()
    return Saved(out=out, lse=lse)


def check_all(name: str) -> tuple[float, list[str], int]:
    """Every case of a configuration: the worst error over what is allowed, what is wrong, how many cases."""
    worst, wrong, count = 0.0, [], 0
    for title, request in cases(requests_like(BACKWARD[name][0])):
        ratio, faults = check(name, request, repeats=3)
        worst, count = max(worst, ratio), count + 1
        wrong += [f"{title}: {fault}" for fault in faults]
    wrong += [f"large: {fault}" for fault in check_large(name)]
    return worst, wrong, count + 1
