"""Random batches of unequal sequences, laid out in storage in every way that flash3 knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flash3.problem import Request
from flash3.sequences import Packed, Padded, Paged


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@dataclass(frozen=True)
class Batch:
    """Sequences of q (m, heads_q, d), k (n, heads_kv, d) and v (n, heads_kv, value_dim)."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def random(
        cls, lengths: Sequence[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 8), seed: int = 0
    ) -> Batch:
        """float32, normally distributed. `lengths`: (q_len, k_len) of each sequence; heads (q, kv); dims (head_dim, value_dim)."""
        g = torch.Generator().manual_seed(seed)
        q = [torch.randn(m, heads[0], dims[0], generator=g) for m, _ in lengths]
        k = [torch.randn(n, heads[1], dims[0], generator=g) for _, n in lengths]
        v = [torch.randn(n, heads[1], dims[1], generator=g) for _, n in lengths]
        return cls(q, k, v)

    def one(self, i: int, **options: Any) -> Request:
        """Sequence i alone, dense with batch 1."""
        return Request(q=self.q[i][None], k=self.k[i][None], v=self.v[i][None], **options)

    def packed(self, **options: Any) -> Request:
        """Queries and keys packed."""
        q, q_sequences = pack(self.q)
        k, k_sequences = pack(self.k)
        v, _ = pack(self.v)
        return Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=k_sequences, **options)


def pack(pieces: list[Tensor], room: int = 0, fill: float = 0.0) -> tuple[Tensor, Packed]:
    """(total, heads, dim). `room`: unused rows after each sequence, holding `fill`."""
    rows = [torch.cat([p, p.new_full((room, *p.shape[1:]), fill)]) for p in pieces]
    cu = int32([0, *accumulate(len(r) for r in rows)])
    used = int32([len(p) for p in pieces]) if room else None
    return torch.cat(rows), Packed(cu_seqlens=cu, used=used)


def pad(
    pieces: list[Tensor], *, fill: float = 0.0, room: int = 2, leftpad: Sequence[int] | None = None, rows: Sequence[int] | None = None
) -> tuple[Tensor, Padded]:
    """(rows, capacity, heads, dim), sequence i in row rows[i], after leftpad[i] slots; unused slots hold `fill`."""
    pads = [0] * len(pieces) if leftpad is None else list(leftpad)
    lengths = [a + len(p) for a, p in zip(pads, pieces, strict=True)]
    where = list(range(len(pieces))) if rows is None else list(rows)
    storage = pieces[0].new_full((max(where) + 1, max(lengths) + room, *pieces[0].shape[1:]), fill)
    for row, a, b, p in zip(where, pads, lengths, pieces, strict=True):
        storage[row, a:b] = p
    layout = Padded(
        lengths=int32(lengths),
        leftpad=None if leftpad is None else int32(leftpad),
        batch_index=None if rows is None else int32(rows),
    )
    return storage, layout


def page(padded: Tensor, layout: Padded, page_size: int, *, fill: float = 0.0, seed: int = 0) -> tuple[Tensor, Paged]:
    """The same rows in pages (pages, page_size, heads, dim), shuffled, with one page that no table lists and holds `fill`."""
    rows, capacity = padded.shape[:2]
    per_row = -(-capacity // page_size)
    slots = padded.new_full((rows, per_row * page_size, *padded.shape[2:]), fill)
    slots[:, :capacity] = padded
    order = torch.randperm(rows * per_row + 1, generator=torch.Generator().manual_seed(seed))
    pages = padded.new_full((len(order), page_size, *padded.shape[2:]), fill)
    pages[order[:-1]] = slots.reshape(rows * per_row, page_size, *padded.shape[2:])
    table = order[:-1].reshape(rows, per_row).int()
    return pages, Paged(page_table=table, lengths=layout.lengths, leftpad=layout.leftpad, batch_index=layout.batch_index)


def close(ours: Tensor, exact: Tensor, wide: float = 1e-12) -> None:
    """Equal up to the rounding of float32 (up to `wide` for two float64 results), infinities and NaN in the same places."""
    tolerance = wide if ours.dtype == exact.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
