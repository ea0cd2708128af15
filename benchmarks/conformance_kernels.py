"""The kernels that the conformance suite takes on a Hopper GPU, compiled without one: `python -m benchmarks.conformance_kernels FOLDER`.

The suite runs here with a stand-in for the Hopper backend: it plans as the real one does for an H200, writes down which kernels it would
launch, and lets the CPU backend compute. Then they are compiled into FOLDER, a cache that serves the GPU machine (FLASH3_CACHE_DIR=FOLDER):
`pytest -m gpu tests/conformance` there takes a minute instead of some ten.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash3 import dispatch
from flash3.backends.base import Gradients, Refusal, Saved, Support
from flash3.backends.cpu.plan import CpuBackend
from flash3.backends.hopper import backward_plan, launch
from flash3.backends.hopper.arguments import layout_of
from flash3.backends.hopper.backward_plan import Backward
from flash3.backends.hopper.backward_tiles import BackwardSpec
from flash3.backends.hopper.plan import Forward, HopperBackend
from flash3.backends.hopper.tiles import DENSE, SequenceLayout
from flash3.plan import Plan
from flash3.problem import Device, Problem, Request
from flash3.sequences import SequenceKind

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")
TAKEN: set[tuple[Any, Any]] = set()
"""(spec, tiles) of what the stand-in was asked to run."""
REAL = HopperBackend(lambda spec, tiles: lambda *arguments: None)


class StandIn:
    """Says and plans what the Hopper backend would; the CPU computes."""

    name = "hopper"

    def support(self, problem: Problem) -> Support | Refusal:
        return REAL.support(replace(problem, device=H200))

    def plan(self, problem: Problem, tiles: Any = None) -> Plan:
        real, under = REAL.plan(replace(problem, device=H200), tiles), CpuBackend().plan(problem)

        def forward(request: Request, out: torch.Tensor, lse: torch.Tensor | None) -> None:
            _take_forward(real.run, request)  # type: ignore[arg-type]
            under.run(request, out, lse)

        def backward(request: Request, saved: Saved, gradients: Gradients) -> None:
            _take_backward(real.run, request, gradients)  # type: ignore[arg-type]
            under.run(request, saved, gradients)

        run = forward if isinstance(real.run, Forward) else backward
        return Plan(backend=self.name, problem=problem, run=run, tiles=real.tiles)


def _take_forward(planned: Forward, request: Request) -> None:
    if planned.nothing:
        return
    q_layout, pages = layout_of(request.q_sequences), request.k_sequences
    if planned.no_keys:
        k_layout = SequenceLayout(kind=SequenceKind.PADDED)
    elif pages.kind is SequenceKind.PAGED:  # gathered
        k_layout = SequenceLayout(kind=SequenceKind.PADDED, leftpad=pages.leftpad is not None)  # type: ignore[union-attr]
    else:
        k_layout = layout_of(pages)
    if not (planned.no_keys and q_layout == DENSE):
        p = planned.problem
        TAKEN.add((launch.forward_spec(p.spec, p.sizes.scale, q_layout, k_layout), planned.tiles))


def _take_backward(planned: Backward, request: Request, gradients: Gradients) -> None:
    if not planned.nothing:
        layouts = layout_of(request.q_sequences), layout_of(request.k_sequences)
        TAKEN.add((backward_plan.spec_of(planned.problem, *layouts, gradients.d_lse is not None), planned.tiles))


def taken(words: list[str]) -> list[tuple[Any, Any]]:
    """Run the suite (of tests whose name holds the pytest expression, if any) and say what it took."""
    from tests.conformance import backends

    dispatch.BACKENDS["hopper"] = f"{__name__}:StandIn"
    dispatch.backend_named.cache_clear()
    backends.UNDER_TEST[:] = [backends.BackendUnderTest("hopper", "cpu", torch.float16)]
    arguments = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "tests/conformance", *itertools.chain(*(("-k", w) for w in words))]
    if status := pytest.main(arguments):
        raise SystemExit(f"the suite ended with {status}: its stand-in does not keep the contract")
    return sorted(TAKEN, key=repr)


def compile_one(key: tuple[Any, Any]) -> bool:
    """Into the cache; False: it was there."""
    from flash3.backends.hopper import backward_compile, compile

    spec, tiles = key
    return backward_compile.warm(spec, tiles) if isinstance(spec, BackwardSpec) else compile.warm(spec, tiles)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument("-k", action="append", default=[], help="pytest's -k: a part of the suite")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    a = p.parse_args()
    keys = taken(a.k)
    a.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["FLASH3_CACHE_DIR"] = str(a.folder.resolve())
    begin = time.time()
    with concurrent.futures.ProcessPoolExecutor(a.jobs, multiprocessing.get_context("spawn")) as pool:
        built = sum(pool.map(compile_one, keys))
    print(f"{len(keys)} kernels, {built} of them compiled in {time.time() - begin:.0f} s, in {a.folder}")


if __name__ == "__main__":
    main()
