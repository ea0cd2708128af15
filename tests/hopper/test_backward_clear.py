"""Zeros ahead of the tiles that add to them: every block is cleared once, long before, by a tile that was launched before."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from flash3.backends.hopper.backward_clear import SPARE_WARPS, WAVES, columns_ahead, slice_of, slices_of

CASES = [(1, 1, 1), (1, 300, 2), (4, 512, 8), (16, 128, 32), (64, 32, 128), (512, 4, 1024), (3, 50, 1), (5, 40, 7)]
"""Tiles of a column, columns, blocks of queries of a head."""


@pytest.mark.parametrize(("num_tiles", "columns", "blocks"), CASES)
@pytest.mark.parametrize("multiprocessors", [1, 4, 132])
def test_cleared_once_and_before(num_tiles: int, columns: int, blocks: int, multiprocessors: int) -> None:
    ahead = columns_ahead(num_tiles, multiprocessors)
    cleared = {column: [0] * blocks for column in range(columns)}
    counters = dict.fromkeys(range(columns), 0)
    last_clearer = dict.fromkeys(range(columns), -1)
    for column in range(min(ahead, columns)):  # backward_prepare
        cleared[column], counters[column] = [1] * blocks, slices_of(num_tiles)
    for launched in range(columns * num_tiles):
        column, kv_block = launched // num_tiles + ahead, launched % num_tiles
        if column < columns:
            first, end = slice_of(kv_block, blocks, num_tiles)
            for block in range(first, end):
                cleared[column][block] += 1
            counters[column] += SPARE_WARPS
            last_clearer[column] = launched
    assert all(times == [1] * blocks for times in cleared.values())
    assert set(counters.values()) == {slices_of(num_tiles)}
    for column, launched in last_clearer.items():
        assert launched == -1 or launched + WAVES * multiprocessors < column * num_tiles
