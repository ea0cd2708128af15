"""The Triton backend beside FlashAttention-2 and compiled FlexAttention, in one process: `python -m benchmarks.portable [--json FILE] …`.

The grid of benchmarks/forward.py, forward and backward: 16k tokens in all, hidden size 2048, head dims 64/128/256, lengths 512 … 16k, full
and causal; FLOPs 4·s²·d·h·b, halved when causal, 2.5 times that backward. FA2 is torch's flash backend. Every choice of tiles is held
against float64 before it is timed. Each cell: several rounds, all contenders in random order in each; then medians, and the median over
the rounds of the ratio to each peer of the same round. `--candidates` times every choice of CANDIDATES instead of the heuristic's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash3.backends.base import Gradients, Saved
from flash3.backends.triton.plan import TritonBackend
from flash3.backends.triton.tiles import BackwardTiles, Tiles
from flash3.bench import catalogue, providers
from flash3.bench.case import Case
from flash3.frameworks.torch.describe import describe
from flash3.mask import Mask
from flash3.problem import Problem, Request, Task

from .timing import HIDDEN, TOKENS, Run, flops

SMALL = Tiles(32, 32, 4, 1)
UNWANTED = {"dkdv": ("dq",), "dk": ("dq", "dv"), "dv": ("dq", "dk"), "dq": ("dk", "dv")}
"""Gradients that a part of the backward leaves to others."""
CANDIDATES: dict[tuple[str, int], list[Tiles]] = {}
"""(kernel, head_dim) → tiles; filled by --candidates FILE, lines of `kernel head_dim rows keys warps stages`."""


@dataclass(frozen=True)
class Cell:
    kernel: str  # forward, backward, or a part of it: dkdv, dk, dv, dq
    d: int
    causal: bool
    s: int

    @property
    def work(self) -> float:
        share = {"forward": 1.0, "backward": 2.5, "dkdv": 1.5, "dq": 1.0, "dk": 1.0, "dv": 0.5}[self.kernel]
        return share * flops(TOKENS // self.s, HIDDEN // self.d, self.s, self.d, self.causal)

    @property
    def name(self) -> str:
        return f"{self.kernel} d{self.d:<3d} {'causal' if self.causal else 'full  '} {self.s:5d}"


def tensors(shape: tuple[int, ...], count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


@functools.lru_cache(maxsize=1)
def inputs(d: int, s: int) -> list[Tensor]:
    """q, k, v, d_out of a cell of the grid."""
    return tensors((TOKENS // s, s, HIDDEN // d, d), 4)


class Ours:
    """The backend's plan for one set of inputs; `tiles` None: its own choice."""

    def __init__(self, cell: Cell, data: list[Tensor], tiles: Tiles | None = None) -> None:
        self.q, self.k, self.v, self.d_out = data
        self.cell, self.tiles = cell, tiles
        self.request = Request(q=self.q, k=self.k, v=self.v, mask=Mask(causal=cell.causal), lse=True)
        b, s, h, _ = self.q.shape
        self.out, self.lse = torch.empty_like(self.q), torch.empty(b, h, s, device="cuda")
        self.forward = self._plan(self.request, tiles if cell.kernel == "forward" else None)

    def _plan(self, request: Request, tiles: Any) -> Run:
        plan = TritonBackend().plan(Problem.of(request, describe), tiles)
        self.chosen = plan.tiles
        return lambda: plan.run(request, self.out, self.lse)

    def backward(self) -> tuple[Run, Gradients]:
        request, kernel, tiles = replace(self.request, task=Task.BACKWARD), self.cell.kernel, self.tiles
        both = None if tiles is None else BackwardTiles(dkdv=SMALL if kernel == "dq" else tiles, dq=tiles if kernel == "dq" else SMALL)
        plan = TritonBackend().plan(Problem.of(request, describe), both)
        self.chosen = plan.tiles
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (self.q, self.k, self.v))
        gradients = Gradients(d_out=self.d_out, dq=dq, dk=dk, dv=dv)
        for name in UNWANTED.get(kernel, ()):
            setattr(gradients, name, None)
        saved = Saved(out=self.out, lse=self.lse)
        return lambda: plan.run(request, saved, gradients), gradients

    def run(self) -> Run:
        if self.cell.kernel == "forward":
            return self.forward
        self.forward()
        return self.backward()[0]


def exact(data: list[Tensor], causal: bool) -> list[Tensor]:
    """out, dq, dk, dv in float64, by torch."""
    q, k, v, d_out = (x.double().transpose(1, 2).requires_grad_(i < 3) for i, x in enumerate(data))
    S = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        S = S.masked_fill(torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1), -torch.inf)
    out = S.softmax(-1) @ v
    return [x.detach().transpose(1, 2) for x in (out, *torch.autograd.grad(out, (q, k, v), d_out))]


