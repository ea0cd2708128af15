"""`flash3 check`: small calls with every feature, on this machine, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..backends.base import Refusal, Tunable
from ..dispatch import BACKENDS, backend_named, choose
from ..frameworks.torch.describe import describe, device_of
from ..problem import Problem, Task
from ..settings import settings
from ..tune.ahead import Order, compile_all
from . import accuracy
from .case import make
from .catalogue import select
from .providers import Unsupported, providers
from .workloads import Workload

GROUP = "check"
"""Of the named workloads."""


@dataclass(frozen=True)
class Finding:
    """One workload and task on one backend. refusal: why it was not run; faults: what is wrong."""

    workload: Workload
    task: Task
    backend: str
    refusal: str = ""
    max_error: float | None = None
    max_allowed: float | None = None
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.faults


def backends_here(device: torch.device, wanted: Sequence[str]) -> list[str]:
    """Backends that support something on this device, of those wanted (empty: the one that FLASH3_BACKEND names, else all).

    Raises:
        ValueError: one wanted is not known.
    """
    for name in wanted:
        backend_named(name)
    wanted = wanted or ([settings.backend] if settings.backend else [])
    probe = select([GROUP])[0]
    problem = Problem.of(make(probe, Task.FORWARD, device).request, describe)
    return [name for name in wanted or BACKENDS if wanted or not isinstance(backend_named(name).support(problem), Refusal)]


def check(
    device: torch.device, backends: Sequence[str], tasks: Sequence[Task], say: Callable[[str], object] = lambda _: None
) -> Iterator[Finding]:
    """Every small workload on every backend. Kernels are compiled first, in parallel."""
    todo = [(backend, workload, task) for backend in backends for workload in select([GROUP]) for task in tasks]
    for i, done in enumerate(compile_all(list(_orders(device, todo))), start=1):
        say(f"{done.order.backend}: compiled {i}")
    for backend, workload, task in todo:
        say(f"{backend}: {workload.name}, {task.value}")
        yield check_one(device, backend, workload, task)


def _orders(device: torch.device, todo: Sequence[tuple[str, Workload, Task]]) -> Iterator[Order]:
    """The kernels that these need, each once."""
    seen = set()
    for backend, workload, task in todo:
        problem = workload.problem(device_of(device), task)
        chosen = backend_named(backend)
        if isinstance(chosen.support(problem), Refusal) or not isinstance(chosen, Tunable):
            continue
        tiles = chosen.plan(problem).tiles
        if (key := (backend, repr(problem.spec), repr(tiles))) not in seen:
            seen.add(key)
            yield Order(workload.name, backend, problem, tiles)


def check_one(device: torch.device, backend: str, workload: Workload, task: Task) -> Finding:
    """Run it, and hold it against float64. Any exception is a fault."""
    case = make(workload, task, device)
    try:
        choose(Problem.of(case.request, describe), backend)
    except NotImplementedError as reason:
        return Finding(workload, task, backend, refusal=str(reason))
    try:
        prepared = providers()[f"flash3:{backend}"].prepare(case)
    except Unsupported as reason:
        return Finding(workload, task, backend, refusal=str(reason))
    except Exception as error:
        return Finding(workload, task, backend, faults=(f"{type(error).__name__}: {error}",))
    try:
        found = accuracy.errors(case, prepared.outputs(prepared.call()))
    except Exception as error:
        return Finding(workload, task, backend, faults=(f"{type(error).__name__}: {error}",))
    assert found is not None  # small calls are never too large to be checked
    return Finding(workload, task, backend, "", found.max_error, found.max_allowed, found.faults)
