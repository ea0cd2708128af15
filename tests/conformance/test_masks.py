"""Every kind of mask, at every kind of length: at, below and above the edges of tiles, more queries than keys, and the other way."""

import pytest
import torch

from flash3 import Mask
from tests.conformance.cases import Case, check_gradients, mask_name

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(right=9),
    Mask(left=20),
    Mask(left=0, right=0),
    Mask(left=20, right=9),
    Mask(causal=True, left=16),
    Mask(causal=True, left=127),
    Mask(left=5000, right=5000),
    Mask(chunk=16),
    Mask(causal=True, chunk=50),
    Mask(causal=True, chunk=64, left=40),
    Mask(causal=True, q_offset=0),
    Mask(causal=True, q_offset=64, k_offset=32),
    Mask(left=30, right=3, q_offset=10, k_offset=-7),
    Mask(causal=True, chunk=32, q_offset=-40, k_offset=-40),
    Mask(causal=True, q_offset=-1000),
    Mask(left=100, k_offset=-1000),
]
LENGTHS = [(1, 1), (1, 129), (15, 16), (17, 15), (16, 127), (64, 64), (127, 128), (128, 17), (128, 255), (129, 129), (130, 1), (257, 130)]


def _case(mask, q_len, k_len):
    """Short sequences come in larger batches: the largest error of a handful of numbers is luck.

    Where most rows see a lone key there is nothing but one dot product to measure, and in float32 its order of summation decides which
    of two correct codes is closer: such cases run in bfloat16.
    """
    batch = min(8, max(1, 64 // min(q_len, k_len)))
    seen = mask.dense(q_len, k_len).sum(1)
    lonely = 2 * (seen == 1).sum() > (seen > 0).sum()
    return Case(q_lens=(q_len,) * batch, k_lens=(k_len,) * batch, mask=mask, dtype=torch.bfloat16 if lonely else None)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
@pytest.mark.parametrize("mask", MASKS, ids=mask_name)
def test_mask(mask, lengths, backend):
    check_gradients(_case(mask, *lengths), backend)


@pytest.mark.slow
@pytest.mark.parametrize("k_len", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512, 513])
@pytest.mark.parametrize("q_len", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
@pytest.mark.parametrize("mask", MASKS, ids=mask_name)
def test_mask_at_every_tile_edge(mask, q_len, k_len, backend):
    check_gradients(_case(mask, q_len, k_len), backend)
