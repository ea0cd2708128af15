"""dQ behind: every block of queries is converted once, long after the last tile that adds to it was launched, or by backward_finish."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from flash3.backends.hopper.backward_behind import heads_left, place_of
from flash3.backends.hopper.backward_clear import WAVES, columns_ahead, slice_of
from flash3.backends.hopper.backward_tiles import PIECE_FOURS, PIECE_WORDS
from flash3.mask import MaskKind


@pytest.mark.parametrize(
    ("num_tiles", "batch", "kv_heads", "blocks"), [(1, 3, 5, 1), (4, 32, 16, 8), (64, 2, 16, 128), (128, 1, 2, 64), (3, 7, 9, 5)]
)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("kind", [MaskKind.FULL, MaskKind.CAUSAL])
def test_converted_once_and_behind(
    num_tiles: int, batch: int, kv_heads: int, blocks: int, group: int, multiprocessors: int, kind: MaskKind
) -> None:
    ahead, columns = columns_ahead(num_tiles, multiprocessors), batch * kv_heads
    converted = {column: [0] * blocks for column in range(columns)}
    for launched in range(columns * num_tiles):
        column, kv_block = launched // num_tiles - ahead, launched % num_tiles
        if column >= 0:
            assert (column + 1) * num_tiles - 1 + WAVES * multiprocessors < launched
            first, end = slice_of(kv_block, blocks, num_tiles, kind)
            for block in range(first, end):
                converted[column][block] += 1
    heads = kv_heads * group
    for head in range(heads - heads_left(heads, kv_heads, batch, ahead), heads, group):  # backward_finish, a head of each group
        for sequence in range(batch):
            column = head // group * batch + sequence
            if column + ahead >= columns:
                converted[column] = [times + 1 for times in converted[column]]
    assert all(times == [1] * blocks for times in converted.values())


@pytest.mark.parametrize("words", [128 * 32, 128 * 64, 64 * 128])
def test_pieces_make_up_a_block(words: int) -> None:
    """(consumer, first float4) of each piece of a block: all float4s of both consumers' threads."""
    pieces = words // PIECE_WORDS
    found = [place_of(piece, pieces) for piece in range(pieces)]
    fours = words // 2 // (4 * 128)
    assert sorted((consumer, four + i) for consumer, four in found for i in range(PIECE_FOURS)) == [
        (c, i) for c in (0, 1) for i in range(fours)
    ]
    for piece, (consumer, four) in enumerate(found):
        assert consumer * words // 2 + four * 4 * 128 == piece * PIECE_WORDS
