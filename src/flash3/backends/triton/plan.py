"""The Triton backend: what it supports, which tiles it takes, and how a call becomes launches."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import tuned
from ...plan import Plan
from ...problem import DType, Problem, Request, ScaleKind, Spec, Task
from ...sequences import Dense, Padded, Paged
from ..base import Footprint, Gradients, Refusal, Saved, Support, copied_rows, starts_aligned
from . import heuristics, space
from .tiles import BackwardTiles, Tiles

MOST_PROGRAMS = 1 << 31
DTYPES = (DType.FP16, DType.BF16, DType.FP32)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU (TRITON_INTERPRET=1, read when they are imported)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


class TritonBackend:
    """Portable kernels: NVIDIA GPUs from Ampere on."""

    name = "triton"
    compiles_ahead = False  # Triton compiles when a kernel is first launched, and keeps its own cache

    def support(self, problem: Problem) -> Support | Refusal:
        """Forward and backward in fp16, bf16 and fp32, every mask and layout."""
        device = problem.device
        if device.type == "cpu" and not interpreted():
            return Refusal("its tensors must be on a GPU, these are on cpu (TRITON_INTERPRET=1 interprets the kernels, for tests)")
        if device.type not in ("cuda", "cpu") or (device.capability or heuristics.OLDEST) < heuristics.OLDEST:
            return Refusal(f"it needs an NVIDIA GPU of compute capability 8.0 or newer, these tensors are on {device}")
        for reason in _unsupported(problem):
            return Refusal(reason)
        if importlib.util.find_spec("triton") is None:
            return Refusal("the package triton is not installed (pip install 'flash3[triton]')")
        notes = ["interpreted" if device.type == "cpu" else f"{problem.spec.dtype.value} kernels"]
        notes += copied_rows(problem)
        return Support("; ".join(notes))

    def plan(self, problem: Problem, tiles: Any = None) -> Plan:
        """Forward: one launch, two where keys are split. Backward: three, four where dV has its own.

        Raises:
            TypeError: `tiles` is no Tiles (backward: BackwardTiles).
        """
        if interpreted():
            from .interpreter import repair

            repair()
        run: Forward | Backward
        notes: tuple[str, ...] = ()
        if problem.spec.task is Task.FORWARD:
            asked = tiles is None and not interpreted()
            found = tuned.find(self.name, problem, self.tuning_key(problem), Tiles, _faults(problem)) if asked else None
            if found:
                tiles, notes = found[0], (f"tiles by the tuned table {found[1]}",)
            run = Forward.of(problem, _typed(tiles, Tiles))
        else:
            run = Backward.of(problem, _typed(tiles, BackwardTiles))
        return Plan(backend=self.name, problem=problem, run=run, tiles=run.tiles, notes=notes)

    def tuning_space(self, problem: Problem) -> list[Tiles]:
        """See backends.base.Tunable; forward only."""
        return space.legal(_forward(problem).tiles, _capability(problem), _width(problem), problem.spec.dtype.bytes)

    def tuning_key(self, problem: Problem) -> Spec:
        """The spec, with and without an LSE alike."""
        return replace(problem.spec, lse=True, deterministic=False)

    def footprint(self, problem: Problem, tiles: Tiles | None = None) -> Footprint:
        """See backends.base.Tunable; forward only. What few rows do (packed heads, split keys) is left out."""
        chosen = tiles or _forward(problem).tiles
        smem = space.smem_bytes(chosen, _width(problem), problem.spec.dtype.bytes)
        return Footprint(q_block=chosen.rows, kv_block=chosen.keys, smem_bytes=smem, threads=32 * chosen.warps)

    def is_compiled(self, problem: Problem, tiles: Tiles | None = None) -> bool:
        """Nothing is compiled ahead: see compiles_ahead."""
        return True

    def compile(self, problem: Problem, tiles: Tiles | None = None) -> bool:
        """See is_compiled."""
        return False


def _forward(problem: Problem) -> Forward:
    """The heuristic's."""
    if problem.spec.task is not Task.FORWARD:
        raise NotImplementedError("the triton backend has tiles to choose from for the forward only")
    return Forward.of(problem, None)


def _faults(problem: Problem) -> Callable[[Tiles], list[str]]:
    return lambda tiles: space.problems(tiles, _capability(problem), _width(problem), problem.spec.dtype.bytes)


