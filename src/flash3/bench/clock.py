"""How long one call takes.

Timing.EVENTS   CUDA events around a burst of launches, behind a pause that gives the host a start: the GPU's own time, if the host keeps up
Timing.GRAPH    the same around replays of a CUDA graph that holds one call: short calls, without their host time
Timing.COLD     events around each single launch, with the L2 cache overwritten between them: calls whose tensors would stay in it
Timing.WALL     the host's clock around a burst, with a wait at its end: a CPU, and frameworks with streams of their own
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
LEAST_COUNT, MOST_COUNT = 1, 4096
HEAD_START_CYCLES = 2_000_000
"""About 1 ms of the GPU's clock, in which the host launches the first calls of a burst: an autograd call takes it 0.2 … 0.5 ms, which
would else be part of every short burst."""
L2_TIMES = 2
"""A buffer this many times as large as the L2 replaces all that it holds."""
GRAPHED_BELOW_MS = 0.5
"""Workloads that could take less are replayed from a graph, whoever runs them: a launch of 20 … 90 µs would show."""


class Timing(enum.Enum):
    EVENTS = "events"
    GRAPH = "graph"
    COLD = "cold L2"
    WALL = "wall"


class Clock(Protocol):
    """Times one prepared call."""

    timing: Timing

    def burst_ms(self, count: int) -> float:
        """Milliseconds of one call, the mean of `count` in a row."""
        ...


@dataclass
class WallClock:
    """`wait` returns when all that was launched is done (None: calls return when they are done)."""

    call: Call
    wait: Callable[[], object] | None = None
    now: Callable[[], float] = time.perf_counter
    timing = Timing.WALL

    def burst_ms(self, count: int) -> float:
        begin = self.now()
        for _ in range(count):
            self.call()
        if self.wait is not None:
            self.wait()
        return 1e3 * (self.now() - begin) / count


@dataclass
class EventClock:
    """CUDA events around `count` launches."""

    call: Call
    timing: Timing = Timing.EVENTS

    def burst_ms(self, count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        for _ in range(count):
            self.call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count


@dataclass
class ColdClock:
    """Events around each launch; before each, `scrub` fills the L2 with something else."""

    call: Call
    scrub: Callable[[], object]
    timing = Timing.COLD

    def burst_ms(self, count: int) -> float:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        torch.cuda._sleep(HEAD_START_CYCLES)
        for begin, end in pairs:
            self.scrub()
            begin.record()
            self.call()
            end.record()
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / count


def graphed(call: Call) -> Call:
    """A replay of one call, captured after three warm ones. The outputs of those stay alive, as their memory is the graph's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(_alive: object = (call, kept)) -> None:
        graph.replay()

    return replay


def scrubber(device: torch.device) -> Callable[[], object]:
    """A function that overwrites the L2 cache."""
    size = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer.zero_


def fits_l2(touched_bytes: float, device: torch.device) -> bool:
    """Whether what a call touches may stay in the L2 from one run to the next."""
    return touched_bytes < L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size


def clock_for(call: Call, wait: Callable[[], object] | None, device: torch.device, cold: bool, graph: bool) -> Clock:
    """The clock that suits a call, which has run before.

    Args:
        wait: as WallClock's, for what does not run on torch's current stream.
        cold: overwrite the L2 between calls.
        graph: replay it from a CUDA graph; where it cannot be captured, it is launched, and the clock says so.
    """
    if device.type != "cuda" or wait is not None:
        return WallClock(call, wait)
    launched = EventClock(call)
    if graph:
        try:
            call = graphed(call)
            launched = EventClock(call, Timing.GRAPH)
        except RuntimeError:
            torch.cuda.synchronize()
    return ColdClock(call, scrubber(device)) if cold else launched


def count_for(clock: Clock, budget_ms: float) -> int:
    """How many calls in a row take about `budget_ms`; two warm ones are timed for it."""
    clock.burst_ms(1)
    each = clock.burst_ms(1)
    return max(LEAST_COUNT, min(MOST_COUNT, round(budget_ms / max(each, 1e-3))))
