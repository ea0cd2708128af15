"""The demo's results as tables for people and as JSON for programs; and the progress display."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from flash3.demo.chat import ChatResult
    from flash3.demo.embed import EmbedResult


class ProgressDisplay:
    """One line that follows the current phase, on standard error so that standard output stays the result's alone."""

    def __init__(self, console: Console):
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.display = Progress(*columns, console=console, transient=True)
        self.task: TaskID | None = None

    def __enter__(self) -> ProgressDisplay:
        self.display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.stop()

    def begin(self, what: str, steps: int | None = None) -> Callable[[], None]:
        """See options.Progress."""
        if self.task is not None:
            self.display.remove_task(self.task)
        task = self.task = self.display.add_task(what, total=steps)
        return lambda: self.display.advance(task)


def to_json(result: ChatResult | EmbedResult) -> str:
    """Every number of the tables, `checks` and `passed`."""
    return json.dumps({**asdict(result), "passed": passed(result)}, indent=2)


def passed(result: ChatResult | EmbedResult) -> bool:
    return all(result.checks.values())


def show_chat(result: ChatResult, console: Console) -> None:
    """Answers, the comparison of runs, the errors of layers, where the picture is, and the verdict."""
    console.print(f"\n[bold]{result.model}[/] on {result.device}, {result.dtype}; attention by flash3's backend [bold]{result.backend}[/]\n")

    answers = Table("prompt", "flash3's answer", "tokens", "equal", title="Answers: packed prompts, paged cache, greedy", show_lines=True)
    for row in result.answers:
        answers.add_row(row.prompt, row.answer, f"{row.prompt_tokens} + {len(row.tokens)}", tick(row.tokens_equal))
    console.print(answers)

    runs = Table(title="Beside the model's own attention", caption=logit_caption(result))
    for column in ("run", "equal tokens", "largest logit difference", "answer tokens/s"):
        runs.add_column(column, justify="left" if column == "run" else "right")
    for run in result.runs:
        runs.add_row(run.name, f"{run.equal_tokens}/{run.all_tokens}", f"{run.largest_logit_difference:.1e}", f"{run.tokens_per_second:.1f}")
    console.print(runs)

    layers = Table(title=f"Largest error of each layer's attention against float64, on the model's own q, k, v of {result.layer_tokens} tokens")
    for column in ("layer", "plain torch", "flash3", "flash3, paged", "allowed", ""):
        layers.add_column(column, justify="right")
    for layer in result.layers:
        errors = (layer.torch.largest, layer.flash3.largest, layer.flash3_paged.largest, layer.allowed)
        layers.add_row(str(layer.layer), *(f"{error:.1e}" for error in errors), tick(layer.within))
    console.print(layers)
    console.print(f"Blocks that the masks visit: {result.picture}")
    show_checks(result, console)


def logit_caption(result: ChatResult) -> str:
    return (
        f"allowed: {result.logit_difference_allowed:.1e}, twice torch SDPA's difference and 2 ulp of the largest logit ({result.largest_logit:.0f}); "
        f"the closest call between two tokens was {result.closest_call:.1e}"
    )


def show_embed(result: EmbedResult, console: Console) -> None:
    """The similarity of sentences, the comparison of runs, and the verdict."""
    console.print(f"\n[bold]{result.model}[/] on {result.device}, {result.dtype}; attention by flash3's backend [bold]{result.backend}[/]\n")

    names = [str(i + 1) for i in range(len(result.sentences))]
    similarity = Table("", "sentence", *names, title="Cosine similarity, from flash3's embeddings")
    for name, sentence, row in zip(names, result.sentences, result.similarity, strict=True):
        similarity.add_row(name, sentence, *(f"[bold]{value:.2f}[/]" if value > 0.4 else f"{value:.2f}" for value in row))
    console.print(similarity)

    caption = f"allowed: {result.difference_allowed:.1e}; speed with {result.timed_sentences} sentences in a batch"
    runs = Table(title="Beside the model's own attention", caption=caption)
    for column in ("run", "largest difference", "1 - smallest cosine", "token slots", "sentences/s"):
        runs.add_column(column, justify="left" if column == "run" else "right")
    for run in result.runs:
        distance = f"{max(0.0, 1 - run.smallest_cosine):.1e}"
        runs.add_row(run.name, f"{run.largest_difference:.1e}", distance, str(run.token_slots), f"{run.sentences_per_second:.0f}")
    console.print(runs)
    show_checks(result, console)


def show_checks(result: ChatResult | EmbedResult, console: Console) -> None:
    for what, holds in result.checks.items():
        console.print(f"{tick(holds)} {what}")


def tick(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[bold red]NO[/]"
