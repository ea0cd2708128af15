"""What the scripts of this folder share: the paper's grid, and interleaved timing by the clocks of `flash3.bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from flash3.bench.catalogue import PAPER_HIDDEN as HIDDEN
from flash3.bench.catalogue import PAPER_TOKENS as TOKENS
from flash3.bench.clock import EventClock, graphed
from flash3.bench.other_peers import fa3_launch
from flash3.bench.protocol import Interleaved
from flash3.bench.results import geometric_mean

Run = Callable[[], Any]
OURS = "flash3"
GRAPHED_UP_TO = 2048
"""Shorter lengths are replayed from a CUDA graph, so that launch cost stays out."""


def flops(b: int, h: int, s: int, d: int, causal: bool) -> float:
    """The paper's: a causal call counts as half."""
    return 4.0 * b * h * s * s * d / (2 if causal else 1)


def inputs(s: int, d: int, tokens: int = TOKENS, hidden: int = HIDDEN) -> list[torch.Tensor]:
    """q, k and v of a cell of the paper's grid."""
    torch.manual_seed(0)
    return [torch.randn(tokens // s, s, hidden // d, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def fa3(library: str) -> Callable[..., Run]:
    """FlashAttention-3's operator as (q, k, v, causal, left=-1, **its own arguments by name) → a call."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, left: int = -1, **given: Any) -> Run:
        return fa3_launch(library, q=q, k=k, v=v, is_causal=causal, window_size_left=left, **given)

    return prepare


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


def interleaved(runs: dict[str, Run], rounds: int, budget_ms: float) -> dict[str, list[float]]:
    """Milliseconds per run, per round; in every round all kernels once, in random order."""
    clocks = {name: EventClock(run) for name, run in runs.items()}
    found = list(Interleaved(rounds, budget_ms).run(clocks))
    return {name: [times[name] for times in found] for name in runs}


def report(rows: list[dict[str, Any]], peers: list[str]) -> None:
    """A line per cell, then the geometric means."""
    for row in rows:
        rates = "  ".join(f"{n} {t:.0f}" for n, t in row["tflops"].items())
        mark = "<" if row.get("ratio", 1.0) < 0.99 else " "
        head = f"d{row['d']:<3d} {'causal' if row['causal'] else 'full  '} {row['s']:5d}"
        print(f"{head} {row.get('ratio', 0):.3f}{mark} of {row.get('best_peer', '-'):5s}  {rates}  [{row['configuration']}]")
    for key, name in (("ratio", "the best peer per cell"), *((f"ratio_{n}", n) for n in peers)):
        ratios = [row[key] for row in rows if key in row]
        if ratios:
            low = sum(r < 0.99 for r in ratios)
            print(f"of {name}: geometric mean {geometric_mean(ratios):.3f}, smallest {min(ratios):.3f}, cells under 0.99: {low}")
