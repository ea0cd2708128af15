"""Tiles of the backward: every choice fits, what does not fit is named, and every head dim has a width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.backward_configurations import BACKWARD
from flash3.backends.hopper import backward_budget
from flash3.backends.hopper.backward_tiles import BackwardSpec, BackwardTiles, DqPath, Order, Split, tiles_of
from flash3.mask import MaskKind


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [False, True])
def test_every_pair_of_head_dims_has_tiles(softcap: bool, deterministic: bool) -> None:
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            qk, v = backward_budget.widths_of(d, dv, softcap)
            assert qk >= d
            assert v >= dv
            spec = BackwardSpec(qk_width=qk, v_width=v, softcap=softcap, deterministic=deterministic)
            assert backward_budget.problems(spec, backward_budget.choose(spec, 4096)) == []


def test_the_list_covers_every_choice() -> None:
    assert len(BACKWARD) <= 66
    specs, tiles = zip(*BACKWARD.values(), strict=True)
    assert {s.mask_kind for s in specs} == set(MaskKind)
    assert {t.dq_path for t in tiles} == set(DqPath)
    assert {t.split for t in tiles} == set(Split)
    assert {t.order for t in tiles} == set(Order)
    assert {s.qk_width for s in specs} == {32, 64, 128, 256}
    assert {s.v_width for s in specs} == set(backward_budget.WIDTHS)
    for spec, tile in BACKWARD.values():
        assert backward_budget.problems(spec, tile) == []


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("backward_128_full", {"q": 128, "kv_stages": 1, "order": Order.TOGETHER}, "registers"),
        ("backward_128_full", {"q_stages": 3}, "stages of Q, dO and dS"),
        ("backward_128_full", {"q": 96}, "q must be"),
        ("backward_128_full", {"kv": 64}, "kv must be"),
        ("backward_64_full", {"q": 64}, "width 128"),
        ("backward_64_full", {"do_stages": 1}, "stages of Q, dO and dS"),
        ("backward_256_full", {"q_stages": 0}, "need a stage"),
        ("backward_256_full", {"ds_stages": 2}, "shared memory"),
        ("backward_256_causal_packed", {"cluster": 4}, "cluster must be"),
        ("backward_128_full", {"cluster": 2}, "cluster must be"),
        ("backward_256_full", {"order": Order.IN_TURN}, "turns need"),
        ("backward_128_full_softcap", {"order": Order.IN_TURN}, "turns need"),
        ("backward_128_full_shared", {"order": Order.IN_TURN}, "turns need"),
        ("backward_64_full", {"ds_stages": 3}, "dS"),
        ("backward_256_full", {"q_stages": 3}, "shared memory"),
        ("backward_256_full", {"kv_stages": 2}, "persistent"),
        ("backward_128_causal_packed", {"kv_stages": 2}, "persistent"),
        ("backward_256_full", {"dq_path": DqPath.SHARED}, "no sender"),
        ("backward_64_full_deterministic", {"dq_path": DqPath.SHARED}, "ordered"),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: dict[str, Any], word: str) -> None:
    spec, tiles = BACKWARD[name]
    found = backward_budget.problems(spec, replace(tiles, **change))
    assert any(word in reason for reason in found), found


@pytest.mark.parametrize(
    ("width", "mask", "heads", "in_turn_from"),
    [(64, MaskKind.FULL, 1, 1024), (64, MaskKind.CAUSAL, 1, 2048), (128, MaskKind.FULL, 1, 2048), (128, MaskKind.CAUSAL, 4, 512)],
)
def test_turns_are_for_long_walks(width: int, mask: MaskKind, heads: int, in_turn_from: int) -> None:
    spec = BackwardSpec(qk_width=width, v_width=width, mask_kind=mask, heads_per_kv=heads)
    short, long, longer = (backward_budget.choose(spec, n) for n in (in_turn_from - 128, in_turn_from, 4 * in_turn_from))
    assert (short.order, long.order, longer.order) == (Order.TOGETHER, Order.IN_TURN, Order.IN_TURN)
    assert not short.persistent or mask is MaskKind.CAUSAL
    assert long.persistent == longer.persistent == (width == 128)


def test_widths_that_no_kernel_has() -> None:
    spec = BackwardSpec(qk_width=96, v_width=96)
    assert "tile widths" in backward_budget.problems(spec, BackwardTiles(q=64))[0]


@pytest.mark.parametrize(("cluster", "length", "tiles"), [(1, 0, 0), (1, 65, 2), (1, 200, 4), (2, 1, 2), (2, 128, 2), (2, 129, 4)])
def test_tiles_of_a_sequence(cluster: int, length: int, tiles: int) -> None:
    """In a cluster the last one may be empty."""
    assert tiles_of(length, BackwardTiles(q=64, kv=64, split=Split.ROLES, cluster=cluster)) == tiles


def test_registers_of_a_block() -> None:
    """setmaxnreg moves registers between warpgroups: it waits for ever where their sum is more than there is at entry."""
    for _, tiles in BACKWARD.values():
        held = backward_budget.producer_registers(tiles) + sum(backward_budget.consumer_registers(tiles))
        assert held <= backward_budget.entry_registers(tiles) * (1 + tiles.consumers) <= backward_budget.REGISTERS_PER_BLOCK // 128
