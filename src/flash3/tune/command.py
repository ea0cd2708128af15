"""`flash3 tune` and `flash3 compile`. Everything heavy is imported when they run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.command import (
    COULD_NOT_RUN,
    INTERRUPTED,
    WRONG,
    AsJson,
    Words,
    checked_outputs,
    device_here,
    progress,
    quiet_threads,
    tables_console,
    tasks_named,
    usage_errors,
    with_dtype,
)

if TYPE_CHECKING:
    import torch

    from .. import tuned
    from ..bench.workloads import Workload
    from ..problem import Device
    from .ahead import Order
    from .search import Outcome, Tuner

TUNE_EXAMPLES = """\b
Examples:
  flash3 tune paper                                write this device's table, used by every later call
  flash3 tune 'paper/d64-*' --limit 24 -o space.png            minutes instead of hours
  flash3 tune models --limit 24 --seconds 20                   at most so long for each, when its kernels are compiled
  flash3 tune models --table mine.json             a table of your own: FLASH3_TUNED=mine.json
  flash3 tune smoke --device cpu
"""
COMPILE_EXAMPLES = """\b
Examples:
  flash3 compile                                   common calls: on a GPU machine, or on any other for an H200
  flash3 compile b=1,q=4096,h=32,kv=8,d=128,causal,packed --lse without
  flash3 compile --all --jobs 16
  flash3 compile 'paper/d128-*' --space 24         and what flash3 tune 'paper/d128-*' --limit 24 will want
  FLASH3_CACHE_DIR=./kernels flash3 compile models --device h200
"""


def tune(
    workloads: Words = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="forward (default) or backward; repeat it for both.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    backend: Annotated[str | None, typer.Option(help="Whose tiles. Default: of the backend that serves the workload.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Another dtype for every workload.")] = None,
    table: Annotated[Path | None, typer.Option(help="The table to write. Default: the one that this package reads for the device.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most candidates per workload, the nearest to the heuristic's choice.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time. Default: one per core.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of the first rungs; the last has three times as many.")] = 3,
    ms: Annotated[float, typer.Option(min=0.001, help="Milliseconds of each candidate and round in the first rung.")] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Most for checking and timing a workload: what has not had its turn by then is left out.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an earlier, interrupted run has found.")] = False,
    output: Annotated[list[Path] | None, typer.Option("--output", "-o", help="A file: .json (every candidate), .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest tiles: all legal ones are compiled in parallel, checked against float64, and timed by successive halving.

    A winner is at least 2 % faster than the heuristic's choice, twice measured. An interrupted or killed run goes on where it was when it
    is started again. Exits with 0; with 1 when some candidate was wrong; with 2 when nothing can be tuned; with 3 when a candidate hung
    (start again: it goes on after it); with 130 after Ctrl-C.
    """
    from rich.console import Console

    quiet_threads()
    from .. import tuned
    from ..bench import catalogue as named
    from ..frameworks.torch.describe import device_of
    from .journal import Journal
    from .search import Tuner

    with usage_errors():
        where = device_here(device)
        files = checked_outputs(output or [], (".json", ".png", ".svg"))
        chosen = with_dtype(named.select(workloads or ["paper" if where.type == "cuda" else "cpu"]), dtype)
        tasks = tasks_named(task or ["forward"])
        about = device_of(where)
        name = about.name or about.type
        path = table or tuned.shipped(name)
        start = tuned.read(path) if path.exists() else tuned.Table(name)
        if start.device != name:
            raise ValueError(f"--table {path} is of {start.device}, this device is {name}")
    journal = Journal(path.with_suffix(".journal"), fingerprint(name))
    if fresh:
        journal.forget()
    with usage_errors(), progress(Console(stderr=True, quiet=as_json), len(chosen) * len(tasks)) as (say, step):
        tuner = Tuner(where, journal, limit=limit, jobs=jobs, rounds=rounds, budget_ms=ms, seconds=seconds, say=say)
        outcomes, refused, stopped = search_all(tuner, [(w, t) for w in chosen for t in tasks], backend, (path, start), step)
    data = as_data(outcomes, refused, path, stopped, where)
    if as_json:
        typer.echo(json.dumps(data))
    else:
        show(outcomes, refused, tables_console())
    with usage_errors():
        for file in files:
            save(outcomes, data, file)
    if not stopped and outcomes:
        journal.forget()
    raise typer.Exit(exit_code(outcomes, stopped))


