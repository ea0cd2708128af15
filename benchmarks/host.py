"""Host time of small eager calls beside FlashAttention-3's operator, in one process: `python -m benchmarks.host [--json FILE]` (on a Hopper
GPU; FA3_LIBRARY names FlashAttention-3's library; `--first` also times the first calls of this process, with and without the disk cache).

One sequence of 128 tokens, 8 heads of 128: the kernel is over before the host is, so that a loop of calls takes the host's time. Each round
times all calls in random order, a hundred in a row between two synchronizations; the figures are medians over the rounds, the ratio that of
the same round to FlashAttention-3's operator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import flash3
from flash3 import flash_attn_interface as fa3_names
from flash3.backends.hopper.compile import kernel
from flash3.bench import providers
from flash3.bench.case import make
from flash3.bench.workloads import even
from flash3.frameworks.torch import operators
from flash3.problem import Task

Run = Callable[[], Any]
REFERENCE = "FA3's operator"
GOALS = {"attention": 0.5, "attention, gradient": 0.8}


def calls(device: str = "cuda") -> dict[str, Run]:
    """Ours, and torch.add as the least that a launch through torch costs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 128, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    packed = [x[0] for x in (q, k, v)]
    graded = [x.clone().requires_grad_() for x in (q, k, v)]
    starts, lengths = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, 128], [128]))
    cache, causal, one = flash3.KVCache(k, v, lengths), flash3.Mask(causal=True), q[:, :1]
    return {
        "torch.add": lambda: torch.add(q, k),
        "attention": lambda: flash3.attention(q, k, v),
        "attention, LSE": lambda: flash3.attention(q, k, v, return_lse=True),
        "attention, causal": lambda: flash3.attention(q, k, v, mask=causal),
        "attention, gradient": lambda: flash3.attention(*graded),
        "attention_varlen": lambda: flash3.attention_varlen(*packed, starts, starts, 128, 128),
        "attention_kvcache": lambda: flash3.attention_kvcache(one, cache),
        "flash_attn_func": lambda: fa3_names.flash_attn_func(q, k, v),
        "flash_attn_varlen_func": lambda: fa3_names.flash_attn_varlen_func(*packed, starts, starts, 128, 128),
        "flash_attn_with_kvcache": lambda: fa3_names.flash_attn_with_kvcache(one, k, v, cache_seqlens=lengths),
    }


def peer_calls() -> dict[str, Run]:
    """The providers of `flash3 bench` that run here, on the same call."""
    found, case = {}, make(even("host", 1, 128, 8, 128), Task.FORWARD, torch.device("cuda"))
    for provider in providers.select(["sdpa:cudnn", "sdpa:flash", "fa3", "fa4"]):
        try:
            found[REFERENCE if provider.name == "fa3" else provider.name] = provider.prepare(case).call
        except providers.Unsupported as reason:
            print(f"! {provider.name}: {reason}")
    return found


@contextlib.contextmanager
def only_forward() -> Iterator[None]:
    """A backend that has no backward yet is taken at its word: only forwards are timed."""
    original = operators.backward_plan
    operators.backward_plan = lambda *_: None  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        operators.backward_plan = original


def microseconds(run: Run, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(count):
        run()
    return (time.perf_counter_ns() - start) / count / 1000


def measure(runs: dict[str, Run], rounds: int, count: int) -> dict[str, list[float]]:
    for run in runs.values():
        microseconds(run, 20)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(microseconds(runs[name], count))
    return times


def summary(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, own in times.items():
        row: dict[str, Any] = {"call": name, "median_us": round(statistics.median(own), 2), "least_us": round(min(own), 2)}
        if REFERENCE in times:
            row["of_fa3"] = round(statistics.median(a / b for a, b in zip(own, times[REFERENCE], strict=True)), 3)
        if name in GOALS:
            row["goal_of_fa3"] = GOALS[name]
        rows.append(row)
    return rows


def first_call() -> dict[str, float]:
    """Seconds until the first result of a kernel that is not in memory: compiled, or from the disk where it is there."""
    q = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    found = {}
    for name, options in (("full", {}), ("causal with softcap", {"mask": flash3.Mask(causal=True), "softcap": 5.0})):
        start = time.perf_counter()
        flash3.attention(q, q, q, **options)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        found[name] = round(time.perf_counter() - start, 3)
    return found


def new_lengths(count: int = 40) -> float:
    """Microseconds of a call with a length never seen before: planned anew, but not compiled."""
    flash3.attention(*(torch.zeros(1, 999, 8, 128, device="cuda", dtype=torch.bfloat16),) * 3)
    tensors = [torch.zeros(1, 1000 + n, 8, 128, device="cuda", dtype=torch.bfloat16) for n in range(count)]
    torch.cuda.synchronize()
    times = []
    for x in tensors:
        start = time.perf_counter_ns()
        flash3.attention(x, x, x)
        times.append((time.perf_counter_ns() - start) / 1000)
    return round(statistics.median(times), 1)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rounds", type=int, default=60)
    p.add_argument("--calls", type=int, default=100, help="in a row")
    p.add_argument("--first", action="store_true", help="time the first calls too")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    device = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {"device": device.name, "torch": torch.__version__, "cpus": os.cpu_count()}
    result |= {"rounds": a.rounds, "calls": a.calls}
    assert kernel  # the compiler is imported: what is timed below leaves imports out
    if a.first:
        result["first_call_seconds"] = first_call()
    with only_forward():
        result["rows"] = summary(measure(calls() | peer_calls(), a.rounds, a.calls))
    result["new_length_us"] = new_lengths()
    for row in result["rows"]:
        ratio = f"  {row['of_fa3']:.2f} of FA3" if "of_fa3" in row else ""
        goal = f" (goal {row['goal_of_fa3']})" if "goal_of_fa3" in row else ""
        print(f"{row['call']:26s} {row['median_us']:7.2f} µs, least {row['least_us']:7.2f}{ratio}{goal}")
    print({name: value for name, value in result.items() if name != "rows"})
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
