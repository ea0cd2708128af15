"""Tiles for a problem that no tuned table covers, in plain Python. The reasons are measurements: docs/performance.md."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from ...mask import MaskKind
from ...problem import Sizes
from . import budget
from .keyblocks import level_of
from .tiles import ROWS_PER_CONSUMER, WIDTHS, FirstBlock, ForwardSpec, QuerySource, Tiles

L2_FOR_KV_BYTES = 32 << 20
"""Half of the L2: what K and V of the heads that run side by side may take."""
LARGEST_HEAD_GROUP = 16
LEVELS_BELOW = 20
"""Tiles per block of the grid."""
MOST_STAGES = 4
MOST_OUTPUT_PARTS = 4


def width_of(dim: int) -> int:
    """The narrowest tile that holds `dim` columns."""
    return next(width for width in WIDTHS if width >= dim)


def choose(spec: ForwardSpec, k_len: int, q_len: int | None = None) -> Tiles:
    """Tiles for sequences of up to k_len keys and, where known, q_len queries."""
    tiles = _for_keys(spec, k_len)
    return tiles if q_len is None else replace(tiles, heads=shared_heads(spec, tiles.q, q_len))


def shared_heads(spec: ForwardSpec, rows: int, q_len: int) -> int:
    """How many query heads of a key head to put into tiles of so many rows: all that fit evenly where that saves an eighth of the tiles,
    which is so for few queries only. Every tile then reads as many keys as before."""
    most = math.gcd(spec.heads_per_kv, ROWS_PER_CONSUMER)
    together, apart = -(-q_len * most // rows), -(-q_len // rows) * most
    return most if 8 * together <= 7 * apart else 1


def _for_keys(spec: ForwardSpec, k_len: int) -> Tiles:
    widest = max(spec.qk_width, spec.v_width)
    if widest <= 64:
        return _narrow(spec, k_len)
    tiles = _largest(spec, consumers=2)
    if widest > 128:
        return replace(tiles, hold=60)
    if spec.mask_kind is MaskKind.FULL or tiles.kv % 32:
        return replace(tiles, hold=30)
    return replace(tiles, parts=2, first_block=FirstBlock.HALF, hold=0 if spec.softcap else 50)  # with both ptxas spills


def _narrow(spec: ForwardSpec, k_len: int) -> Tiles:
    """At width 64 the softmax's latency counts: four consumers, until at long lengths the power limit asks for fewer bytes and instructions
    per FLOP. Where sequences may be short, tiles of 256 rows would be mostly empty; softcap needs more registers."""
    full, shared = spec.mask_kind is MaskKind.FULL, QuerySource.SHARED
    if spec.is_ragged or spec.softcap:
        return replace(_largest(spec, consumers=3, most_kv=96), hold=60)
    if full and k_len <= 512:
        return _fitting(spec, Tiles(q=256, kv=48, stages=MOST_STAGES, o_columns=spec.v_width, hold=30))
    if full and k_len > 4096:
        return _fitting(spec, Tiles(q=192, kv=128, stages=MOST_STAGES, o_columns=spec.v_width, query_source=shared, hold=30))
    return _fitting(spec, Tiles(q=256, kv=64, stages=MOST_STAGES, o_columns=spec.v_width, query_source=shared, hold=60))


def _fitting(spec: ForwardSpec, tiles: Tiles) -> Tiles:
    found = budget.problems(spec, tiles)
    if found:
        raise LookupError(f"tiles of width 64 that do not fit: {spec}: {found[0]}")
    return tiles


@functools.lru_cache(maxsize=1024)
def _largest(spec: ForwardSpec, consumers: int, most_kv: int = 128) -> Tiles:
    """The most keys per block that fit, then the most columns of O at a time, then the most stages."""
    source = QuerySource.REGISTERS if spec.qk_width <= 128 else QuerySource.SHARED
    for kv in range(most_kv, 15, -16):
        for columns in _output_columns(spec):
            for stages in range(MOST_STAGES, 1, -1):
                tiles = Tiles(q=64 * consumers, kv=kv, stages=stages, o_columns=columns, query_source=source)
                if not budget.problems(spec, tiles):
                    return tiles
    raise LookupError(f"no tiles fit: {spec}")


def _output_columns(spec: ForwardSpec) -> Iterator[int]:
    for parts in range(1, MOST_OUTPUT_PARTS + 1):
        if spec.v_width % (32 * parts) == 0:
            yield spec.v_width // parts


def first_level(tiles: Tiles, sizes: Sizes, multiprocessors: int) -> int:
    """keyblocks.level_of of the longest sequence, or 1, which puts all sequences into one level: the order of the batch. That is as good
    where many tiles come to each block, and spares the walks."""
    num_tiles = (sizes.total_q // tiles.queries + sizes.batch) * (sizes.heads_q // tiles.heads)
    few = num_tiles < LEVELS_BELOW * multiprocessors
    return level_of(sizes.k_len, tiles) if few else 1


def head_group(spec: ForwardSpec, k_len: int, heads: int) -> int:
    """Query heads visited together. Full: one at a time, since its tiles already share K and V. Masked: as many as L2 holds."""
    if spec.mask_kind is MaskKind.FULL:
        return 1
    per_kv_head = max(1, k_len * (spec.qk_width + spec.v_width) * spec.dtype.bytes)
    kv_heads = max(1, L2_FOR_KV_BYTES // per_kv_head)
    return max(1, min(heads, LARGEST_HEAD_GROUP, kv_heads * spec.heads_per_kv))
