"""Which backend serves a problem: the first of `BACKENDS` that supports it. Nothing falls back in silence: `explain` names each refusal."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from .backends.base import Backend, Refusal, Support
from .plan import Plan
from .problem import Problem
from .settings import settings
from .tuned import encode

BACKENDS: dict[str, str] = {
    "hopper": "flash3.backends.hopper.plan:HopperBackend",
    "triton": "flash3.backends.triton.plan:TritonBackend",
    "cpu": "flash3.backends.cpu.plan:CpuBackend",
}
"""Name -> where its class is, best first. Modules are imported when first asked for."""


@functools.cache
def backend_named(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        ValueError: no such backend; the message lists the known ones.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None (the first that fits), got {name!r}")
    module, cls = BACKENDS[name].split(":")
    backend: Backend = getattr(importlib.import_module(module), cls)()
    return backend


@dataclass(frozen=True)
class Explanation:
    """Why a backend was chosen. Prints itself."""

    problem: Problem
    answers: tuple[tuple[str, Support | Refusal], ...]
    plan: Plan | None

    @property
    def backend(self) -> str | None:
        """Name of the backend that serves the problem, None when all refuse."""
        return None if self.plan is None else self.plan.backend

    def __str__(self) -> str:
        s, z = self.problem.spec, self.problem.sizes
        widths = f"head_dim {s.head_dim}, value_dim {s.value_dim}"
        lines = [
            f"{s.task.value}, {s.dtype.value} -> {s.out_dtype.value}, {widths}, on {self.problem.device}",
            f"batch {z.batch}, {z.heads_q} query and {z.heads_kv} key heads, mask {s.mask_kind.value}",
            f"up to {z.q_len} queries ({s.q_sequences.value}) and {z.k_len} keys ({s.k_sequences.value})",
        ]
        asked = [name for name, _ in self.answers]
        lines.append("backends, best first:" if asked == list(BACKENDS) else f"only {', '.join(asked)}, by backend= or FLASH3_BACKEND:")
        for name, answer in self.answers:
            match answer:
                case Refusal(reason):
                    lines.append(f"  {name}: no, {reason}")
                case Support(note):
                    lines.append(f"  {name}: yes{', ' + note if note else ''}{'  <- runs' if name == self.backend else ''}")
        if self.plan is not None:
            lines += [f"tiles: {_spelled(self.plan.tiles)}"] if self.plan.tiles is not None else []
            lines += [f"note: {note}" for note in self.plan.notes]
        return "\n".join(lines)


def _spelled(tiles: Any) -> str:
    """A backend's tiles: name and value of each field."""
    data = encode(tiles)
    return ", ".join(f"{name} {value}" for name, value in data.items()) if isinstance(data, dict) else str(tiles)


def explain(problem: Problem, backend: str | None = None) -> Explanation:
    """Ask every backend (or the one named) about a problem; a plan is made for the first that says yes."""
    wanted = backend or settings.backend
    names = [wanted] if wanted else list(BACKENDS)
    answers = tuple((name, backend_named(name).support(problem)) for name in names)
    chosen = next((name for name, answer in answers if isinstance(answer, Support)), None)
    return Explanation(problem, answers, None if chosen is None else backend_named(chosen).plan(problem))


def choose(problem: Problem, backend: str | None = None) -> Plan:
    """The plan of the first backend that supports the problem.

    Raises:
        ValueError: `backend` (or FLASH3_BACKEND) names no backend.
        NotImplementedError: every backend refuses; the message lists each with its reason.
    """
    found = explain(problem, backend)
    if found.plan is None:
        reasons = "; ".join(f"{name}: {answer.reason}" for name, answer in found.answers if isinstance(answer, Refusal))
        raise NotImplementedError(f"no backend supports this call ({reasons})")
    return found.plan
