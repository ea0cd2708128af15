"""The Hopper backend: what it supports, which tiles it takes, and how a call becomes one launch."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ... import tuned
from ...plan import Plan
from ...problem import DType, Problem, Request, ScaleKind, Task
from ...sequences import Padded, Paged, SequenceKind
from ..base import Footprint, Refusal, Support, copied_rows
from . import backward_budget, backward_plan, backward_space, budget, heuristics, launch, roles, space
from .arguments import arrays_of, is_straight, layout_of, packed, refused, tma_ready
from .backward_tiles import BackwardSpec, BackwardTiles
from .tiles import SEQUENCE_LIMIT, ForwardSpec, ScaleSign, SequenceLayout, Tiles

CAPABILITY = (9, 0)
MOST_WORK_TILES = 1 << 31
Kernel = Callable[..., None]


def compiled(spec: ForwardSpec | BackwardSpec, tiles: Any) -> Kernel:
    """The kernel from the cache, compiled where it is not there yet. The compiler is imported when first needed."""
    from . import backward_compile, compile

    return backward_compile.kernel(spec, tiles) if isinstance(spec, BackwardSpec) else compile.kernel(spec, tiles)


class HopperBackend:
    """CuTe DSL kernels for sm_90a.

    Args:
        kernels: what turns (ForwardSpec, Tiles) or (BackwardSpec, BackwardTiles) into a function; tests and benchmarks bring their own.
    """

    name = "hopper"

    def __init__(self, kernels: Callable[..., Kernel] = compiled) -> None:
        self._kernels = kernels

    def support(self, problem: Problem) -> Support | Refusal:
        """fp16 and bf16, dense, packed or padded, on a Hopper GPU; backward to the head dims of `backward_budget.WIDTHS`."""
        spec, device = problem.spec, problem.device
        if device.type != "cuda" or device.capability != CAPABILITY:
            return Refusal(f"it needs a Hopper GPU (compute capability 9.0), these tensors are on {device}")
        for reason in _unsupported(problem):
            return Refusal(reason)
        if importlib.util.find_spec("cutlass") is None:
            return Refusal("the package nvidia-cutlass-dsl is not installed (pip install 'flash3[hopper]')")
        notes = [f"{spec.dtype.value} kernels"]
        notes += copied_rows(problem)
        if spec.k_sequences is SequenceKind.PAGED:
            notes.append("gathers the pages into a copy first: a kernel that reads pages is still to come")
        return Support("; ".join(notes))

    def plan(self, problem: Problem, tiles: Any = None) -> Plan:
        """Forward: one launch. Backward: one call that launches three kernels.

        Raises:
            ValueError: `tiles` do not fit; the message says why.
        """
        base = _spec_of(problem)
        chosen, origin = (tiles, "as given") if tiles is not None else self._choose(problem, base)
        wrong = _faults(base, chosen)
        if wrong:
            raise ValueError(f"tiles {chosen} cannot run: {'; '.join(wrong)}")
        notes = (f"tiles {origin}",)
        if isinstance(base, BackwardSpec):
            backward = backward_plan.Backward(problem, chosen, self._kernels)
            return Plan(backend=self.name, problem=problem, run=backward, prepare=backward.prepare, tiles=chosen, notes=notes)
        forward = Forward(problem, chosen, self._kernels)
        return Plan(backend=self.name, problem=problem, run=forward, prepare=forward.prepare, tiles=chosen, notes=notes)

    def _choose(self, problem: Problem, base: ForwardSpec | BackwardSpec) -> tuple[Any, str]:
        """The tuned table first, the heuristic second."""
        kind: type[Any] = BackwardTiles if isinstance(base, BackwardSpec) else Tiles
        found = tuned.find(self.name, problem, self.tuning_key(problem), kind, functools.partial(_faults, base))
        return (found[0], f"by the tuned table {found[1]}") if found else (_heuristic(problem, base), "by the heuristic")

    def tuning_space(self, problem: Problem) -> list[Any]:
        """See backends.base.Tunable."""
        base = _spec_of(problem)
        own = _heuristic(problem, base)
        return backward_space.legal(base, own) if isinstance(base, BackwardSpec) else space.legal(base, own)

    def tuning_key(self, problem: Problem) -> ForwardSpec | BackwardSpec:
        """The kernel spec; a forward's LSE and sign of the scale do not count: neither decides which tiles are best."""
        base = _spec_of(problem)
        return base if isinstance(base, BackwardSpec) else replace(base, lse=True, scale_sign=ScaleSign.POSITIVE)

    def footprint(self, problem: Problem, tiles: Any = None) -> Footprint:
        """See backends.base.Tunable. Registers are a consumer's, after setmaxnreg."""
        base, sizes = _spec_of(problem), problem.sizes
        chosen = tiles or self._choose(problem, base)[0]
        held = {"registers": roles.consumer_registers(chosen), "threads": chosen.threads, "kv_block": chosen.kv}
        if isinstance(base, BackwardSpec):
            smem = backward_budget.smem_bytes(base, chosen)
            return Footprint(q_block=chosen.q, smem_bytes=smem, persistent=chosen.persistent, by_keys=True, **held)
        group = heuristics.head_group(base, sizes.k_len, sizes.batch * sizes.heads_q)
        smem = budget.smem_bytes(base, chosen)
        return Footprint(q_block=chosen.queries, smem_bytes=smem, head_group=group, heads=chosen.heads, persistent=True, **held)

    def is_compiled(self, problem: Problem, tiles: Any = None) -> bool:
        """See backends.base.Tunable. For lengths given as arrays: the layout without optional arrays."""
        from .compile import is_compiled

        base = _spec_of(problem)
        return is_compiled(base, tiles or self._choose(problem, base)[0])

    def compile(self, problem: Problem, tiles: Any = None) -> bool:
        """See backends.base.Tunable."""
        from . import backward_compile, compile

        base = _spec_of(problem)
        chosen = tiles or self._choose(problem, base)[0]
        return backward_compile.warm(base, chosen) if isinstance(base, BackwardSpec) else compile.warm(base, chosen)


