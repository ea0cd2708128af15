"""The report as a picture like the paper's figures: a panel for each head dim and mask, bars by sequence length, a colour per provider."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernel_cache import write_whole
from .results import Report, Subject, terabytes, tflops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "flash3": "#c1121f",
    "sdpa:cudnn": "#6a994e",
    "sdpa:flash": "#9aa5b1",
    "sdpa:efficient": "#b8a1c9",
    "sdpa:math": "#d4c5a0",
    "fa3": "#1d4e89",
    "fa4": "#5fa8d3",
    "flex": "#f2a541",
    "pallas": "#7b2d8b",
    "naive": "#cccccc",
}
OTHERS = ("#e07a5f", "#3d405b", "#81b29a", "#8d99ae")
SUFFIXES = (".png", ".svg")
DPI = 110


def panel_of(subject: Subject) -> tuple[str, str]:
    """(panel, label of the bars): paper/d128-causal-4k -> (d128 causal, forward; 4k); others by their group."""
    group, _, rest = subject.workload.partition("/")
    if group == "paper":
        panel, _, label = rest.rpartition("-")
        return f"{panel.replace('-', ', ')}, {subject.task}", label
    return f"{group if rest else 'shape'}, {subject.task}", rest or subject.workload


def panels_of(report: Report) -> dict[str, list[tuple[str, Subject]]]:
    """Panel -> its (label, subject)."""
    found: dict[str, list[tuple[str, Subject]]] = {}
    for subject in report.subjects:
        panel, label = panel_of(subject)
        found.setdefault(panel, []).append((label, subject))
    return found


def colour_of(provider: str, providers: list[str]) -> str:
    unnamed = [p for p in providers if p not in COLOURS]
    return COLOURS[provider] if provider in COLOURS else OTHERS[unnamed.index(provider) % len(OTHERS)]


def draw(report: Report) -> Figure:
    """All panels, two in a row."""
    from matplotlib.figure import Figure

    panels = panels_of(report)
    providers = [p for p in report.providers() if any(row.ms for row in report.rows if row.provider == p)]
    columns = min(2, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(8 * columns, 0.6 + 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, members) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, title, members, report, providers)
    for axes in list(grid)[len(panels) :]:
        axes.axis("off")
    handles = _handles(providers)
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    device = report.machine.get("device", "")
    figure.supxlabel(
        f"{device}; medians of {_rounds(report)} interleaved rounds; whiskers: half the distance between the quartiles", size=9
    )
    return figure


def _rounds(report: Report) -> int:
    return max((len(row.times_ms) for row in report.rows), default=0)


def _handles(providers: list[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour_of(p, providers), label=p) for p in providers]


def _draw_panel(axes: Any, title: str, members: list[tuple[str, Subject]], report: Report, providers: list[str]) -> None:
    by_memory = all(subject.unit == "memory" for _, subject in members)
    rate: Callable[[Subject, float | None], float | None] = terabytes if by_memory else tflops
    width = 0.84 / max(1, len(providers))
    for place, (_, subject) in enumerate(members):
        rows = {row.provider: row for row in report.of(subject) if row.ms}
        for i, provider in enumerate(providers):
            row = rows.get(provider)
            if row is None or row.ms is None:
                continue
            height = rate(subject, row.ms) or 0.0
            x = place + (i - (len(providers) - 1) / 2) * width
            error = height * row.spread_ms / row.ms
            axes.bar(x, height, width, color=colour_of(provider, providers), yerr=error or None, error_kw={"lw": 0.6})
            axes.annotate(
                f"{height:.{_decimals(height)}f}",
                (x, height + error),
                (0, 1),
                textcoords="offset points",
                size=5.5,
                ha="center",
                rotation=90,
            )
    axes.set_xticks(range(len(members)), [label for label, _ in members], rotation=0 if max(len(label) for label, _ in members) < 8 else 25)
    axes.set(title=title, ylabel="TB/s" if by_memory else "TFLOP/s")
    axes.margins(y=0.16)
    axes.spines[["top", "right"]].set_visible(False)


def _decimals(value: float) -> int:
    return 0 if value >= 10 else 1 if value >= 1 else 2


def render(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a png or svg."""
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flash3"}):  # text stays text, and equal pictures are equal files
        figure.savefig(out, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix says as what.

    Raises:
        ValueError: a suffix that is not known.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"pictures must end in {' or '.join(SUFFIXES)}, got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(figure, path.suffix[1:]), mode=0o644)