def fingerprint(device: str) -> str:
    """What a tuning run's facts depend on."""
    import importlib.util

    from .. import __version__
    from ..dispatch import BACKENDS

    parts = [device, __version__, *BACKENDS]
    if importlib.util.find_spec("cutlass") is not None:
        from ..backends.hopper.compile import source_hash

        parts.append(source_hash())
    return " ".join(parts)


def exit_code(outcomes: list[Outcome], stopped: bool) -> int:
    if stopped:
        return INTERRUPTED
    if not any(o.winner for o in outcomes):
        return COULD_NOT_RUN
    return WRONG if any(c.wrong for o in outcomes for c in o.candidates) else 0


def search_all(
    tuner: Tuner, todo: list[tuple[Workload, Any]], backend: str | None, where: tuple[Path, tuned.Table], step: Any
) -> tuple[list[Outcome], dict[str, str], bool]:
    """Outcomes, reasons of what could not be tuned, and whether Ctrl-C ended it. The table is written after each workload, whole."""
    from .. import tuned
    from ..bench.machine import kernel_sources
    from .search import entry, merged

    path, table = where
    sources = kernel_sources()
    outcomes: list[Outcome] = []
    refused: dict[str, str] = {}
    try:
        for workload, task in todo:
            try:
                outcome = tuner.tune(workload, task, backend)
            except (NotImplementedError, ValueError) as reason:
                refused[f"{workload.name} {task.value}"] = str(reason)
                continue
            outcomes.append(outcome)
            table = merged(table, [(outcome, entry(outcome, {"task": task.value, "sources": sources}))])
            tuned.write(path, table)
            step()
    except KeyboardInterrupt:
        return outcomes, refused, True
    finally:
        tuned.forget()
    return outcomes, refused, False


def save(outcomes: list[Outcome], data: dict[str, Any], path: Path) -> None:
    from ..bench import pictures, results
    from .picture import draw

    if path.suffix == ".json":
        results.save(path, json.dumps(data, indent=1) + "\n")
    else:
        pictures.save(draw(outcomes), path)


def as_data(outcomes: list[Outcome], refused: dict[str, str], table: Path, stopped: bool, device: torch.device) -> dict[str, Any]:
    from .. import tuned
    from ..bench.machine import device_name, kernel_sources
    from ..bench.results import rounded
    from .search import facts

    return {
        "table": str(table),
        "device": device_name(device),
        "sources": kernel_sources(),
        "interrupted": stopped,
        "refused": refused,
        "workloads": [
            {
                "workload": o.workload.name,
                "task": o.task.value,
                "backend": o.backend,
                "winner": tuned.encode(o.winner.tiles) if o.winner else None,
                "gain": rounded(o.gain),
                "candidates": [rounded(fact) for fact in facts(o)],
            }
            for o in outcomes
        ],
    }


