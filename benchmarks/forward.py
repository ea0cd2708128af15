"""Forward speed beside the peers, in one process: `python -m benchmarks.forward [--json FILE] …` (needs build/hopper.tar.xz).

Grid of the FlashAttention-3 paper: 16k tokens in all, hidden size 2048, head dims 64/128/256, lengths 512 … 16k, full and causal; FLOPs
4·s²·d·h·b, halved when causal. Each cell: several rounds, all kernels in random order in each, a few milliseconds per kernel; then medians,
and the median over the rounds of ours / best peer of the same round. `--solo` runs each kernel alone until the power limit has settled.
`--ablation` times the paper's ablation shape (4×16384, 16 heads, d128, full).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flash3.backends.hopper import heuristics
from flash3.backends.hopper.tiles import ForwardSpec
from flash3.mask import Mask, MaskKind
from flash3.problem import Request

from .calls import prepare_named
from .configurations import ABLATION, CONFIGURATIONS, name_of
from .gpu_check import GOOD
from .objects import unpacked
from .peers import available

Run = Callable[[], Any]
TOKENS, HIDDEN = 16384, 2048
GRAPHED_UP_TO = 2048
"""Shorter lengths are replayed from a CUDA graph, so that launch cost stays out."""
OURS = "flash3"


def flops(b: int, h: int, s: int, d: int, causal: bool) -> float:
    return 4.0 * b * h * s * s * d / (2 if causal else 1)


def inputs(s: int, d: int, tokens: int = TOKENS, hidden: int = HIDDEN) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens // s, s, hidden // d, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, name: str | None = None) -> tuple[str, Run]:
    """The configuration that the heuristic takes (or the one named), and its launch."""
    request = Request(q=q, k=k, v=v, mask=Mask(causal=causal), lse=True)
    if name is None:
        spec = ForwardSpec(qk_width=q.shape[-1], v_width=v.shape[-1], mask_kind=MaskKind.CAUSAL if causal else MaskKind.FULL)
        name = name_of(spec, heuristics.choose(spec, k.shape[1]))
    return name, prepare_named(request, name)[0]


def graphed(run: Run) -> Run:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(_outputs: Run = run) -> None:  # `run` holds the outputs: freed, their memory would go back to the driver
        graph.replay()

    return replay


class Timer:
    def __init__(self) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def per_run_ms(self, run: Run, count: int) -> float:
        self.start.record()
        for _ in range(count):
            run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / count


def interleaved(runs: dict[str, Run], rounds: int, budget_ms: float) -> dict[str, list[float]]:
    """Milliseconds per run, per round; in every round all kernels once, in random order."""
    timer, counts = Timer(), {}
    for name, run in runs.items():
        timer.per_run_ms(run, 2)
        counts[name] = max(2, int(budget_ms / max(timer.per_run_ms(run, 2), 0.02)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(timer.per_run_ms(runs[name], counts[name]))
    return times


def ready(candidates: dict[str, Callable[[], Run]], graph: bool) -> dict[str, Run]:
    """Those that run at all; the others are named."""
    runs = {}
    for name, make in candidates.items():
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            runs[name] = graphed(run) if graph else run
        except Exception as error:
            print(f"! {name}: {str(error)[:160]}", file=sys.stderr)
    return runs


def contenders(d: int, causal: bool, s: int, peers: dict[str, Any]) -> tuple[list[torch.Tensor], str, dict[str, Callable[[], Run]]]:
    """A cell's inputs, the configuration that ours takes, and what prepares each kernel: the peers and ours."""
    q, k, v = inputs(s, d)
    chosen, run = ours(q, k, v, causal)
    makers: dict[str, Callable[[], Run]] = {n: (lambda p=p: p(q, k, v, causal)) for n, p in peers.items()}
    makers[OURS] = lambda: run
    return [q, k, v], chosen, makers


