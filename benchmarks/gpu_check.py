"""Numerics of the built kernels on a GPU: `python -m benchmarks.gpu_check [WORD ...]` (needs build/hopper.tar.xz from benchmarks.objects).

Every configuration on lengths at and off tile edges, against float64: outputs full of NaN before, NaN and −inf in the right places, error
at most twice that of plain torch in the same dtype (RMS 1.5 times), LSE to float32 rounding, repeated launches bitwise equal (50 of them at
one larger shape). Each group runs in a process of its own with a deadline: a kernel that hangs ends its group, not the run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flash3.backends.hopper.tiles import ForwardSpec, ScaleSign
from flash3.mask import Mask, MaskKind

from .configurations import CONFIGURATIONS

LANES = 12
DEADLINE_SECONDS = 120
GOOD = Path("/tmp/flash3-good.txt")
"""Names that passed, for forward.py."""
LENGTHS = (
    (1, 2, 128, 128),
    (2, 3, 113, 257),
    (1, 2, 1, 1),
    (1, 2, 127, 129),
    (2, 2, 500, 500),
    (2, 4, 1024, 1024),
    (1, 2, 300, 1111),
    (3, 5, 640, 640),
)
UNEVEN = ((1, 2, 300, 77), (2, 2, 257, 64))
"""More queries than keys: with a mask, rows without keys."""
LARGE = (2, 7, 4133, 4133)
REPEATS = 50


def masks_of(kind: MaskKind) -> tuple[Mask, ...]:
    """Masks that one kind of kernel serves: its numbers are run-time values."""
    return {
        MaskKind.FULL: (Mask(),),
        MaskKind.CAUSAL: (Mask(causal=True), Mask(right=37), Mask(causal=True, q_offset=-40), Mask(right=200, q_offset=0, k_offset=150)),
        MaskKind.WINDOW: (
            Mask(left=64, right=0),
            Mask(left=0, right=1),
            Mask(left=130, right=200),
            Mask(left=100),
            Mask(causal=True, left=300, q_offset=90),
        ),
        MaskKind.CHUNK: (Mask(chunk=64), Mask(chunk=100, causal=True), Mask(chunk=300, left=50), Mask(chunk=1000, right=20, q_offset=-300)),
    }[kind]


def reference(call: Any, compute: Any) -> tuple[Any, Any]:
    """O and L in dtype `compute`, from the definition; the final O keeps that type."""
    import torch

    q, k, v = (x.to(compute).transpose(1, 2) for x in (call.q, call.k, call.v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * call.softmax_scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = torch.from_numpy(call.mask.dense(q.shape[2], k.shape[2])).cuda()
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sink is not None:
        column = call.sink.to(compute).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=-2)
    lse = scores.double().logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf")).double()
    weights = scores.softmax(-1).masked_fill(lse.isneginf().unsqueeze(-1), 0.0)
    return (weights @ v).transpose(1, 2), lse


def calls(spec: ForwardSpec) -> Iterator[tuple[str, Any]]:
    """Named calls that a configuration must get right."""
    import torch

    from .calls import Call

    dtype = getattr(torch, spec.dtype.value)
    full = spec.mask_kind is MaskKind.FULL

    def make(shape: tuple[int, ...], mask: Mask, dims: tuple[int, int], sharp: bool = False) -> Call:
        torch.manual_seed(1)
        b, hk, sq, sk = shape
        h = hk * spec.heads_per_kv
        q, k = torch.randn(b, sq, h, dims[0], device="cuda"), torch.randn(b, sk, hk, dims[0], device="cuda")
        v = torch.randn(b, sk, hk, dims[1], device="cuda")
        if sharp:
            q, k = q * 6, k * 3
        scale = {ScaleSign.POSITIVE: None, ScaleSign.NEGATIVE: -0.21, ScaleSign.ZERO: 0.0}[spec.scale_sign]
        sink = torch.randn(h, device="cuda") * 3 if spec.sink else None
        return Call(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), mask=mask, scale=scale, softcap=13.0 if spec.softcap else 0.0, sink=sink)

    widths = (spec.qk_width, spec.v_width)
    first, *others = masks_of(spec.mask_kind)
    for shape in LENGTHS if full else LENGTHS + UNEVEN:
        yield str(shape), make(shape, first, widths)
    yield "sharp", make((2, 3, 1500, 1500), first, widths, sharp=True)
    for mask in others:
        for shape in ((2, 3, 113, 257), (1, 2, 640, 640), (1, 2, 1500, 1700), (1, 2, 300, 77)):
            yield f"{shape} {mask}", make(shape, mask, widths)
    narrower = tuple(max(8, w - 24) for w in widths)
    yield f"dims {narrower}", make((2, 2, 300, 300), first, narrower)
    strided = make((2, 2, 200, 330), first, widths)
    strided.q, strided.k, strided.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (strided.q, strided.k, strided.v))
    yield "heads first", strided
    shared = make((2, 2, 200, 330), first, widths)
    shared.k, shared.v = shared.k[:1].expand_as(shared.k), shared.v[:1].expand_as(shared.v)
    yield "batch stride 0", shared


def check(name: str, call: Any, repeats: int = 10) -> tuple[float, str]:
    """Error over plain torch's, and what is wrong ("" when right)."""
    import torch

    spec, _ = CONFIGURATIONS[name]
    want, want_lse = reference(call, torch.float64)
    plain = reference(call, call.q.dtype)[0].double() - want
    out, lse = call.outputs(name)
    launch = call.launcher(name, out, lse)
    launch()
    torch.cuda.synchronize()
    first, first_lse = out.clone(), lse.clone()
    same = True
    for _ in range(repeats):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        launch()
        same &= torch.equal(out, first) and torch.equal(lse, first_lse)
    error = first.double() - want
    worst, base = error.abs().max().item(), plain.abs().max().item()
    ulp = want.abs().max().item() * 2.0 ** (-8 if call.q.dtype == torch.bfloat16 else -11)
    rms, base_rms = (x.square().mean().sqrt().item() for x in (error, plain))
    wrong = []
    if not worst <= 2 * base + 2 * ulp:
        wrong.append(f"error {worst:.2e}, plain {base:.2e}")
    if not rms <= 1.5 * base_rms + ulp / 4:
        wrong.append(f"rms {rms:.2e}, plain {base_rms:.2e}")
    if spec.lse:
        empty = want_lse.isneginf()
        lse_error = (first_lse.double() - want_lse)[~empty].abs().max().item() if (~empty).any() else 0.0
        allowed = 1e-5 * max(1.0, want_lse[~empty].abs().max().item() if (~empty).any() else 1.0)
        if not (torch.equal(first_lse.isneginf(), empty) and lse_error <= allowed):
            wrong.append(f"lse error {lse_error:.1e}, -inf {int(first_lse.isneginf().sum())} for {int(empty.sum())}")
        rows = empty.transpose(1, 2)
        if rows.any() and spec.sink is False and not (first[rows] == 0).all():
            wrong.append("rows without keys are not 0")
    if not same:
        wrong.append("launches differ")
    return worst / max(base, 1e-9), ", ".join(wrong)


