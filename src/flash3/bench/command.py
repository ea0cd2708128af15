"""`flash3 bench`. Everything heavy is imported when it runs, so that `flash3 --help` stays quick."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from .results import Report
    from .session import Plan

WRONG, COULD_NOT_RUN, INTERRUPTED = 1, 2, 130  # exit codes; 0: all is well
KINDS = (".json", ".csv", ".png", ".svg", ".html")
PAINTED = (".png", ".svg", ".html")
WIDE = 160
"""Columns of a table that goes into a pipe or a file."""

EXAMPLES = """\b
Examples:
  flash3 bench                                     the paper's grid (on a CPU: small shapes), beside torch
  flash3 bench 'paper/d128-*' -p flash3 -p fa3 -p sdpa -o run.html -o run.json
  flash3 bench models decode --task forward --task backward
  flash3 bench b=2,q=4096,h=32,kv=8,d=128,causal --solo
  flash3 bench --list                              every workload and provider
"""

Words = Annotated[list[str] | None, typer.Argument(metavar="WORKLOAD...", help="Names, groups, patterns or shapes; see --list.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output, no tables.")]


def bench(
    workloads: Words = None,
    provider: Annotated[
        list[str] | None, typer.Option("--provider", "-p", help="Who runs; repeat it. Default: flash3 and the usual peers.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="forward (default) or backward; repeat it for both.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Another dtype for every workload.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds, in random order.")] = 9,
    ms: Annotated[float, typer.Option(min=0.01, help="Milliseconds of each call in each round.")] = 2.5,
    solo: Annotated[bool, typer.Option("--solo", help="Also run each call alone until power and clock settle.")] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of a solo run.")] = 0.7,
    l2: Annotated[str, typer.Option(help="cold, warm, or auto: cold where the tensors would stay in the L2.")] = "auto",
    check: Annotated[bool, typer.Option("--check/--no-check", help="Hold every result against float64.")] = True,
    seed: Annotated[int, typer.Option(help="Of tensors and of the order.")] = 0,
    output: Annotated[list[Path] | None, typer.Option("--output", "-o", help="A file: .json .csv .png .svg or .html; repeat it.")] = None,
    as_json: AsJson = False,
    show_names: Annotated[bool, typer.Option("--list", help="List workloads and providers.")] = False,
) -> None:
    """Measure attention: flash3 beside every other implementation that can be had, with errors beside times.

    Exits with 0; with 1 when a result of flash3 is wrong or fails; with 2 when nothing can run; with 130 after Ctrl-C, which keeps what
    was measured.
    """

    quiet_threads()
    from . import catalogue as named
    from . import providers
    from .protocol import Interleaved, Solo
    from .session import AUTO, COLD, WARM, Plan

    if show_names:
        list_names(tables_console())
        return
    with usage_errors():
        if l2 not in (COLD, WARM, AUTO):
            raise ValueError(f"--l2 must be cold, warm or auto, got {l2!r}")
        where = device_here(device)
        files = checked_outputs(output or [], KINDS)
        plan = Plan(
            workloads=with_dtype(named.select(workloads or ["paper" if where.type == "cuda" else "cpu"]), dtype),
            tasks=tasks_named(task or ["forward"]),
            providers=providers.select(provider or providers.usual(where)),
            device=where,
            interleaved=Interleaved(rounds, ms, seed),
            solo=Solo(seconds) if solo else None,
            l2=l2,
            check=check,
            seed=seed,
        )
    with usage_errors():
        report = measure(plan, files, as_json)
    if as_json:
        from .results import to_json

        typer.echo(to_json(report), nl=False)
    else:
        from . import tables

        tables.show(report, tables_console())
    raise typer.Exit(exit_code(report))


def exit_code(report: Report) -> int:
    from .session import ours_failed

    if report.interrupted:
        return INTERRUPTED
    if not any(row.ms for row in report.rows):
        return COULD_NOT_RUN
    return WRONG if ours_failed(report) else 0


def measure(plan: Plan, files: list[Path], quiet: bool) -> Report:
    """Run with a progress line on standard error; files grow with every workload, so that a kill leaves what there was."""
    from rich.console import Console

    from .session import run

    with progress(Console(stderr=True, quiet=quiet), len(plan.workloads) * len(plan.tasks)) as (begin, step):

        def each(report: Report) -> None:
            step()
            write(report, [path for path in files if path.suffix in (".json", ".csv")])

        report = run(plan, begin, each)
    write(report, files)
    return report


def write(report: Report, files: list[Path]) -> None:
    """Each file in the kind that its suffix names."""
    from . import page, pictures, results

    makers: dict[str, Callable[[], str]] = {
        ".json": lambda: results.to_json(report),
        ".csv": lambda: results.to_csv(report),
        ".html": lambda: page.page(report),
    }
    for path in files:
        if path.suffix in makers:
            results.save(path, makers[path.suffix]())
        else:
            pictures.save(pictures.draw(report), path)


def list_names(console: Console) -> None:
    from rich.table import Table

    from .catalogue import WORKLOADS
    from .providers import providers

    table = Table("workload", "shape", title="Workloads", title_justify="left")
    for workload in WORKLOADS.values():
        table.add_row(workload.name, str(workload))
    console.print(table)
    table = Table("provider", "what it is", title="Providers", title_justify="left")
    for one in providers().values():
        table.add_row(one.name, one.title)
    console.print(table)


# ------------------------------------------------------------------------------------------------ shared by all commands


class usage_errors:
    """What was asked wrongly, or cannot be done here, becomes one red line and exit code 2."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | RuntimeError | OSError) and not isinstance(error, typer.Exit):
            from rich.console import Console

            Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(COULD_NOT_RUN) from None