def cell(d: int, causal: bool, s: int, a: argparse.Namespace, peers: dict[str, Any]) -> dict[str, Any]:
    (q, k, v), chosen, makers = contenders(d, causal, s, peers)
    kind = MaskKind.CAUSAL if causal else MaskKind.FULL
    for name, (spec, _) in CONFIGURATIONS.items():
        same = spec.mask_kind is kind and spec.qk_width == spec.v_width == d and spec == ForwardSpec(qk_width=d, v_width=d, mask_kind=kind)
        if a.variants and same and name != chosen and name in a.good:
            makers[name] = lambda name=name: ours(q, k, v, causal, name)[1]
    times = interleaved(ready(makers, s <= GRAPHED_UP_TO), a.rounds, a.ms)
    work = flops(TOKENS // s, HIDDEN // d, s, d, causal)
    row: dict[str, Any] = {"d": d, "causal": causal, "s": s, "configuration": chosen}
    row["tflops"] = {n: round(work / statistics.median(t) / 1e9, 1) for n, t in times.items()}
    row["spread"] = {n: round((max(t) - min(t)) / statistics.median(t), 3) for n, t in times.items()}
    rivals = [n for n in times if n in peers]
    if rivals and OURS in times:
        best = max(rivals, key=lambda n: row["tflops"][n])
        row["best_peer"] = best
        row["ratio"] = round(statistics.median(p / o for p, o in zip(times[best], times[OURS], strict=True)), 4)
        for n in rivals:
            row[f"ratio_{n}"] = round(statistics.median(p / o for p, o in zip(times[n], times[OURS], strict=True)), 4)
    return row


def solo_cell(d: int, causal: bool, s: int, a: argparse.Namespace, peers: dict[str, Any]) -> dict[str, Any]:
    """Each kernel alone, twice, in both orders: the first third of each run lets power and clock settle."""
    _, chosen, makers = contenders(d, causal, s, peers)
    runs = ready(makers, s <= GRAPHED_UP_TO)
    rates: dict[str, list[float]] = {n: [] for n in runs}
    for order in (list(runs), list(runs)[::-1]):
        for n in order:
            rates[n].append(flops(TOKENS // s, HIDDEN // d, s, d, causal) / _alone_ms(runs[n], a.seconds) / 1e9)
    tflops = {n: round(statistics.mean(r), 1) for n, r in rates.items()}
    row: dict[str, Any] = {"d": d, "causal": causal, "s": s, "configuration": chosen, "solo": True, "tflops": tflops}
    rivals = [n for n in tflops if n in peers]
    if rivals:
        row["best_peer"] = max(rivals, key=lambda n: tflops[n])
        row["ratio"] = round(tflops[OURS] / tflops[row["best_peer"]], 4)
    return row


def _alone_ms(run: Run, seconds: float) -> float:
    timer, begin, count, settled = Timer(), time.time(), 0, False
    while time.time() - begin < seconds:
        if not settled and time.time() - begin > seconds / 3:
            settled, count = True, 0
            timer.start.record()
        for _ in range(16):
            run()
        count += 16
        torch.cuda.current_stream().synchronize()
    timer.end.record()
    timer.end.synchronize()
    return timer.start.elapsed_time(timer.end) / count


def ablation(a: argparse.Namespace) -> list[dict[str, Any]]:
    """4 sequences of 16384, 16 heads of 128, full attention: with and without turns, with and without overlap."""
    q, k, v = inputs(16384, 128, tokens=4 * 16384)
    names = ["128_full", *ABLATION]
    runs = ready({n: (lambda n=n: ours(q, k, v, False, n)[1]) for n in names}, graph=False)
    times = interleaved(runs, a.rounds, 4 * a.ms)
    work = flops(4, 16, 16384, 128, False)
    return [{"ablation": n, "tflops": round(work / statistics.median(t) / 1e9, 1)} for n, t in times.items()]


def report(rows: list[dict[str, Any]], peers: list[str]) -> None:
    for row in rows:
        rates = "  ".join(f"{n} {t:.0f}" for n, t in row["tflops"].items())
        mark = "<" if row.get("ratio", 1.0) < 0.99 else " "
        head = f"d{row['d']:<3d} {'causal' if row['causal'] else 'full  '} {row['s']:5d}"
        print(f"{head} {row.get('ratio', 0):.3f}{mark} of {row.get('best_peer', '-'):5s}  {rates}  [{row['configuration']}]")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        low = sum(r < 0.99 for r in ratios)
        print(f"of the best peer per cell: geometric mean {mean:.3f}, smallest {min(ratios):.3f}, cells under 0.99: {low}")
    for n in peers:
        ratios = [row[f"ratio_{n}"] for row in rows if f"ratio_{n}" in row]
        if ratios:
            print(f"of {n}: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, smallest {min(ratios):.3f}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--dims", default="128,64,256")
    p.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    p.add_argument("--causal", default="0,1")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--ms", type=float, default=2.5, help="per kernel and round")
    p.add_argument("--variants", action="store_true", help="also every other built configuration of the cell")
    p.add_argument("--peers", default="cudnn,fa2,fa3,fa4")
    p.add_argument("--solo", action="store_true")
    p.add_argument("--seconds", type=float, default=0.7, help="of a solo run")
    p.add_argument("--ablation", action="store_true")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    a.good = GOOD.read_text().split() if GOOD.exists() else []
    peers, missing = available()
    peers = {n: peer for n, peer in peers.items() if n in a.peers.split(",")}
    print("\n".join(f"! {line}" for line in missing))
    device = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "sources": unpacked()["sources"],
        "device": device.name,
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(a).items() if name not in ("json", "good")},
    }
    if a.ablation:
        result["ablation"] = ablation(a)
        for row in result["ablation"]:
            print(f"ablation {row['ablation']:28s} {row['tflops']:.0f}")
    rows = []
    for d in map(int, filter(None, a.dims.split(","))):
        for causal in (bool(int(c)) for c in a.causal.split(",")):
            for s in map(int, a.seqs.split(",")):
                rows.append((solo_cell if a.solo else cell)(d, causal, s, a, peers))
                torch.cuda.empty_cache()
    report(rows, list(peers))
    result["rows"] = rows
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
