"""How the sequences of a batch lie in storage. Queries and keys each have a layout of their own.

A field holds whatever the framework calls a tensor, or its description (`problem.TensorInfo`): the layouts themselves know no framework.
`extents` spells the rules out in plain Python, for the CPU, the oracle and tests; `check_values` holds them against the storage.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any


class SequenceKind(enum.Enum):
    DENSE = "dense"
    PACKED = "packed"
    PADDED = "padded"
    PAGED = "paged"


@dataclass(frozen=True)
class Dense:
    """(batch, length, heads, dim): every sequence fills its row."""

    kind = SequenceKind.DENSE


@dataclass(frozen=True, kw_only=True)
class Packed:
    """(total, heads, dim): sequence i is rows cu_seqlens[i] … cu_seqlens[i + 1] - 1, of which the first used[i] count.

    cu_seqlens int32 (batch + 1,); used int32 (batch,) or None; max_length an int, or None when only the device knows it.
    """

    cu_seqlens: Any
    max_length: int | None = None
    used: Any = None
    kind = SequenceKind.PACKED


@dataclass(frozen=True, kw_only=True)
class Padded:
    """(rows, capacity, heads, dim): sequence i is slots leftpad[i] … lengths[i] - 1 of row batch_index[i].

    lengths int32 (batch,), leftpad *included* (FlashAttention-3's rule); leftpad and batch_index int32 (batch,) or None (0; i itself).
    """

    lengths: Any
    leftpad: Any = None
    batch_index: Any = None
    kind = SequenceKind.PADDED


@dataclass(frozen=True, kw_only=True)
class Paged:
    """(pages, page_size, heads, dim): slot s of sequence i is slot s % page_size of page page_table[batch_index[i], s // page_size].

    page_table int32 (rows, pages per row); lengths, leftpad and batch_index as in Padded.
    """

    page_table: Any
    lengths: Any
    leftpad: Any = None
    batch_index: Any = None
    kind = SequenceKind.PAGED


Sequences = Dense | Packed | Padded | Paged


def map_tensors(layout: Sequences, change: Callable[[Any], Any]) -> Any:
    """The same layout with `change` applied to each of its tensors (max_length and None stay)."""
    if isinstance(layout, Dense):
        return layout
    values = {f.name: getattr(layout, f.name) for f in fields(layout) if f.name != "max_length"}
    return replace(layout, **{name: change(value) for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class Extent:
    """Where one sequence lies: slots start … start + length - 1 of `row` (Packed: of the one packed row, 0)."""

    row: int
    start: int
    length: int


def extents(layout: Sequences, storage: tuple[int, ...]) -> list[Extent]:
    """One Extent per sequence. `storage` is the shape of the tensor that holds them. Reads the layout's values.

    A length that ends before its leftpad is an empty sequence.
    """
    match layout:
        case Dense():
            return [Extent(row, 0, storage[1]) for row in range(storage[0])]
        case Packed():
            starts = layout.cu_seqlens.tolist()
            lengths = [b - a for a, b in itertools.pairwise(starts)]
            if layout.used is not None:
                lengths = layout.used.tolist()
            return [Extent(0, start, length) for start, length in zip(starts, lengths, strict=False)]
        case _:
            ends = layout.lengths.tolist()
            pads = [0] * len(ends) if layout.leftpad is None else layout.leftpad.tolist()
            rows = list(range(len(ends))) if layout.batch_index is None else layout.batch_index.tolist()
            return [Extent(row, pad, max(0, end - pad)) for row, pad, end in zip(rows, pads, ends, strict=True)]


def check_values(name: str, shape: tuple[int, ...], layout: Sequences) -> None:
    """Validate the values of one layout (`name` is q or k) against the shape of its storage. They are read.

    Raises:
        ValueError: decreasing or out-of-range cu_seqlens, lengths beyond their storage, pages or rows that do not exist.
    """
    match layout:
        case Packed():
            _check_packed_values(name, shape, layout)
        case Padded() | Paged():
            _check_row_values(shape, layout)


def _check_range(name: str, values: list[int], low: int, high: int, what: str) -> None:
    for i, value in enumerate(values):
        if not low <= value <= high:
            raise ValueError(f"{name}[{i}] is {value}; allowed: {low} to {high} ({what})")


def _check_packed_values(name: str, shape: tuple[int, ...], layout: Packed) -> None:
    cu = layout.cu_seqlens.tolist()
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens_{name} must start with 0, got {cu[0]}")
    for i, (a, b) in enumerate(itertools.pairwise(cu)):
        if b < a:
            raise ValueError(f"cu_seqlens_{name} must not decrease, got {a} then {b} at index {i + 1}")
    if cu[-1] > shape[0]:
        raise ValueError(f"cu_seqlens_{name} ends at {cu[-1]}, but {name} has only {shape[0]} rows")
    room = [b - a for a, b in itertools.pairwise(cu)]
    if layout.used is not None:
        used = layout.used.tolist()
        for i, (length, space) in enumerate(zip(used, room, strict=True)):
            if not 0 <= length <= space:
                raise ValueError(f"seqused_{name}[{i}] is {length}; allowed: 0 to {space} (the sequence's rows)")
        room = used
    if layout.max_length is not None and room and max(room) > layout.max_length:
        raise ValueError(f"max_seqlen_{name} is {layout.max_length}, but a sequence has {max(room)} tokens")


def _check_row_values(shape: tuple[int, ...], layout: Padded | Paged) -> None:
    paged = isinstance(layout, Paged)
    rows = layout.page_table.shape[0] if isinstance(layout, Paged) else shape[0]
    capacity = layout.page_table.shape[1] * shape[1] if isinstance(layout, Paged) else shape[1]
    lengths = layout.lengths.tolist()
    _check_range("lengths", lengths, 0, capacity, "the cache's capacity")
    if layout.leftpad is not None:
        _check_range("leftpad", layout.leftpad.tolist(), 0, capacity, "the cache's capacity")
    chosen = list(range(len(lengths)))
    if layout.batch_index is not None:
        chosen = layout.batch_index.tolist()
        _check_range("batch_index", chosen, 0, rows - 1, "the cache's rows")
    if paged:
        _check_pages(shape, layout, chosen, lengths)


def _check_pages(shape: tuple[int, ...], layout: Any, chosen: list[int], lengths: list[int]) -> None:
    """Only the entries that a sequence uses count: the rest of a row may hold anything."""
    pages, page_size = shape[0], shape[1]
    table = layout.page_table.tolist()
    pads = [0] * len(lengths) if layout.leftpad is None else layout.leftpad.tolist()
    for i, (row, pad, length) in enumerate(zip(chosen, pads, lengths, strict=True)):
        for j in range(pad // page_size, -(-length // page_size)):
            if not 0 <= table[row][j] < pages:
                raise ValueError(
                    f"page_table[{row}, {j}] is {table[row][j]} for sequence {i}; allowed: 0 to {pages - 1} (the cache's pages)"
                )