def check(cell: Cell, tiles: Tiles | None) -> float:
    """Largest relative error (Frobenius norm) of a choice of tiles; a length off every tile's edge is one of the shapes."""
    worst = 0.0
    for shape in ((2, 512, 2, cell.d), (1, 333, 2, cell.d)):
        data = tensors(shape, 4)
        wanted = exact(data, cell.causal)
        ours = Ours(cell, data, tiles)
        ours.out.fill_(torch.nan)
        ours.forward()
        found = [ours.out]
        if cell.kernel != "forward":
            run, g = ours.backward()
            run()
            found += [x for x in (g.dq, g.dk, g.dv) if x is not None]
            wanted = [x for x, name in zip(wanted, ("out", "dq", "dk", "dv"), strict=True) if name not in UNWANTED.get(cell.kernel, ())]
        errors = [((f.double() - w).norm() / w.norm()).item() for f, w in zip(found, wanted[: len(found)], strict=True)]
        worst = max(worst, *(math.inf if math.isnan(e) else e for e in errors))
    return worst


LARGEST_ERROR = 8e-3


def peer(name: str) -> Callable[[Cell, list[Tensor]], Run]:
    """A provider of `flash3 bench` on a cell's tensors."""

    def prepare(cell: Cell, data: list[Tensor]) -> Run:
        q, k, v, d_out = data
        workload = catalogue.paper_cell(cell.d, cell.causal, cell.s)
        task = Task.FORWARD if cell.kernel == "forward" else Task.BACKWARD
        case = Case(workload, task, workload.request(q, k, v, None, {}, task), None if task is Task.FORWARD else d_out)
        return providers.select([name])[0].prepare(case).call

    return prepare


PEERS: dict[str, Callable[[Cell, list[Tensor]], Run]] = {"fa2": peer("sdpa:flash"), "flex": peer("flex")}


class Timer:
    """Device time of many runs. A sleeping GPU lets the host run ahead first, so that launch cost stays out."""

    HEAD_START_CYCLES = 3_000_000

    def __init__(self) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def per_run_ms(self, run: Run, count: int) -> float:
        torch.cuda._sleep(self.HEAD_START_CYCLES)
        self.start.record()
        for _ in range(count):
            run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / count


