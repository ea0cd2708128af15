"""A picture of the blocks that a mask visits, from the same arithmetic that the kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

import flash3


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
    mask: flash3.Mask
    q_len: int
    k_len: int
    q_block: int
    kv_block: int

    def visits(self) -> np.ndarray:
        """(query blocks, key blocks) of Visit."""
        grid = np.full((-(-self.q_len // self.q_block), -(-self.k_len // self.kv_block)), Visit.SKIPPED)
        for row in range(grid.shape[0]):
            first, last = row * self.q_block, min(self.q_len, (row + 1) * self.q_block) - 1
            blocks = self.mask.key_blocks(first, last, self.q_len, self.k_len, self.kv_block)
            grid[row, blocks.begin : blocks.end] = Visit.PARTIAL
            grid[row, blocks.full_begin : blocks.full_end] = Visit.FULL
        return grid


def draw(panels: list[Panel], path: Path) -> Path:
    """Write the panels side by side as a PNG; makes the folder. Returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(6.4 * len(panels), 7), layout="constrained")
    FigureCanvasAgg(figure)
    colours = ListedColormap([LOOK[visit][0] for visit in Visit])
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        grid = panel.visits()
        share = np.count_nonzero(grid) / grid.size
        axes.pcolormesh(grid, cmap=colours, vmin=min(Visit), vmax=max(Visit), edgecolors="white", linewidth=0.8)
        axes.set(aspect="equal", title=f"{panel.title}\n{np.count_nonzero(grid)} of {grid.size} blocks visited ({share:.0%})")
        axes.set(xlabel=f"blocks of {panel.kv_block} keys", ylabel=f"blocks of {panel.q_block} queries")
        axes.invert_yaxis()
    keys = [Patch(facecolor=colour, edgecolor="#999999", label=label) for colour, label in LOOK.values()]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
