"""Every configuration compiles for sm_90a without a GPU: no spills, the expected instructions, loops that do not grow, budgets held."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.configurations import CONFIGURATIONS
from flash3.backends.hopper import roles
from flash3.backends.hopper.tiles import FirstBlock, Overlap, QuerySource, ScaleSign, Turns
from flash3.mask import MaskKind

pytest.importorskip("cutlass")
pytestmark = pytest.mark.timeout(600)

# Instructions in the loop over blocks that every row sees in full, together with the rarely run way of taking a block again (about 381 of
# the 693 at d128).
INTERIOR = {
    "64_full": 661,
    "64_full_short": 326,
    "64_full_middle": 430,
    "64_causal": 431,
    "128_full": 693,
    "128_causal": 739,
    "128_full_fp16": 693,
    "128_full_partial": 693,
    "128_full_sink": 693,
    "128_full_negative": 693,
    "128_window": 738,
    "128_causal_packed": 753,
    "256_full": 705,
    "256_causal": 704,
}
ALWAYS = (
    "64_full",
    "128_full",
    "128_causal",
    "256_causal",
    "64_window_sink",
    "128_causal_packed",
    "64_full_cache_left",
    "128_chunk_packed_partial",
    "128_causal_padded_shared",
    "192_128_causal",
)
"""Compiled in every run; the others with -m slow."""


def cases() -> list[object]:
    return [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CONFIGURATIONS]


@pytest.mark.parametrize("name", cases())
def test_compiles(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from flash3.backends.hopper.compile import TARGET, compile_forward
    from tests.hopper.sass import facts

    spec, tiles = CONFIGURATIONS[name]
    compile_forward(spec, tiles, f"{TARGET} --keep-cubin --dump-dir {tmp_path} remarks{{ptx}}")
    sys.stdout.flush()
    remarks = "".join(capfd.readouterr())
    assert "0 bytes spill stores, 0 bytes spill loads" in remarks
    assert "used 16 barriers" in remarks
    (cubin,) = tmp_path.glob("*.cubin")
    found = facts(cubin)
    assert found.stack_bytes == found.counts["STL"] == found.counts["LDL"] == 0
    assert found.registers == roles.entry_registers(tiles)
    assert found.highest_register < roles.consumer_registers(tiles)
    assert found.highest_producer_register < roles.producer_registers(tiles)
    assert found.counts["USETMAXREG"] == 2
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS"):
        assert found.counts[instruction] > 0, instruction
    assert len(found.loops) == {MaskKind.FULL: 1, MaskKind.CAUSAL: 2}.get(spec.mask_kind, 3)
    interior = 0 if spec.mask_kind is MaskKind.FULL else 1
    if name in INTERIOR:
        assert found.loops[interior] <= INTERIOR[name]
    if tiles.overlap is Overlap.SOFTMAX_UNDER_PV:  # so many exponentials lie under P·V, wherever else ptxas would like to wait for it
        held = (tiles.parts - 1) * (tiles.hold > 0) + tiles.hold / 100
        assert found.hidden[interior] >= int(tiles.kv / 2 / tiles.parts * held)


def test_the_list_covers_every_choice() -> None:
    """At most 60 configurations, and every value of every enum among them."""
    assert len(CONFIGURATIONS) <= 60
    specs, tiles = zip(*CONFIGURATIONS.values(), strict=True)
    assert {s.mask_kind for s in specs} == set(MaskKind)
    assert {s.scale_sign for s in specs} == set(ScaleSign)
    assert {t.turns for t in tiles} == set(Turns)
    assert {t.query_source for t in tiles} == set(QuerySource)
    assert {t.overlap for t in tiles} == set(type(tiles[0].overlap))
    assert {t.first_block for t in tiles} == set(FirstBlock)
    assert {t.heads for t in tiles} >= {1, 4, 8, 16}
    assert {s.qk_width for s in specs} == {32, 64, 96, 128, 192, 256}
    assert set(INTERIOR) <= set(CONFIGURATIONS)
    assert set(ALWAYS) <= set(CONFIGURATIONS)
