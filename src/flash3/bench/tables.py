"""The report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .pictures import panels_of
from .results import Report, Row, Subject, compare, fraction, summaries, terabytes, tflops

BEHIND = 0.99
"""Below this ratio to the best peer a cell counts as behind."""


MOST_WHOLE_TABLES = 6
"""With more workloads than this each is a line, not a table."""


def show(report: Report, console: Console) -> None:
    """A table per workload and task, or a line where there are many; the reasons of what did not run; the summary."""
    if len(report.subjects) <= MOST_WHOLE_TABLES:
        for subject in report.subjects:
            console.print(table_of(report, subject))
    else:
        for title, members in panels_of(report).items():
            console.print(overview(report, title, [subject for _, subject in members]))
    for line in reasons(report):
        console.print(line, style="dim", markup=False, highlight=False)
    show_summary(report, console)


def overview(report: Report, title: str, subjects: list[Subject]) -> Table:
    """A line per workload: the rate of every provider, and flash3 beside the best of the others."""
    providers = [p for p in report.providers() if any(row.ms for row in report.rows if row.provider == p)]
    by_memory = all(subject.unit == "memory" for subject in subjects)
    table = Table("workload", title=f"{title}: {'TB/s' if by_memory else 'TFLOP/s'}", title_justify="left")
    for head in (*providers, "roofline", "of best peer"):
        table.add_column(head, justify="right", no_wrap=True)
    for subject in subjects:
        rows, found = {row.provider: row for row in report.of(subject)}, compare(report, subject)
        rates = [(terabytes if by_memory else tflops)(subject, rows[p].ms) if p in rows else None for p in providers]
        marks = [Text(number(rate), style="red" if p in rows and rows[p].faults else "") for p, rate in zip(providers, rates, strict=True)]
        mine = rows.get("flash3")
        beside = found.ratio if found is not None else None
        last = Text(number(beside), style="red" if beside is not None and beside < BEHIND else "")
        table.add_row(subject.workload, *marks, share(fraction(subject, mine.ms) if mine else None), last)
    return table


def table_of(report: Report, subject: Subject) -> Table:
    """Providers of one workload and task, the fastest first."""
    found = compare(report, subject)
    table = Table(title=Text(f"{subject.workload}, {subject.task}: {subject.shape}"), title_justify="left")
    table.add_column("provider", no_wrap=True)
    solo = any(row.solo_ms for row in report.of(subject))
    for head in ("ms", "±", "TFLOP/s", "TB/s", "roofline", *(["solo"] if solo else []), "error", "of allowed", "MB"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in sorted(report.of(subject), key=lambda row: row.ms or float("inf")):
        table.add_row(*cells(subject, row, solo), style="bold" if row.ours else "")
    timings = ", ".join(dict.fromkeys(row.timing for row in report.of(subject) if row.timing))
    notes = [f"the floor is {number(subject.floor_ms)} ms, set by {subject.unit}", *([f"timed by {timings}"] if timings else [])]
    if found is not None and found.ratio is not None:
        notes.append(f"flash3 is {found.ratio:.3f} times as fast as {found.peer}, the best peer")
    if found is not None and found.solo_ratio is not None:
        notes.append(f"alone {found.solo_ratio:.3f} times as fast as {found.solo_peer}")
    table.caption = "; ".join(notes)
    table.caption_justify = "left"
    return table


def cells(subject: Subject, row: Row, solo: bool) -> Iterator[Text]:
    """One row; what there is no number for is a dash, or the kind of the error."""
    yield Text(row.provider)
    if row.ms is None:
        yield Text("–", style="yellow")
        yield Text("no" if row.error.startswith("not supported") else "failed", style="yellow")
        return
    alone = sum(row.solo_ms) / len(row.solo_ms) if row.solo_ms else None
    yield from map(Text, (number(row.ms, 4), number(row.spread_ms if row.times_ms else None, 2)))
    yield from map(Text, (number(tflops(subject, row.ms)), number(terabytes(subject, row.ms)), share(fraction(subject, row.ms))))
    if solo:
        yield Text(number(tflops(subject, alone)))
    yield Text(scientific(row.max_error), style="red" if row.faults else "")
    yield Text("–" if row.max_error is None or not row.max_allowed else share(row.max_error / row.max_allowed))
    yield Text(number(row.memory_mb, 4))


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def scientific(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def reasons(report: Report) -> Iterator[str]:
    """Why providers did not run, and what is wrong with results; equal reasons once."""
    seen: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        for text in (*([row.error] if row.error else []), *row.faults, *([row.note] if row.note else [])):
            seen.setdefault((row.provider, text), []).append(row.workload)
    for (provider, text), workloads in seen.items():
        where = dict.fromkeys(workloads)
        yield f"{provider}: {text} ({next(iter(where))}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"


def show_summary(report: Report, console: Console) -> None:
    """Geometric means over everything."""
    found = list(summaries(report))
    if not found:
        return
    table = Table("flash3 beside", title="How many times as fast (median of each round's ratio)", title_justify="left")
    for head in ("workloads", "geometric mean", "least", "at"):
        table.add_column(head, justify="right")
    for s in found:
        table.add_row(s.peer, str(s.count), f"{s.mean:.3f}", Text(f"{s.least:.3f}", style="red" if s.least < BEHIND else ""), s.where_least)
    console.print(table)
