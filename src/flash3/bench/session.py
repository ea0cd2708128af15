"""One run: every workload and task by every provider, a row for each, whatever happens to it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ..problem import DType, Task
from . import accuracy, machine, roofline
from .case import Case, make
from .clock import GRAPHED_BELOW_MS, Clock, clock_for, fits_l2
from .protocol import Interleaved, Solo
from .providers import Prepared, Provider, Unsupported, is_ours
from .results import Report, Row, Subject, rates_data
from .workloads import Workload

COLD, WARM, AUTO = "cold", "warm", "auto"
MESSAGE_LENGTH = 300


@dataclass(frozen=True)
class Plan:
    """What to measure and how.

    interleaved, solo: the protocols; None leaves one out. l2: "cold" overwrites the L2 between calls, "warm" does not, "auto" does where
    the tensors would stay in it. check: hold results against float64.
    """

    workloads: list[Workload]
    tasks: list[Task]
    providers: list[Provider]
    device: torch.device
    interleaved: Interleaved | None = field(default_factory=Interleaved)
    solo: Solo | None = None
    l2: str = AUTO
    check: bool = True
    seed: int = 0

    def settings(self) -> dict[str, object]:
        """For the report."""
        return {
            "workloads": [w.name for w in self.workloads],
            "tasks": [t.value for t in self.tasks],
            "providers": [p.name for p in self.providers],
            "interleaved": None if self.interleaved is None else asdict(self.interleaved),
            "solo_seconds": None if self.solo is None else self.solo.seconds,
            "l2": self.l2,
            "seed": self.seed,
        }


Note = Callable[[str], object]


def run(plan: Plan, begin: Note = lambda _: None, each: Callable[[Report], object] = lambda _: None) -> Report:
    """Measure. An interrupt (Ctrl-C) ends it, and what was measured stays.

    Args:
        begin: told what starts now, one line each.
        each: given the report after each workload and task, for a file that grows.
    """
    report = Report(machine=machine.describe(plan.device), settings=plan.settings(), before=asdict(machine.state(plan.device)))
    start = time.perf_counter()
    try:
        for workload in plan.workloads:
            if workload.dtype.value not in report.rates:
                begin(f"rates of this machine, {workload.dtype.value}")
                report.rates[workload.dtype.value] = rates_data(_rates(plan.device, workload.dtype))
            for task in plan.tasks:
                begin(f"{workload.name}, {task.value}")
                _measure(plan, workload, task, report)
                each(report)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.perf_counter() - start
    report.after = asdict(machine.state(plan.device))
    return report


_measured: dict[tuple[torch.device, DType], roofline.Rates] = {}


def _rates(device: torch.device, dtype: DType) -> roofline.Rates:
    """Of this process, measured once."""
    if (device, dtype) not in _measured:
        _measured[device, dtype] = roofline.measure(device, dtype)
    return _measured[device, dtype]


def _measure(plan: Plan, workload: Workload, task: Task, report: Report) -> None:
    floor = roofline.floor_of(workload, task, _rates(plan.device, workload.dtype))
    flops, num_bytes = workload.flops(task), workload.bytes(task)
    report.subjects.append(Subject(workload.name, task.value, str(workload), flops, num_bytes, floor.seconds * 1e3, floor.unit))
    rows = {p.name: Row(workload.name, task.value, p.name) for p in plan.providers}
    report.rows += rows.values()
    with _row_errors(rows.values()):
        case = make(workload, task, plan.device, plan.seed)
        cold = plan.l2 == COLD or (plan.l2 == AUTO and plan.device.type == "cuda" and fits_l2(num_bytes, plan.device))
        clocks = dict(_ready(plan, case, rows, cold, graph=floor.seconds * 1e3 < GRAPHED_BELOW_MS))
        if plan.interleaved is not None:
            for times in plan.interleaved.run(clocks):
                for name, ms in times.items():
                    rows[name].times_ms.append(ms)
        if plan.solo is not None:
            for name, ms in plan.solo.run(clocks):
                rows[name].solo_ms.append(ms)
                rows[name].solo_watts = machine.state(plan.device).power_watts  # right after: the GPU's average still is this run's
    _tidy(plan.device)


def _ready(plan: Plan, case: Case, rows: dict[str, Row], cold: bool, graph: bool) -> Iterator[tuple[str, Clock]]:
    """Providers that run at all, as clocks; the rows of the others say why they do not."""
    truth = accuracy.Truth(case)
    for provider in plan.providers:
        row = rows[provider.name]
        with _row_errors([row]):
            prepared = provider.prepare(case)
            outputs = _first_call(plan, prepared, row)
            row.note = prepared.note
            if plan.check:
                _check(truth, outputs, row)
            clock = clock_for(prepared.call, prepared.wait, plan.device, cold, graph and prepared.may_graph)
            row.timing = clock.timing.value
            yield provider.name, clock


def _first_call(plan: Plan, prepared: Prepared, row: Row) -> tuple[Tensor, ...]:
    """Run it (compiling on the way), then again for its peak of memory, which only torch's own allocator tells."""
    result = prepared.call()
    if prepared.wait is not None:
        prepared.wait()
    elif plan.device.type == "cuda":
        del result
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = prepared.call()
        torch.cuda.synchronize()
        row.memory_mb = (torch.cuda.max_memory_allocated() - before) / 2**20
    return prepared.outputs(result)


def _check(truth: accuracy.Truth, outputs: tuple[Tensor, ...], row: Row) -> None:
    found = truth.errors(outputs)
    if found is not None:
        row.max_error, row.max_allowed = found.max_error, found.max_allowed
        row.faults = list(found.faults)


@contextmanager
def _row_errors(rows: Iterable[Row]) -> Iterator[None]:
    """Whatever goes wrong becomes the rows' error."""
    try:
        yield
    except (Unsupported, NotImplementedError) as reason:
        _fail(rows, f"not supported: {reason}")
    except Exception as error:
        _fail(rows, f"failed: {type(error).__name__}: {error}")


def _fail(rows: Iterable[Row], message: str) -> None:
    text = " ".join(message.split())
    for row in rows:
        if not row.error:
            row.error = text if len(text) <= MESSAGE_LENGTH else text[:MESSAGE_LENGTH] + " …"


def _tidy(device: torch.device) -> None:
    """Give the memory of this workload back before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ours_failed(report: Report) -> bool:
    """Whether a result is wrong, or flash3 was asked and measured nowhere."""
    ours = [row for row in report.rows if is_ours(row.provider)]
    return bool(report.wrong()) or (bool(ours) and not any(row.ms for row in ours))
