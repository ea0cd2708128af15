"""What every backend offers. A backend states what it can do, plans without data, and runs on the framework's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..plan import Plan
from ..problem import Problem


@dataclass(frozen=True)
class Support:
    """Yes; `note` is a sentence for `explain`."""

    note: str = ""


@dataclass(frozen=True)
class Refusal:
    """No; `reason` completes "the … backend cannot run this: "."""

    reason: str


@dataclass(kw_only=True)
class Saved:
    """What the forward leaves for the backward. lse is the forward's (a sink included), float32."""

    out: Any
    lse: Any


@dataclass(kw_only=True)
class Gradients:
    """The backward's inputs (d_out, d_lse) and outputs (dq, dk, dv, d_sink); None: not given, not wanted.

    d_out has out's shape, d_lse lse's. dq, dk and dv have their tensors' shapes and dtypes, d_sink is float32 (heads_q,). A backend
    fills the whole of each output: rows outside every sequence become 0.
    """

    d_out: Any
    d_lse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    d_sink: Any = None


class Backend(Protocol):
    name: str

    def support(self, problem: Problem) -> Support | Refusal:
        """Whether this backend runs the problem, from the description alone."""
        ...

    def plan(self, problem: Problem, tiles: Any = None) -> Plan:
        """How: the plan for a problem it supports. `tiles` overrides the backend's own choice.

        Forward plans run as `run(request, out, lse)`, backward plans as `run(request, saved, gradients)`, with Request's tensors.
        """
        ...
