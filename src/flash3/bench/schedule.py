"""How work tiles fall onto the multiprocessors: a simulation in units of key blocks, for `explain`.

Blocks are persistent and take the next tile when they are done with one. Heads are visited in groups (their K and V fit the L2); inside a
group the query block is the slow index, the longest tile first where a mask makes them unequal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..backends.base import Footprint
from ..mask import MaskKind
from .blocks import Panel
from .workloads import Workload


@dataclass(frozen=True)
class Job:
    """One tile of queries of one head: on which slot it ran, from when, how long (blocks of keys)."""

    slot: int
    start: int
    cost: int


@dataclass(frozen=True)
class Schedule:
    """All jobs. slots: thread blocks that run at once."""

    slots: int
    jobs: tuple[Job, ...]

    @property
    def span(self) -> int:
        """Until the last one is done."""
        return max((job.start + job.cost for job in self.jobs), default=0)

    @property
    def busy(self) -> float:
        """How much of slots × span is work."""
        return sum(job.cost for job in self.jobs) / (self.slots * self.span) if self.span else 1.0

    @property
    def waves(self) -> float:
        return len(self.jobs) / self.slots


def costs(workload: Workload, footprint: Footprint) -> Iterator[int]:
    """Visited blocks of every tile, in the order in which tiles are handed out. A tile that sees nothing still takes one."""
    by_length = {pair: tile_costs(workload, pair, footprint) for pair in set(workload.lengths)}
    heads = [by_length[pair] for pair in workload.lengths for _ in range(workload.heads_q // footprint.heads)]
    step = max(1, footprint.head_group // footprint.heads)
    for first in range(0, len(heads), step):
        group = heads[first : first + step]
        for block in range(max(map(len, group), default=0)):
            yield from (tiles[block] for tiles in group if block < len(tiles))


def tile_costs(workload: Workload, pair: tuple[int, int], footprint: Footprint) -> list[int]:
    """Of one sequence and head, in the order of the kernel: from the last tile on where later rows see more; of keys from the first."""
    q_len, k_len = pair
    panel = Panel("", workload.mask, q_len, k_len, footprint.q_block, footprint.kv_block)
    if footprint.by_keys:
        return [max(1, int(n)) for n in np.count_nonzero(panel.visits(), axis=0)]
    found = [max(1, visited) for visited, _ in panel.rows()]
    return found if workload.mask.kind is MaskKind.FULL else found[::-1]


def simulate(workload: Workload, footprint: Footprint, multiprocessors: int) -> Schedule:
    """Each next tile goes to the slot that is free first."""
    slots = max(1, multiprocessors * footprint.blocks_per_sm)
    free = [(0, slot) for slot in range(slots)]
    jobs = []
    for cost in costs(workload, footprint):
        start, slot = heapq.heappop(free)
        jobs.append(Job(slot, start, cost))
        heapq.heappush(free, (start + cost, slot))
    return Schedule(slots, tuple(jobs))


def paint(axes: object, schedule: Schedule, multiprocessors: int) -> None:
    """Time to the right, a line for each slot, a tile as dark as it is long."""
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection

    assert isinstance(axes, Axes)
    longest = max((job.cost for job in schedule.jobs), default=1)
    shapes = [[(j.start, j.slot), (j.start + j.cost, j.slot), (j.start + j.cost, j.slot + 1), (j.start, j.slot + 1)] for j in schedule.jobs]
    shades = [colormaps["viridis_r"](0.1 + 0.85 * job.cost / longest) for job in schedule.jobs]
    axes.add_collection(PolyCollection(shapes, facecolors=shades, edgecolors="white", linewidths=0.15))
    axes.set_xlim(0, max(1, schedule.span))
    axes.set_ylim(schedule.slots, 0)
    slots = f"{multiprocessors} multiprocessors" if schedule.slots == multiprocessors else f"{schedule.slots} slots"
    axes.set(title=f"Tiles on {slots}, longest first: busy {schedule.busy:.0%}", xlabel="time, in blocks of keys", ylabel="slot")
