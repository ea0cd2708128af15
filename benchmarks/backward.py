"""Backward speed beside the peers, in one process: `python -m benchmarks.backward [--json FILE] …` (needs build/hopper.tar.xz).

The grid and the protocol of forward.py; FLOPs are 2.5 times the forward's. Whole calls: ours with prepare and finish, the peers with theirs
(cuDNN and FA2 through torch.autograd, FA4 through its own function). `--split` adds the time of each of our kernels, by the profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash3.backends.base import Gradients, Saved
from flash3.backends.hopper import backward_budget
from flash3.backends.hopper.backward_tiles import BackwardSpec
from flash3.mask import Mask, MaskKind
from flash3.problem import Request, Task

from .backward_configurations import BACKWARD
from .calls import prepare_backward
from .gpu_check import GOOD
from .objects import unpacked
from .timing import GRAPHED_UP_TO, HIDDEN, OURS, TOKENS, Run, flops, inputs, interleaved, ready, report

Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], Run]


def sdpa(backend: SDPBackend) -> Peer:
    """torch's scaled_dot_product_attention on one backend, its backward alone."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool) -> Run:
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        arriving = d_out.transpose(1, 2)
        return lambda: torch.autograd.grad(out, leaves, arriving, retain_graph=True)

    return prepare


def fa4() -> Peer:
    """flash-attn-4: CuTe DSL, its Hopper path."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool) -> Run:
        scale = q.shape[-1] ** -0.5
        out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, softmax_scale=scale, return_lse=True)
        return lambda: _flash_attn_bwd(q, k, v, out, d_out, lse, causal=causal, softmax_scale=scale)

    return prepare


def available() -> dict[str, Peer]:
    found = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    try:
        found["fa4"] = fa4()
    except ImportError as error:
        print(f"! fa4: {error}")
    return found


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool, name: str) -> Run:
    """The whole call of a configuration. The forward's results come from torch."""
    leaves = [x.transpose(1, 2) for x in (q, k, v)]
    found = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, causal)
    saved = Saved(out=found[0].transpose(1, 2).contiguous(), lse=found[1])
    deterministic = BACKWARD[name][0].deterministic
    request = Request(q=q, k=k, v=v, mask=Mask(causal=causal), lse=True, task=Task.BACKWARD, deterministic=deterministic)
    gradients = Gradients(d_out=d_out, dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
    return prepare_backward(request, saved, gradients, name)


def names_of(d: int, causal: bool, s: int) -> list[str]:
    """Configurations of a cell, the heuristic's first."""
    spec = BackwardSpec(qk_width=d, v_width=d, mask_kind=MaskKind.CAUSAL if causal else MaskKind.FULL)
    names = [name for name, (found, _) in BACKWARD.items() if replace(found, deterministic=False) == spec]
    return sorted(names, key=lambda name: BACKWARD[name] != (spec, backward_budget.choose(spec, s)))


def cell(d: int, causal: bool, s: int, a: argparse.Namespace, peers: dict[str, Peer]) -> dict[str, Any]:
    q, k, v = inputs(s, d)
    d_out = torch.randn_like(q)
    chosen, *others = names_of(d, causal, s)
    makers: dict[str, Callable[[], Run]] = {n: (lambda p=p: p(q, k, v, d_out, causal)) for n, p in peers.items()}
    makers[OURS] = lambda: ours(q, k, v, d_out, causal, chosen)
    if a.variants:
        for name in others:
            if a.unchecked or name in a.good:
                makers[name] = lambda name=name: ours(q, k, v, d_out, causal, name)
    runs = ready(makers, s <= GRAPHED_UP_TO)
    times = interleaved(runs, a.rounds, a.ms)
    work = 2.5 * flops(TOKENS // s, HIDDEN // d, s, d, causal)
    row: dict[str, Any] = {"d": d, "causal": causal, "s": s, "configuration": chosen}
    row["tflops"] = {n: round(work / statistics.median(t) / 1e9, 1) for n, t in times.items()}
    row["spread"] = {n: round((max(t) - min(t)) / statistics.median(t), 3) for n, t in times.items()}
    rivals = [n for n in times if n in peers]
    if rivals and OURS in times:
        row["best_peer"] = max(rivals, key=lambda n: row["tflops"][n])
        for n in rivals:
            row[f"ratio_{n}"] = round(statistics.median(p / o for p, o in zip(times[n], times[OURS], strict=True)), 4)
        row["ratio"] = row[f"ratio_{row['best_peer']}"]
    if a.split:
        row["kernels_us"] = kernels_us(ours(q, k, v, d_out, causal, chosen))
        print(f"d{d} {'causal' if causal else 'full'} {s}: {row['kernels_us']}")
    return row


def kernels_us(run: Run) -> dict[str, float]:
    """Microseconds of each kernel of one call."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        name = next((n for n in ("PrepareKernel", "BackwardKernel", "FinishKernel") if n in event.key), event.key[:30])
        found[name] = found.get(name, 0.0) + round(event.device_time_total / 3, 1)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--dims", default="128,64")
    p.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    p.add_argument("--causal", default="0,1")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--ms", type=float, default=4.0, help="per kernel and round")
    p.add_argument("--variants", action="store_true", help="also every other built configuration of the cell")
    p.add_argument("--unchecked", action="store_true", help="configurations that gpu_check has not passed too")
    p.add_argument("--peers", default="cudnn,fa2,fa4")
    p.add_argument("--split", action="store_true")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    a.good = GOOD.read_text().split() if GOOD.exists() else []
    peers = {n: peer for n, peer in available().items() if n in a.peers.split(",")}
    device = torch.cuda.get_device_properties(0)
    rows = []
    for d in map(int, a.dims.split(",")):
        for causal in (bool(int(c)) for c in a.causal.split(",")):
            for s in map(int, a.seqs.split(",")):
                rows.append(cell(d, causal, s, a, peers))
                torch.cuda.empty_cache()
    report(rows, list(peers))
    if a.json:
        settings = {name: value for name, value in vars(a).items() if name not in ("json", "good")}
        result = {"sources": unpacked()["sources"], "device": device.name, "torch": torch.__version__, "settings": settings, "rows": rows}
        a.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
