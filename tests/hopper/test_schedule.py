"""The order of work tiles, on ints: every tile once, and the longest first under a mask."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.configurations import CONFIGURATIONS, PACKED, PACKED_USED, PADDED
from flash3.mask import MaskKind

pytest.importorskip("cutlass")


@pytest.mark.parametrize("mask", [MaskKind.FULL, MaskKind.CAUSAL])
def test_every_tile_once(mask: MaskKind) -> None:
    from flash3.backends.hopper.schedule import tile_in

    spec = replace(CONFIGURATIONS["128_full"][0], mask_kind=mask)
    for q_blocks in (1, 2, 7):
        for heads in (1, 3, 16, 17):
            for group in (1, 2, 16, 40):
                order = [tile_in(i, q_blocks, heads, group, spec) for i in range(q_blocks * heads)]
                assert sorted(order) == [(b, h) for b in range(q_blocks) for h in range(heads)]
                first_group = [b for b, _ in order[: q_blocks * min(group, heads)]]
                assert first_group == sorted(first_group, reverse=mask is MaskKind.CAUSAL)


def test_every_gap_row_is_cleared_once() -> None:
    """Whatever the numbers of gaps and spare warps; and where warps outnumber gaps, all but a few of them have a share."""
    from flash3.backends.hopper.clear import num_gaps, shares_of

    for gaps, warps in itertools.product((1, 2, 3, 5, 64, 100), (3, 6, 99, 396)):
        shares = shares_of(gaps, warps)
        taken = sorted(n for worker in range(warps) for n in range(worker, gaps * shares, warps))
        assert taken == list(range(gaps * shares))
        assert gaps * shares > warps - gaps
        for length in (0, 1, 7, 400):
            rows = sorted((n % gaps, row) for n in taken for row in range(n // gaps, length, shares))
            assert rows == [(gap, row) for gap in range(gaps) for row in range(length)]
    assert [num_gaps(layout, 7) for layout in (PADDED, PACKED, PACKED_USED)] == [7, 1, 8]


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64])
def test_rows_of_a_tile_that_heads_share(heads: int) -> None:
    """Row r is query r // heads of head r % heads. The kernel divides a thread's first row only, its mask once per tile: the second row's
    query lies ROW_STEP // heads further."""
    from flash3.backends.hopper.fragments import ROW_STEP

    for thread in range(512):
        first_row = thread // 32 * 16 + thread % 32 // 4
        for r in range(2):
            assert (first_row + ROW_STEP * r) // heads == first_row // heads + ROW_STEP // heads * r


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 64])
def test_every_load_of_queries_holds_a_row(heads: int) -> None:
    """Of ragged sequences TMA must not be asked for rows that all lie past the end; rows within it are where they belong."""
    from flash3.backends.hopper.extents import last_block
    from flash3.backends.hopper.tiles import ROWS_PER_CONSUMER

    rows = ROWS_PER_CONSUMER // heads
    for length, consumers in itertools.product(range(1, 6 * rows + 2), (1, 2, 3, 4)):
        for q_block in range(-(-length // (rows * consumers))):
            for consumer in range(consumers):
                asked = q_block * consumers + consumer
                block = min(asked, last_block(length, rows))
                assert 0 <= block * rows < length
                assert block == asked or asked * rows >= length
