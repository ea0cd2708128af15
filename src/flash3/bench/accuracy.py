"""How far a result is from float64, beside how far plain torch in the same dtype is: the test suite's rule (reference.error).

Large calls are sampled: bands of rows at the start, in the middle and at the end of the first and the longest sequence, for the first and
the last key head. A band of rows is a call of its own, with the mask's offset moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .. import reference
from ..problem import Request, Task
from ..reference.error import GRADIENT_FACTOR
from ..sequences import Dense, Paged, SequenceKind
from .case import Case

BAND = 64
MOST_PAIRS = 1 << 25
"""(query, key) pairs of one key head whose gradients are held against float64; larger calls leave the gradients unchecked."""


@dataclass(frozen=True)
class Errors:
    """Largest error against float64 and largest that was allowed, over all samples. `faults`: what is wrong, empty when all is well."""

    max_error: float
    max_allowed: float
    faults: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.max_error / self.max_allowed if self.max_allowed else float(self.max_error > 0)


@dataclass(frozen=True)
class Sample:
    """A part of a result: where it lies, what it should be, and how well plain torch hits it."""

    at: Callable[[tuple[Tensor, ...]], Tensor]
    exact: Tensor
    plain: Tensor


class Truth:
    """What the results of a case should be, where they are sampled; made once, for all providers."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def samples(self) -> list[Sample]:
        """None at all: the gradients of so large a call are left unchecked."""
        return list(_backward(self.case) if self.case.task is Task.BACKWARD else _forward(self.case))

    def errors(self, outputs: tuple[Tensor, ...]) -> Errors | None:
        """Of a provider's outputs, (out,) or (dq, dk, dv). None: too large to be checked."""
        queries = self.case.request.q
        if outputs[0].shape[:-1] != queries.shape[:-1]:
            return Errors(float("inf"), 0.0, (f"shape {tuple(outputs[0].shape)} for queries {tuple(queries.shape)}",))
        factor = GRADIENT_FACTOR if self.case.task is Task.BACKWARD else 2.0
        reports = [reference.compare(s.at(outputs), s.exact, s.plain, factor=factor) for s in self.samples]
        if not reports:
            return None
        faults = tuple(dict.fromkeys(fault for report in reports for fault in report.faults))
        worst = max(reports, key=lambda report: report.max_error / max(report.max_allowed, 1e-30))
        return Errors(worst.max_error, worst.max_allowed, faults)


def errors(case: Case, outputs: tuple[Tensor, ...]) -> Errors | None:
    """Of one result."""
    return Truth(case).errors(outputs)


def _forward(case: Case) -> Iterator[Sample]:
    for part, where in _parts(case):
        for first in _bands(part.q.shape[1]):
            band = _band(part, first)
            rows = slice(first, first + band.q.shape[1])
            exact, _ = reference.attention(band)
            with torch.no_grad():
                plain, _ = reference.plain(band)
            yield Sample(lambda outputs, where=where, rows=rows: where(outputs[0])[:, rows], exact, plain)  # type: ignore[misc]


def _backward(case: Case) -> Iterator[Sample]:
    assert case.d_out is not None
    for part, where in _parts(case):
        if part.q.shape[1] * part.q.shape[2] * part.k.shape[1] > MOST_PAIRS:
            return
        d_out = where(case.d_out)
        exact, plain = reference.gradients(part, d_out), reference.plain_gradients(part, d_out)
        for i, at in enumerate((where, where.keys, where.keys)):
            yield Sample(lambda outputs, i=i, at=at: at(outputs[i]), exact[i], plain[i])  # type: ignore[misc, arg-type]


@dataclass(frozen=True)
class Where:
    """A sequence and a key head of a call's tensors, as (1, length, heads, dim)."""

    layout: SequenceKind
    batch: int
    head: int
    group: int
    rows: slice
    key_rows: slice

    def __call__(self, t: Tensor) -> Tensor:
        """Of a tensor shaped as the queries."""
        heads = slice(self.head * self.group, (self.head + 1) * self.group)
        return t[None, self.rows, heads] if self.layout is SequenceKind.PACKED else t[self.batch : self.batch + 1, self.rows, heads]

    def keys(self, t: Tensor) -> Tensor:
        """Of a tensor shaped as the keys, pages put together."""
        heads = slice(self.head, self.head + 1)
        return t[None, self.key_rows, heads] if self.layout is SequenceKind.PACKED else t[self.batch : self.batch + 1, self.key_rows, heads]


def _parts(case: Case) -> Iterator[tuple[Request, Where]]:
    w, r = case.workload, case.request
    k, v = (_unpaged(t, r.k_sequences) if isinstance(r.k_sequences, Paged) else t for t in (r.k, r.v))
    starts = [(0, 0), *zip(accumulate(m for m, _ in w.lengths), accumulate(n for _, n in w.lengths), strict=True)]
    longest = max(range(w.batch), key=lambda i: w.lengths[i][1])
    group = w.heads_q // w.heads_kv
    for batch in dict.fromkeys((0, longest)):
        (m, n), (q_start, k_start) = w.lengths[batch], starts[batch]
        if w.layout is not SequenceKind.PACKED:
            q_start = k_start = 0
        for head in dict.fromkeys((0, w.heads_kv - 1)):
            where = Where(w.layout, batch, head, group, slice(q_start, q_start + m), slice(k_start, k_start + n))
            sink = None if r.sink is None else r.sink[head * group : (head + 1) * group]
            q, own_k, own_v = where(r.q), where.keys(k), where.keys(v)
            yield replace(r, q=q, k=own_k, v=own_v, q_sequences=Dense(), k_sequences=Dense(), sink=sink, task=Task.FORWARD), where


def _unpaged(t: Tensor, pages: Paged) -> Tensor:
    return t[pages.page_table].flatten(1, 2)


def _bands(q_len: int) -> list[int]:
    if q_len <= 3 * BAND:
        return list(range(0, q_len, BAND))
    return [0, (q_len - BAND) // 2, q_len - BAND]


def _band(part: Request, first: int) -> Request:
    """Rows first … first + BAND - 1."""
    q_len, k_len = part.q.shape[1], part.k.shape[1]
    offset = part.mask.bounds(q_len, k_len).q_offset + first
    return replace(part, q=part.q[:, first : first + BAND], mask=replace(part.mask, q_offset=offset))