def _typed(tiles: Any, wanted: type) -> Any:
    if tiles is not None and not isinstance(tiles, wanted):
        raise TypeError(f"tiles must be a {wanted.__name__} or None, got {tiles!r}")
    return tiles


def _unsupported(problem: Problem) -> list[str]:
    spec, sizes = problem.spec, problem.sizes
    found = []
    if spec.dtype not in DTYPES:
        found.append(f"its inputs must be float16, bfloat16 or float32, got {spec.dtype.value}")
    if spec.out_dtype not in DTYPES:
        found.append(f"its output must be float16, bfloat16 or float32, got {spec.out_dtype.value}")
    if spec.qv or spec.scales is not ScaleKind.NONE:
        found.append("it has no qv and no scales for FP8")
    if (max(sizes.q_len, sizes.k_len) // 16 + 1) * sizes.heads_q * sizes.batch >= MOST_PROGRAMS:
        found.append(f"{sizes.batch} sequences of up to {sizes.q_len} queries with {sizes.heads_q} heads are too many tiles for 32 bits")
    return found


def _capability(problem: Problem) -> tuple[int, int]:
    return problem.device.capability or heuristics.OLDEST


def _width(problem: Problem) -> int:
    return heuristics.width_of(max(problem.spec.head_dim, problem.spec.value_dim))


def _aligned(t: Tensor) -> Tensor:
    """A copy where rows do not start at multiples of 16 bytes.

    Kernels could load such rows number by number, but ptxas (of CUDA 12.8) optimizes that into wrong code for sm_90 (docs/performance.md).
    """
    return t if starts_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def _all_aligned(request: Request) -> Request:
    q, k, v = (_aligned(t) for t in (request.q, request.k, request.v))
    return request if (q is request.q and k is request.k and v is request.v) else replace(request, q=q, k=k, v=v)


def _chosen(table: Callable[..., Any], problem: Problem, small: Any) -> Any:
    """The heuristic's choice of tiles; small ones where kernels are interpreted."""
    if interpreted():
        return small
    return table(_capability(problem), _width(problem), problem.spec.dtype.bytes, problem.mask.kind)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Forward:
    """A plan's `run(request, out, lse)`: fills out and lse on the current stream."""

    problem: Problem
    tiles: Tiles
    pack: int
    splits: int

    @classmethod
    def of(cls, problem: Problem, tiles: Tiles | None) -> Forward:
        """Few rows to a key head are packed into one tile, few tiles share out their keys."""
        spec, z = problem.spec, problem.sizes
        chosen = tiles or _chosen(heuristics.forward, problem, heuristics.INTERPRETED)
        rows = z.q_len * spec.heads_per_kv
        pack = spec.heads_per_kv if z.q_len < chosen.rows else 1
        if tiles is None and rows <= heuristics.FEW_ROWS and not interpreted():
            chosen = heuristics.few_rows(_capability(problem), _width(problem), spec.dtype.bytes, max(1, rows))
        programs = math.ceil(z.q_len * pack / chosen.rows) * (z.heads_q // pack) * z.batch
        return cls(problem, chosen, pack, heuristics.splits(programs, z.k_len, problem.device.multiprocessors))

    def __call__(self, request: Request, out: Tensor, lse: Tensor | None) -> None:
        if not isinstance(request.q_sequences, Dense):  # rows of no sequence, which no tile writes
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        if out.numel() == 0 or self.problem.sizes.batch == 0:
            return
        from . import launch

        request = _all_aligned(request)
        with _on(out.device):
            if self.splits == 1:
                launch.forward(self.problem, self.tiles, self.pack, request, out, lse)
                return
            O = out.new_empty((self.splits, *out.shape), dtype=torch.float32)
            statistics = out.new_empty((2, self.splits, *self.problem.lse_shape), dtype=torch.float32)
            launch.split_forward(self.problem, self.tiles, self.pack, self.splits, request, out, lse, (O, *statistics))


@dataclass(frozen=True)
class Backward:
    """A plan's `run(request, saved, gradients)`."""

    problem: Problem
    tiles: BackwardTiles

    @classmethod
    def of(cls, problem: Problem, tiles: BackwardTiles | None) -> Backward:
        small = BackwardTiles(heuristics.INTERPRETED, heuristics.INTERPRETED)
        return cls(problem, tiles or _chosen(heuristics.backward, problem, small))

    def __call__(self, request: Request, saved: Saved, gradients: Gradients) -> None:
        at, at_keys = request.q_sequences, request.k_sequences
        if isinstance(at_keys, Paged) or (isinstance(at_keys, Padded) and at_keys.batch_index is not None):
            self._apart(at_keys, request, saved, gradients)
            return
        no_rows = request.q.numel() == 0 or self.problem.sizes.batch == 0
        nothing = no_rows or request.k.numel() == 0
        for total, layout in ((gradients.dq, at), (gradients.dk, at_keys), (gradients.dv, at_keys)):
            if total is not None and (nothing or not isinstance(layout, Dense)):
                total.zero_()
        if no_rows:
            if gradients.d_sink is not None:
                gradients.d_sink.zero_()
            return
        with _on(request.q.device):
            self._launch(_all_aligned(request), saved, replace(gradients, d_out=_aligned(gradients.d_out)), nothing)

    def _launch(self, request: Request, saved: Saved, gradients: Gradients, nothing: bool) -> None:
        from . import launch

        p, tiles = self.problem, self.tiles
        stats = saved.lse.new_empty((3, *saved.lse.shape))
        if not isinstance(request.q_sequences, Dense):  # rows of no sequence
            stats.zero_()[1].fill_(torch.inf)
        launch.prepare(p, tiles.dq, request, saved, gradients, stats)
        if gradients.d_sink is not None:
            gradients.d_sink.copy_(_sink_gradient(request.sink, p.sizes.softcap or p.sizes.scale, *stats))
        if nothing:
            return
        for chosen, part in self._of_keys(gradients):
            launch.dkdv(p, chosen, request, part, stats)
        if gradients.dq is not None:
            launch.dq(p, tiles.dq, request, gradients, stats)

    def _of_keys(self, gradients: Gradients) -> list[tuple[Tiles, Gradients]]:
        """The launches for dK and dV, those that are wanted."""
        tiles, wanted = self.tiles, [gradients]
        if tiles.dv and gradients.dk is not None and gradients.dv is not None:
            wanted = [replace(gradients, dk=None), replace(gradients, dv=None)]
        own = [tiles.dv if tiles.dv and g.dk is None else tiles.dkdv for g in wanted]
        return [(t, g) for t, g in zip(own, wanted, strict=True) if not (g.dk is None and g.dv is None)]

    def _apart(self, at: Paged | Padded, request: Request, saved: Saved, gradients: Gradients) -> None:
        """Sequences may share slots: each gets its own copy of them, and the gradients add up, in a fixed order."""
        rows, slots = _places(at, request.k)
        k, v = request.k[rows, slots], request.v[rows, slots]
        alone = replace(request, k=k, v=v, k_sequences=Padded(lengths=at.lengths, leftpad=at.leftpad))
        own = replace(gradients, dk=torch.empty_like(k), dv=torch.empty_like(v))
        problem = replace(self.problem, sizes=replace(self.problem.sizes, page_size=0))
        replace(self, problem=problem)(alone, saved, own)
        for total, part in ((gradients.dk, own.dk), (gradients.dv, own.dv)):
            if total is not None:
                total.copy_(torch.zeros_like(total, dtype=torch.float32).index_put_((rows, slots), part.float(), accumulate=True))


def _sink_gradient(sink: Tensor, top: float, row_max: Tensor, log_sum: Tensor, delta: Tensor) -> Tensor:
    """The sink's share of each row's softmax times −delta, summed over the rows: float32 (heads_q,). top: a score per unit of row_max."""
    shares = torch.exp2((sink.double()[:, None] - row_max.double() * top) * math.log2(math.e) - log_sum)
    return -(shares * delta).transpose(-1, -2).flatten(0, -2).sum(0).float()


def _places(at: Paged | Padded, k: Tensor) -> tuple[Tensor, Tensor]:
    """Row (or page) and slot of each sequence's slots, (batch, capacity). Table entries that no sequence uses may hold anything."""
    if isinstance(at, Padded):
        slots = torch.arange(k.shape[1], device=k.device)
        return at.batch_index.long()[:, None].expand(-1, len(slots)), slots.expand(len(at.lengths), -1)
    table = at.page_table if at.batch_index is None else at.page_table[at.batch_index.long()]
    slot = torch.arange(table.shape[1] * k.shape[1], device=k.device)
    pages = table.long().clamp(0, max(0, k.shape[0] - 1))[:, slot // k.shape[1]]
    return pages, (slot % k.shape[1]).expand(len(table), -1)
