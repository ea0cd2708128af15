"""Clocks and protocols, with time that tests make themselves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from flash3.bench.clock import MOST_COUNT, Timing, WallClock, clock_for, count_for
from flash3.bench.protocol import Interleaved, Solo, median, ratio, spread


@dataclass
class Time:
    """A clock that only moves when told to."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


def wall(time: Time, cost_ms: float, wait_ms: float = 0.0) -> WallClock:
    def spend(ms: float) -> None:
        time.seconds += ms / 1e3

    return WallClock(lambda: spend(cost_ms), (lambda: spend(wait_ms)) if wait_ms else None, now=time)


def test_a_burst_is_the_mean_and_counts_the_wait() -> None:
    time = Time()
    assert wall(time, 2.0).burst_ms(5) == pytest.approx(2.0)
    assert wall(time, 2.0, wait_ms=10.0).burst_ms(5) == pytest.approx(4.0)


@pytest.mark.parametrize(("cost_ms", "count"), [(0.5, 20), (10.0, 1), (100.0, 1), (0.0, MOST_COUNT)])
def test_counts_fill_the_budget(cost_ms: float, count: int) -> None:
    assert count_for(wall(Time(), cost_ms), 10.0) == count


def test_the_cpu_is_timed_by_the_wall() -> None:
    clock = clock_for(lambda: None, None, torch.device("cpu"), cold=True, graph=True)
    assert clock.timing is Timing.WALL
    assert clock.burst_ms(10) >= 0


@dataclass
class Scripted:
    """Bursts of given lengths, in turn; remembers who was called when."""

    name: str
    lengths: list[float]
    log: list[str]
    timing = Timing.WALL
    at: itertools.count = field(default_factory=itertools.count)

    def burst_ms(self, count: int) -> float:
        self.log.append(self.name)
        return self.lengths[next(self.at) % len(self.lengths)]


def test_interleaved_rounds_hold_everybody_in_changing_order() -> None:
    log: list[str] = []
    clocks = {name: Scripted(name, [1.0], log) for name in "abc"}
    found = list(Interleaved(rounds=8, budget_ms=1.0).run(clocks))
    assert [set(one) for one in found] == [set("abc")] * 8
    orders = {tuple(log[i : i + 3]) for i in range(len(log) - 24, len(log), 3)}
    assert all(sorted(order) == list("abc") for order in orders)
    assert len(orders) > 2
    assert list(Interleaved().run({})) == []


def test_an_interrupt_keeps_whole_rounds() -> None:
    class Interrupted(Scripted):
        def burst_ms(self, count: int) -> float:
            if self.log.count(self.name) == 5:
                raise KeyboardInterrupt
            return super().burst_ms(count)

    log: list[str] = []
    kept: list[dict[str, float]] = []
    rounds = Interleaved(rounds=9).run({"a": Scripted("a", [1.0], []), "b": Interrupted("b", [1.0], log)})
    with pytest.raises(KeyboardInterrupt):
        kept.extend(rounds)
    assert [set(one) for one in kept] == [{"a", "b"}] * 3


def test_solo_goes_both_ways_and_counts_what_has_settled() -> None:
    time = Time()
    hot = {"calls": 0}

    def warms_up() -> None:  # 1 ms until 0.3 s have gone, then 2 ms
        time.seconds += 1e-3 if time.seconds < 0.3 else 2e-3
        hot["calls"] += 1

    clocks = {"a": WallClock(warms_up, now=time), "b": wall(time, 4.0)}
    found = list(Solo(seconds=0.9, now=time).run(clocks))
    assert [name for name, _ in found] == ["a", "b", "b", "a"]
    assert found[0][1] == pytest.approx(2.0, rel=0.05)
    assert found[1][1] == pytest.approx(4.0)


def test_ratios_are_taken_inside_rounds() -> None:
    """A machine that slows down in the middle changes medians, not the ratio."""
    ours, theirs = [1.0, 1.0, 3.0, 3.0], [2.0, 2.0, 6.0, 6.0]
    assert ratio(theirs, ours) == pytest.approx(2.0)
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([5.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.5)


@pytest.mark.gpu
def test_gpu_clocks_agree() -> None:
    from flash3.bench.clock import ColdClock, EventClock, graphed, scrubber

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    call = lambda: torch.mm(a, a, out=out)  # noqa: E731
    launched, cold = EventClock(call), ColdClock(call, scrubber(a.device))
    replayed = EventClock(graphed(call), Timing.GRAPH)
    times = [min(clock.burst_ms(20) for _ in range(3)) for clock in (launched, replayed, cold)]
    assert max(times) < 1.5 * min(times)
