"""Every backward configuration compiles for sm_90a without a GPU: no spills, no serialized matmuls, loops that do not grow."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.backward_configurations import BACKWARD
from flash3.backends.hopper import backward_budget
from flash3.backends.hopper.backward_tiles import BackwardSpec, BackwardTiles, Order, Split
from flash3.mask import MaskKind

pytest.importorskip("cutlass")
pytestmark = pytest.mark.timeout(600)

# Instructions in the loop over blocks whose rows see every key of the tile.
INTERIOR = {"backward_64_full": 590, "backward_64_causal_short": 580, "backward_128_full_short": 400, "backward_128_causal": 430}
ALWAYS = ("backward_64_full", "backward_64_causal_short", "backward_128_causal", "backward_256_causal", "backward_128_chunk_deterministic")
"""Compiled in every run; the others with -m slow."""
MOST_SPILLED_BYTES = 352
"""Of the main kernel, in all: between tiles, and in the rare walk."""
MOST_RELOADS = 7
"""Of what does not change, in a loop that counts: at width 64 two consumers have no register to spare, with a softcap none at all."""
SECOND_PARTS = 8
"""Loads of it in a block, at least."""
SECTION = re.compile(r"(?=^\s*\.section\s+\.text\.)", re.MULTILINE)


def cases() -> list[object]:
    return [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in BACKWARD]


def main_kernel(cubin: Path) -> str:
    """Its disassembly, out of that of the three."""
    from benchmarks.disassembly import disassembly

    (text,) = (part for part in SECTION.split(disassembly(cubin)) if "BackwardKernel" in part.partition("\n")[0])
    return text


def common_loops(instructions: list[str], labels: dict[str, int]) -> list[list[str]]:
    """The innermost loops with matmuls but those of the rare walk, which has loads of the second part of L."""
    from tests.hopper.sass import inner_loops

    return [loop for loop in inner_loops(instructions, labels) if sum("LDG" in line for line in loop) < SECOND_PARTS]


def groups_of_matmuls(spec: BackwardSpec, tiles: BackwardTiles) -> int:
    """Waits for matmuls in the whole kernel: three kinds of bodies (masked, interior, and with a second part of L), four with two edges; in
    turn one more at the end of a tile. With roles only that of scores has them: the others have one body."""
    bodies = 4 if spec.mask_kind in (MaskKind.WINDOW, MaskKind.CHUNK) else 3
    if tiles.split is Split.ROLES:
        return bodies * 2 + 2 + (1 if tiles.cluster > 1 else 2)
    return bodies * 4 + (tiles.order is Order.IN_TURN)


@pytest.mark.parametrize("name", cases())
def test_compiles(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from flash3.backends.hopper.backward_compile import TARGET, compile_backward
    from tests.hopper.sass import inner_loops, parse

    spec, tiles = BACKWARD[name]
    compile_backward(spec, tiles, f"{TARGET} --keep-cubin --dump-dir {tmp_path} remarks{{ptx}}")
    sys.stdout.flush()
    remarks = "".join(capfd.readouterr())
    spills = [sum(map(int, pair)) for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)]
    assert sorted(spills)[:2] == [0, 0]
    assert max(spills) <= MOST_SPILLED_BYTES
    assert f"Used {backward_budget.entry_registers(tiles)} registers" in remarks
    (cubin,) = tmp_path.glob("*.cubin")
    text = main_kernel(cubin)
    instructions, labels = parse(text)
    count = {
        word: sum(word in line for line in instructions) for word in ("STL", "LDL", "USETMAXREG", "WARPGROUP.DEPBAR", "REDG", "UBLKRED")
    }
    for loop in common_loops(instructions, labels):
        assert sum("LDL" in line for line in loop) <= MOST_RELOADS
        assert spec.softcap or not any("STL" in line for line in loop)
    assert count["USETMAXREG"] == (4 if tiles.split is Split.ROLES else 2)
    assert count["WARPGROUP.DEPBAR"] == groups_of_matmuls(spec, tiles)  # more: ptxas has serialized the matmuls
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "STSM"):
        assert any(instruction in line for line in instructions), instruction
    assert bool(count["UBLKRED"]) == tiles.has_sender
    assert max(int(n) for n in re.findall(r"\bR(\d+)\b", text)) < max(backward_budget.consumer_registers(tiles))
    if name in INTERIOR:
        assert min(map(len, inner_loops(instructions, labels))) <= INTERIOR[name]


def test_the_names_exist() -> None:
    assert set(ALWAYS) | set(INTERIOR) <= set(BACKWARD)
