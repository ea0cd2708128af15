"""The `flash3` command (also `python -m flash3`)."""

from __future__ import annotations

import typer

from . import __version__
from .demo.command import demo

app = typer.Typer(no_args_is_help=True, add_completion=False, help="FlashAttention-3, complete, in Python.")
app.command("demo")(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flash3 {__version__}")
        raise typer.Exit()


@app.callback()
def options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit.")) -> None:
    """Options of every command."""


def main() -> None:
    """Entry point of the console script."""
    app()
