"""`flash3 explain`, `flash3 check` and `flash3 env`. Everything heavy is imported when they run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command import (
    COULD_NOT_RUN,
    WRONG,
    AsJson,
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
    from ..problem import Device, DType
    from .check import Finding
    from .roofline import Rates

EXPLAIN_EXAMPLES = """\b
Examples:
  flash3 explain paper/d128-causal-4k --device h200
  flash3 explain b=1,q=8192,h=16,kv=8,d=256,causal,left=4095,softcap=50 --device h200 -o picture.png
  flash3 explain models --device h200 --json
"""
CHECK_EXAMPLES = """\b
Examples:
  flash3 check
  flash3 check --device cpu --task forward
  flash3 check --backend hopper --json
"""


def explain(
    workloads: Annotated[list[str], typer.Argument(metavar="WORKLOAD...", help="Names, groups, patterns or shapes; flash3 bench --list.")],
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="forward (default) or backward; repeat it for both.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda (the one here), or h200, h100, b200, a100, l40s, rtx4090.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask this backend only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Another dtype for every workload.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A picture of the mask's blocks and of the schedule: .png or .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what would happen to a call, and why: backend, tiles, memory, blocks visited, waves, time by the roofline. No GPU is needed.

    Exits with 0; with 1 when no backend serves one of the workloads; with 2 when the question is wrong.
    """

    quiet_threads()
    from . import catalogue as named
    from . import explain as story_of
    from . import pictures

    with usage_errors():
        checked_outputs([output] if output else [], pictures.SUFFIXES)
        chosen = with_dtype(named.select(workloads), dtype)
        stories = []
        for workload in chosen:
            where, rates = place(device, workload.dtype)
            stories += [story_of.tell(workload, t, where, rates, backend) for t in tasks_named(task or ["forward"])]
        if output is not None:
            pictures.save(story_of.draw(stories[0]), output)
    if as_json:
        typer.echo(json.dumps([story_of.as_data(story) for story in stories]))
    else:
        for story in stories:
            story_of.show(story, tables_console())
            typer.echo("")
    raise typer.Exit(0 if all(story.explanation.backend for story in stories) else WRONG)


def place(name: str | None, dtype: DType) -> tuple[Device, Rates]:
    """A device and its rates: of the datasheet for a model, measured for what is here.

    Raises:
        ValueError: no such device.
    """
    import torch

    from ..frameworks.torch.describe import device_of
    from . import roofline

    if name is not None and name.partition(":")[0] not in ("cpu", "cuda"):
        model = roofline.model_named(name)
        return model.device, model.rates(dtype)
    here = device_here(name)
    for model in roofline.MODELS.values():
        if here.type == "cuda" and model.device.name == torch.cuda.get_device_name(here):
            return device_of(here), model.rates(dtype)
    return device_of(here), roofline.measure(here, dtype, seconds=0.05)


def check(
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="forward or backward. Default: both.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this one; repeat it. Default: all that run here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check flash3 on this machine: small calls with every feature, forward and backward, against float64. About a minute.

    Exits with 0 when all is right, 1 when something is wrong, 2 when no backend runs here.
    """
    from rich.console import Console

    quiet_threads()
    from . import check as checking
    from .catalogue import select

    with usage_errors():
        where, tasks = device_here(device), tasks_named(task or ["forward", "backward"])
        names = checking.backends_here(where, backend or [])
        if not names:
            raise ValueError(f"no backend runs on {where}")
    count = len(names) * len(select([checking.GROUP])) * len(tasks)
    with progress(Console(stderr=True, quiet=as_json), count) as (say, step):
        found = []
        for finding in checking.check(where, names, tasks, say):
            found.append(finding)
            step()
    if as_json:
        typer.echo(json.dumps([finding_data(f) for f in found]))
    else:
        show_findings(found, tables_console())
    ran = [f for f in found if not f.refusal]
    raise typer.Exit(COULD_NOT_RUN if not ran else 0 if all(f.ok for f in ran) else WRONG)


def finding_data(finding: Finding) -> dict[str, Any]:
    rest = {name: value for name, value in asdict(finding).items() if name not in ("workload", "task")}
    return {"workload": finding.workload.name, "task": finding.task.value, "ok": finding.ok} | rest


def show_findings(found: list[Finding], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "workload", "task")
    for head in ("error", "of allowed", "right"):
        table.add_column(head, justify="right")
    for f in found:
        if f.refusal:
            continue
        known = f.max_error is not None and f.max_allowed
        error = f"{f.max_error:.1e}" if f.max_error is not None else "–"
        row = [error, f"{f.max_error / f.max_allowed:.0%}" if known else "–"]  # type: ignore[operator]
        table.add_row(f.backend, f.workload.name, f.task.value, *row, Text("yes") if f.ok else Text("NO", style="bold red"))
    console.print(table)
    for f in found:
        for text in f.faults:
            console.print(f"{f.backend}: {f.workload.name}, {f.task.value}: {text}", style="red", markup=False)
    refused: dict[str, list[str]] = {}
    for f in found:
        if f.refusal:
            refused.setdefault(f.refusal, []).append(f"{f.workload.name} {f.task.value}")
    for reason, names in refused.items():
        console.print(f"not served, {len(names)} of {len(found)} ({names[0]} …): {reason}", style="dim", markup=False)
    ran = [f for f in found if not f.refusal]
    console.print(f"{sum(f.ok for f in ran)} of {len(ran)} are right")


def env(as_json: AsJson = False) -> None:
    """Tell what a bug report needs: versions, devices, clocks, settings."""
    quiet_threads()
    from .machine import State, environment

    about = environment()
    if as_json:
        typer.echo(json.dumps(about))
        return
    for name, value in about.items():
        if name == "gpus":
            for i, gpu in enumerate(value):
                typer.echo(
                    f"gpu {i}: {gpu['device']}, {gpu['memory_gib']} GiB, CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}, {State(**gpu['state'])}"
                )
        elif isinstance(value, dict):
            typer.echo(f"{name}: {', '.join(f'{k} {v}' for k, v in value.items()) or 'none'}")
        else:
            typer.echo(f"{name}: {', '.join(map(str, value)) if isinstance(value, list | tuple) else value}")
