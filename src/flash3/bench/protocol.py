"""Two fair ways to time several calls.

interleaved   in every round each call once, in random order, a few milliseconds each: all meet the same clock and the same noise, so the
              ratio of two calls is taken inside each round, and then the median of these ratios
solo          each call alone, long enough for power and clock to settle, in both orders: what a training run would see
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .clock import Clock, count_for

SETTLED_AFTER = 1 / 3
"""Of a solo run: what comes before is not counted."""
SOLO_BURST_MS = 20.0


@dataclass(frozen=True)
class Interleaved:
    """budget_ms: of each call in each round."""

    rounds: int = 9
    budget_ms: float = 2.5
    seed: int = 0

    def run(self, clocks: Mapping[str, Clock]) -> Iterator[dict[str, float]]:
        """Milliseconds of each call, round by round: who stops early has whole rounds."""
        counts = {name: count_for(clock, self.budget_ms) for name, clock in clocks.items()}
        order = random.Random(self.seed)
        for _ in range(self.rounds if clocks else 0):
            yield {name: clocks[name].burst_ms(counts[name]) for name in order.sample(list(clocks), len(clocks))}


@dataclass(frozen=True)
class Solo:
    """seconds: of each run."""

    seconds: float = 0.7
    now: Callable[[], float] = time.perf_counter

    def run(self, clocks: Mapping[str, Clock]) -> Iterator[tuple[str, float]]:
        """(name, milliseconds): every call in one order, then every call in the other."""
        for order in (list(clocks), list(clocks)[::-1]):
            for name in order:
                yield name, self._alone_ms(clocks[name])

    def _alone_ms(self, clock: Clock) -> float:
        count = count_for(clock, min(SOLO_BURST_MS, self.seconds * 1e3 / 10))
        begin, bursts = self.now(), []
        while (spent := self.now() - begin) < self.seconds:
            ms = clock.burst_ms(count)
            if spent >= self.seconds * SETTLED_AFTER:
                bursts.append(ms)
        return statistics.fmean(bursts) if bursts else clock.burst_ms(count)


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> float:
    """Half the distance between the quartiles; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast we are: the median over rounds of (their time / our time in the same round)."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
