"""The Triton backend: what it supports, which tiles it takes, and how a call becomes launches."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...plan import Plan
from ...problem import DType, Problem, Request, ScaleKind, Task
from ...sequences import Dense, Padded, Paged, Sequences
from ..base import Gradients, Refusal, Saved, Support
from . import heuristics
from .tiles import BackwardTiles, Tiles

OLDEST = (8, 0)
MOST_PROGRAMS = 1 << 31
DTYPES = (DType.FP16, DType.BF16, DType.FP32)
COARSE = {DType.FP32: 64.0, DType.FP16: 1024.0, DType.BF16: 8192.0}
"""Up to here float32 holds an LSE well enough for gradients of this type."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU (TRITON_INTERPRET=1, read when they are imported)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


class TritonBackend:
    """Portable kernels: NVIDIA GPUs from Ampere on."""

    name = "triton"

    def support(self, problem: Problem) -> Support | Refusal:
        """Forward and backward in fp16, bf16 and fp32, every mask and layout."""
        device = problem.device
        if device.type == "cpu" and not interpreted():
            return Refusal("its tensors must be on a GPU, these are on cpu (TRITON_INTERPRET=1 interprets the kernels, for tests)")
        if device.type not in ("cuda", "cpu") or (device.capability or OLDEST) < OLDEST:
            return Refusal(f"it needs an NVIDIA GPU of compute capability 8.0 or newer, these tensors are on {device}")
        for reason in _unsupported(problem):
            return Refusal(reason)
        if importlib.util.find_spec("triton") is None:
            return Refusal("the package triton is not installed (pip install 'flash3[triton]')")
        return Support("interpreted" if device.type == "cpu" else f"{problem.spec.dtype.value} kernels")

    def plan(self, problem: Problem, tiles: Any = None) -> Plan:
        """Forward: one launch, two where keys are split. Backward: three.

        Raises:
            TypeError: `tiles` is no Tiles (backward: BackwardTiles).
        """
        if interpreted():
            from .interpreter import repair

            repair()
        forward = problem.spec.task is Task.FORWARD
        wanted = Tiles if forward else BackwardTiles
        if tiles is not None and not isinstance(tiles, wanted):
            raise TypeError(f"tiles must be a {wanted.__name__} or None, got {tiles!r}")
        run = Forward.of(problem, tiles) if forward else Backward.of(problem, tiles)
        return Plan(backend=self.name, problem=problem, run=run, tiles=run.tiles)


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
    return problem.device.capability or OLDEST


