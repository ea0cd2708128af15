"""Layouts: where each sequence's tokens lie, and what is refused when the values are looked at."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flash3.sequences import Dense, Extent, Packed, Padded, Paged, SequenceKind, check_values, extents, map_tensors


def ints(*values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_dense_fills_every_row() -> None:
    assert extents(Dense(), (2, 7, 4, 64)) == [Extent(0, 0, 7), Extent(1, 0, 7)]
    assert extents(Dense(), (0, 7, 4, 64)) == []
    assert extents(Dense(), (1, 0, 4, 64)) == [Extent(0, 0, 0)]


def test_packed_sequences_follow_one_another() -> None:
    layout = Packed(cu_seqlens=ints(0, 3, 3, 8))
    assert extents(layout, (10, 4, 64)) == [Extent(0, 0, 3), Extent(0, 3, 0), Extent(0, 3, 5)]
    assert extents(Packed(cu_seqlens=ints(0)), (10, 4, 64)) == []


def test_packed_used_lengths() -> None:
    layout = Packed(cu_seqlens=ints(0, 3, 8), used=ints(0, 4))
    assert extents(layout, (8, 4, 64)) == [Extent(0, 0, 0), Extent(0, 3, 4)]


def test_padded_lengths_include_the_left_padding() -> None:
    layout = Padded(lengths=ints(5, 2, 1), leftpad=ints(2, 2, 3))
    assert extents(layout, (3, 6, 4, 64)) == [Extent(0, 2, 3), Extent(1, 2, 0), Extent(2, 3, 0)]


def test_padded_rows_are_chosen() -> None:
    layout = Padded(lengths=ints(5, 2), batch_index=ints(3, 0))
    assert extents(layout, (4, 6, 4, 64)) == [Extent(3, 0, 5), Extent(0, 0, 2)]


def test_paged_extents_count_slots_of_a_table_row() -> None:
    layout = Paged(page_table=ints([0, 1], [2, 3], [4, 5]), lengths=ints(7, 3), leftpad=ints(1, 0), batch_index=ints(2, 1))
    assert extents(layout, (6, 4, 2, 64)) == [Extent(2, 1, 6), Extent(1, 0, 3)]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Dense(), SequenceKind.DENSE),
        (Packed(cu_seqlens=ints(0)), SequenceKind.PACKED),
        (Padded(lengths=ints()), SequenceKind.PADDED),
        (Paged(page_table=ints(), lengths=ints()), SequenceKind.PAGED),
    ],
)
def test_kind(layout: Any, kind: SequenceKind) -> None:
    assert layout.kind is kind
    assert map_tensors(layout, lambda t: t).kind is kind


def test_map_tensors_changes_tensors_only() -> None:
    packed = map_tensors(Packed(cu_seqlens=1, max_length=5, used=None), lambda t: t + 10)
    assert packed == Packed(cu_seqlens=11, max_length=5, used=None)
    paged = map_tensors(Paged(page_table=1, lengths=2, batch_index=3), lambda t: t + 10)
    assert paged == Paged(page_table=11, lengths=12, batch_index=13)
    assert map_tensors(Dense(), lambda t: 1 / 0) == Dense()


PACKED, PADDED, PAGES = (8, 4, 64), (3, 6, 4, 64), (5, 4, 2, 64)
TABLE = ints([0, 1], [4, 9], [2, 3])  # page 9 does not exist: legal while no length reaches it

GOOD = [
    (PACKED, Packed(cu_seqlens=ints(0, 3, 3, 8))),
    (PACKED, Packed(cu_seqlens=ints(0, 3, 5))),  # rows left over
    (PACKED, Packed(cu_seqlens=ints(0, 3, 8), used=ints(0, 5), max_length=5)),
    (PACKED, Packed(cu_seqlens=ints(0), max_length=0)),
    (PADDED, Padded(lengths=ints(0, 6, 3))),
    (PADDED, Padded(lengths=ints(1, 6), leftpad=ints(2, 6), batch_index=ints(2, 2))),
    (PAGES, Paged(page_table=TABLE, lengths=ints(8, 4, 0))),
    (PAGES, Paged(page_table=TABLE, lengths=ints(0, 4, 8), leftpad=ints(0, 0, 4))),
    (PADDED, Dense()),
]


@pytest.mark.parametrize(("shape", "layout"), GOOD)
def test_good_values(shape: tuple[int, ...], layout: Any) -> None:
    check_values("k", shape, layout)


BAD = [
    (PACKED, Packed(cu_seqlens=ints(1, 3, 8)), "cu_seqlens_k must start with 0, got 1"),
    (PACKED, Packed(cu_seqlens=ints(0, 5, 3)), "cu_seqlens_k must not decrease, got 5 then 3 at index 2"),
    (PACKED, Packed(cu_seqlens=ints(0, 5, 9)), "cu_seqlens_k ends at 9, but k has only 8 rows"),
    (PACKED, Packed(cu_seqlens=ints(0, 5, 8), used=ints(6, 0)), "seqused_k[0] is 6; allowed: 0 to 5"),
    (PACKED, Packed(cu_seqlens=ints(0, 5, 8), used=ints(5, -1)), "seqused_k[1] is -1; allowed: 0 to 3"),
    (PACKED, Packed(cu_seqlens=ints(0, 5, 8), max_length=4), "max_seqlen_k is 4, but a sequence has 5 tokens"),
    (PADDED, Padded(lengths=ints(1, 2, -1)), "lengths[2] is -1; allowed: 0 to 6"),
    (PADDED, Padded(lengths=ints(1, 7, 2)), "lengths[1] is 7; allowed: 0 to 6"),
    (PADDED, Padded(lengths=ints(1, 2, 3), leftpad=ints(0, -1, 0)), "leftpad[1] is -1; allowed: 0 to 6"),
    (PADDED, Padded(lengths=ints(1, 2, 3), leftpad=ints(0, 0, 7)), "leftpad[2] is 7; allowed: 0 to 6"),
    (PADDED, Padded(lengths=ints(1, 2), batch_index=ints(0, 3)), "batch_index[1] is 3; allowed: 0 to 2"),
    (PADDED, Padded(lengths=ints(1, 2), batch_index=ints(-1, 0)), "batch_index[0] is -1; allowed: 0 to 2"),
    (PAGES, Paged(page_table=TABLE, lengths=ints(8, 9, 0)), "lengths[1] is 9; allowed: 0 to 8"),
    (PAGES, Paged(page_table=TABLE, lengths=ints(8, 5, 0)), "page_table[1, 1] is 9 for sequence 1; allowed: 0 to 4"),
    (
        PAGES,
        Paged(
            page_table=TABLE,
            lengths=ints(
                5,
            ),
            batch_index=ints(1),
        ),
        "page_table[1, 1] is 9 for sequence 0; allowed: 0 to 4",
    ),
    (PAGES, Paged(page_table=-TABLE, lengths=ints(1, 1, 1)), "page_table[1, 0] is -4 for sequence 1; allowed: 0 to 4"),
]


@pytest.mark.parametrize(("shape", "layout", "message"), BAD)
def test_bad_values(shape: tuple[int, ...], layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_values("k", shape, layout)