def _spec_of(problem: Problem) -> ForwardSpec | BackwardSpec:
    spec = problem.spec
    layouts = _least(spec.q_sequences), _least(spec.k_sequences)
    if spec.task is Task.BACKWARD:
        return backward_plan.spec_of(problem, *layouts)
    return launch.forward_spec(spec, problem.sizes.scale, *layouts)


def _faults(spec: ForwardSpec | BackwardSpec, tiles: Any) -> list[str]:
    return backward_budget.problems(spec, tiles) if isinstance(spec, BackwardSpec) else budget.problems(spec, tiles)


def _heuristic(problem: Problem, spec: ForwardSpec | BackwardSpec) -> Any:
    if isinstance(spec, BackwardSpec):
        return backward_budget.choose(spec, problem.sizes.q_len)
    return heuristics.choose(spec, problem.sizes.k_len, problem.sizes.q_len)


def _unsupported(problem: Problem) -> list[str]:
    spec, sizes = problem.spec, problem.sizes
    found = []
    if spec.task is Task.BACKWARD:
        found += backward_plan.unsupported(problem)
    if spec.dtype not in (DType.BF16, DType.FP16):
        found.append(f"its inputs must be bfloat16 or float16, got {spec.dtype.value}")
    if spec.out_dtype not in (DType.BF16, DType.FP16, DType.FP32):
        found.append(f"its output must be bfloat16, float16 or float32, got {spec.out_dtype.value}")
    if spec.qv or spec.scales is not ScaleKind.NONE:
        found.append("it has no qv and no scales for FP8")
    for name, kind, length in (("query", spec.q_sequences, sizes.q_len), ("key", spec.k_sequences, sizes.k_len)):
        if kind is not SequenceKind.DENSE and length > SEQUENCE_LIMIT:
            found.append(f"packed and padded {name} sequences must not be longer than {SEQUENCE_LIMIT}, got room for {length}")
    if (sizes.total_q // 64 + sizes.batch) * sizes.heads_q >= MOST_WORK_TILES:
        found.append(f"{sizes.total_q} query rows in all with {sizes.heads_q} heads are too many tiles for 32 bits")
    return found


Launch = Callable[..., None]
"""launch(q, k, v, out, lse, sink, q_arrays, k_arrays), see flash3.plan.Plan."""


@dataclass
class Forward:
    """A plan's `run(request, out, lse)`, for requests of the plan's own problem: fills out and lse on the current stream."""

    problem: Problem
    tiles: Tiles
    kernels: Callable[[ForwardSpec, Tiles], Kernel]
    launches: dict[tuple[SequenceLayout, SequenceLayout], Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        self.nothing = math.prod(p.out_shape) == 0 or p.sizes.batch == 0
        self.no_keys = math.prod(p.k.shape) == 0

    def __call__(self, request: Request, out: Tensor, lse: Tensor | None) -> None:
        if self.nothing:  # but perhaps rows of no sequence
            _fill_empty(out, lse, sink=None)
            return
        if request.k_sequences.kind is SequenceKind.PAGED:
            request = gathered(request)
        if self.no_keys and request.q_sequences.kind is SequenceKind.DENSE:
            _fill_empty(out, lse, sink=request.sink)
            return
        if self.no_keys:  # TMA needs some storage, and only the device knows which rows are a sequence's
            request = with_empty_keys(request, self.problem.sizes.batch)
        arrays = arrays_of(request.q_sequences), arrays_of(request.k_sequences)
        with torch.cuda.device_of(out):
            self._launch(request)(request.q, request.k, request.v, out, lse, request.sink, *arrays)

    def prepare(self, request: Request) -> Launch | None:
        """See flash3.plan.Plan."""
        if self.nothing or self.no_keys or request.k_sequences.kind is SequenceKind.PAGED:
            return None
        return self._launch(request)

    def _launch(self, request: Request) -> Launch:
        layouts = layout_of(request.q_sequences), layout_of(request.k_sequences)
        if layouts not in self.launches:
            self.launches[layouts] = self._make_launch(*layouts)
        return self.launches[layouts]

    def _make_launch(self, q_layout: SequenceLayout, k_layout: SequenceLayout) -> Launch:
        """Microseconds count in what this returns: what the problem and the layouts decide is decided here."""
        p = self.problem
        spec = launch.forward_spec(p.spec, p.sizes.scale, q_layout, k_layout)
        kernel = self.kernels(spec, self.tiles)
        numbers = packed(launch.numbers(spec, self.tiles, p.sizes, p.mask, p.device.multiprocessors))
        straight = all(is_straight(t.strides, t.dtype.bytes) for t in (p.q, p.k, p.v) if isinstance(t.dtype, DType))
        device = p.device.index
        current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a torch without CUDA only plans
        counters = _counters.setdefault(device, {})

        def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, sink: Any, q_arrays: Any, k_arrays: Any) -> None:
            stream = current_stream(device)
            work = counters.get(stream)
            if work is None or stream:
                work = counter(device, stream)
            try:
                kernel(q, k, v, out, lse, sink, work, q_arrays, k_arrays, numbers)
            except Exception:
                ready = refused(q, k, v)
                if ready is None:
                    raise
                kernel(*ready, out, lse, sink, work, q_arrays, k_arrays, numbers)

        def copying(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            run(tma_ready(q), tma_ready(k), tma_ready(v), *rest)

        return run if straight else copying


def gathered(request: Request) -> Request:
    """The keys of a paged request in a padded copy. Entries of the page table that no sequence uses may be anything: they are clamped, and
    what they bring lies beyond the length."""
    pages = request.k_sequences
    assert isinstance(pages, Paged)
    table = pages.page_table if pages.batch_index is None else pages.page_table[pages.batch_index]
    table = table.clamp(0, max(0, request.k.shape[0] - 1))

    def copy(t: Tensor) -> Tensor:
        return t[table].flatten(1, 2) if t.shape[0] else t.new_empty(len(table), 0, *t.shape[2:])

    padded = Padded(lengths=pages.lengths, leftpad=pages.leftpad)
    return replace(request, k=copy(request.k), v=copy(request.v), k_sequences=padded)


def with_empty_keys(request: Request, batch: int) -> Request:
    """A request without any key, its keys in padded storage of which every sequence uses nothing."""
    k, v = (t.new_zeros(batch, 1, *t.shape[-2:]) for t in (request.k, request.v))
    lengths = torch.zeros(batch, dtype=torch.int32, device=k.device)
    return replace(request, k=k, v=v, k_sequences=Padded(lengths=lengths))


def _least(kind: SequenceKind) -> SequenceLayout:
    """A layout of this kind, as far as tiles depend on it: which optional arrays come along is known only when a request runs."""
    return SequenceLayout(kind=SequenceKind.PADDED if kind is SequenceKind.PAGED else kind)


def _fill_empty(out: Tensor, lse: Tensor | None, sink: Tensor | None) -> None:
    """What rows without keys hold."""
    out.zero_()
    if lse is None:
        return
    if sink is None:
        lse.fill_(-torch.inf)
    else:
        lse.copy_(sink.view(-1, 1).expand(lse.shape[-2:]))


_counters: dict[int, dict[int, Tensor]] = {}
"""By device and stream."""


def counter(device: int, stream: int) -> Tensor:
    """The work counter: 0 at every launch, and left at 0. One per stream, since launches of two streams may overlap; inside a graph
    capture a new one, since graphs may be replayed on any stream. (The default stream, 0, cannot capture.)"""
    if stream and torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
    found = _counters[device].get(stream)
    if found is None:
        found = _counters[device][stream] = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
    return found
