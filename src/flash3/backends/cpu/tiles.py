"""How the CPU backend cuts a call up, where a caller or a tuned table says so. Without, each sequence's lengths decide (fused, blocks)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from ...mask import MaskKind
from ...problem import Problem

ROWS = (64, 128, 256, 512)
KEYS = (128, 256, 512)
MOST_ROWS, MOST_KEYS = 1 << 14, 1 << 16


class Method(enum.Enum):
    """Which of the two ways computes it."""

    FUSED = "fused"  # torch's CPU flash attention, by tiles of queries where the mask is neither full nor square causal
    BLOCKS = "blocks"  # Algorithm 1 in torch operations


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """rows: query rows of a tile (over all query heads that share a key head); keys: of a block, for the method BLOCKS only (else 0)."""

    method: Method
    rows: int
    keys: int = 0


def problems(problem: Problem, tiles: Tiles) -> list[str]:
    """Why these tiles cannot serve a problem, one sentence each; empty when they can."""
    found = []
    if not 1 <= tiles.rows <= MOST_ROWS:
        found.append(f"rows must be from 1 to {MOST_ROWS}, got {tiles.rows}")
    if tiles.method is Method.BLOCKS and not 1 <= tiles.keys <= MOST_KEYS:
        found.append(f"keys must be from 1 to {MOST_KEYS}, got {tiles.keys}")
    if tiles.method is Method.FUSED and (problem.spec.softcap or problem.spec.qv):
        found.append("torch's fused attention has no softcap and no qv: the method must be blocks")
    return found


def space(problem: Problem) -> Iterator[Tiles]:
    """Tiles worth trying."""
    if problem.spec.mask_kind is not MaskKind.FULL:
        yield from (t for rows in ROWS if not problems(problem, t := Tiles(method=Method.FUSED, rows=rows)))
    yield from (Tiles(method=Method.BLOCKS, rows=rows, keys=keys) for rows in ROWS for keys in KEYS)
