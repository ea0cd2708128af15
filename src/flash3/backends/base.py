"""What every backend offers. A backend states what it can do, plans without data, and runs on the framework's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..plan import Plan
from ..problem import DType, Problem, TensorInfo

ROW_ALIGNMENT_BYTES = 16
"""Where rows begin at multiples of this, one instruction loads so much, and TMA can read them."""


def copied_rows(problem: Problem) -> list[str]:
    """A note where a backend that wants rows to start at multiples of ROW_ALIGNMENT_BYTES copies q, k or v."""
    copied = [name for name, t in (("q", problem.q), ("k", problem.k), ("v", problem.v)) if not _is_aligned(t)]
    return [f"copies {', '.join(copied)}, whose rows do not start at multiples of {ROW_ALIGNMENT_BYTES} bytes"] if copied else []


def _is_aligned(t: TensorInfo) -> bool:
    return t.aligned and rows_are_apart(t.shape, t.strides, t.dtype.bytes if isinstance(t.dtype, DType) else 1)


def starts_aligned(t: Any) -> bool:
    """Whether every row of a tensor starts at a multiple of ROW_ALIGNMENT_BYTES."""
    return t.data_ptr() % ROW_ALIGNMENT_BYTES == 0 and rows_are_apart(t.shape, t.stride(), t.element_size())


def rows_are_apart(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:
    """By multiples of ROW_ALIGNMENT_BYTES. The stride of a dimension of size 1 is never used."""
    step = ROW_ALIGNMENT_BYTES // element_bytes
    return all(n <= 1 or s % step == 0 for n, s in zip(shape[:-1], strides[:-1], strict=True))


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


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one thread block (CPU: one step) of a plan takes, for `explain` and the tuner.

    q_block, kv_block: queries of a tile, keys of a block. heads: query heads that share a tile. smem_bytes: shared memory (CPU: scores
    that a step keeps). registers: most of any thread. blocks_per_sm: how many run on a multiprocessor at once. head_group: heads whose
    tiles are visited together, longest first among them. persistent: a block takes tile after tile. by_keys: work
    tiles are blocks of keys, which walk over the queries (backward).
    """

    q_block: int
    kv_block: int
    smem_bytes: int = 0
    registers: int = 0
    threads: int = 0
    blocks_per_sm: int = 1
    head_group: int = 1
    heads: int = 1
    persistent: bool = False
    by_keys: bool = False


@runtime_checkable
class Tunable(Protocol):
    """A backend whose tiles can be enumerated, compiled ahead and explained.

    Raises, each of its methods:
        NotImplementedError: not for this task.
    """

    def tuning_space(self, problem: Problem) -> Sequence[Any]:
        """Every legal choice of tiles, none twice: what `plan` would take without a tuned table first, then the nearest to it."""
        ...

    def tuning_key(self, problem: Problem) -> Any:
        """The dataclass that a tuned entry belongs to: problems with equal keys share kernels, and so their best tiles."""
        ...

    def footprint(self, problem: Problem, tiles: Any = None) -> Footprint:
        """What a block takes. `tiles` None: those that `plan` takes."""
        ...

    def is_compiled(self, problem: Problem, tiles: Any = None) -> bool:
        """Whether the kernel is there, or none is needed."""
        ...

    def compile(self, problem: Problem, tiles: Any = None) -> bool:
        """Have the kernel in the disk cache, without a GPU. False: it was there already."""
        ...
