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


PRODUCER_WARPGROUP = 0
FIRST_CONSUMER_WARPGROUP = 1
WARPGROUP_THREADS = 128

# consumers -> registers of a thread: at entry, then of a producer and of a consumer
_REGISTERS = {1: (240, 56, 240), 2: (168, 24, 240), 3: (128, 32, 160), 4: (96, 24, 112)}


def is_known(tiles: Warpgroups) -> bool:
    """Whether there is a split of the registers for this many warpgroups."""
    return tiles.consumers in _REGISTERS


def entry_registers(tiles: Warpgroups) -> int:
    return _REGISTERS[tiles.consumers][0]


def producer_registers(tiles: Warpgroups) -> int:
    return _REGISTERS[tiles.consumers][1]


def consumer_registers(tiles: Warpgroups) -> int:
    return _REGISTERS[tiles.consumers][2]
