"""Which blocks of scores a mask visits, counted and painted: the same arithmetic that the kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ..mask import Mask

MOST_CELLS = 192
"""Blocks on a side of a painted grid; more are put together."""


class Visit(IntEnum):
    """What a kernel does with a block of scores."""

    SKIPPED = 0
    PARTIAL = 1
    FULL = 2


LOOK = {
    Visit.FULL: ("#1f6f8b", "full: no mask applied"),
    Visit.PARTIAL: ("#f2a541", "partial: masked"),
    Visit.SKIPPED: ("#eeeeee", "skipped: never loaded"),
}


@dataclass(frozen=True)
class Panel:
    """One mask over one pair of lengths, cut into tiles of q_block × kv_block."""

    title: str
    mask: Mask
    q_len: int
    k_len: int
    q_block: int
    kv_block: int

    def rows(self) -> list[tuple[int, int]]:
        """(visited, full) blocks of each tile of queries."""
        found = []
        for first in range(0, self.q_len, self.q_block):
            last = min(self.q_len, first + self.q_block) - 1
            blocks = self.mask.key_blocks(first, last, self.q_len, self.k_len, self.kv_block)
            found.append((blocks.end - blocks.begin, blocks.full_end - blocks.full_begin))
        return found

    def visits(self) -> np.ndarray:
        """(query blocks, key blocks) of Visit."""
        grid = np.full((-(-self.q_len // self.q_block), -(-self.k_len // self.kv_block)), Visit.SKIPPED)
        for row in range(grid.shape[0]):
            first, last = row * self.q_block, min(self.q_len, (row + 1) * self.q_block) - 1
            blocks = self.mask.key_blocks(first, last, self.q_len, self.k_len, self.kv_block)
            grid[row, blocks.begin : blocks.end] = Visit.PARTIAL
            grid[row, blocks.full_begin : blocks.full_end] = Visit.FULL
        return grid

    def coarse(self) -> Panel:
        """The same with blocks so large that a picture shows them."""
        q = self.q_block * -(-self.q_len // (self.q_block * MOST_CELLS))
        kv = self.kv_block * -(-self.k_len // (self.kv_block * MOST_CELLS))
        return Panel(self.title, self.mask, self.q_len, self.k_len, max(q, self.q_block), max(kv, self.kv_block))


def paint(axes: Any, panel: Panel) -> None:
    """The grid on matplotlib axes."""
    from matplotlib.colors import ListedColormap

    grid = panel.visits()
    share = np.count_nonzero(grid) / grid.size
    colours = ListedColormap([LOOK[visit][0] for visit in Visit])
    axes.pcolormesh(grid, cmap=colours, vmin=min(Visit), vmax=max(Visit), edgecolors="white", linewidth=0.8 if max(grid.shape) < 65 else 0)
    axes.set(aspect="equal", title=f"{panel.title}\n{np.count_nonzero(grid)} of {grid.size} blocks visited ({share:.0%})")
    axes.set(xlabel=f"blocks of {panel.kv_block} keys", ylabel=f"blocks of {panel.q_block} queries")
    axes.invert_yaxis()


def legend() -> list[Any]:
    """Handles for a figure's legend."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, edgecolor="#999999", label=label) for colour, label in LOOK.values()]
