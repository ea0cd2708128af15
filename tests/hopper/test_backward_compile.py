"""Every backward configuration compiles for sm_90a without a GPU: no spills, no serialized matmuls, loops that do not grow."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.backward_configurations import BACKWARD
from flash3.backends.hopper import roles
from flash3.backends.hopper.backward_tiles import BackwardSpec, BackwardTiles, DqPath, Split
from flash3.mask import MaskKind

pytest.importorskip("cutlass")
pytestmark = pytest.mark.timeout(600)

# Instructions in the loop over blocks whose rows see every key of the tile, the rarely taken second part of L included (32 subtractions of
# the 443 at d128, 64 of the 614 at d64).
INTERIOR = {
    "backward_64_full": 614,
    "backward_64_causal": 614,
    "backward_128_full": 443,
    "backward_128_causal": 444,
    "backward_128_causal_packed": 450,
}
ALWAYS = ("backward_64_full", "backward_128_causal", "backward_256_causal", "backward_128_chunk_deterministic")
"""Compiled in every run; the others with -m slow."""
SECTION = re.compile(r"(?=^\s*\.section\s+\.text\.)", re.MULTILINE)


def cases() -> list[object]:
    return [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in BACKWARD]


def main_kernel(cubin: Path) -> str:
    """Its disassembly, out of that of the three."""
    from tests.hopper.sass import disassembly

    (text,) = (part for part in SECTION.split(disassembly(cubin)) if "BackwardKernel" in part.partition("\n")[0])
    return text


def groups_of_matmuls(spec: BackwardSpec, tiles: BackwardTiles) -> int:
    """Waits for matmuls in the whole kernel: two kinds of bodies, three with two edges."""
    bodies = 3 if spec.mask_kind in (MaskKind.WINDOW, MaskKind.CHUNK) else 2
    return bodies * (5 if tiles.split is Split.ROLES else 4)


@pytest.mark.parametrize("name", cases())
def test_compiles(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from flash3.backends.hopper.backward_compile import TARGET, compile_backward
    from tests.hopper.sass import inner_loops, parse

    spec, tiles = BACKWARD[name]
    compile_backward(spec, tiles, f"{TARGET} --keep-cubin --dump-dir {tmp_path} remarks{{ptx}}")
    sys.stdout.flush()
    remarks = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks) == [("0", "0")] * 3
    assert f"Used {roles.entry_registers(tiles)} registers, used 16 barriers" in remarks
    (cubin,) = tmp_path.glob("*.cubin")
    text = main_kernel(cubin)
    instructions, labels = parse(text)
    count = {
        word: sum(word in line for line in instructions) for word in ("STL", "LDL", "USETMAXREG", "WARPGROUP.DEPBAR", "REDG", "UBLKRED")
    }
    assert count["STL"] == count["LDL"] == 0
    assert count["USETMAXREG"] == 2
    assert count["WARPGROUP.DEPBAR"] == groups_of_matmuls(spec, tiles)  # more: ptxas has serialized the matmuls
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "STSM"):
        assert any(instruction in line for line in instructions), instruction
    by_registers = tiles.dq_path is DqPath.REGISTERS
    assert bool(count["UBLKRED"]) != by_registers
    assert max(int(n) for n in re.findall(r"\bR(\d+)\b", text)) < roles.consumer_registers(tiles)
    if name in INTERIOR:
        loops = inner_loops(instructions, labels)
        assert loops[1] <= INTERIOR[name]


def test_the_names_exist() -> None:
    assert set(ALWAYS) | set(INTERIOR) <= set(BACKWARD)