def _width(problem: Problem) -> int:
    return heuristics.width_of(max(problem.spec.head_dim, problem.spec.value_dim))


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
        capability, width = _capability(problem), _width(problem)
        if tiles is None and interpreted():
            tiles = heuristics.INTERPRETED
        chosen = tiles or heuristics.forward(capability, width, spec.dtype.bytes, problem.mask.kind)
        rows = z.q_len * spec.heads_per_kv
        pack = spec.heads_per_kv if z.q_len < chosen.rows and spec.heads_per_kv > 1 else 1
        if tiles is None and rows <= heuristics.FEW_ROWS:
            chosen = heuristics.few_rows(capability, width, spec.dtype.bytes, max(1, rows))
        programs = math.ceil(z.q_len * pack / chosen.rows) * (z.heads_q // pack) * z.batch
        return cls(problem, chosen, pack, heuristics.splits(programs, z.k_len, problem.device.multiprocessors))

    def __call__(self, request: Request, out: Tensor, lse: Tensor | None) -> None:
        at = request.q_sequences
        if not isinstance(at, Dense):  # rows of no sequence, which no tile writes
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        if out.numel() == 0 or self.problem.sizes.batch == 0:
            return
        with _on(out.device):
            if self.splits == 1:
                self._launch(request, out, lse, None)
            else:
                self._split(request, out, lse)

    def _launch(self, request: Request, out: Tensor, lse: Tensor | None, parts: Any) -> Any:
        from . import launch
        from .forward import forward_kernel

        p, z, tiles, at = self.problem, self.problem.sizes, self.tiles, request.q_sequences
        scales, sign = launch.forward_scales(p)
        spec = launch.kernel_spec(p, tiles, sign, launch.is_wide(request.k, request.v), self.pack, self.splits)
        blocks, heads = math.ceil(z.q_len * self.pack / tiles.rows), z.heads_q // self.pack
        k, v = launch.rows_of(request.k, request.k_sequences), launch.rows_of(request.v, request.k_sequences)
        forward_kernel[(blocks * heads * z.batch, self.splits)](
            launch.rows_of(request.q, at),
            k,
            v,
            launch.descriptor(k, spec.keys, _capability(p)),
            launch.descriptor(v, spec.values, _capability(p)),
            launch.rows_of(out if parts is None else out[0], at),
            None if lse is None else launch.lse_rows(lse, at),
            request.sink,
            parts,
            launch.arrays_of(at),
            launch.arrays_of(request.k_sequences),
            *launch.numbers_of(p),
            scales,
            heads,
            blocks,
            spec,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return spec, scales

    def _split(self, request: Request, out: Tensor, lse: Tensor | None) -> None:
        from . import launch
        from .blocks import Parts
        from .forward import combine_kernel

        z, at = self.problem.sizes, request.q_sequences
        O = out.new_empty((self.splits, *out.shape), dtype=torch.float32)
        row_max, row_sum = out.new_empty((2, self.splits, *self.problem.lse_shape), dtype=torch.float32)
        parts = Parts(*launch.lse_rows(row_max[0], at)[:4], row_sum, row_max.stride(0), O.stride(0))
        spec, scales = self._launch(request, O, lse, parts)
        combine_kernel[(z.q_len * z.heads_q * z.batch,)](
            launch.rows_of(O[0], at),
            parts,
            launch.rows_of(out, at),
            None if lse is None else launch.lse_rows(lse, at),
            request.sink,
            launch.arrays_of(at),
            z.q_len,
            scales,
            z.heads_q,
            self.splits,
            spec,
        )


@dataclass(frozen=True)
class Backward:
    """A plan's `run(request, saved, gradients)`."""

    problem: Problem
    tiles: BackwardTiles

    @classmethod
    def of(cls, problem: Problem, tiles: BackwardTiles | None) -> Backward:
        if tiles is None and interpreted():
            tiles = BackwardTiles(heuristics.INTERPRETED, heuristics.INTERPRETED)
        chosen = tiles or heuristics.backward(_capability(problem), _width(problem), problem.spec.dtype.bytes, problem.mask.kind)
        return cls(problem, chosen)

    def __call__(self, request: Request, saved: Saved, gradients: Gradients) -> None:
        if _shares_keys(request.k_sequences):
            self._gathered(request, saved, gradients)
            return
        dense_q, dense_k = isinstance(request.q_sequences, Dense), isinstance(request.k_sequences, Dense)
        nothing = request.q.numel() == 0 or request.k.numel() == 0 or self.problem.sizes.batch == 0
        for total, whole in ((gradients.dq, dense_q), (gradients.dk, dense_k), (gradients.dv, dense_k)):
            if total is not None and (nothing or not whole):
                total.zero_()
        if request.q.numel() == 0 or self.problem.sizes.batch == 0:
            if gradients.d_sink is not None:
                gradients.d_sink.zero_()
            return
        with _on(request.q.device):
            stats = self._prepare(request, saved, gradients)
            if gradients.d_sink is not None:
                gradients.d_sink.copy_(_sink_gradient(request.sink, self.problem.sizes.softcap or self.problem.sizes.scale, *stats))
            if not nothing:
                self._differentiate(request, gradients, stats)

    def _gathered(self, request: Request, saved: Saved, gradients: Gradients) -> None:
        """Sequences may share slots: each gets its own copy of them, and the gradients add up, in a fixed order."""
        rows, slots = _places(request)
        k, v = request.k[rows, slots], request.v[rows, slots]
        at = request.k_sequences
        alone = replace(request, k=k, v=v, k_sequences=Padded(lengths=at.lengths, leftpad=at.leftpad))
        own = replace(gradients, dk=torch.empty_like(k), dv=torch.empty_like(v))
        sizes = replace(self.problem.sizes, page_size=0)
        replace(self, problem=replace(self.problem, sizes=sizes))(alone, saved, own)
        for total, part in ((gradients.dk, own.dk), (gradients.dv, own.dv)):
            if total is not None:
                total.copy_(torch.zeros_like(total, dtype=torch.float32).index_put_((rows, slots), part.float(), accumulate=True))

    def _common(self, request: Request, wide: bool, tiles: Tiles) -> tuple[tuple[Any, ...], Any]:
        """What all three kernels take: the numbers, and the KernelSpec."""
        from . import launch

        p = self.problem
        scales, sign = launch.backward_scales(p)
        layouts = launch.arrays_of(request.q_sequences), launch.arrays_of(request.k_sequences)
        return (*layouts, *launch.numbers_of(p), scales), launch.kernel_spec(p, tiles, sign, wide)

    def _descriptors(self, *operands: tuple[Any, Any]) -> list[Any]:
        from . import launch

        return [launch.descriptor(rows, block, _capability(self.problem)) for rows, block in operands]

    def _prepare(self, request: Request, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
        """row_max, log_sum and delta, of the LSE's shape."""
        from . import launch
        from .backward import prepare_kernel

        p, z, at, tiles = self.problem, self.problem.sizes, request.q_sequences, self.tiles.dq
        row_max, log_sum, delta = saved.lse.new_empty((3, *saved.lse.shape))
        if not isinstance(at, Dense):
            row_max.zero_()
            log_sum.fill_(torch.inf)
            delta.zero_()
        numbers, spec = self._common(request, launch.is_wide(request.k), tiles)
        blocks = math.ceil(z.q_len / tiles.rows)
        prepare_kernel[(blocks * z.heads_q * z.batch,)](
            launch.rows_of(request.q, at),
            launch.rows_of(request.k, request.k_sequences),
            launch.rows_of(saved.out, at),
            launch.rows_of(gradients.d_out, at),
            launch.lse_rows(saved.lse, at),
            None if gradients.d_lse is None else launch.lse_rows(gradients.d_lse, at),
            request.sink,
            _statistics(row_max, log_sum, delta, at),
            *numbers,
            z.heads_q,
            blocks,
            COARSE[p.spec.dtype],
            spec,
            num_warps=4,
            num_stages=1,
        )
        return row_max, log_sum, delta

    def _differentiate(self, request: Request, gradients: Gradients, stats: tuple[Tensor, Tensor, Tensor]) -> None:
        from . import launch
        from .backward import dkdv_kernel, dq_kernel

        z, at, at_keys = self.problem.sizes, request.q_sequences, request.k_sequences
        wide = launch.is_wide(request.q, request.k, request.v, gradients.d_out)
        q, d_out = launch.rows_of(request.q, at), launch.rows_of(gradients.d_out, at)
        k, v = launch.rows_of(request.k, at_keys), launch.rows_of(request.v, at_keys)
        rows = _statistics(*stats, at)
        if gradients.dk is not None or gradients.dv is not None:
            tiles = self.tiles.dkdv
            numbers, spec = self._common(request, wide, tiles)
            blocks = math.ceil(z.k_len / tiles.keys)
            dk, dv = (None if x is None else launch.rows_of(x, at_keys) for x in (gradients.dk, gradients.dv))
            dkdv_kernel[(blocks * z.heads_kv * z.batch,)](
                q, k, v, d_out, *self._descriptors((q, spec.queries), (d_out, spec.outputs)), dk, dv, rows, *numbers, z.scale, z.heads_kv, blocks, spec,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
        if gradients.dq is not None:
            tiles = self.tiles.dq
            numbers, spec = self._common(request, wide, tiles)
            blocks = math.ceil(z.q_len / tiles.rows)
            dq_kernel[(blocks * z.heads_q * z.batch,)](
                q, k, v, d_out, *self._descriptors((k, spec.keys), (v, spec.values)), launch.rows_of(gradients.dq, at), rows, *numbers, z.scale, z.heads_q, blocks, spec,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip


def _statistics(row_max: Tensor, log_sum: Tensor, delta: Tensor, at: Sequences) -> Any:
    from . import launch
    from .blocks import Statistics

    return Statistics(*launch.lse_rows(row_max, at)[:4], log_sum, delta)


def _sink_gradient(sink: Tensor, top: float, row_max: Tensor, log_sum: Tensor, delta: Tensor) -> Tensor:
    """The sink's share of each row's softmax times −delta, summed over the rows: float32 (heads_q,). top: a score per unit of row_max."""
    shares = torch.exp2((sink.double()[:, None] - row_max.double() * top) * math.log2(math.e) - log_sum)
    return -(shares * delta).transpose(-1, -2).flatten(0, -2).sum(0).float()


def _shares_keys(layout: Sequences) -> bool:
    return isinstance(layout, Paged) or (isinstance(layout, Padded) and layout.batch_index is not None)


def _places(request: Request) -> tuple[Tensor, Tensor]:
    """Row (or page) and slot of each sequence's slots, (batch, capacity). Table entries that no sequence uses may hold anything."""
    at, k = request.k_sequences, request.k
    assert isinstance(at, Padded | Paged)
    if isinstance(at, Padded):
        assert at.batch_index is not None
        slots = torch.arange(k.shape[1], device=k.device)
        return at.batch_index.long()[:, None].expand(-1, len(slots)), slots.expand(len(at.lengths), -1)
    table = at.page_table if at.batch_index is None else at.page_table[at.batch_index.long()]
    slot = torch.arange(table.shape[1] * k.shape[1], device=k.device)
    pages = table.long().clamp(0, max(0, k.shape[0] - 1))[:, slot // k.shape[1]]
    return pages, (slot % k.shape[1]).expand(len(table), -1)
