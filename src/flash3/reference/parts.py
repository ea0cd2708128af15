"""A call taken apart into pieces that do not meet: one sequence, and one key head with the query heads that share it.

A storage's *tokens* are all its dimensions before (heads, dim), flattened. Every layout then says the same thing: which tokens, in
order, make up sequence i. Reading is `tokens[index]`, writing back is `index_add_`, and what no index names is never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..problem import Request, default_scale
from ..sequences import Packed, Paged, Sequences, extents


@dataclass(frozen=True, kw_only=True)
class Part:
    """One sequence of m queries and n keys under one key head with its `group` query heads.

    q (group, m, head_dim), k (n, head_dim), v (n, value_dim), qv (group, m, value_dim) or None, sink (group,) or None: the values meant,
    FP8 scales multiplied in. seen (m, n) bool. q_tokens (m,) and k_tokens (n,) say where they lie, `heads` and `kv_head` of which heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None
    sink: Tensor | None
    seen: Tensor
    scale: float
    softcap: float
    q_tokens: Tensor
    k_tokens: Tensor
    heads: slice
    kv_head: int


def tokens(t: Tensor) -> Tensor:
    """(…, heads, dim) as (tokens, heads, dim)."""
    return t.reshape(t.shape[:-2].numel(), *t.shape[-2:])


def token_indices(layout: Sequences, storage: tuple[int, ...], device: Any = None) -> list[Tensor]:
    """For each sequence, the int64 indices of its tokens in a storage of this shape. Reads the layout's values."""
    found = []
    for extent in extents(layout, storage):
        slot = torch.arange(extent.start, extent.start + extent.length, device=device)
        match layout:
            case Packed():
                found.append(slot)
            case Paged():
                page_size = storage[1]
                page = layout.page_table[extent.row].long()[slot // page_size]
                found.append(page * page_size + slot % page_size)
            case _:
                found.append(extent.row * storage[1] + slot)
    return found


def parts(request: Request, dtype: torch.dtype) -> Iterator[Part]:
    """Every part of a request, its tensors converted to `dtype`."""
    r = request
    q, k, v = tokens(r.q), tokens(r.k), tokens(r.v)
    qv = None if r.qv is None else tokens(r.qv)
    device = r.q.device
    queries = token_indices(r.q_sequences, tuple(r.q.shape), device)
    keys = token_indices(r.k_sequences, tuple(r.k.shape), device)

    def scaled(t: Tensor, scale: Tensor | None, sequence: int, kv_head: int) -> Tensor:
        t = t.to(dtype)
        return t if scale is None else t * scale[sequence, kv_head].to(dtype)

    for i, (q_tokens, k_tokens) in enumerate(zip(queries, keys, strict=True)):
        seen = torch.from_numpy(r.mask.dense(len(q_tokens), len(k_tokens))).to(device)
        for kv_head in range(k.shape[1] if q.shape[1] else 0):
            group = q.shape[1] // k.shape[1]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            yield Part(
                q=scaled(q[q_tokens, heads].transpose(0, 1), r.q_scale, i, kv_head),
                k=scaled(k[k_tokens, kv_head], r.k_scale, i, kv_head),
                v=scaled(v[k_tokens, kv_head], r.v_scale, i, kv_head),
                qv=None if qv is None else scaled(qv[q_tokens, heads].transpose(0, 1), r.q_scale, i, kv_head),
                sink=None if r.sink is None else r.sink[heads].to(dtype),
                seen=seen,
                scale=default_scale(r),
                softcap=float(r.softcap),
                q_tokens=q_tokens,
                k_tokens=k_tokens,
                heads=heads,
                kv_head=kv_head,
            )


@dataclass(frozen=True)
class Result:
    """out and lse under construction: by token, empty (0 and -inf) until a part is put in."""

    out: Tensor  # (tokens, heads_q, value_dim)
    lse: Tensor  # (tokens, heads_q)

    @classmethod
    def empty(cls, request: Request, dtype: torch.dtype, lse_dtype: torch.dtype) -> Result:
        shape, device = request.q.shape[:-1], request.q.device
        count, heads = shape[:-1].numel(), shape[-1]
        return cls(
            torch.zeros(count, heads, request.v.shape[-1], dtype=dtype, device=device),
            torch.full((count, heads), -torch.inf, dtype=lse_dtype, device=device),
        )

    def put(self, part: Part, out: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """out (group, m, value_dim) and lse (group, m) of one part, or of those of its rows."""
        where = part.q_tokens[rows], part.heads
        self.out[where] = out.transpose(0, 1).to(self.out.dtype)
        self.lse[where] = lse.transpose(0, 1).to(self.lse.dtype)

    def shaped(self, request: Request) -> tuple[Tensor, Tensor]:
        """out as q's shape with value_dim; lse as (batch, heads_q, q_len), packed (heads_q, total_q)."""
        shape = request.q.shape[:-1]
        return self.out.reshape(*shape, self.out.shape[-1]), self.lse.reshape(shape).transpose(-1, -2)


def lse_by_token(lse: Tensor) -> Tensor:
    """(batch, heads_q, q_len) or (heads_q, total_q) as (tokens, heads_q): what `Result.shaped` undoes."""
    by_token = lse.transpose(-1, -2)
    return by_token.reshape(by_token.shape[:-1].numel(), by_token.shape[-1])
