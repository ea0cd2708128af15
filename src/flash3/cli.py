"""The `flash3` command (also `python -m flash3`)."""

from __future__ import annotations

import importlib.util
import itertools
import os
from enum import StrEnum
from typing import Annotated

import typer

from . import __version__
from .bench import command as bench
from .bench import inspect_commands as inspect
from .demo.command import demo
from .tune import command as tune

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="FlashAttention-3, complete, in Python.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.command("demo")(demo)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("tune", epilog=tune.TUNE_EXAMPLES)(tune.tune)
app.command("explain", epilog=inspect.EXPLAIN_EXAMPLES)(inspect.explain)
app.command("compile", epilog=tune.COMPILE_EXAMPLES)(tune.compile_)
app.command("check", epilog=inspect.CHECK_EXAMPLES)(inspect.check)
app.command("env")(inspect.env)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flash3 {__version__}")
        raise typer.Exit()


@app.callback()
def options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit.")) -> None:
    """Options of every command."""


class Half(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Layout(StrEnum):
    DENSE = "dense"
    PACKED = "packed"
    CACHE = "cache"


@app.command("compile")
def compile_ahead(
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dims. Default: 64 and 128.")] = None,
    heads_per_kv: Annotated[list[int] | None, typer.Option(help="Query heads of one key head. Default: 1.")] = None,
    dtype: Annotated[list[Half] | None, typer.Option(help="Default: bfloat16.")] = None,
    layout: Annotated[list[Layout] | None, typer.Option(help="Default: dense and packed.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Kernels at a time.")] = max(1, (os.cpu_count() or 1) // 2),
) -> None:
    """Compile the Hopper kernels of common calls, full and causal, into the disk cache, so that no call waits for the compiler.

    Run it on the machine (or in the image) that will use them: the driver's version is part of what the cache goes by. Needs no GPU.
    """
    from .mask import Mask
    from .problem import DType
    from .sequences import SequenceKind

    if importlib.util.find_spec("cutlass") is None:
        typer.echo("The package nvidia-cutlass-dsl is not installed: pip install 'flash3[hopper]'", err=True)
        raise typer.Exit(2)
    from .backends.hopper import ahead

    kinds = {Layout.DENSE: SequenceKind.DENSE, Layout.PACKED: SequenceKind.PACKED, Layout.CACHE: SequenceKind.PADDED}
    try:
        types = [DType(name.value) for name in dtype or [Half.BFLOAT16]]
        families = itertools.product(types, head_dim or [64, 128], (Mask(), Mask(causal=True)), heads_per_kv or [1])
        chosen = [kinds[name] for name in layout or (Layout.DENSE, Layout.PACKED)]
        calls = [r for family in families for kind in chosen for r in ahead.requests(*family, kind)]
        keys = ahead.keys_of(calls)
    except (TypeError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    for number, ((spec, _), seconds) in enumerate(ahead.build(keys, jobs), 1):
        what = f"{spec.dtype.value} {spec.qk_width} {spec.mask_kind.value} {spec.q_layout.kind.value}/{spec.k_layout.kind.value}"
        typer.echo(f"{number}/{len(keys)}  {what}{' lse' if spec.lse else ''}  {seconds:.1f} s")


def main() -> None:
    """Entry point of the console script."""
    app()
