"""The order of work tiles, on ints: every tile once, and the longest first under a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.configurations import CONFIGURATIONS
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
