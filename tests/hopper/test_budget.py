"""Tiles: every choice of the heuristic fits, what does not fit is named, and widths cover every head dim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.configurations import CONFIGURATIONS
from flash3.backends.hopper import budget, heuristics, roles
from flash3.backends.hopper.tiles import WIDTHS, ForwardSpec, QuerySource, Tiles
from flash3.mask import MaskKind
from flash3.problem import DType


@pytest.mark.parametrize("out", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("mask", MaskKind)
def test_every_pair_of_widths_has_tiles(mask: MaskKind, out: DType) -> None:
    for qk in WIDTHS:
        for v in WIDTHS:
            for k_len in (1, 512, 1024, 2048, 1 << 22):
                spec = ForwardSpec(qk_width=qk, v_width=v, mask_kind=mask, out_dtype=out)
                assert budget.problems(spec, heuristics.choose(spec, k_len)) == []


def test_every_head_dim_has_a_width() -> None:
    for dim in range(8, 257, 8):
        width = heuristics.width_of(dim)
        assert width in WIDTHS
        assert width >= dim
        assert all(w < dim for w in WIDTHS if w < width)


def test_the_measured_tiles() -> None:
    """The heuristic takes what was measured to be best."""
    tiles = {name: CONFIGURATIONS[name][1] for name in ("64_full", "128_full", "256_full", "64_full_short", "64_causal")}
    assert [(t.q, t.kv, t.stages, t.o_columns) for t in tiles.values()] == [
        (192, 128, 4, 64),
        (128, 128, 2, 128),
        (128, 64, 2, 128),
        (256, 48, 4, 64),
        (256, 64, 4, 64),
    ]
    assert tiles["256_full"].query_source is QuerySource.SHARED


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv": 160}, "registers"),
        ({"stages": 3}, "shared memory"),
        ({"kv": 100}, "multiple of 16"),
        ({"q": 100}, "multiple of 64"),
        ({"q": 64 * 5}, "no split"),
        ({"o_columns": 48}, "o_columns"),
        ({"stages": 0}, "stages"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, int], word: str) -> None:
    spec, tiles = CONFIGURATIONS["128_full"]
    found = budget.problems(spec, replace(tiles, **change))
    assert any(word in reason for reason in found), found


def test_registers_are_those_at_entry() -> None:
    """setmaxnreg only moves registers; asking for one more than there are hangs the GPU."""
    for q in (64, 128, 192, 256):
        tiles = Tiles(q=q, kv=64, stages=2, o_columns=64)
        assert budget.registers_held(tiles) <= roles.entry_registers(tiles) * tiles.threads <= 1 << 16


def test_head_groups() -> None:
    full, causal = CONFIGURATIONS["128_full"][0], CONFIGURATIONS["128_causal"][0]
    assert heuristics.head_group(full, 4096, 64) == 1
    assert heuristics.head_group(causal, 512, 64) == 16
    assert heuristics.head_group(causal, 16384, 64) == 4
    assert heuristics.head_group(causal, 1 << 22, 64) == 1
    assert heuristics.head_group(replace(causal, heads_per_kv=8), 1 << 22, 64) == 8
