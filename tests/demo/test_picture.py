"""The picture's blocks are those of the dense mask, and a PNG is written."""

import numpy as np
import pytest

from flash3 import Mask
from flash3.demo import chat
from flash3.demo.picture import Panel, Visit, draw


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=True), Mask(causal=True, left=10), Mask(left=5, right=7), Mask(chunk=12, causal=True)]
)
@pytest.mark.parametrize(("q_len", "k_len"), [(64, 64), (37, 50), (50, 37)])
def test_blocks_are_those_of_the_dense_mask(mask, q_len, k_len):
    grid = Panel("", mask, q_len, k_len, 8, 16).visits()
    dense = mask.dense(q_len, k_len)
    for row, column in np.ndindex(*grid.shape):
        tile = dense[row * 8 : row * 8 + 8, column * 16 : column * 16 + 16]
        if grid[row, column] == Visit.FULL:
            assert tile.all()
        assert tile.any() == (grid[row, column] != Visit.SKIPPED)


def test_png_is_written(tmp_path):
    path = draw(chat.panels(93), tmp_path / "new" / "blocks.png")
    assert path.read_bytes().startswith(b"\x89PNG")
