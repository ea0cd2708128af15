"""The walk over key blocks, on ints: every visible key is visited, interior blocks need no mask, consumers stay within their tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.configurations import CONFIGURATIONS
from flash3.backends.hopper.keyblocks import KeyBlocks, TileBlocks, Walk, consumers_part, level_of
from flash3.backends.hopper.tiles import ROWS_PER_CONSUMER, ForwardSpec, Tiles, Turns
from flash3.mask import Mask

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(right=37),
    Mask(causal=True, q_offset=-40),
    Mask(right=70, q_offset=0, k_offset=150),
    Mask(left=20, right=0),
    Mask(left=0, right=1),
    Mask(left=33, right=50),
    Mask(left=100),
    Mask(causal=True, left=60, q_offset=90),
    Mask(chunk=16),
    Mask(chunk=50, causal=True),
    Mask(chunk=90, left=25),
    Mask(chunk=70, right=20, q_offset=-100),
    Mask(q_offset=5000, left=3),
]
LENGTHS = [0, 1, 15, 16, 17, 31, 32, 48, 63, 65, 130, 200]


def configuration(mask: Mask, turns: Turns, heads: int = 1) -> tuple[ForwardSpec, Tiles]:
    spec, tiles = CONFIGURATIONS["128_full"]
    return replace(spec, mask_kind=mask.kind, heads_per_kv=heads), replace(tiles, kv=16, turns=turns, heads=heads)


def walked(b: KeyBlocks) -> tuple[list[int], list[int]]:
    """Masked and unmasked blocks in the order of a consumer's loops."""
    masked, plain, block = [b.first], [], b.first - 1
    masked += [block - i for i in range(b.right_edge)]
    block -= b.right_edge
    plain += [block - i for i in range(b.interior)]
    block -= max(b.interior, 0)
    masked += [block - i for i in range(b.left_edge)]
    return masked, plain


def blocks_of(tile: TileBlocks) -> list[int]:
    return [tile.first - i for i in range(tile.count)]


def check_consumer(seen: np.ndarray, tile: TileBlocks, b: KeyBlocks, kv: int) -> None:
    masked, plain = walked(b)
    assert b.passed_right + len(masked) + len(plain) + b.passed_left == tile.count
    if seen.any():
        mine = blocks_of(tile)[b.passed_right : tile.count - b.passed_left]
        assert masked[:1] + sorted(masked[1:] + plain, reverse=True) == mine
    for block in plain:
        assert seen[:, block * kv : (block + 1) * kv].all()
        assert (block + 1) * kv <= seen.shape[1]
    right_half = seen[:, b.first * kv + kv // 2 :]
    assert not (b.first_half and right_half.any())
    visible = {int(k) // kv for k in seen.any(axis=0).nonzero()[0]}
    assert visible <= set(masked) | set(plain)


@pytest.mark.parametrize(("turns", "heads"), [(Turns.PING_PONG, 1), (Turns.FREE, 1), (Turns.FREE, 4), (Turns.PING_PONG, 64)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_walk(mask: Mask, turns: Turns, heads: int) -> None:
    """A consumer's part of a tile is 64 rows, or, where heads share the tile, 64 // heads queries of each."""
    spec, tiles = configuration(mask, turns, heads)
    tile_rows, consumer_rows = tiles.q // heads, ROWS_PER_CONSUMER // heads
    for q_len in LENGTHS[1:] if heads == 1 else (1, 2, 33, 65):
        for k_len in LENGTHS:
            rows = -(-q_len // tile_rows) * tile_rows
            bounds = mask.bounds(q_len, k_len)
            # rows past the end are computed too, and must be masked right
            seen = replace(mask, q_offset=bounds.q_offset).dense(rows, k_len)
            for q_block in range(rows // tile_rows):
                walk = Walk(spec, tiles, q_block, k_len, bounds)
                tile = walk.of_tile()
                assert tile.count >= 1
                if not seen[q_block * tile_rows : (q_block + 1) * tile_rows].any():
                    assert tile.count == 1
                    assert tile.first * tiles.kv >= max(k_len, 1)  # TMA fills it with zeros
                for consumer in range(tiles.consumers):
                    begin = q_block * tile_rows + (consumer * consumer_rows if consumers_part(spec, tiles) else 0)
                    mine = seen[begin : begin + (consumer_rows if consumers_part(spec, tiles) else tile_rows)]
                    check_consumer(mine, tile, walk.of_consumer(consumer), tiles.kv)


def test_work_follows_the_visible_area() -> None:
    """A window of 64 keys visits as many blocks in a long sequence as in a short one."""
    spec, tiles = configuration(Mask(left=63, right=0), Turns.FREE)
    counts = {Walk(spec, tiles, n // tiles.q - 1, n, Mask(left=63, right=0).bounds(n, n)).of_tile().count for n in (1024, 1 << 20)}
    assert counts == {(tiles.q + 64) // tiles.kv}


def test_levels() -> None:
    """Sequences of one level have as many key blocks to within a factor of two; a longer one is never of a lower level."""
    _, tiles = configuration(Mask(), Turns.FREE)
    levels = [level_of(n, tiles) for n in range(3000)]
    assert levels[:3] == [1, 1, 1]
    assert levels == sorted(levels)
    for level in set(levels):
        blocks = [-(-n // tiles.kv) for n, of_n in enumerate(levels) if of_n == level and n]
        assert max(blocks) < 2 * min(blocks)