def check_large(name: str) -> str:
    """A shape with many tiles per block: two heads against float64, 50 launches bitwise equal."""
    import torch

    from .calls import Call

    spec, _ = CONFIGURATIONS[name]
    mask = masks_of(spec.mask_kind)[0]
    torch.manual_seed(3)
    b, hk, sq, sk = LARGE
    h = hk * spec.heads_per_kv
    dtype = getattr(torch, spec.dtype.value)
    shapes = ((b, sq, h, spec.qk_width), (b, sk, hk, spec.qk_width), (b, sk, hk, spec.v_width))
    q, k, v = (torch.randn(s, device="cuda").to(dtype) for s in shapes)
    sink = torch.randn(h, device="cuda") if spec.sink else None
    scale = {ScaleSign.POSITIVE: None, ScaleSign.NEGATIVE: -0.21, ScaleSign.ZERO: 0.0}[spec.scale_sign]
    call = Call(q=q, k=k, v=v, mask=mask, scale=scale, softcap=13.0 if spec.softcap else 0.0, sink=sink)
    out, lse = call.outputs(name)
    launch = call.launcher(name, out, lse)
    launch()
    first, first_lse = out.clone(), lse.clone()
    for _ in range(REPEATS):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        launch()
        if not (torch.equal(out, first) and torch.equal(lse, first_lse)):
            return "large: launches differ"
    for i, j in ((0, 0), (b - 1, h - 1)):
        g = j // spec.heads_per_kv
        cut = Call(
            q=q[i : i + 1, :, j : j + 1],
            k=k[i : i + 1, :, g : g + 1],
            v=v[i : i + 1, :, g : g + 1],
            mask=mask,
            scale=scale,
            softcap=call.softcap,
            sink=None if sink is None else sink[j : j + 1],
        )
        want, _ = reference(cut, torch.float64)
        base = (reference(cut, dtype)[0].double() - want).abs().max().item()
        error = (first[i : i + 1, :, j : j + 1].double() - want).abs().max().item()
        if not error <= 2 * base + 2 * want.abs().max().item() * 2.0**-8:
            return f"large: error {error:.2e}, plain {base:.2e}"
    return ""


def run(names: list[str]) -> None:
    for name in names:
        start, worst, wrong, count = time.time(), 0.0, [], 0
        for title, call in calls(CONFIGURATIONS[name][0]):
            ratio, problem = check(name, call)
            worst, count = max(worst, ratio), count + 1
            if problem:
                wrong.append(f"{title}: {problem}")
        problem = check_large(name)
        wrong += [problem] if problem else []
        word = "BAD" if wrong else "ok "
        print(
            f"{word} {name:30s} {count + 1:3d} cases  error/plain {worst:.2f}  {time.time() - start:4.1f} s  " + "; ".join(wrong[:4]),
            flush=True,
        )


def main(words: list[str]) -> None:
    from .objects import built_names

    names = [n for n in built_names() if not words or any(w in n for w in words)]
    lanes = [lane for lane in (names[i::LANES] for i in range(LANES)) if lane]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run"]
    running = [subprocess.Popen([*command, *lane], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for lane in lanes]
    end, lines = time.time() + DEADLINE_SECONDS, []
    for process, lane in zip(running, lanes, strict=True):
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"{process.communicate()[0]}\nBAD {' '.join(lane)}: no end within {DEADLINE_SECONDS} s after the lines above"
        shown = [line for line in text.splitlines() if line.startswith(("ok", "BAD"))]
        if process.returncode not in (0, -9):
            shown.append(f"BAD {' '.join(lane)}: exit {process.returncode}: {' | '.join(text.splitlines()[-6:])}")
        print("\n".join(shown), flush=True)
        lines += shown
    good = [line.split()[1] for line in lines if line.startswith("ok")]
    GOOD.write_text("\n".join(good))
    print(f"{len(good)} of {len(names)} configurations are right")
    sys.exit(len(good) != len(names))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        main(sys.argv[1:])
