"""What the user asked for, settled: device, dtype, and the backend that will serve it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import flash3

from .weights import CannotRun


@dataclass(frozen=True)
class Options:
    """One run of the demo."""

    prompts: tuple[str, ...]  # empty: the model's default ones
    tokens: int
    backend: str | None
    dtype: torch.dtype
    device: torch.device
    output: Path
    note: str = ""  # why a GPU that is there does not run it


def settle(prompts: list[str], tokens: int, backend: str | None, dtype: str | None, output: Path) -> Options:
    """A GPU if there is one that a backend serves (and the CPU backend was not asked for); float32 on a CPU, float16 on a GPU.

    float16 and not bfloat16: both halve the bytes, and float16 rounds eight times finer, so that equal tokens mean more.
    """
    on_gpu = torch.cuda.is_available() and backend != "cpu"
    note = refusals(dtype or "float16") if on_gpu and backend is None else ""
    on_gpu = on_gpu and not note
    return Options(
        prompts=tuple(prompts),
        tokens=tokens,
        backend=backend,
        dtype=getattr(torch, dtype or ("float16" if on_gpu else "float32")),
        device=torch.device("cuda" if on_gpu else "cpu"),
        output=output,
        note=note,
    )


def refusals(dtype: str) -> str:
    """Why no backend serves the GPU, "" when one does."""
    q = torch.empty(1, 16, 2, 64, dtype=getattr(torch, dtype), device="cuda")
    found = flash3.explain(q, q, q)
    reasons = "; ".join(f"{name}: {getattr(answer, 'reason', 'yes')}" for name, answer in found.answers)
    return "" if found.backend else f"{torch.cuda.get_device_name()} is not served ({reasons})"


def serving_backend(options: Options, heads_q: int, heads_kv: int, head_dim: int, mask: flash3.Mask) -> str:
    """The name of the backend that will run the model's attention.

    Raises:
        CannotRun: none will, or there is no backend of that name; the message gives each one's reason.
    """

    def empty(heads: int) -> torch.Tensor:
        return torch.empty(1, 16, heads, head_dim, dtype=options.dtype, device=options.device)

    try:
        found = flash3.explain(empty(heads_q), empty(heads_kv), empty(heads_kv), mask=mask, backend=options.backend)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    if found.backend is None:
        raise CannotRun(f"No backend serves this model here:\n{found}")
    return found.backend


def device_name(options: Options) -> str:
    """For the tables."""
    if options.device.type == "cuda":
        return torch.cuda.get_device_name(options.device)
    return f"CPU, {torch.get_num_threads()} threads" + (f"; {options.note}" if options.note else "")


class Progress(Protocol):
    """How a run tells how far it is."""

    def begin(self, what: str, steps: int | None = None) -> Callable[[], None]:
        """A new phase, of so many steps (None: not known). Returns what to call after each; the phase ends when the next begins."""
