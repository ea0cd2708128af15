"""Zeros ahead of the tiles that add to them: every block is cleared once, long before, by a tile that was launched before."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cutlass")

from flash3.backends.hopper.backward_clear import WAVES, columns_ahead, slice_of, slices_of
from flash3.mask import MaskKind

CASES = [(1, 1, 1), (1, 300, 2), (4, 512, 8), (16, 128, 32), (64, 32, 128), (512, 4, 1024), (3, 50, 1), (5, 40, 7)]
"""Tiles of a column, columns, blocks of queries of a head."""


@pytest.mark.parametrize(("num_tiles", "columns", "blocks"), CASES)
@pytest.mark.parametrize("multiprocessors", [1, 4, 132])
@pytest.mark.parametrize("kind", [MaskKind.FULL, MaskKind.CAUSAL, MaskKind.WINDOW])
def test_cleared_once_and_before(num_tiles: int, columns: int, blocks: int, multiprocessors: int, kind: MaskKind) -> None:
    ahead = columns_ahead(num_tiles, multiprocessors)
    cleared = {column: [0] * blocks for column in range(columns)}
    counters = dict.fromkeys(range(columns), 0)
    last_clearer = dict.fromkeys(range(columns), -1)
    for column in range(min(ahead, columns)):  # backward_prepare
        cleared[column], counters[column] = [1] * blocks, slices_of(num_tiles)
    for launched in range(columns * num_tiles):
        column, kv_block = launched // num_tiles + ahead, launched % num_tiles
        if column < columns:
            first, end = slice_of(kv_block, blocks, num_tiles, kind)
            for block in range(first, end):
                cleared[column][block] += 1
            counters[column] += 1
            last_clearer[column] = launched
    assert all(times == [1] * blocks for times in cleared.values())
    assert set(counters.values()) == {slices_of(num_tiles)}
    for column, launched in last_clearer.items():
        assert launched == -1 or launched + WAVES * multiprocessors < column * num_tiles


def test_causal_slices_are_as_long_as_their_tiles() -> None:
    """The first of eight tiles is seen by every block of queries, the last by an eighth of them."""
    sizes = [end - first for first, end in (slice_of(i, 640, 8, MaskKind.CAUSAL) for i in range(8))]
    assert sizes == [150, 130, 110, 90, 70, 50, 30, 10]


class Persistent:
    """Persistent blocks on fewer multiprocessors than they were meant for, in any order of their steps: a producer that takes tickets,
    begins a tile, waits for its column's zeros and goes on; and spare warps that clear beside it, when they come to it."""

    def __init__(self, num_tiles: int, columns: int, resident: int, launched: int, own_first: bool):
        self.num_tiles, self.total, self.launched = num_tiles, num_tiles * columns, launched
        self.ahead = columns_ahead(num_tiles, 1)
        self.counters = [slices_of(num_tiles) if column < self.ahead else 0 for column in range(columns)]
        self.next_ticket = launched if own_first else 0
        self.own_first, self.waiting_blocks = own_first, list(range(launched))
        self.at: list[int | None] = [self.launch() for _ in range(min(resident, launched))]
        self.to_clear: list[int] = [index for index in self.at if index is not None and index < self.total]

    def launch(self) -> int | None:
        if not self.waiting_blocks:
            return None
        block = self.waiting_blocks.pop(0)
        return block if self.own_first else self.ticket()

    def ticket(self) -> int:
        self.next_ticket += 1
        return self.next_ticket - 1

    def steps(self) -> list[tuple[str, int]]:
        able = [("clear", i) for i in range(len(self.to_clear))]
        for i, index in enumerate(self.at):
            if index is not None and (index >= self.total or self.counters[index // self.num_tiles] == slices_of(self.num_tiles)):
                able.append(("go on", i))
        return able

    def step(self, kind: str, i: int) -> None:
        if kind == "clear":
            column = self.to_clear.pop(i) // self.num_tiles + self.ahead
            if column < len(self.counters):
                self.counters[column] += 1
            return
        index = self.at[i]
        assert index is not None
        self.at[i] = new = self.launch() if index >= self.total else self.ticket()
        if new is not None and new < self.total:
            self.to_clear.append(new)

    def run(self, seed: int) -> bool:
        """Whether all end."""
        order = random.Random(seed)
        while able := self.steps():
            self.step(*order.choice(able))
        return all(index is None for index in self.at) and not self.to_clear


@pytest.mark.parametrize("resident", [1, 2, 5])
def test_persistent_blocks_end_though_some_have_no_room(resident: int) -> None:
    for seed in range(30):
        assert Persistent(num_tiles=3, columns=9, resident=resident, launched=5, own_first=False).run(seed)
    assert not Persistent(num_tiles=1, columns=30, resident=1, launched=8, own_first=True).run(0)
