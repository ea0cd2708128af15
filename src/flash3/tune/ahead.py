"""Kernels compiled ahead, in parallel processes, into the disk cache; no GPU is needed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from ..backends.base import Tunable
from ..dispatch import backend_named
from ..problem import Problem
from ..settings import override, settings


@dataclass(frozen=True)
class Order:
    """One kernel to have: the backend's own choice of tiles where there are none. `label` comes back with the result."""

    label: str
    backend: str
    problem: Problem
    tiles: Any = None


@dataclass(frozen=True)
class Done:
    """built: it was compiled now, not found. error: why there is no kernel, empty when all is well."""

    order: Order
    built: bool
    seconds: float
    error: str = ""


def usual_jobs() -> int:
    return os.cpu_count() or 1


def compile_all(orders: Sequence[Order], jobs: int | None = None) -> Iterator[Done]:
    """Results as they come: first those that are there already, then those of the other processes."""
    rest = []
    for order in orders:
        backend = backend_named(order.backend)
        try:
            there = not isinstance(backend, Tunable) or backend.is_compiled(order.problem, order.tiles)
        except Exception:  # whatever it is, `compile` will say it
            there = False
        if there:
            yield Done(order, built=False, seconds=0.0)
        else:
            rest.append(order)
    if not rest:
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit a CUDA context and threads
    with ProcessPoolExecutor(min(jobs or usual_jobs(), len(rest)), mp_context=spawn) as pool:
        running = [pool.submit(compile_one, order, settings.cache_dir) for order in rest]
        try:
            for future in as_completed(running):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compile_one(order: Order, cache_dir: str | None) -> Done:
    """In whatever process this runs, into that one's cache folder. A kernel that does not compile is a result too."""
    start = time.perf_counter()
    backend = backend_named(order.backend)
    assert isinstance(backend, Tunable)
    try:
        with override(cache_dir=cache_dir):
            built, error = backend.compile(order.problem, order.tiles), ""
    except Exception as problem:
        built, error = False, f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    return Done(order, built, time.perf_counter() - start, error)
