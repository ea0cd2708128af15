"""A small float64 check of attention and its gradients, one sequence at a time, straight from the definition."""

from __future__ import annotations

from dataclasses import replace

import torch

from flash3.backends.base import Gradients, Saved
from flash3.backends.cpu.plan import CpuBackend
from flash3.problem import DType, Problem, Request, Task, TensorInfo, default_scale
from flash3.sequences import Dense, Packed, Paged, extents

NAMES = {d.value: d for d in DType}


def info(t):
    return TensorInfo(NAMES[str(t.dtype).removeprefix("torch.")], tuple(t.shape), t.stride())


def torch_dtype(d):
    return getattr(torch, d.value)


def forward(request, fill=float("nan")):
    """out and lse of the CPU backend, into buffers poisoned with NaN."""
    problem = Problem.of(replace(request, lse=True), info)
    out = torch.full(problem.out_shape, fill, dtype=torch_dtype(problem.spec.out_dtype))
    lse = torch.full(problem.lse_shape, fill)
    CpuBackend().plan(problem).run(request, out, lse)
    return out, lse


def backward(request, out, lse, d_out, d_lse=None):
    """dq, dk, dv, d_sink of the CPU backend."""
    request = replace(request, task=Task.BACKWARD)
    problem = Problem.of(request, info)
    grads = [torch.full_like(t, float("nan")) for t in (request.q, request.k, request.v)]
    d_sink = None if request.sink is None else torch.full_like(request.sink, float("nan"))
    g = Gradients(d_out=d_out, d_lse=d_lse, dq=grads[0], dk=grads[1], dv=grads[2], d_sink=d_sink)
    CpuBackend().plan(problem).run(request, Saved(out=out, lse=lse), g)
    return [*grads, d_sink]


def _slots(x, layout, at):
    """Indices into x flattened to (slots, heads, dim)."""
    j = torch.arange(at.start, at.start + at.length)
    if isinstance(layout, Packed):
        return j
    if isinstance(layout, Paged):
        return layout.page_table[at.row].long()[j // x.shape[1]] * x.shape[1] + j % x.shape[1]
    return at.row * x.shape[1] + j


def _one(q, k, v, r, qv, dtype):
    """(q_len, heads, dim)… -> out, lse."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", q, k)
    if qv is not None:
        s = s + torch.einsum("qhd,khd->hqk", qv, v)
    s = s * default_scale(r)
    if r.softcap:
        s = torch.tanh(s / r.softcap) * r.softcap
    seen = torch.from_numpy(r.mask.dense(q.shape[0], k.shape[0]))
    s = s.masked_fill(~seen, -torch.inf)
    logits = s
    if r.sink is not None:
        logits = torch.cat([s, r.sink.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)], -1)
    if logits.shape[-1] == 0:
        logits = torch.cat([logits, torch.full((*s.shape[:2], 1), -torch.inf, dtype=dtype)], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("hqk,khd->qhd", p, v), lse


def reference(request, d_out=None, d_lse=None, dtype=torch.float64):
    """out, lse (and gradients when d_out is given) in `dtype`; nothing outside the sequences is read."""
    r = request
    leaves = [x.to(dtype).requires_grad_(d_out is not None) for x in (r.q, r.k, r.v)]
    sink = None if r.sink is None else r.sink.to(dtype).requires_grad_(d_out is not None)
    rr = replace(r, sink=sink)
    packed = isinstance(r.q_sequences, Packed)
    flat = [x.flatten(0, -3) for x in leaves]
    out = torch.zeros(flat[0].shape[0], flat[0].shape[1], flat[2].shape[-1], dtype=dtype)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=dtype)
    loss = torch.zeros((), dtype=dtype)
    for i, (aq, ak) in enumerate(zip(extents(r.q_sequences, r.q.shape), extents(r.k_sequences, r.k.shape), strict=True)):
        iq, ik = _slots(r.q, r.q_sequences, aq), _slots(r.k, r.k_sequences, ak)
        q, k, v = flat[0][iq], flat[1][ik], flat[2][ik]
        qv = None if r.qv is None else r.qv.to(dtype).flatten(0, -3)[iq]
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        if r.q_scale is not None:
            q = q * r.q_scale[i].to(dtype).repeat_interleave(group)[:, None]
        if r.k_scale is not None:
            k = k * r.k_scale[i].to(dtype)[:, None]
        if r.v_scale is not None:
            v = v * r.v_scale[i].to(dtype)[:, None]
        o, e = _one(q, k, v, rr, qv, dtype)
        out[iq], lse[iq] = o.detach(), e.T.detach()
        if d_out is not None and aq.length:
            loss = loss + (o * d_out.flatten(0, -3)[iq].to(dtype)).sum()
            if d_lse is not None:
                own = (d_lse if packed else d_lse.transpose(0, 1).flatten(1)).T[iq].T.to(dtype)
                alive = e.detach() > -torch.inf
                loss = loss + (e[alive] * own[alive]).sum()
    out = out.view(*r.q.shape[:-1], -1) if out.numel() else out.view(*r.q.shape[:-1], r.v.shape[-1])
    lse = lse.T if packed else lse.view(*r.q.shape[:2], r.q.shape[2]).transpose(1, 2)
    if d_out is None:
        return out, lse
    if loss.requires_grad:
        loss.backward()
    return (
        out,
        lse,
        [x.grad if x is None or x.grad is not None else torch.zeros_like(x) for x in leaves]
        + [None if sink is None else torch.zeros_like(sink) if sink.grad is None else sink.grad],
    )


__all__ = ["Dense", "Request", "backward", "forward", "reference"]
