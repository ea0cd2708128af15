"""Memory against time: every candidate of a tuning run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .search import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(outcomes: Sequence[Outcome]) -> Figure:
    """A panel per workload, a dot per candidate that was timed, darker the more rungs it lasted; heuristic's choice and winner marked."""
    from matplotlib.figure import Figure

    columns = min(3, max(1, len(outcomes)))
    rows = -(-len(outcomes) // columns) or 1
    figure = Figure(figsize=(5.2 * columns, 4.2 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, outcome in zip(grid, outcomes, strict=False):
        timed = [c for c in outcome.candidates if c.ms]
        places = [(c.footprint.smem_bytes / 1024, c.ms or 0.0) for c in timed]
        if places:
            axes.scatter(
                *zip(*places, strict=True), c=[c.rung for c in timed], cmap="Blues", vmin=-1.5, edgecolors="#33415c", linewidths=0.5, s=32
            )
        for candidate, mark, colour, label in ((outcome.own, "s", "#f2a541", "heuristic"), (outcome.winner, "*", "#c1121f", "winner")):
            if candidate is not None and candidate.ms:
                axes.scatter(
                    [candidate.footprint.smem_bytes / 1024], [candidate.ms], marker=mark, s=90, color=colour, label=label, zorder=3
                )
        out = sum(bool(c.fault) for c in outcome.candidates)
        axes.set(
            title=f"{outcome.workload.name}, {outcome.task.value}\n{len(timed)} timed, {out} out", xlabel="shared memory of a block, KB"
        )
        axes.set(ylabel="ms (of the last rung)")
        axes.spines[["top", "right"]].set_visible(False)
        if places:
            axes.legend(frameon=False, fontsize=8)
    for axes in grid[len(outcomes) :]:
        axes.axis("off")
    return figure
