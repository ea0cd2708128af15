"""The CPU backend: what it supports, and how a call becomes runs of equal sequences, each by torch's fused attention or by blocks."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ... import tuned
from ...plan import Plan
from ...problem import Problem, Request, Spec, Task, default_scale
from ...sequences import Dense
from ..base import Footprint, Gradients, Refusal, Saved, Support
from . import backward, blocks, forward, fused
from .gather import Run, add_keys, keys, lse_view, runs, view
from .tiles import Method, Tiles, problems, space
from .work import Visibility, Work


class CpuBackend:
    """torch on the CPU: every mask, layout and feature; memory linear in sequence length."""

    name = "cpu"

    def support(self, problem: Problem) -> Support | Refusal:
        """Every forward on the CPU; backward but for FP8 and qv, which have no gradient."""
        spec = problem.spec
        if problem.device.type != "cpu":
            return Refusal(f"its tensors must be on the CPU, these are on {problem.device}")
        if spec.task is Task.BACKWARD and spec.dtype.is_float8:
            return Refusal(f"{spec.dtype.value} inputs have no backward here")
        if spec.task is Task.BACKWARD and spec.qv:
            return Refusal("attention with qv has no backward")
        if spec.softcap or spec.qv:
            return Support("by blocks of keys: torch's fused attention has no softcap and no qv")
        return Support("torch's fused attention, by tiles of queries where the mask is neither full nor square causal")

    def plan(self, problem: Problem, tiles: Tiles | None = None) -> Plan:
        """See backends.base. Without tiles, given or tuned, each sequence's lengths decide.

        Raises:
            ValueError: `tiles` cannot serve this problem; the message says why.
        """
        notes: tuple[str, ...] = ()
        if tiles is None:
            found = tuned.find(self.name, problem, self.tuning_key(problem), Tiles, functools.partial(problems, problem))
            if found:
                tiles, notes = found[0], (f"tiles by the tuned table {found[1]}",)
        elif wrong := problems(problem, tiles):
            raise ValueError(f"tiles {tiles} cannot run: {'; '.join(wrong)}")
        run = run_forward if problem.spec.task is Task.FORWARD else run_backward
        return Plan(backend=self.name, problem=problem, run=functools.partial(run, sizes=tiles), tiles=tiles, notes=notes)

    def tuning_space(self, problem: Problem) -> list[Tiles | None]:
        """See backends.base.Tunable. None stands for sizes that follow from each sequence's lengths."""
        return [None, *space(problem)]

    def tuning_key(self, problem: Problem) -> Spec:
        """The spec, with and without an LSE alike."""
        return replace(problem.spec, lse=True, deterministic=False)

    def footprint(self, problem: Problem, tiles: Tiles | None = None) -> Footprint:
        """See backends.base.Tunable. Memory: the float32 scores of a tile against a block (a fused call keeps its additive mask)."""
        chosen = tiles or self.plan(problem).tiles or Tiles(method=Method.BLOCKS, rows=blocks.TILE_ROWS, keys=blocks.TILE_KEYS)
        keys = chosen.keys or problem.sizes.k_len
        return Footprint(q_block=chosen.rows, kv_block=keys, smem_bytes=4 * chosen.rows * keys)

    def is_compiled(self, problem: Problem, tiles: Tiles | None = None) -> bool:
        """Nothing has to be."""
        return True

    def compile(self, problem: Problem, tiles: Tiles | None = None) -> bool:
        """Nothing is compiled here."""
        return False


@torch.no_grad()
def run_forward(request: Request, out: Tensor, lse: Tensor | None, sizes: Tiles | None = None) -> None:
    """Fill the whole of out and lse."""
    if not _all_dense(request):  # rows outside every sequence
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
    for at_q, at_k in runs(request):
        work, _ = work_of(request, at_q, at_k, sizes)
        own_lse = None if lse is None else lse_view(lse, request.q_sequences, at_q)
        attend = fused.attend if fused.fits(work) else forward.attend
        attend(work, view(out, request.q_sequences, at_q), own_lse)


@torch.no_grad()
def run_backward(request: Request, saved: Saved, gradients: Gradients, sizes: Tiles | None = None) -> None:
    """Fill the whole of each gradient that is wanted."""
    for total in (gradients.dq, gradients.dk, gradients.dv, gradients.d_sink):
        if total is not None:
            total.zero_()
    at = request.q_sequences
    for at_q, at_k in runs(request):
        work, at_k = work_of(request, at_q, at_k, sizes)
        own_saved = Saved(out=view(saved.out, at, at_q), lse=lse_view(saved.lse, at, at_q))
        d_lse = None if gradients.d_lse is None else lse_view(gradients.d_lse, at, at_q)
        own = Gradients(d_out=view(gradients.d_out, at, at_q), d_lse=d_lse)
        differentiate = fused.gradients if fused.fits_backward(work, own_saved) else backward.gradients
        dq, dk, dv, d_sink = differentiate(work, own_saved, own)
        if gradients.dq is not None:
            view(gradients.dq, at, at_q).copy_(dq)
        for total, part in ((gradients.dk, dk), (gradients.dv, dv)):
            if total is not None:
                add_keys(total, request.k_sequences, at_k, part)
        if gradients.d_sink is not None and d_sink is not None:
            gradients.d_sink += d_sink


def work_of(request: Request, at_q: Run, at_k: Run, sizes: Tiles | None = None) -> tuple[Work, Run]:
    """The run's tensors with the keys that no row sees left out, and where its keys lie. FP8 becomes float32 here."""
    sees = Visibility(request.mask.kind, request.mask.bounds(at_q.length, at_k.length), at_q.length, at_k.length)
    begin, end = sees.span()
    at_k = at_k.narrowed(begin, end)
    q, qv = view(request.q, request.q_sequences, at_q), None if request.qv is None else view(request.qv, request.q_sequences, at_q)
    k, v = keys(request, at_k)
    if q.dtype.itemsize == 1:
        batch = slice(at_q.first, at_q.first + at_q.count)
        q, k, v = dequantized(q, request.q_scale, batch), dequantized(k, request.k_scale, batch), dequantized(v, request.v_scale, batch)
        qv = None if qv is None else dequantized(qv, request.q_scale, batch)
    sees, scale = sees.narrowed(begin, end), default_scale(request)
    return Work(q=q, k=k, v=v, sees=sees, scale=scale, softcap=float(request.softcap), sink=request.sink, qv=qv, sizes=sizes), at_k


def dequantized(x: Tensor, scale: Tensor | None, batch: slice) -> Tensor:
    """FP8 (count, heads, length, dim) in float32, times the scale (batch, heads_kv) of its key head."""
    x = x.float()
    if scale is None:
        return x
    repeats = x.shape[1] // scale.shape[1]
    return x.mul_(scale[batch].repeat_interleave(repeats, 1)[..., None, None])


def _all_dense(request: Request) -> bool:
    return isinstance(request.q_sequences, Dense) and isinstance(request.k_sequences, Dense)
