"""Tiles by compute capability, else by shared memory.

What was measured on an H200 (docs/performance.md): sm_90's forward at every width, its backward at widths 64 and 128. The rest are the
largest tiles that compile within the GPU's limits almost without spills (tests/triton/test_compile.py).
"""

from __future__ import annotations

from ...mask import MaskKind
from .tiles import BackwardTiles, Tiles

OLDEST = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""
SHARED_MEMORY_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""What one program may use (CUDA C++ Programming Guide); every other GPU from Ampere on has at least SMALLEST_KB."""
SMALLEST_KB = 99
SMALLEST_WIDTH = 16
LARGEST_TILE = 256
INTERPRETED = Tiles(32, 16, 1, 1)
"""Small, so that small cases have edges and interiors."""
FLOAT32 = Tiles(32, 32, 4, 1)
"""Matmuls in float32 use no tensor cores: accuracy is what they are for."""
FEW_ROWS = 64
"""So many rows of one key head are one tile."""
MOST_SPLITS = 128
KEYS_PER_SPLIT = 256
"""Fewer keys than this are not worth a program."""

Choice = tuple[Tiles, BackwardTiles]
"""Forward, backward. At width 256 eight warps on 64 keys would compute the scores twice, each half of the warps for its half of dK and dV;
there dV has a launch of its own."""
BY_CAPABILITY: dict[tuple[int, int], dict[int, Choice]] = {
    (9, 0): {
        64: (Tiles(64, 128, 4, 2), BackwardTiles(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2))),
        128: (Tiles(64, 64, 4, 3), BackwardTiles(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2))),
        256: (Tiles(128, 64, 8, 2), BackwardTiles(Tiles(32, 128, 8, 3), Tiles(128, 32, 8, 3), dv=Tiles(64, 128, 8, 2))),
    },
    (10, 0): {
        64: (Tiles(128, 128, 8, 2), BackwardTiles(Tiles(64, 64, 8, 2), Tiles(128, 64, 8, 2))),
        128: (Tiles(128, 64, 8, 3), BackwardTiles(Tiles(64, 64, 8, 2), Tiles(128, 64, 8, 2))),
        256: (Tiles(64, 64, 8, 2), BackwardTiles(Tiles(32, 32, 8, 1), Tiles(64, 64, 8, 1))),
    },
}
LARGE: dict[int, Choice] = {
    64: (Tiles(128, 64, 8, 3), BackwardTiles(Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2))),
    128: (Tiles(64, 64, 4, 3), BackwardTiles(Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2))),
    256: (Tiles(64, 64, 8, 2), BackwardTiles(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))),
}
"""More shared memory than SMALLEST_KB."""
SMALL: dict[int, Choice] = {
    64: (Tiles(128, 64, 8, 2), BackwardTiles(Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 1))),
    128: (Tiles(64, 64, 4, 2), BackwardTiles(Tiles(32, 64, 8, 1), Tiles(64, 32, 4, 2))),
    256: (Tiles(64, 32, 8, 1), BackwardTiles(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))),
}


def width_of(dim: int) -> int:
    """The tile that holds `dim` columns: a power of two."""
    return max(SMALLEST_WIDTH, 1 << (dim - 1).bit_length())


def is_large(capability: tuple[int, int]) -> bool:
    return SHARED_MEMORY_KB.get(capability, SMALLEST_KB) > SMALLEST_KB


def _choice(capability: tuple[int, int], width: int) -> Choice:
    by_width = BY_CAPABILITY.get(capability) or (LARGE if is_large(capability) else SMALL)
    return by_width[max(width, 64)]


def forward(capability: tuple[int, int], width: int, bytes_each: int, kind: MaskKind) -> Tiles:
    """For sequences of many rows; width: of the wider of K and V."""
    return FLOAT32 if bytes_each > 2 else _choice(capability, width)[0]


def few_rows(capability: tuple[int, int], width: int, bytes_each: int, rows: int) -> Tiles:
    """For at most `rows` rows, packed: decoding. What counts is reading K and V."""
    tile = min(FEW_ROWS, max(16, 1 << (rows - 1).bit_length()))
    if bytes_each > 2:
        return Tiles(tile, FLOAT32.keys, FLOAT32.warps, FLOAT32.stages)
    return Tiles(tile, 64 if width > 128 else 128, 4, 3 if is_large(capability) and width <= 128 else 2)


def backward(capability: tuple[int, int], width: int, bytes_each: int, kind: MaskKind) -> BackwardTiles:
    return BackwardTiles(FLOAT32, FLOAT32) if bytes_each > 2 else _choice(capability, width)[1]


def splits(programs: int, k_len: int, multiprocessors: int) -> int:
    """Into how many parts the keys of each tile go, so that about two programs run on each multiprocessor."""
    if programs == 0 or programs >= multiprocessors or k_len < 2 * KEYS_PER_SPLIT:
        return 1
    return max(1, min(MOST_SPLITS, 2 * multiprocessors // programs, k_len // KEYS_PER_SPLIT))
