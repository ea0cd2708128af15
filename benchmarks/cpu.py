"""The CPU backend beside torch's own scaled_dot_product_attention: one table, interleaved rounds, medians.

    python benchmarks/cpu.py [--rounds 7] [--threads N] [--only NAME] [--json PATH]

Each round runs every contender of a case once, in turn, so that a busy machine slows all of them alike; the spread is half the distance
between the quartiles. "ratio" is the median over rounds of (SDPA's time / ours): above 1, ours is faster. SDPA has no window without an S×S
mask and no packed sequences: there it runs causal attention (over the same 16k tokens), and a loop over the sequences.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash3
from flash3.backends import cpu

Call = Callable[[], object]
PACKED = (1100, 37, 512, 803, 256, 64, 1000, 324)


@dataclass(frozen=True)
class Case:
    """One row of the table: what SDPA does and what ours does, on the same q, k, v (batch, tokens, heads, 64)."""

    name: str
    theirs_does: str
    tokens: int
    theirs: Callable[[Tensor, Tensor, Tensor], Tensor]
    ours: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads: tuple[int, int] = (8, 8)


def _sdpa(causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return call


def _flash3(mask: flash3.Mask | None = None) -> Callable[..., Tensor]:
    return lambda q, k, v: flash3.attention(q, k, v, mask=mask)


def _loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(*(x.split(PACKED, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(True)(*part) for part in parts], dim=1)


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = torch.tensor([0, *torch.tensor(PACKED).cumsum(0)], dtype=torch.int32)
    longest = max(PACKED)
    return flash3.attention_varlen(q[0], k[0], v[0], cu, cu, longest, longest, mask=flash3.Mask(causal=True))[None]


CAUSAL, WINDOW = flash3.Mask(causal=True), flash3.Mask(left=1023, right=0)
CASES = (
    Case("full", "full", 4096, _sdpa(False), _flash3()),
    Case("causal", "causal", 4096, _sdpa(True), _flash3(CAUSAL)),
    Case("causal, 8/2 heads", "causal", 4096, _sdpa(True), _flash3(CAUSAL), heads=(8, 2)),
    Case("packed causal", "a loop", sum(PACKED), _loop, _packed),
    Case("window 1024", "causal", 4096, _sdpa(True), _flash3(WINDOW)),
    Case("window 1024 of 16k", "full", 16384, _sdpa(False), _flash3(WINDOW)),
)


def tensors(case: Case, dtype: torch.dtype, grad: bool) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    heads = (case.heads[0], case.heads[1], case.heads[1])
    return [torch.randn(1, case.tokens, h, 64, generator=gen).to(dtype).requires_grad_(grad) for h in heads]


def calls(case: Case, dtype: torch.dtype, backward: bool) -> tuple[Call, Call]:
    """SDPA's call and ours, forward or forward and backward."""
    q, k, v = tensors(case, dtype, backward)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def timed(f: Callable[..., Tensor]) -> Call:
        return (lambda: torch.autograd.grad(f(q, k, v), (q, k, v), d_out)) if backward else (lambda: f(q, k, v))

    return timed(case.theirs), timed(case.ours)


def measure(case: Case, dtype: torch.dtype, backward: bool, rounds: int) -> dict[str, object]:
    """Milliseconds of each contender (median, spread) and the ratio."""
    contenders = calls(case, dtype, backward)
    for call in contenders:
        call()
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            contenders[which]()
            times[which].append(1e3 * (time.perf_counter() - start))
    theirs, ours = times
    return {
        "case": case.name,
        "sdpa_does": case.theirs_does,
        "tokens": case.tokens,
        "heads": case.heads,
        "dtype": str(dtype).removeprefix("torch."),
        "what": "forward+backward" if backward else "forward",
        "sdpa_ms": statistics.median(theirs),
        "sdpa_spread_ms": spread(theirs),
        "flash3_ms": statistics.median(ours),
        "flash3_spread_ms": spread(ours),
        "ratio": statistics.median(a / b for a, b in zip(theirs, ours, strict=True)),
        "rounds": rounds,
    }


def spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    sources = sorted(Path(cpu.__file__).parent.glob("*.py"))
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
        "sources_sha256": hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in sources)).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="flash3's CPU backend beside torch SDPA")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, torch {about['torch']}, load {about['load_average']}")
    print(f"{'case':20} {'dtype':9} {'what':17} {'SDPA does':10} {'SDPA ms':>16} {'flash3 ms':>16} {'ratio':>6}")
    rows = []
    for case in (c for c in CASES if options.only in c.name):
        for dtype in (torch.float32, torch.bfloat16) if case.tokens == 4096 else (torch.float32,):
            for backward in (False, True):
                row = measure(case, dtype, backward, options.rounds if case.tokens == 4096 else 3)
                rows.append(row)
                theirs = f"{row['sdpa_ms']:.1f} ± {row['sdpa_spread_ms']:.1f}"
                ours = f"{row['flash3_ms']:.1f} ± {row['flash3_spread_ms']:.1f}"
                print(f"{case.name:20} {row['dtype']:9} {row['what']:17} {case.theirs_does:10} {theirs:>16} {ours:>16} {row['ratio']:6.2f}")
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "cases": [rounded(row) for row in rows]}, indent=1) + "\n")


def rounded(row: dict[str, object]) -> dict[str, object]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
