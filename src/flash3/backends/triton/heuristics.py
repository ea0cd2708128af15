"""Tiles by compute capability and shared memory. The reasons are measurements: docs/performance.md."""

from __future__ import annotations

from ...mask import MaskKind
from .tiles import BackwardTiles, Tiles

OLDEST = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""
LARGEST_TILE = 256
SHARED_MEMORY_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""What one program may use; every other GPU from Ampere on has at least SMALLEST_KB."""
SMALLEST_KB = 99
SMALLEST_WIDTH = 16
INTERPRETED = Tiles(32, 16, 1, 1)
"""Small, so that small cases have edges and interiors."""
FEW_ROWS = 64
"""So many rows of one key head are one tile."""
MOST_SPLITS = 128
KEYS_PER_SPLIT = 256
"""Fewer keys than this are not worth a program."""


def width_of(dim: int) -> int:
    """The tile that holds `dim` columns: a power of two."""
    return max(SMALLEST_WIDTH, 1 << (dim - 1).bit_length())


def shared_memory_kb(capability: tuple[int, int]) -> int:
    return SHARED_MEMORY_KB.get(capability, SMALLEST_KB)


def forward(capability: tuple[int, int], width: int, bytes_each: int, kind: MaskKind) -> Tiles:
    """For sequences of many rows."""
    if bytes_each > 2:
        return Tiles(32, 32, 4, 1)
    if capability == (9, 0):
        return {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 64, 8, 2)}[max(width, 64)]
    if shared_memory_kb(capability) > SMALLEST_KB:
        return {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 64, 8, 2)}[max(width, 64)]
    return {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 1)}[max(width, 64)]


def few_rows(capability: tuple[int, int], width: int, bytes_each: int, rows: int) -> Tiles:
    """For at most `rows` rows, packed: decoding. What counts is reading K and V."""
    tile = min(64, max(16, 1 << (rows - 1).bit_length()))
    if bytes_each > 2:
        return Tiles(tile, 32, 4, 1)
    big = shared_memory_kb(capability) > SMALLEST_KB
    return Tiles(tile, 64 if width > 128 else 128, 4, 3 if big and width <= 128 else 2)


def backward(capability: tuple[int, int], width: int, bytes_each: int, kind: MaskKind) -> BackwardTiles:
    if bytes_each > 2:
        return BackwardTiles(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1))
    if capability == (9, 0):
        return {
            64: BackwardTiles(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
            128: BackwardTiles(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
            256: BackwardTiles(Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
        }[max(width, 64)]
    if shared_memory_kb(capability) > SMALLEST_KB:
        return {
            64: BackwardTiles(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
            128: BackwardTiles(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
            256: BackwardTiles(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        }[max(width, 64)]
    return {
        64: BackwardTiles(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
        128: BackwardTiles(Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
        256: BackwardTiles(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    }[max(width, 64)]


def splits(programs: int, k_len: int, multiprocessors: int) -> int:
    """Into how many parts the keys of each tile go, so that about two programs run on each multiprocessor."""
    if programs == 0 or programs >= multiprocessors or k_len < 2 * KEYS_PER_SPLIT:
        return 1
    return max(1, min(MOST_SPLITS, 2 * multiprocessors // programs, k_len // KEYS_PER_SPLIT))
