"""Kernels by name beside the peers: `python -m benchmarks.forward [--variants] [--json FILE] …` (needs build/hopper.tar.xz).

What `flash3 bench paper` measures, by the same clocks and providers, but on prebuilt objects, and with `--variants` every other built
configuration of a cell too. `--solo` runs each kernel alone until the power limit has settled; `--ablation` times the paper's ablation
shape (4×16384, 16 heads, d128, full).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flash3.backends.hopper import heuristics
from flash3.backends.hopper.tiles import ForwardSpec
from flash3.bench import catalogue, providers, workloads
from flash3.bench.case import Case
from flash3.bench.protocol import Interleaved, Solo
from flash3.bench.providers import Prepared, Provider
from flash3.bench.results import Report, Subject, as_data, compare, summaries, tflops
from flash3.bench.session import Plan, run
from flash3.bench.workloads import Workload
from flash3.problem import Task

from .calls import prepare_named
from .configurations import ABLATION, CONFIGURATIONS, name_of
from .gpu_check import GOOD
from .objects import unpacked

OLD_NAMES = {"cudnn": "sdpa:cudnn", "fa2": "sdpa:flash"}
LONG = workloads.even("ablation/16k", 4, 16384, 16, 128)


def kernel(name: str, shown: str) -> Provider:
    """A built configuration as a provider."""

    def prepare(case: Case) -> Prepared:
        launch, out, _ = prepare_named(case.request, name)

        def call() -> torch.Tensor:
            launch()
            return out

        return Prepared(call, lambda result: (result,), note=name if shown == "flash3" else "")

    return Provider(shown, name, prepare)


def contenders(w: Workload, variants: bool, peers: list[Provider]) -> list[Provider]:
    """The heuristic's configuration, as `flash3`; the peers; the other configurations of this cell that gpu_check found right."""
    spec = ForwardSpec(qk_width=w.head_dim, v_width=w.value_dim, mask_kind=w.mask.kind)
    chosen = name_of(spec, heuristics.choose(spec, w.k_len))
    good = GOOD.read_text().split() if GOOD.exists() else []
    others = [n for n, (other, _) in CONFIGURATIONS.items() if other == spec and n != chosen and n in good] if variants else []
    return [kernel(chosen, "flash3"), *peers, *(kernel(name, f"flash3:{name}") for name in others)]


def line(report: Report, subject: Subject) -> str:
    """A cell: ours beside the best peer, then everybody's TFLOP/s."""
    rows, found = report.of(subject), compare(report, subject)
    ratio = (found.ratio or found.solo_ratio or 0.0) if found else 0.0
    best = (found.peer or found.solo_peer) if found else "-"
    rates = "  ".join(f"{row.provider} {tflops(subject, row.ms):.0f}" for row in rows if row.ms)
    wrong = "".join(f"  ! {row.provider}: {row.error or row.faults[0]}" for row in rows if row.error or row.faults)
    return f"{subject.workload:26s} {ratio:.3f}{'<' if ratio < 0.99 else ' '} of {best:10s}  {rates}  [{rows[0].note}]{wrong}"


def measure(cells: list[Workload], who: Callable[[Workload], list[Provider]], a: argparse.Namespace) -> Report:
    """One report of all cells, a line printed for each."""
    report: Report | None = None
    for w in cells:
        interleaved, solo = (None, Solo(a.seconds)) if a.solo else (Interleaved(a.rounds, a.ms), None)
        part = run(Plan([w], [Task.FORWARD], who(w), torch.device("cuda", 0), interleaved, solo))
        print(line(part, part.subjects[0]), flush=True)
        if report is None:
            report = part
        else:
            report.rows += part.rows
            report.subjects += part.subjects
        if part.interrupted:
            break
    assert report is not None
    return report


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--dims", default="128,64,256")
    p.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    p.add_argument("--causal", default="0,1")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--ms", type=float, default=2.5, help="per kernel and round")
    p.add_argument("--variants", action="store_true", help="also every other built configuration of the cell")
    p.add_argument("--peers", default="cudnn,fa2,fa3,fa4", help="names of flash3 bench, or these short ones")
    p.add_argument("--solo", action="store_true")
    p.add_argument("--seconds", type=float, default=0.7, help="of a solo run")
    p.add_argument("--ablation", action="store_true")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    peers = providers.select([OLD_NAMES.get(name, name) for name in a.peers.split(",") if name])
    result: dict[str, Any] = {"sources": unpacked()["sources"], "settings": {k: str(v) for k, v in vars(a).items() if k != "json"}}
    if a.ablation:
        names = ["128_full", *ABLATION]
        found = measure([LONG], lambda w: [kernel(name, f"flash3:{name}") for name in names], a)
        result["ablation"] = as_data(found)
    grid = [(int(d), bool(int(c)), int(s)) for d in filter(None, a.dims.split(",")) for c in a.causal.split(",") for s in a.seqs.split(",")]
    cells = [catalogue.paper_cell(*cell) for cell in grid]
    if cells:
        report = measure(cells, lambda w: contenders(w, a.variants, peers), a)
        for s in summaries(report):
            print(f"of {s.peer}: geometric mean {s.mean:.3f}, least {s.least:.3f} at {s.where_least} ({s.count} cells)")
        result |= as_data(report)
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
