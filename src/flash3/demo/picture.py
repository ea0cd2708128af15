"""A picture of the blocks that a mask visits, side by side for several calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..bench.blocks import Panel, Visit, legend, paint

__all__ = ["Panel", "Visit", "draw"]


def draw(panels: list[Panel], path: Path) -> Path:
    """Write the panels side by side as a PNG; makes the folder. Returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        paint(axes, panel)
    keys = legend()
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.2)
    return path
