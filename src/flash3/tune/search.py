"""The best tiles of a workload: all legal ones compiled, each checked against float64, then timed by successive halving.

A rung times every candidate that is left, interleaved in random order, and keeps the faster half; the next rung gives each twice the time.
The heuristic's own choice stays in to the end, so that the last rung says by how much the best one is faster, round by round. The best of
many is partly the luckiest: so the two are timed once more alone, and it wins only if it is ahead in both, by more than noise. An entry of
the table serves any batch: so it must not be behind with a quarter of the sequences or heads either, which leaves few tiles to each block.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import tuned
from ..backends.base import Footprint, Gradients, Saved, Tunable
from ..bench import accuracy
from ..bench.case import Case, forward_of, make
from ..bench.clock import Clock, clock_for
from ..bench.protocol import Interleaved, median, ratio
from ..bench.workloads import Workload
from ..dispatch import backend_named, choose
from ..frameworks.torch.describe import describe, dtype_of
from ..problem import Problem, Task
from ..settings import override
from .ahead import Order, compile_all
from .journal import Journal

LONGEST_CHECKED = 2048
"""Of the smaller call."""
REPEATS = 3
"""Launches that must give bitwise the same forward."""
FINALISTS = 4
"""The last rung has no more than these (and the heuristic's choice)."""
MOST_ATTEMPTS = 2
ENDS_PROCESS = "each process that ran it ended"
"""The fault of a candidate whose check was begun so often, in as many runs, and never came back."""
HANGS = "it did not come back"
HANG_SECONDS = 60.0
"""A candidate's check takes milliseconds; longer than this, it waits for something that never comes."""
HUNG = 3
"""Exit code of a process that a candidate hung: there is no other way out of a kernel that does not end."""
NOT_RUN = "does not"
"""How faults begin that are no mistake of a kernel."""
TIME_IS_UP = f"{NOT_RUN} get its turn: the time was up"
WORTH_IT = 1.02
"""A winner must be this much faster than the heuristic's choice, in the last rung and in the one after it, to be written down."""
NOT_BEHIND = 0.99
"""And so much, at least, with a quarter of the work."""


@dataclass
class Candidate:
    """tiles: the backend's (None: its own choice by lengths). fault: why it is out. times_ms: of its last rung."""

    tiles: Any
    footprint: Footprint
    fault: str = ""
    times_ms: list[float] = field(default_factory=list)
    rung: int = -1

    @property
    def label(self) -> str:
        return json.dumps(tuned.encode(self.tiles), sort_keys=True)

    @property
    def ms(self) -> float | None:
        return median(self.times_ms) if self.times_ms else None

    @property
    def wrong(self) -> bool:
        """It ran, and should not have: its result is wrong, or it ended its process. (What does not compile or launch is merely out.)"""
        return bool(self.fault) and not self.fault.startswith(NOT_RUN)


@dataclass
class Outcome:
    """Of one workload and task. gain: how many times as fast as the heuristic's choice (candidates[0]) the winner is, at the least."""

    workload: Workload
    task: Task
    backend: str
    candidates: list[Candidate]
    winner: Candidate | None = None
    gain: float = 1.0

    @property
    def own(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True)
class Tuner:
    """How to search.

    limit: most candidates of a workload, the nearest to the heuristic's choice; None: all. rounds, budget_ms: of the first rung.
    seconds: of checking and timing a workload; after them, what has not been checked is left out, and the next rung is the last. None: no
    end. end: ends the process when a candidate hangs.
    """

    device: torch.device
    journal: Journal
    limit: int | None = None
    jobs: int | None = None
    rounds: int = 3
    budget_ms: float = 1.0
    seconds: float | None = None
    seed: int = 0
    say: Callable[[str], object] = lambda text: None
    now: Callable[[], float] = time.monotonic
    end: Callable[[str], object] = lambda text: _end(text)

    def tune(self, workload: Workload, task: Task, backend: str | None = None) -> Outcome:
        """Search one workload.

        Raises:
            NotImplementedError: no backend supports it, or the one that does has no tuning space.
        """
        with override(tuned=tuned.OFF):
            case = make(workload, task, self.device, self.seed)
            problem = Problem.of(case.request, describe)
            name = choose(problem, backend).backend
            chosen = backend_named(name)
            if not isinstance(chosen, Tunable):
                raise NotImplementedError(f"the {name} backend has no tuning space")
            space = list(chosen.tuning_space(problem))[: self.limit]
            outcome = Outcome(workload, task, name, [Candidate(tiles, chosen.footprint(problem, tiles)) for tiles in space])
            runs = Runs(case, problem, name)
            self._compile(outcome, problem)
            until = float("inf") if self.seconds is None else self.now() + self.seconds
            self._check(outcome, runs, until)
            self._halve(outcome, runs, until)
        return outcome

    def clock(self, runs: Runs, tiles: Any) -> Clock:
        """What times a candidate."""
        return clock_for(runs.call(tiles), None, self.device, cold=False, graph=True)

    def _key(self, outcome: Outcome, *rest: str) -> tuple[str, ...]:
        return (outcome.workload.name, outcome.task.value, outcome.backend, *rest)

    def _compile(self, outcome: Outcome, problem: Problem) -> None:
        """Those that are not known to compile already."""
        todo = [c for c in outcome.candidates if "fault" not in (self.journal.known(*self._key(outcome, "check", c.label)) or {})]
        by_label = {c.label: c for c in todo}
        orders = [Order(c.label, outcome.backend, problem, c.tiles) for c in todo]
        for i, done in enumerate(compile_all(orders, self.jobs), start=1):
            self.say(f"{outcome.workload.name}: compiled {i} of {len(orders)}")
            if done.error:
                by_label[done.order.label].fault = f"{NOT_RUN} compile: {done.error}"

    def _check(self, outcome: Outcome, runs: Runs, until: float) -> None:
        """Against float64, and bitwise the same in repeated launches. The heuristic's choice is checked however little time there is."""
        for i, candidate in enumerate(outcome.candidates, start=1):
            self.say(f"{outcome.workload.name}: checked {i} of {len(outcome.candidates)}")
            key = self._key(outcome, "check", candidate.label)
            fact = self.journal.known(*key) or {}
            if "fault" not in fact and self.now() >= until and candidate is not outcome.own:
                candidate.fault = candidate.fault or TIME_IS_UP
                continue
            if "fault" not in fact:
                fact = self.journal.add(*key, value={"fault": candidate.fault or self._fault(key, fact, candidate, runs)})
                _still_alive(self.device, candidate)
            candidate.fault = fact["fault"]

    def _fault(self, key: tuple[str, ...], fact: dict[str, Any], candidate: Candidate, runs: Runs) -> str:
        """The journal knows what was begun, so that the next run knows what ended this one."""
        attempts = fact.get("attempts", 0)
        self.journal.add(*key, value={"attempts": attempts + 1})
        if attempts >= MOST_ATTEMPTS:
            return ENDS_PROCESS
        runs.get_ready()

        def hung() -> None:
            self.journal.add(*key, value={"fault": f"{HANGS} within {HANG_SECONDS:g} s"})
            self.end(f"{candidate.label} hangs; run the same command again: it goes on after it")

        with _watched(hung):
            return runs.fault(candidate.tiles)

    def _halve(self, outcome: Outcome, runs: Runs, until: float) -> None:
        left = [c for c in outcome.candidates if not c.fault]
        rung, rounds, budget = 0, self.rounds, self.budget_ms
        while left:
            if self.now() >= until and rung:
                left = [c for c in left if c in survivors(left, outcome.own, FINALISTS)]
            last = len(left) <= FINALISTS + 1
            self._time(outcome, runs, left, (rung, Interleaved(rounds * (3 if last else 1), budget, self.seed + rung)))
            if last:
                break
            left = survivors(left, outcome.own)
            rung, budget = rung + 1, 2 * budget
        if left:
            self._decide(outcome, left, runs, (rung + 1, Interleaved(rounds * 3, budget, self.seed + rung + 1)))

    def _time(self, outcome: Outcome, runs: Runs, left: Sequence[Candidate], step: tuple[int, Interleaved]) -> None:
        rung, protocol = step
        self.say(f"{outcome.workload.name}: {len(left)} candidates, rung {rung + 1}")
        times = self._times(self._key(outcome, "rung", str(rung)), runs, left, protocol)
        for candidate in left:
            candidate.times_ms, candidate.rung = times[candidate.label], rung

    def _times(self, key: tuple[str, ...], runs: Runs, some: Sequence[Candidate], protocol: Interleaved) -> dict[str, Any]:
        """Milliseconds of each round by label, from the journal where they are known."""
        key = (*key, *(c.label for c in some))
        fact = self.journal.known(*key)
        if fact is not None:
            return fact
        clocks = {c.label: self.clock(runs, c.tiles) for c in some}
        times: dict[str, list[float]] = {label: [] for label in clocks}
        for measured in protocol.run(clocks):
            for label, ms in measured.items():
                times[label].append(ms)
        return self.journal.add(*key, value=times)

    def _decide(self, outcome: Outcome, left: Sequence[Candidate], runs: Runs, once_more: tuple[int, Interleaved]) -> None:
        best = min(left, key=lambda c: c.ms or float("inf"))
        own = outcome.own
        if own.fault:  # then anything that is right is better
            outcome.winner, outcome.gain = best, float("inf")
            return
        gain = ratio(own.times_ms, best.times_ms)
        if gain >= WORTH_IT:
            self._time(outcome, runs, [own, best], once_more)
            gain = min(gain, ratio(own.times_ms, best.times_ms))
        ahead = gain >= WORTH_IT and self._holds_with_less(outcome, best, once_more[1])
        outcome.winner, outcome.gain = (best, gain) if ahead else (own, 1.0)

    def _holds_with_less(self, outcome: Outcome, best: Candidate, protocol: Interleaved) -> bool:
        less = outcome.workload.quarter()
        if less is None:
            return True
        self.say(less.name)
        case = make(less, outcome.task, self.device, self.seed)
        runs = Runs(case, Problem.of(case.request, describe), outcome.backend)
        times = self._times(self._key(outcome, "quarter"), runs, [outcome.own, best], protocol)
        return ratio(times[outcome.own.label], times[best.label]) >= NOT_BEHIND


@contextmanager
def _watched(hung: Callable[[], object]) -> Iterator[None]:
    """Calls `hung` from another thread if the block takes too long."""
    timer = threading.Timer(HANG_SECONDS, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    os._exit(HUNG)


def _still_alive(device: torch.device, candidate: Candidate) -> None:
    """A kernel that reads or writes where it must not takes the CUDA context with it, and nothing after it could run.

    Raises:
        RuntimeError: so it was; the fault is in the journal, and the next run goes on behind it.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise RuntimeError(f"{candidate.label} broke the CUDA context ({error}); run the same command again: it goes on after it") from None


def survivors(candidates: Sequence[Candidate], own: Candidate, count: int | None = None) -> list[Candidate]:
    """The faster half (or the fastest `count`), and the heuristic's choice with it."""
    ordered = sorted(candidates, key=lambda c: c.ms or float("inf"))
    kept = ordered[: max(FINALISTS, len(ordered) // 2) if count is None else count]
    return kept if own in kept or own.fault or own not in ordered else [*kept, own]


@dataclass(frozen=True)
class Runs:
    """The launches of a case with any tiles."""

    case: Case
    problem: Problem
    backend: str

    def call(self, tiles: Any) -> Callable[[], tuple[Tensor, ...]]:
        """A function that runs once and returns (out,) or (dq, dk, dv), always the same tensors."""
        plan = backend_named(self.backend).plan(self.problem, tiles)
        if self.case.task is Task.FORWARD:
            out, lse = self._outputs()
            return _returning(functools.partial(plan.run, self.case.request, out, lse), (out,))
        grads = [torch.full_like(t, torch.nan) for t in self.case.qkv]
        sink = self.case.request.sink
        gradients = Gradients(
            d_out=self.case.d_out, dq=grads[0], dk=grads[1], dv=grads[2], d_sink=None if sink is None else torch.zeros_like(sink)
        )
        return _returning(functools.partial(plan.run, self.case.request, self._saved, gradients), tuple(grads))

    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Full of NaN, so that what is not written shows."""
        device = self.case.device
        out = torch.full(self.problem.out_shape, torch.nan, device=device, dtype=dtype_of(self.problem.spec.out_dtype))
        return out, torch.full(self.problem.lse_shape, torch.nan, device=device)

    def get_ready(self) -> None:
        """What the first check would otherwise wait for."""
        checked = self._checked
        assert checked._truth.samples
        if self.case.task is Task.BACKWARD:
            assert checked._saved is not None

    @functools.cached_property
    def _checked(self) -> Runs:
        """These launches; a smaller call for the same kernels where these gradients are too many to be held against float64."""
        if self._truth.samples:
            return self
        case = make(self.case.workload.small(LONGEST_CHECKED), self.case.task, self.case.device)
        return Runs(case, Problem.of(case.request, describe), self.backend)

    @functools.cached_property
    def _truth(self) -> accuracy.Truth:
        return accuracy.Truth(self.case)

    @functools.cached_property
    def _saved(self) -> Saved:
        """Of the forward, by whoever serves it."""
        request = forward_of(self.case)
        out, lse = self._outputs()
        choose(Problem.of(request, describe)).run(request, out, lse)
        return Saved(out=out, lse=lse)

    def fault(self, tiles: Any) -> str:
        """What is wrong with these tiles, empty when nothing is."""
        checked = self._checked
        try:
            call = checked.call(tiles)
            results = [t.clone() for t in call()]
            if self.case.device.type == "cuda":
                torch.cuda.synchronize(self.case.device)  # here a hung kernel holds no lock of Python's that the watch needs
            for _ in range(REPEATS if self.case.task is Task.FORWARD else 0):
                for again, first in zip(call(), results, strict=True):
                    if not torch.equal(again, first):
                        return "repeated launches differ"
            found = checked._truth.errors(tuple(results))
        except Exception as error:
            return f"{NOT_RUN} run: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        assert found is not None
        return "; ".join(found.faults)


def _returning(run: Callable[[], object], result: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        run()
        return result

    return call


def entry(outcome: Outcome, evidence: dict[str, Any]) -> tuned.Entry | None:
    """For the table; None where the heuristic's choice is (about) the best, or stands for sizes by length."""
    winner = outcome.winner
    if winner is None or winner is outcome.own or winner.tiles is None:
        return None
    backend = backend_named(outcome.backend)
    assert isinstance(backend, Tunable)
    problem = outcome.workload.problem(_plain_device(outcome), outcome.task)
    own = None if outcome.own.ms is None else float(f"{outcome.own.ms:.5g}")
    measured = {
        "workload": outcome.workload.name,
        "ms": float(f"{winner.ms:.5g}"),
        "heuristic_ms": own,
        "gain": float(f"{outcome.gain:.4g}"),
    }
    return tuned.Entry(
        backend=outcome.backend,
        spec=tuned.encode(backend.tuning_key(problem)),
        q_len=problem.sizes.q_len,
        reach=tuned.reach(problem.mask, problem.sizes),
        tiles=tuned.encode(winner.tiles),
        evidence=measured | evidence,
    )


def _plain_device(outcome: Outcome) -> Any:
    """The device of the workload's description: which one does not matter for a key."""
    from ..problem import CPU

    return CPU


def merged(table: tuned.Table, outcomes: Sequence[tuple[Outcome, tuned.Entry | None]]) -> tuned.Table:
    """The table with the entries of these outcomes; what no longer wins is taken out."""
    for outcome, new in outcomes:
        if new is not None:
            table = table.with_entry(new)
        else:
            gone = (outcome.backend, outcome.workload.name, outcome.task.value)
            kept = [e for e in table.entries if (e.backend, e.evidence.get("workload"), e.evidence.get("task")) != gone]
            table = tuned.Table(table.device, tuple(kept))
    return table


def facts(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """A line per candidate, for JSON."""
    for c in outcome.candidates:
        yield {
            "tiles": tuned.encode(c.tiles),
            "smem_bytes": c.footprint.smem_bytes,
            "fault": c.fault or None,
            "rungs": c.rung + 1,
            "ms": c.ms,
            "winner": c is outcome.winner,
        }
