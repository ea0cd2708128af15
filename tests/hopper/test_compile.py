"""Every configuration compiles for sm_90a without a GPU: no spills, the expected instructions, loops that do not grow, budgets held."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.configurations import CONFIGURATIONS
from flash3.backends.hopper import roles
from flash3.backends.hopper.tiles import FirstBlock, Maximum, QuerySource, ScaleSign, Turns
from flash3.mask import MaskKind

pytest.importorskip("cutlass")
pytestmark = pytest.mark.timeout(600)

# Instructions in the loop over blocks that every row sees in full, the rarely taken rise of a row's maximum included (about 170 of the
# 653 at d128) and the rescaling of O. Two blocks per SM and four consumers have small blocks.
INTERIOR = {
    "64_full": 378,
    "64_full_short": 270,
    "64_full_middle": 411,
    "64_causal": 378,
    "64_causal_short": 288,
    "64_causal_middle": 271,
    "128_full": 653,
    "128_causal": 657,
    "128_causal_hold": 565,
    "128_full_fp16": 653,
    "128_full_partial": 653,
    "128_full_sink": 653,
    "128_full_negative": 653,
    "128_window": 657,
    "128_causal_packed": 657,
    "256_full": 504,
    "256_causal": 507,
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
    if name in INTERIOR:
        interior = found.loops[0] if spec.mask_kind is MaskKind.FULL else found.loops[1]
        assert interior <= INTERIOR[name]


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
    assert {t.maximum for t in tiles} == set(Maximum)
    assert {t.rescale for t in tiles} == set(type(tiles[0].rescale))
    assert {t.heads for t in tiles} >= {1, 4, 8, 16}
    assert {s.qk_width for s in specs} == {32, 64, 96, 128, 192, 256}
    assert set(INTERIOR) <= set(CONFIGURATIONS)
    assert set(ALWAYS) <= set(CONFIGURATIONS)
