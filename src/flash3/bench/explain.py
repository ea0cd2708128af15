"""`flash3 explain`: what would happen to a call, and why; from descriptions alone, for a device that need not be here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..backends.base import Footprint, Refusal, Tunable
from ..dispatch import Explanation, backend_named
from ..dispatch import explain as ask
from ..problem import Device, Problem, Task
from ..tuned import encode
from .blocks import Panel, legend, paint
from .roofline import TERA, Floor, Rates, floor, floor_of
from .schedule import Schedule, simulate
from .schedule import paint as paint_schedule
from .workloads import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

MOST_PAINTED_TILES = 20_000


@dataclass(frozen=True)
class Counts:
    """Blocks of scores of all heads and sequences."""

    full: int
    partial: int
    skipped: int


@dataclass(frozen=True)
class Story:
    """All that can be told without running. What a backend keeps to itself is None."""

    workload: Workload
    task: Task
    problem: Problem
    explanation: Explanation
    rates: Rates
    floor: Floor
    footprint: Footprint | None = None
    counts: Counts | None = None
    schedule: Schedule | None = None
    predicted: Floor | None = None


def tell(workload: Workload, task: Task, device: Device, rates: Rates, backend: str | None = None) -> Story:
    """Ask the dispatcher, then the chosen backend for its footprint, and lay its tiles out.

    Raises:
        ValueError: `backend` names none.
    """
    problem = workload.problem(device, task)
    explanation = ask(problem, backend)
    story = Story(workload, task, problem, explanation, rates, floor_of(workload, task, rates))
    if explanation.backend is None:
        return story
    chosen = backend_named(explanation.backend)
    if not isinstance(chosen, Tunable):
        return story
    try:
        footprint = chosen.footprint(problem)
    except NotImplementedError:  # not for this task
        return story
    counts, schedule = count(workload, footprint), simulate(workload, footprint, max(1, device.multiprocessors))
    predicted = predict(workload, task, rates, footprint, (counts, schedule))
    return Story(workload, task, problem, explanation, rates, story.floor, footprint, counts, schedule, predicted)


def count(workload: Workload, footprint: Footprint) -> Counts:
    """Full, partial and skipped blocks."""
    full = partial = total = 0
    for q_len, k_len in workload.lengths:
        rows = Panel("", workload.mask, q_len, k_len, footprint.q_block, footprint.kv_block).rows()
        full += sum(f for _, f in rows)
        partial += sum(visited - f for visited, f in rows)
        total += len(rows) * -(-k_len // footprint.kv_block)
    heads = workload.heads_q // footprint.heads
    return Counts(full * heads, partial * heads, (total - full - partial) * heads)


def predict(workload: Workload, task: Task, rates: Rates, footprint: Footprint, laid_out: tuple[Counts, Schedule]) -> Floor:
    """The roofline with what the tiles add: whole blocks instead of visible pairs, and multiprocessors that wait at the end."""
    counts, schedule = laid_out
    pairs = (counts.full + counts.partial) * footprint.q_block * footprint.heads * footprint.kv_block
    rounding = pairs / max(1, workload.area() * workload.heads_q)
    found = floor(rates, workload.flops(task) * rounding, workload.bytes(task), float(pairs))
    return found if found.unit == "memory" else Floor(found.seconds / max(schedule.busy, 1e-9), found.unit)


def as_data(story: Story) -> dict[str, Any]:
    """As JSON values."""
    e, f, s = story.explanation, story.footprint, story.schedule
    return {
        "workload": story.workload.name,
        "shape": str(story.workload),
        "task": story.task.value,
        "device": str(story.problem.device),
        "backend": e.backend,
        "answers": {
            name: f"no, {a.reason}" if isinstance(a, Refusal) else f"yes{', ' + a.note if a.note else ''}" for name, a in e.answers
        },
        "tiles": None if e.plan is None else encode(e.plan.tiles),
        "notes": [] if e.plan is None else list(e.plan.notes),
        "footprint": encode(f) if f else None,
        "blocks": encode(story.counts) if story.counts else None,
        "schedule": {"slots": s.slots, "tiles": len(s.jobs), "waves": s.waves, "busy": s.busy} if s else None,
        "flops": story.workload.flops(story.task),
        "bytes": story.workload.bytes(story.task),
        "rates": encode(story.rates),
        "floor_ms": story.floor.seconds * 1e3,
        "floor_unit": story.floor.unit,
        "predicted_ms": story.predicted.seconds * 1e3 if story.predicted else None,
        "predicted_unit": story.predicted.unit if story.predicted else None,
    }


def lines(story: Story) -> list[str]:
    """For people."""
    found = [f"{story.workload.name}: {story.workload}", "", str(story.explanation)]
    f, c, s = story.footprint, story.counts, story.schedule
    if f is not None:
        who, memory = ("a thread block", "shared memory") if f.threads else ("a step", "memory")
        heads = f" of {f.heads} heads" if f.heads > 1 else ""
        found.append(f"{who} takes {f.q_block} queries{heads} × {f.kv_block} keys, {f.smem_bytes / 1024:.0f} KB of {memory}")
    if f is not None and f.threads:
        registers = f" with at most {f.registers} registers, {f.blocks_per_sm} on a multiprocessor at once" if f.registers else ""
        found.append(f"{f.threads} threads{registers}")
    if c is not None:
        share = (c.full + c.partial) / max(1, c.full + c.partial + c.skipped)
        found.append(f"blocks of scores: {c.full} full, {c.partial} partial, {c.skipped} skipped ({share:.0%} visited)")
    if s is not None and f is not None and f.threads:
        found.append(f"{len(s.jobs)} tiles on {s.slots} slots: {s.waves:.2f} waves, {s.busy:.0%} busy")
    r, low = story.rates, story.floor
    found.append(f"rates ({r.source}): {r.matmul / TERA:.4g} TFLOP/s, {r.bandwidth / TERA:.3g} TB/s")
    found.append(f"roofline: at least {low.seconds * 1e6:.4g} µs, set by {low.unit}")
    if story.predicted is not None:
        rate = story.workload.flops(story.task) / story.predicted.seconds / TERA
        found.append(
            f"with these tiles: at least {story.predicted.seconds * 1e6:.4g} µs, set by {story.predicted.unit} (at most {rate:.4g} TFLOP/s)"
        )
    return found


def show(story: Story, console: Console) -> None:
    for line in lines(story):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def draw(story: Story) -> Figure:
    """The mask's blocks of the longest sequence, and the schedule.

    Raises:
        ValueError: no backend serves the call, or it does not tell its tiles.
    """
    from matplotlib.figure import Figure

    f, s, w = story.footprint, story.schedule, story.workload
    if f is None or s is None:
        raise ValueError("there is no picture: no backend that tells its tiles serves this call")
    q_len, k_len = max(w.lengths)
    panel = Panel(str(w), w.mask, q_len, k_len, f.q_block, f.kv_block).coarse()
    on_gpu = bool(f.threads) and len(s.jobs) <= MOST_PAINTED_TILES
    figure = Figure(figsize=(14 if on_gpu else 7, 6.4), layout="constrained")
    axes = figure.subplots(1, 2 if on_gpu else 1, squeeze=False)[0]
    paint(axes[0], panel)
    if on_gpu:
        paint_schedule(axes[1], s, story.problem.device.multiprocessors)
    keys = legend()
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure
