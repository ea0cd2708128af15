"""The demo's results as tables for people and as JSON for programs; and the progress display."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .results import ChatResult, EmbedResult

RELATED = 0.4  # a cosine above this is set in bold


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


def passed(result: ChatResult | EmbedResult) -> bool:
    """Every check holds."""
    return all(result.checks.values())


def to_json(result: ChatResult | EmbedResult) -> str:
    """Every number of the tables, `checks` and `passed`."""
    return json.dumps({**asdict(result), "passed": passed(result)}, indent=2)


def show(result: ChatResult | EmbedResult, console: Console) -> None:
    """Tables, and whether each check holds."""
    console.print(f"\n[bold]{result.model}[/] on {result.device}, {result.dtype}. Attention: flash3, backend [bold]{result.backend}[/]\n")
    if isinstance(result, ChatResult):
        show_chat(result, console)
    else:
        show_embed(result, console)
    for what, holds in result.checks.items():
        console.print(f"{tick(holds)} {what}")


def show_chat(result: ChatResult, console: Console) -> None:
    """Answers, the runs beside one another, the errors of the layers, and where the picture is."""
    answers = Table("prompt", "flash3's answer", "tokens", "equal", title="Answers: packed prompts, paged cache, greedy", show_lines=True)
    for row in result.answers:
        answers.add_row(Text(row.prompt), Text(row.answer), f"{row.prompt_tokens} + {len(row.tokens)}", tick(row.tokens_equal))
    console.print(answers)

    runs = numbers("Beside the model's own attention", "run", "equal tokens", "largest logit difference", "answer tokens/s")
    for run in result.runs:
        equal = f"{run.equal_tokens}/{run.all_tokens}"
        runs.add_row(run.name, equal, f"{run.largest_logit_difference:.1e}", f"{run.tokens_per_second:.1f}")
    runs.caption = (
        f"allowed: {result.logit_difference_allowed:.1e}, twice torch SDPA's difference and 2 ulp of the largest logit "
        f"({result.largest_logit:.0f}); the closest call between two tokens was {result.closest_call:.1e}"
    )
    console.print(runs)

    title = f"Largest error of each layer's attention against float64, on the model's q, k, v of {result.layer_tokens} tokens"
    layers = numbers(title, "layer", "plain torch", "flash3", "flash3, paged", "allowed", "within")
    for layer in result.layers:
        errors = (layer.torch.largest, layer.flash3.largest, layer.flash3_paged.largest, layer.allowed)
        layers.add_row(str(layer.layer), *(f"{error:.1e}" for error in errors), tick(layer.within))
    console.print(layers)
    console.print(f"Blocks that the masks visit: {result.picture}", markup=False)


def show_embed(result: EmbedResult, console: Console) -> None:
    """How similar the sentences are, and the runs beside one another."""
    names = [str(i + 1) for i in range(len(result.sentences))]
    similarity = numbers("Cosine similarity of flash3's embeddings", "sentence", "", *names)
    for name, sentence, row in zip(names, result.sentences, result.similarity, strict=True):
        similarity.add_row(Text(sentence), name, *(f"[bold]{value:.2f}[/]" if value > RELATED else f"{value:.2f}" for value in row))
    console.print(similarity)

    columns = ("run", "largest difference", "1 - smallest cosine", "token slots", "sentences/s")
    runs = numbers("Beside the model's own attention", *columns)
    for run in result.runs:
        distance = max(0.0, 1 - run.smallest_cosine)  # rounding can put a cosine above 1
        runs.add_row(run.name, f"{run.largest_difference:.1e}", f"{distance:.1e}", str(run.token_slots), f"{run.sentences_per_second:.0f}")
    runs.caption = f"allowed: {result.difference_allowed:.1e}; speed with {result.timed_sentences} sentences in a batch"
    console.print(runs)


def numbers(title: str, first: str, *columns: str) -> Table:
    """A table whose columns after the first hold numbers."""
    table = Table(first, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def tick(holds: bool) -> str:
    """For a table's cell."""
    return "[green]yes[/]" if holds else "[bold red]NO[/]"
