"""The `flash3` command (also `python -m flash3`)."""

from __future__ import annotations

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
    with bench.usage_errors():
        _check_environment()


def _check_environment() -> None:
    """Misspelt, a variable would be found out in the middle of a command, or never.

    Raises:
        ValueError: a FLASH3_… variable has a value that it cannot have, which the message names.
    """
    from .dispatch import BACKENDS  # reads the environment
    from .settings import settings

    if settings.backend not in (None, *BACKENDS):
        raise ValueError(f"FLASH3_BACKEND must be one of {', '.join(BACKENDS)} or empty (the first that fits), got {settings.backend!r}")


def main() -> None:
    """Entry point of the console script."""
    app()
