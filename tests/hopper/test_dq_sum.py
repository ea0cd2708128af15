"""Key tiles at a float32 sum of dQ that they begin and end themselves: every order of their steps, for every walk of a few tiles.

A tile's steps at a block are those of dq_sum.keep_gate: take the block's word, wait where another has taken it and has not stored, touch
the sum, count off. The model has no cache: what a step does, everyone sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from .machine import Violation, require, search

pytest.importorskip("cutlass")

from flash3.backends.hopper.dq_sum import LEFT, STORED, TAKEN

NEW, MARKED, INSIDE = range(3)
"""Where a tile stands at its block: not yet there, it has taken the word, its share is in the sum."""


@dataclass(frozen=True)
class Tiles:
    """walks: each tile's blocks, in its order."""

    walks: tuple[tuple[int, ...], ...]
    waits: bool = True

    def visitors(self, block: int) -> int:
        return sum(block in walk for walk in self.walks)

    @property
    def blocks(self) -> int:
        return 1 + max(block for walk in self.walks for block in walk)

    def start(self) -> tuple[int, ...]:
        """(step, where, found) of each tile, then (word, shares, closed) of each block."""
        words = [n for block in range(self.blocks) for n in (self.visitors(block), 0, 0)]
        return (0, NEW, 0) * len(self.walks) + tuple(words)

    def successors(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for tile, walk in enumerate(self.walks):
            step, where, found = state[3 * tile : 3 * tile + 3]
            if step < len(walk):
                at = 3 * (len(self.walks) + walk[step])
                for mine, block in self.moves(step, where, found, state[at : at + 3], walk[step]):
                    new = list(state)
                    new[3 * tile : 3 * tile + 3], new[at : at + 3] = mine, block
                    yield tuple(new)

    def moves(self, step: int, where: int, found: int, record: tuple[int, ...], block: int) -> Iterator[tuple[list[int], list[int]]]:
        word, shares, closed = record
        if where == NEW:
            yield [step, MARKED, word], [word | TAKEN, shares, closed]
        elif where == MARKED and not found & TAKEN:
            require(shares == 0, "a store over shares that are there")
            yield [step, INSIDE, found], [word, 1, closed]
        elif where == MARKED and (word & STORED or not self.waits):
            require(shares > 0, "an addition to what nobody has stored")
            yield [step, INSIDE, found], [word, shares + 1, closed]
        elif where == INSIDE:
            last = word & LEFT == 1
            require(not last or shares == self.visitors(block), "converted before every share is there")
            yield [step + 1, NEW, 0], [word + (-1 if found & TAKEN else STORED - 1), shares, closed + last]

    def is_over(self, state: tuple[int, ...]) -> bool:
        at = 3 * len(self.walks)
        ended = all(state[3 * tile] == len(walk) for tile, walk in enumerate(self.walks))
        return ended and all(closed == 1 for closed in state[at + 2 :: 3])

    def check(self) -> None:
        search(self.start(), self.successors, self.is_over)


ORDERS = [order for n in (1, 2, 3) for order in itertools.permutations(range(n))]


def test_two_tiles_on_any_walks() -> None:
    for a, b in itertools.product(ORDERS, repeat=2):
        Tiles((a, b)).check()


THREE = ((0, 1), (1, 0), (0, 1)), ((0, 1, 2), (1, 2, 0), (2, 0, 1)), ((0, 1, 2), (1, 2), (2,))


@pytest.mark.parametrize("walks", [*THREE, ((0,),) * 4], ids=str)
def test_more_tiles(walks: tuple[tuple[int, ...], ...]) -> None:
    Tiles(walks).check()


def test_who_does_not_wait_is_found() -> None:
    with pytest.raises(Violation, match="nobody has stored"):
        Tiles(((0,), (0,)), waits=False).check()
