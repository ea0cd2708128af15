"""Which tiles a tuner may try: every combination that the budget lets through, in pure Python.

Some fields follow from others, and are not tried on their own: the deepest ring and the widest output buffer that fit (and rings of two),
and the alternatives that measurements have ruled out for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace

from ...mask import MaskKind
from . import budget
from .tiles import ROWS_PER_CONSUMER, FirstBlock, ForwardSpec, Overlap, QuerySource, Tiles, Turns

CONSUMERS = (2, 3, 4)
KEYS = range(32, 193, 16)
STAGES = (4, 3, 2)
PARTS = (1, 2)
HOLDS = (0, 30, 60)


def legal(spec: ForwardSpec, own: Tiles) -> list[Tiles]:
    """Legal tiles, none twice: `own` first, then the others by the number of fields that differ from it, then by how far q and kv do."""
    found = dict.fromkeys(_combinations(spec, own))
    found.pop(own, None)
    return [own, *sorted(found, key=lambda tiles: _distance(tiles, own))]


def _distance(tiles: Tiles, own: Tiles) -> tuple[int, int]:
    differ = sum(getattr(tiles, f.name) != getattr(own, f.name) for f in fields(Tiles) if f.name not in ("stages", "o_columns"))
    return differ, abs(tiles.q - own.q) + abs(tiles.kv - own.kv)


def _combinations(spec: ForwardSpec, own: Tiles) -> Iterator[Tiles]:
    first_blocks = (FirstBlock.WHOLE,) if spec.mask_kind is MaskKind.FULL else tuple(FirstBlock)
    for frame in _frames(spec, own):
        for turns, parts, hold, first in itertools.product(Turns, PARTS, HOLDS, first_blocks):
            tiles = replace(frame, turns=turns, parts=parts, hold=hold, first_block=first)
            if _sensible(tiles) and not budget.problems(spec, tiles):
                yield tiles


def _sensible(tiles: Tiles) -> bool:
    """What measurements have ruled out (docs/performance.md): half blocks with turns."""
    return not (tiles.first_block is FirstBlock.HALF and tiles.turns is Turns.PING_PONG)


def _frames(spec: ForwardSpec, own: Tiles) -> Iterator[Tiles]:
    """Sizes, without the ways to use them."""
    sources = tuple(QuerySource) if spec.qk_width <= 128 else (QuerySource.SHARED,)
    for consumers, kv, source in itertools.product(CONSUMERS, KEYS, sources):
        frame = Tiles(
            q=ROWS_PER_CONSUMER * consumers,
            kv=kv,
            stages=1,
            o_columns=spec.v_width,
            query_source=source,
            overlap=Overlap.SOFTMAX_UNDER_PV,
            heads=own.heads,
        )
        depths = [tiles for tiles in (_widest_output(spec, frame, stages) for stages in STAGES) if tiles]
        yield from depths[:1] if len(depths) < 2 else (depths[0], depths[-1])


def _widest_output(spec: ForwardSpec, frame: Tiles, stages: int) -> Tiles | None:
    """The frame with this depth and as many columns of O at a time as fit."""
    for parts in range(1, 5):
        if spec.v_width % (32 * parts) == 0:
            tiles = replace(frame, stages=stages, o_columns=spec.v_width // parts)
            if not budget.problems(spec, tiles):
                return tiles
    return None
