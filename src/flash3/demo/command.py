"""The command line of `flash3 demo`. Everything heavy is imported when it runs, so that `flash3 --help` stays quick."""

from __future__ import annotations

import importlib
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .weights import CannotRun

if TYPE_CHECKING:
    from .options import Progress
    from .results import ChatResult, EmbedResult

WRONG, COULD_NOT_RUN = 1, 2  # exit codes; 0: every check holds


class Model(StrEnum):
    SMOLLM2 = "smollm2"
    MINILM = "minilm"


PARTS = {Model.SMOLLM2: "chat", Model.MINILM: "embed"}


class DType(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def demo(
    model: Annotated[
        Model, typer.Option(help="smollm2 answers prompts from a paged cache; minilm embeds sentences, packed.")
    ] = Model.SMOLLM2,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt (minilm: a sentence); may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer (smollm2).")] = 32,
    backend: Annotated[str | None, typer.Option(help="The backend that must serve the attention. Default: the first that can.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Default: float16 on a GPU, float32 on a CPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output, no tables.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the picture (smollm2).")] = Path("demo-output"),
) -> None:
    """A real model answers through flash3, beside its own attention: the same tokens, errors against float64, speed.

    Exits with 0 when tokens are equal and errors within bounds, 1 when they are not, 2 when the demo cannot run here.
    """
    from rich.console import Console

    from . import report

    # OpenMP's threads spin while they wait for one another; on a machine with other work the one waited for then gets no core.
    # Asleep instead, the demo ran 10 to 20 times faster beside other jobs. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console(stderr=True)
    try:
        with report.ProgressDisplay(console) as progress:
            result = run_model(model, prompt or [], tokens, backend, dtype, output, progress)
    except CannotRun as reason:
        console.print(str(reason), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(COULD_NOT_RUN) from None
    if as_json:
        typer.echo(report.to_json(result))
    else:
        report.show(result, Console())
    raise typer.Exit(0 if report.passed(result) else WRONG)


def run_model(
    model: Model, prompts: list[str], tokens: int, backend: str | None, dtype: DType | None, output: Path, progress: Progress
) -> ChatResult | EmbedResult:
    """Import the demo's own requirements, then run the model's part.

    Raises:
        CannotRun: a requirement, the weights, or a backend for this machine is missing.
    """
    try:
        from .options import settle

        part = importlib.import_module(f"{__package__}.{PARTS[model]}")
    except ModuleNotFoundError as missing:
        raise CannotRun(f"The demo needs the package {missing.name}. Run: pip install 'flash3[demo]'") from None
    result: ChatResult | EmbedResult = part.run(settle(prompts, tokens, backend, dtype, output), progress)
    return result
