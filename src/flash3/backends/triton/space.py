"""Which tiles a tuner may try, and what a program takes, in plain Python. Registers are Triton's affair: what spills is slow, not wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple

from . import heuristics
from .tiles import Tiles

ROWS, KEYS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)


def smem_bytes(tiles: Tiles, width: int, bytes_each: int) -> int:
    """Shared memory of a forward program, about: Q, and K and V of every stage of the pipeline."""
    return bytes_each * width * (tiles.rows + 2 * tiles.keys * max(1, tiles.stages - 1))


def problems(tiles: Tiles, capability: tuple[int, int], width: int, bytes_each: int) -> list[str]:
    """Why a forward cannot run with these tiles, one sentence each; empty when it can."""
    found = []
    for name, value, largest in (("rows", tiles.rows, heuristics.LARGEST_TILE), ("keys", tiles.keys, heuristics.LARGEST_TILE)):
        if not 16 <= value <= largest or value & (value - 1):
            found.append(f"{name} must be a power of two from 16 to {largest}, got {value}")
    if tiles.warps not in (1, 2, 4, 8, 16):
        found.append(f"warps must be 1, 2, 4, 8 or 16, got {tiles.warps}")
    if tiles.stages < 1:
        found.append(f"stages must be at least 1, got {tiles.stages}")
    limit = 1024 * heuristics.SHARED_MEMORY_KB.get(capability, heuristics.SMALLEST_KB)
    if not found and (smem := smem_bytes(tiles, width, bytes_each)) > limit:
        found.append(f"shared memory: about {smem} bytes of {limit}")
    return found


def legal(own: Tiles, capability: tuple[int, int], width: int, bytes_each: int) -> list[Tiles]:
    """`own` first, then the others by the number of fields that differ from it."""
    found = dict.fromkeys(t for t in _combinations() if not problems(t, capability, width, bytes_each))
    found.pop(own, None)
    return [own, *sorted(found, key=lambda t: sum(a != b for a, b in zip(astuple(t), astuple(own), strict=True)))]


def _combinations() -> Iterator[Tiles]:
    return itertools.starmap(Tiles, itertools.product(ROWS, KEYS, WARPS, STAGES))
