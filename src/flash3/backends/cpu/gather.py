"""From a layout to dense work: runs of equal sequences, seen as one batch.

Consecutive sequences with equal lengths and evenly spaced starts are one run: a strided view of the storage, without a copy. Pages are
gathered, only those that hold visible keys. What lies outside a sequence is sliced away, never multiplied by 0: NaN there cannot spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...problem import Request
from ...sequences import Dense, Extent, Packed, Paged, Sequences, extents


@dataclass(frozen=True)
class Run:
    """`count` sequences from number `first` on: sequence i lies at row + i · row_step, start + i · start_step. All have one length."""

    first: int
    count: int
    row: int
    start: int
    length: int
    row_step: int = 0
    start_step: int = 0

    def narrowed(self, begin: int, end: int) -> Run:
        """Slots [begin, end) of each sequence alone."""
        return replace(self, start=self.start + begin, length=end - begin)


def runs(request: Request) -> list[tuple[Run, Run]]:
    """The batch as runs of queries and keys, in order; sequences without queries are left out."""
    q, k = request.q, request.k
    if isinstance(request.q_sequences, Dense) and isinstance(request.k_sequences, Dense):
        whole = Run(0, q.shape[0], 0, 0, q.shape[1], row_step=1)
        return [(whole, replace(whole, length=k.shape[1]))] if q.numel() else []
    found: list[tuple[Run, Run]] = []
    paged = isinstance(request.k_sequences, Paged)
    pairs = zip(extents(request.q_sequences, q.shape), extents(request.k_sequences, k.shape), strict=True)
    for number, (at_q, at_k) in enumerate(pairs):
        if at_q.length == 0 or q.shape[-2] == 0:
            continue
        if found and found[-1][0].first + found[-1][0].count == number:
            longer_q, longer_k = _extended(found[-1][0], at_q), _extended(found[-1][1], at_k, paged)
            if longer_q and longer_k:
                found[-1] = longer_q, longer_k
                continue
        found.append((Run(number, 1, at_q.row, at_q.start, at_q.length), Run(number, 1, at_k.row, at_k.start, at_k.length)))
    return found


def _extended(run: Run, at: Extent, paged: bool = False) -> Run | None:
    """The run with one more sequence, or None where that one does not continue it."""
    row_step, start_step = at.row - run.row, at.start - run.start
    if run.count > 1:
        row_step, start_step = row_step // run.count, start_step // run.count
    forward = row_step >= 0 and start_step >= 0 and row_step + start_step > 0
    lands = at == Extent(run.row + run.count * row_step, run.start + run.count * start_step, run.length)
    keeps = run.count == 1 or (row_step, start_step) == (run.row_step, run.start_step)
    if not (forward and lands and keeps) or (paged and start_step):
        return None
    return replace(run, count=run.count + 1, row_step=row_step, start_step=start_step)


def view(x: Tensor, layout: Sequences, run: Run) -> Tensor:
    """The run's slots of x ((row,) slot, heads, …) as (count, heads, length, …): a view of the storage. Not for pages."""
    row_stride, strides, tail = (0, x.stride(), x.shape[1:]) if isinstance(layout, Packed) else (x.stride(0), x.stride()[1:], x.shape[2:])
    slot = strides[0]
    start = x.storage_offset() + run.row * row_stride + run.start * slot
    step = run.row_step * row_stride + run.start_step * slot
    return x.as_strided((run.count, run.length, *tail), (step, *strides), start).transpose(1, 2)


def lse_view(lse: Tensor, layout: Sequences, run: Run) -> Tensor:
    """The run's part of an LSE, (batch, heads, q_len) or packed (heads, total), as (count, heads, length)."""
    return view(lse.transpose(-1, -2), layout, run)


def keys(request: Request, run: Run) -> tuple[Tensor, Tensor]:
    """The run's slots of K and V as (count, heads, length, dim): views, or copies of the pages that hold them."""
    layout = request.k_sequences
    if not isinstance(layout, Paged):
        return view(request.k, layout, run), view(request.v, layout, run)
    pages, skip = _pages(request.k, layout, run)
    chosen = pages.flatten()
    k, v = (
        x.index_select(0, chosen).view(run.count, -1, *x.shape[2:]) if len(chosen) else _no_slots(x, run) for x in (request.k, request.v)
    )
    slots = slice(skip, skip + run.length)
    return k[:, slots].transpose(1, 2), v[:, slots].transpose(1, 2)


def _no_slots(x: Tensor, run: Run) -> Tensor:
    return x.new_empty(run.count, 0, *x.shape[2:])


def add_keys(total: Tensor, layout: Sequences, run: Run, part: Tensor) -> None:
    """Add a gradient (count, heads, length, dim) to the run's slots of `total`; sequences may share pages, and rows of a cache."""
    if isinstance(layout, Dense):
        view(total, layout, run).copy_(part)  # every row is a sequence of its own
        return
    if not isinstance(layout, Paged):
        view(total, layout, run).add_(part)
        return
    pages, skip = _pages(total, layout, run)
    slots = total.new_zeros(run.count, pages.shape[1] * total.shape[1], *total.shape[2:])
    slots[:, skip : skip + run.length] = part.transpose(1, 2)
    total.index_add_(0, pages.flatten(), slots.view(-1, *total.shape[1:]))


def _pages(x: Tensor, layout: Paged, run: Run) -> tuple[Tensor, int]:
    """Pages (count, pages per sequence) that hold the run's slots, and how many slots of the first page come before them."""
    size = x.shape[1]
    first = run.start // size
    stop = -(-(run.start + run.length) // size) if run.length else first  # entries past a sequence's end may hold anything
    rows = slice(run.row, run.row + run.count * max(1, run.row_step), max(1, run.row_step))
    return layout.page_table[rows, first:stop], run.start - first * size
