"""Who does what: warpgroup 0 produces (one warp issues TMA), the others consume; and the registers each role may use.

setmaxnreg moves registers between warpgroups. What a block may hold is not the SM's 64 K but registers at entry times threads:
one step more and the instruction waits for ever. The table keeps that sum; `budget` checks it.
"""

from __future__ import annotations

from typing import Protocol


class Warpgroups(Protocol):
    """What tiles say of them."""

    @property
    def consumers(self) -> int: ...

    @property
    def blocks_per_sm(self) -> int: ...


PRODUCER_WARPGROUP = 0
FIRST_CONSUMER_WARPGROUP = 1
WARPGROUP_THREADS = 128

# (consumers, blocks per SM) -> registers of a thread: at entry, then of a producer and of a consumer
_REGISTERS = {
    (1, 1): (240, 56, 240),
    (2, 1): (168, 24, 240),
    (3, 1): (128, 32, 160),
    (4, 1): (96, 24, 112),
    (2, 2): (80, 24, 104),
}


def is_known(tiles: Warpgroups) -> bool:
    """Whether there is a split of the registers for this many warpgroups."""
    return (tiles.consumers, tiles.blocks_per_sm) in _REGISTERS


def entry_registers(tiles: Warpgroups) -> int:
    return _REGISTERS[tiles.consumers, tiles.blocks_per_sm][0]


def producer_registers(tiles: Warpgroups) -> int:
    return _REGISTERS[tiles.consumers, tiles.blocks_per_sm][1]


def consumer_registers(tiles: Warpgroups) -> int:
    return _REGISTERS[tiles.consumers, tiles.blocks_per_sm][2]