class progress:
    """One line on standard error: (begin(what), step())."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns: Any = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.display = Progress(*columns, console=console, transient=True)
        self.task = self.display.add_task("", total=total)

    def __enter__(self) -> tuple[Callable[[str], object], Callable[[], object]]:
        self.display.start()
        return (lambda what: self.display.update(self.task, description=what)), (lambda: self.display.advance(self.task))

    def __exit__(self, *_: object) -> None:
        self.display.stop()


def quiet_threads() -> None:
    """OpenMP's threads spin while they wait for one another, which on a machine with other work takes the core from the one waited for.
    Read once, when torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def device_here(name: str | None) -> torch.device:
    """A device of this machine.

    Raises:
        ValueError: it is not there; the message lists what is.
    """
    import torch

    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    chosen = name or there[-1]
    if chosen.partition(":")[0] not in there:
        raise ValueError(f"--device must be one of {', '.join(there)} on this machine, got {name!r}")
    device = torch.device(chosen)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def with_dtype(workloads: list[Any], dtype: str | None) -> list[Any]:
    """The workloads in another dtype, which their names tell."""
    from dataclasses import replace

    from .workloads import dtype_named

    if dtype is None:
        return workloads
    kind = dtype_named(dtype)
    return [w if w.dtype is kind else replace(w, name=f"{w.name}, {kind.value}", dtype=kind) for w in workloads]


def tasks_named(words: list[str]) -> list[Any]:
    """Tasks.

    Raises:
        ValueError: no such task.
    """
    from ..problem import Task

    known = [t.value for t in Task]
    for word in words:
        if word not in known:
            raise ValueError(f"--task must be {' or '.join(known)}, got {word!r}")
    return [Task(word) for word in dict.fromkeys(words)]


def checked_outputs(files: list[Path], kinds: tuple[str, ...]) -> list[Path]:
    """Files whose suffix is known, and which can be written: better said before an hour of measuring than after it.

    Raises:
        ValueError: one is not, or what paints it is not installed.
    """
    import importlib.util

    for path in files:
        if path.suffix not in kinds:
            raise ValueError(f"--output must end in {', '.join(kinds)}, got {str(path)!r}")
        if path.suffix in PAINTED and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--output {path} needs the package matplotlib. Run: pip install 'flash3[bench]'")
        if path.is_dir():
            raise ValueError(f"--output {path} is a folder")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"--output {path} cannot be written: {error.strerror}") from None
    return files


def tables_console() -> Any:
    """Standard output; in a pipe or a file as wide as the tables need."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=WIDE)
