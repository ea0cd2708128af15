"""The Triton backend beside FlashAttention-2 and compiled FlexAttention: `python -m benchmarks.portable [--json FILE] …`.

The grid of benchmarks/forward.py, forward and backward: 16k tokens in all, hidden size 2048, head dims 64/128/256, lengths 512 … 16k, full
and causal; FLOPs 4·s²·d·h·b, halved when causal, 2.5 times that backward. FA2 is torch's flash backend. Every choice of tiles is held
against float64 before it is timed. Each cell: several rounds, all contenders in random order in each; then medians, and the median over
the rounds of the ratio to each peer of the same round. `--candidates` times every choice of CANDIDATES instead of the heuristic's.

Compiling takes far longer than timing: several processes check and prepare their shares of the cells side by side; when all are done, each
times its own, one after the other. FlexAttention takes most of it: `--only-compile LIST` fills the caches (TRITON_CACHE_DIR,
TORCHINDUCTOR_CACHE_DIR), times nothing, and appends the cells whose FlexAttention is ready; `--flex LIST` compares with it there only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash3.backends.base import Gradients, Saved
from flash3.backends.triton.plan import TritonBackend
from flash3.backends.triton.tiles import BackwardTiles, Tiles
from flash3.bench import catalogue, providers
from flash3.bench.case import Case
from flash3.bench.catalogue import PAPER_HIDDEN as HIDDEN
from flash3.bench.catalogue import PAPER_TOKENS as TOKENS
from flash3.bench.results import geometric_mean
from flash3.frameworks.torch.describe import describe
from flash3.mask import Mask
from flash3.problem import Problem, Request, Task

from . import timing
from .timing import OURS, Run, flops

SMALL = Tiles(32, 32, 4, 1)
UNWANTED = {"dkdv": ("dq",), "dk": ("dq", "dv"), "dv": ("dq", "dk"), "dq": ("dk", "dv"), "prepare": ("dq", "dk", "dv")}
"""Gradients that a part of the backward leaves to others."""
CANDIDATES: dict[tuple[str, int], list[Tiles]] = {}
"""(kernel, head_dim) → tiles; filled by --candidates FILE, lines of `kernel head_dim rows keys warps stages`."""


@dataclass(frozen=True)
class Cell:
    kernel: str  # forward, backward, or a part of it: dkdv, dk, dv, dq, prepare
    d: int
    causal: bool
    s: int

    @property
    def work(self) -> float:
        share = {"forward": 1.0, "backward": 2.5, "dkdv": 1.5, "dq": 1.0, "dk": 1.0, "dv": 0.5, "prepare": 0.0}[self.kernel]
        return share * flops(TOKENS // self.s, HIDDEN // self.d, self.s, self.d, self.causal)

    @property
    def name(self) -> str:
        return f"{self.kernel} d{self.d:<3d} {'causal' if self.causal else 'full  '} {self.s:5d}"


def tensors(shape: tuple[int, ...], count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


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


def name_of(tiles: Tiles | None) -> str:
    return OURS if tiles is None else "/".join(map(str, astuple(tiles)))


def cells(a: argparse.Namespace) -> Iterator[Cell]:
    """Of each length those first that take longest to compile."""
    for s, d, kernel, causal in itertools.product(a.seqs, a.dims[::-1], a.kernels[::-1], a.causal):
        yield Cell(kernel, d, bool(causal), s)


def choices_of(cell: Cell, a: argparse.Namespace) -> list[Tiles | None]:
    return list(CANDIDATES.get((cell.kernel, cell.d), [None])) if a.candidates else [None]


def peers_of(cell: Cell, a: argparse.Namespace) -> list[str]:
    known = a.flex is None or cell.name in a.flex
    return [n for n in a.peers if cell.kernel in ("forward", "backward") and (n != "flex" or known)]


def contenders(cell: Cell, a: argparse.Namespace) -> tuple[dict[str, Run], str]:
    """Those that run, and the tiles of ours (the last choice's). Forwards are replayed from CUDA graphs."""
    data = inputs(cell.d, cell.s)
    ours = {name_of(tiles): Ours(cell, data, tiles) for tiles in choices_of(cell, a)}
    makers: dict[str, Callable[[], Run]] = {n: o.run for n, o in ours.items()}
    makers |= {n: functools.partial(PEERS[n], cell, data) for n in peers_of(cell, a)}
    runs = timing.ready(makers, graph=cell.kernel == "forward")
    return runs, str(list(ours.values())[-1].chosen)


def measure(cell: Cell, runs: dict[str, Run], tiles: str, a: argparse.Namespace) -> dict[str, Any]:
    times = timing.interleaved(runs, a.rounds, a.ms)
    row: dict[str, Any] = {**asdict(cell), "tiles": tiles if OURS in times else None}
    row["ms"] = {n: round(statistics.median(t), 4) for n, t in times.items()}
    row["tflops"] = {n: round(cell.work / ms / 1e9, 1) for n, ms in row["ms"].items()}
    row["spread"] = {n: round((max(t) - min(t)) / statistics.median(t), 3) for n, t in times.items()}
    for n in a.peers:
        if {OURS, n} <= times.keys():
            row[f"ratio_{n}"] = round(statistics.median(p / o for p, o in zip(times[n], times[OURS], strict=True)), 4)
    return row


Check = tuple[Cell, Tiles | None]


def checks_of(a: argparse.Namespace) -> list[Check]:
    return list(dict.fromkeys((replace(c, s=512), t) for c in cells(a) for t in choices_of(c, a)))


def checked(job: Check) -> float | str:
    try:
        return check(*job)
    except Exception as error:
        return str(error)[:160]


def run_share(pipe: Connection, share: int, a: argparse.Namespace) -> None:
    """A process. Sends the error of each of its checks, the name of each cell that is prepared, None, each measured row, None."""
    read_candidates(a.candidates)
    for job in checks_of(a)[share :: a.jobs]:
        pipe.send((job, checked(job)))
    prepared = []
    for cell in list(cells(a))[share :: a.jobs]:
        try:
            runs, tiles = contenders(cell, a)
        except Exception as error:
            print(f"! {cell.name}: {str(error)[:160]}", flush=True)
            continue
        pipe.send((cell, list(runs)))
        if not a.only_compile:
            prepared.append((cell, runs, tiles))
        del runs
    pipe.send(None)
    good = pipe.recv()
    for cell, runs, tiles in prepared:
        right = {name_of(t) for t in choices_of(cell, a) if (replace(cell, s=512), t) in good} | set(a.peers)
        pipe.send(measure(cell, {n: run for n, run in runs.items() if n in right}, tiles, a))
    pipe.send(None)


def received(pipes: list[Connection]) -> Iterator[Any]:
    """What processes send, each until None or until it is no more."""
    open_ones = list(pipes)
    while open_ones:
        for pipe in wait(open_ones):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                print("! a process is lost", flush=True)
                message = None
            if message is None:
                open_ones.remove(pipe)
            else:
                yield message


def prepare(pipes: list[Connection], a: argparse.Namespace) -> set[Check]:
    """Wait until all is checked and compiled; the choices of tiles that are right."""
    good, count = set(), 0
    for what, found in received(pipes):
        if isinstance(what, Cell):
            if a.only_compile and "flex" in found:
                with a.only_compile.open("a") as file:
                    file.write(what.name + "\n")
            continue
        count += 1
        if isinstance(found, float) and found < LARGEST_ERROR:
            good.add(what)
        else:
            print(f"! wrong or not run: {what[0].name} {what[1]}: {found}", flush=True)
    print(f"{len(good)} of {count} right against float64", flush=True)
    return good


def write(rows: list[dict[str, Any]], file: Path | None) -> None:
    if file:
        ordered = sorted(rows, key=lambda row: (row["kernel"], row["d"], row["causal"], row["s"]))
        device = torch.cuda.get_device_properties(0)
        file.write_text(json.dumps({"device": device.name, "torch": torch.__version__, "rows": ordered}, indent=1))


def show(row: dict[str, Any], peers: list[str]) -> None:
    head = f"{row['kernel']:8s} d{row['d']:<3d} {'causal' if row['causal'] else 'full  '} {row['s']:5d}"
    ratios = " ".join(f"{row[f'ratio_{n}']:.2f} of {n}" for n in peers if f"ratio_{n}" in row)
    rates = sorted(row["tflops"].items(), key=lambda x: row["ms"][x[0]])
    print(f"{head} {ratios}  " + "  ".join(f"{n} {t:.0f} ({row['ms'][n]:.3f})" for n, t in rates), flush=True)


def report(rows: list[dict[str, Any]], peers: list[str]) -> None:
    for kernel, n in itertools.product(("forward", "backward"), peers):
        found = [row[f"ratio_{n}"] for row in rows if row["kernel"] == kernel and f"ratio_{n}" in row]
        if found:
            print(f"{kernel} of {n}: geometric mean {geometric_mean(found):.3f}, smallest {min(found):.3f}, {len(found)} cells")


def read_candidates(path: Path | None) -> None:
    for line in path.read_text().splitlines() if path else ():
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
    p.add_argument("--flex", type=lambda x: set(Path(x).read_text().splitlines()), help="a file of the cells that have flex; otherwise all")
    p.add_argument("--only-compile", type=Path, help="no timing; the cells whose flex is compiled are appended to this file")
    p.add_argument("--candidates", type=Path)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--ms", type=float, default=3.0, help="per contender and round")
    p.add_argument("--jobs", type=int, default=12)
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    begin, context, pipes, rows = time.time(), multiprocessing.get_context("spawn"), [], []
    for share in range(a.jobs):
        pipe, theirs = context.Pipe()
        context.Process(target=run_share, args=(theirs, share, a), daemon=True).start()
        theirs.close()
        pipes.append(pipe)
    good = prepare(pipes, a)
    print(f"prepared after {time.time() - begin:.0f} s", flush=True)
    for pipe in pipes:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(good)
        for row in received([pipe]):
            rows.append(row)
            show(row, a.peers)
            write(rows, a.json)
    report(rows, a.peers)
    print(f"all after {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