def interleaved(runs: dict[str, Run], rounds: int, budget_ms: float) -> dict[str, list[float]]:
    """Milliseconds per run, per round; in every round all contenders once, in random order."""
    timer = Timer()
    counts = {name: max(2, min(20, int(budget_ms / max(timer.per_run_ms(run, 2), 0.02)))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(timer.per_run_ms(runs[name], counts[name]))
    return times


def ready(cell: Cell, names: list[str], choices: list[Tiles | None]) -> tuple[dict[str, Run], dict[str, str]]:
    """Contenders that run and are right, and what each of ours runs with."""
    data, runs, chosen = inputs(cell.d, cell.s), {}, {}
    for tiles in choices:
        name = "flash3" if tiles is None else "/".join(str(x) for x in (tiles.rows, tiles.keys, tiles.warps, tiles.stages))
        try:
            ours = Ours(cell, data, tiles)
            run = ours.run()
            run()
            torch.cuda.synchronize()
            runs[name], chosen[name] = run, str(ours.chosen)
        except Exception as error:
            print(f"! {cell.name} {name}: {str(error)[:160]}", file=sys.stderr)
    for name in names:
        runs[name] = PEERS[name](cell, data)
        runs[name]()
    return runs, chosen


def measure(cell: Cell, a: argparse.Namespace, choices: list[Tiles | None]) -> dict[str, Any]:
    names = [n for n in a.peers if cell.kernel in ("forward", "backward") and (n != "flex" or has_flex(cell, a))]
    begin = time.time()
    runs, chosen = ready(cell, names, choices)
    prepared = time.time() - begin
    times = interleaved(runs, a.rounds, a.ms)
    row: dict[str, Any] = {**asdict(cell), "tiles": chosen.get("flash3")}
    row["tflops"] = {n: round(cell.work / statistics.median(t) / 1e9, 1) for n, t in times.items()}
    row["spread"] = {n: round((max(t) - min(t)) / statistics.median(t), 3) for n, t in times.items()}
    row["seconds"] = [round(prepared, 2), round(time.time() - begin - prepared, 2)]
    if "flash3" in times:
        for n in names:
            row[f"ratio_{n}"] = round(statistics.median(p / o for p, o in zip(times[n], times["flash3"], strict=True)), 4)
    return row


def cells(a: argparse.Namespace) -> Iterator[Cell]:
    for s, d, causal, kernel in itertools.product(a.seqs, a.dims, a.causal, a.kernels):
        yield Cell(kernel, d, bool(causal), s)


def choices_of(cell: Cell, a: argparse.Namespace) -> list[Tiles | None]:
    return list(CANDIDATES.get((cell.kernel, cell.d), [None])) if a.candidates else [None]


def _checked(job: tuple[Cell, Tiles | None]) -> tuple[Cell, Tiles | None, float | str]:
    try:
        return (*job, check(*job))
    except Exception as error:
        return (*job, str(error)[:120])


def right(a: argparse.Namespace) -> set[tuple[Cell, Tiles | None]]:
    """Choices within LARGEST_ERROR. Checked side by side in other processes, which leave the compiled kernels in Triton's cache."""
    jobs = sorted({(replace(c, s=512), t) for c in cells(a) for t in choices_of(c, a)}, key=str)
    good = set()
    with multiprocessing.get_context("spawn").Pool(a.jobs) as pool:
        for cell, tiles, error in pool.imap_unordered(_checked, jobs):
            if isinstance(error, float) and error < LARGEST_ERROR:
                good.add((cell, tiles))
            else:
                print(f"! wrong or not run: {cell.name} {tiles}: {error}")
    print(f"{len(good)} of {len(jobs)} right against float64", flush=True)
    return good


def _compiled_flex(cell: Cell) -> None:
    PEERS["flex"](cell, tensors((TOKENS // cell.s, cell.s, HIDDEN // cell.d, cell.d), 4))()


def has_flex(cell: Cell, a: argparse.Namespace) -> bool:
    return "flex" in a.peers and cell.s in a.flex_seqs and cell.kernel in ("forward", "backward")


def compile_flex(a: argparse.Namespace) -> None:
    """FlexAttention takes seconds to compile for each shape: side by side, into Inductor's cache."""
    jobs = [cell for cell in cells(a) if has_flex(cell, a)]
    if not jobs:
        return
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(a.jobs) as pool:
        pool.map(_compiled_flex, jobs, chunksize=1)


def mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def show(row: dict[str, Any], peers: list[str]) -> None:
    head = f"{row['kernel']:8s} d{row['d']:<3d} {'causal' if row['causal'] else 'full  '} {row['s']:5d}"
    ratios = " ".join(f"{row[f'ratio_{n}']:.2f} of {n}" for n in peers if f"ratio_{n}" in row)
    rates = sorted(row["tflops"].items(), key=lambda x: -x[1])
    print(f"{head} {ratios}  " + "  ".join(f"{n} {t:.0f}" for n, t in rates), row["seconds"], flush=True)


def report(rows: list[dict[str, Any]], peers: list[str]) -> None:
    for kernel, n in itertools.product(("forward", "backward"), peers):
        found = [row[f"ratio_{n}"] for row in rows if row["kernel"] == kernel and f"ratio_{n}" in row]
        if found:
            print(f"{kernel} of {n}: geometric mean {mean(found):.3f}, smallest {min(found):.3f}, {len(found)} cells")


def read_candidates(path: Path) -> None:
    for line in path.read_text().splitlines():
        kernel, d, *numbers = line.split()
        CANDIDATES.setdefault((kernel, int(d)), []).append(Tiles(*map(int, numbers)))


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--kernels", type=lambda x: x.split(","), default=["forward", "backward"])
    p.add_argument("--dims", type=numbers, default=[64, 128, 256])
    p.add_argument("--seqs", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    p.add_argument("--causal", type=numbers, default=[0, 1])
    p.add_argument("--peers", type=lambda x: [n for n in x.split(",") if n], default=["fa2", "flex"])
    p.add_argument("--flex-seqs", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    p.add_argument("--candidates", type=Path)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--ms", type=float, default=3.0, help="per contender and round")
    p.add_argument("--jobs", type=int, default=12)
    p.add_argument("--seconds", type=float, default=math.inf, help="no cell is begun after so long")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    if a.candidates:
        read_candidates(a.candidates)
    begin = time.time()
    rows = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        flex = pool.submit(compile_flex, a)
        good = right(a)
        flex.result()
    print(f"checked after {time.time() - begin:.0f} s", flush=True)
    for cell in cells(a):
        choices = [t for t in choices_of(cell, a) if (replace(cell, s=512), t) in good]
        if choices and time.time() - begin < a.seconds:
            rows.append(measure(cell, a, choices))
            show(rows[-1], a.peers)
    report(rows, a.peers)
    if a.json:
        device = torch.cuda.get_device_properties(0)
        a.json.write_text(json.dumps({"device": device.name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