def show(outcomes: list[Outcome], refused: dict[str, str], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..bench.tables import number
    from .search import NOT_RUN

    table = Table("workload", title="The fastest tiles", title_justify="left")
    for head in ("candidates", "do not run", "wrong", "heuristic ms", "best ms", "gain"):
        table.add_column(head, justify="right")
    table.add_column("tiles that differ from the heuristic's")
    for o in outcomes:
        wrong, out = sum(c.wrong for c in o.candidates), sum(bool(c.fault) for c in o.candidates)
        best = o.winner.ms if o.winner else None
        row: list[str | Text] = [
            str(len(o.candidates)),
            str(out - wrong),
            Text(str(wrong), style="red" if wrong else ""),
            number(o.own.ms, 4),
            number(best, 4),
            f"{o.gain:.3f}",
        ]
        table.add_row(f"{o.workload.name}, {o.task.value}", *row, differences(o))
    console.print(table)
    for o in outcomes:
        for fault in dict.fromkeys(c.fault for c in o.candidates if c.fault):
            console.print(f"{o.workload.name}: {fault}", style="red" if not fault.startswith(NOT_RUN) else "dim", markup=False)
    for name, reason in refused.items():
        console.print(f"{name}: {reason}", style="yellow", markup=False)


def differences(outcome: Outcome) -> str:
    """The winner's fields that are not the heuristic's."""
    from .. import tuned

    if outcome.winner is None or outcome.winner is outcome.own:
        return "none"
    mine, own = tuned.encode(outcome.winner.tiles) or {}, tuned.encode(outcome.own.tiles) or {}
    return ", ".join(f"{name} {value}" for name, value in mine.items() if own.get(name) != value)


LSE = {"both": (False, True), "with": (True,), "without": (False,)}


def compile_(
    workloads: Words = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="forward (default) or backward; repeat it for both.")] = None,
    device: Annotated[
        str | None, typer.Option(help="What to compile for: h200, h100, …, or cuda, the one here (default; else h200).")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Whose kernels. Default: of the backend that serves each workload.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Another dtype for every workload.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every named workload.")] = False,
    space: Annotated[int, typer.Option(min=0, help="Also so many candidates of each tuning space, for a later flash3 tune --limit.")] = 0,
    lse: Annotated[str, typer.Option(help="Calls with the LSE (training, flash3 bench), without (inference), or both.")] = "both",
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time. Default: one per core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Have the kernels of workloads in the disk cache, compiled in parallel. No GPU is needed.

    Exits with 0; with 1 when a kernel does not compile; with 2 when there is nothing to compile.
    """
    from rich.console import Console

    quiet_threads()
    from ..bench import catalogue as named
    from .ahead import compile_all

    with usage_errors():
        if lse not in LSE:
            raise ValueError(f"--lse must be {', '.join(LSE)}, got {lse!r}")
        words = list(named.GROUPS) if everything else workloads or ["common"]
        target = compile_target(device)
        orders, refused = orders_of(
            with_dtype(named.select(words), dtype), tasks_named(task or ["forward"]), target, backend, space, LSE[lse]
        )
    with progress(Console(stderr=True, quiet=as_json), len(orders)) as (say, step):
        done = []
        for result in compile_all(orders, jobs):
            done.append(result)
            say(result.order.label)
            step()
    built, failed = [d for d in done if d.built], [d for d in done if d.error]
    if as_json:
        data = {"device": str(target), "built": [d.order.label for d in built], "failed": {d.order.label: d.error for d in failed}}
        typer.echo(json.dumps(data | {"found": len(done) - len(built) - len(failed), "refused": refused}))
    else:
        console = tables_console()
        console.print(f"{len(built)} kernels compiled for {target}, {len(done) - len(built) - len(failed)} found, {len(failed)} failed")
        for text in (*(f"{d.order.label}: {d.error}" for d in failed), *(f"{name}: {why}" for name, why in refused.items())):
            console.print(text, style="yellow", markup=False)
    raise typer.Exit(WRONG if failed else COULD_NOT_RUN if not done else 0)


def compile_target(name: str | None) -> Device:
    """The GPU here, or a model by name.

    Raises:
        ValueError: neither.
    """
    import torch

    from ..bench.roofline import model_named
    from ..frameworks.torch.describe import device_of

    if name in (None, "cuda") and torch.cuda.is_available():
        return device_of(torch.device("cuda", torch.cuda.current_device()))
    return model_named(name or "h200").device


def orders_of(
    workloads: list[Workload], tasks: list[Any], device: Device, backend: str | None, space: int = 0, lse: tuple[bool, ...] = (True,)
) -> tuple[list[Order], dict[str, str]]:
    """One order per kernel, however many workloads share it; and who is refused. lse: whether calls ask for it."""
    from ..backends.base import Tunable
    from ..dispatch import backend_named, choose
    from .ahead import Order

    found: dict[tuple[str, ...], Order] = {}
    refused = {}
    for workload, task, kept in itertools.product(workloads, tasks, lse):
        problem = workload.problem(device, task, kept)
        try:
            plan = choose(problem, backend)
        except NotImplementedError as reason:
            refused[f"{workload.name} {task.value}"] = str(reason)
            continue
        chosen = backend_named(plan.backend)
        if not getattr(chosen, "compiles_ahead", True):
            refused[f"{workload.name} {task.value}"] = f"{plan.backend} compiles when a kernel is first launched: nothing is done ahead"
            continue
        others = list(chosen.tuning_space(problem))[:space] if space and isinstance(chosen, Tunable) else []
        for tiles in (plan.tiles, *others):
            order = Order(workload.name, plan.backend, problem, tiles)
            found.setdefault((plan.backend, repr(problem.spec), repr(tiles)), order)
    return list(found.values()), refused
