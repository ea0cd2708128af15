"""The walk over blocks of queries, on ints: the dual of the walk over blocks of keys, and the order of a deterministic backward."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from flash3 import mask
from flash3.backends.hopper import backward_order
from flash3.backends.hopper.backward_order import Turns, place
from flash3.backends.hopper.backward_tiles import BackwardSpec, BackwardTiles
from flash3.backends.hopper.queryblocks import query_blocks
from flash3.mask import Mask, visible_rows
from tests.hopper.test_keyblocks import LENGTHS, MASKS

TILES = BackwardTiles(q=16, kv=32)
PAIR = BackwardTiles(q=16, kv=16, cluster=2)
"""Two tiles that walk together as one of TILES does."""


def spec_of(m: Mask) -> BackwardSpec:
    return BackwardSpec(qk_width=64, v_width=64, mask_kind=m.kind)


def seen_by_blocks(m: Mask, q_len: int, k_len: int) -> np.ndarray:
    """The mask with rows up to the end of the last block."""
    rows = -(-q_len // TILES.q) * TILES.q
    return replace(m, q_offset=m.bounds(q_len, k_len).q_offset).dense(rows, k_len)


@pytest.mark.parametrize("m", MASKS, ids=str)
def test_rows_that_see_a_key(m: Mask) -> None:
    for q_len, k_len in ((65, 130), (130, 48), (31, 200)):
        bounds, seen = m.bounds(q_len, k_len), seen_by_blocks(m, q_len, k_len)
        for key in range(k_len):
            begin, end = visible_rows(key, bounds, m.kind)
            rows = np.arange(len(seen))
            wanted = (rows >= (0 if begin is None else begin)) & (rows < (len(seen) if end is None else end))
            assert (seen[:, key] == wanted).all()


@pytest.mark.parametrize("m", MASKS, ids=str)
def test_blocks(m: Mask) -> None:
    """Exactly the blocks with a visible pair, and no mask for exactly those that have every pair."""
    for q_len in LENGTHS:
        for k_len in LENGTHS[1:]:
            bounds, seen = m.bounds(q_len, k_len), seen_by_blocks(m, q_len, k_len)
            for tile in range(-(-k_len // TILES.kv)):
                keys = seen[:, tile * TILES.kv : (tile + 1) * TILES.kv]
                by_block = keys.reshape(-1, TILES.q, keys.shape[1])
                some = by_block.any(axis=(1, 2)).nonzero()[0].tolist()
                whole = keys.shape[1] == TILES.kv
                every = by_block.all(axis=(1, 2)).nonzero()[0].tolist() if whole else []
                b = query_blocks(spec_of(m), TILES, tile, q_len, k_len, bounds)
                assert [b.at(i) for i in range(b.count())] == some
                assert [b.first + b.left_edge + i for i in range(b.interior)] == every
                assert query_blocks(spec_of(m), PAIR, tile, q_len, k_len, bounds) == b


def visits(m: Mask, q_len: int, k_len: int, cluster: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    """For each key tile (of a cluster: its tiles together) its blocks in the order of its walk, and its rank at each of them."""
    bounds = m.bounds(q_len, k_len)
    num_tiles, num_blocks = -(-k_len // TILES.kv), -(-q_len // TILES.q)
    orders, ranks = [], []
    for tile in range(num_tiles):
        turns = Turns(tile, num_tiles, num_blocks, k_len, bounds, cluster)
        blocks = query_blocks(spec_of(m), TILES, tile, q_len, k_len, bounds, shift=turns.shift(m.kind))
        orders.append([blocks.at(i) for i in range(blocks.count())])
        ranks.append([turns.rank(block, TILES.q, TILES.kv, m.kind) for block in orders[-1]])
    return orders, ranks


def run_in_order(orders: list[list[int]], ranks: list[list[int]], multiprocessors: int) -> None:
    """Blocks are launched in order as room is made; each goes on when it is its turn. All must end."""
    added: dict[int, int] = {}
    step, launched, running = [0] * len(orders), 0, []
    while launched < len(orders) or running:
        while launched < len(orders) and len(running) < multiprocessors:
            running.append(launched)
            launched += 1
        moved = False
        for tile in list(running):
            if step[tile] < len(orders[tile]) and added.get(orders[tile][step[tile]], 0) == ranks[tile][step[tile]]:
                added[orders[tile][step[tile]]] = ranks[tile][step[tile]] + 1
                step[tile], moved = step[tile] + 1, True
            if step[tile] == len(orders[tile]):
                running.remove(tile)
                moved = True
        assert moved, "every tile waits"


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("m", MASKS, ids=str)
def test_turns(m: Mask, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every block of queries each visitor has a rank of its own, and with as many multiprocessors as a group has tiles none waits for
    ever."""
    monkeypatch.setattr(backward_order, "GROUP", 3 * cluster)
    for q_len in (0, 1, 16, 17, 48, 130, 200):
        for k_len in (1, 32, 33, 100, 130, 320):
            orders, ranks = visits(m, q_len, k_len, cluster)
            by_block: dict[int, list[int]] = {}
            for order, rank in zip(orders, ranks, strict=True):
                for block, number in zip(order, rank, strict=True):
                    by_block.setdefault(block, []).append(number)
            assert all(sorted(numbers) == list(range(len(numbers))) for numbers in by_block.values())
            for multiprocessors in (3, 4, 7):
                run_in_order(orders, ranks, multiprocessors)


def test_a_full_walk_meets_nobody() -> None:
    """Where lengths divide, tiles of a group that go in step have their turn at every step."""
    orders, ranks = visits(Mask(), 8 * TILES.q, 8 * TILES.kv)
    for step in range(8):
        assert [rank[step] for rank in ranks] == [step] * 8
        assert len({order[step] for order in orders}) == 8


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("num_tiles", "columns"), [(1, 1), (5, 3), (64, 2), (65, 4), (200, 3)])
def test_launch_order(num_tiles: int, columns: int, cluster: int) -> None:
    """Every tile once; groups one after another, and all of a column's group side by side."""
    most = backward_order.GROUP // cluster
    found = [place(i, num_tiles, columns, cluster=cluster) for i in range(num_tiles * columns)]
    assert sorted(found) == [(tile, column) for tile in range(num_tiles) for column in range(columns)]
    groups = [tile // most for tile, _ in found]
    assert groups == sorted(groups)
    for a, b in itertools.pairwise(found):
        assert a[1] != b[1] or b[0] == a[0] + 1 or b[0] // most != a[0] // most


def test_both_walks_agree() -> None:
    """A block of queries visits a tile of keys exactly when the tile visits the block."""
    for m in MASKS:
        for q_len, k_len in ((130, 200), (65, 130), (200, 48)):
            bounds = m.bounds(q_len, k_len)
            orders, _ = visits(m, q_len, k_len)
            for block in range(-(-q_len // TILES.q)):
                found = mask.key_blocks(block * TILES.q, block * TILES.q + TILES.q - 1, k_len, TILES.kv, bounds, m.kind)
                assert [tile for tile, order in enumerate(orders) if block in order] == list(range(found.begin, found.end))
