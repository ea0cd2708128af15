"""Tiles for a problem that no tuned table covers, in plain Python. The reasons are measurements: docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...mask import MaskKind
from . import budget
from .tiles import WIDTHS, FirstBlock, ForwardSpec, QuerySource, Tiles

L2_FOR_KV_BYTES = 32 << 20
"""Half of the L2: what K and V of the heads that run side by side may take."""
LARGEST_HEAD_GROUP = 16
MOST_STAGES = 4
MOST_OUTPUT_PARTS = 4


def width_of(dim: int) -> int:
    """The narrowest tile that holds `dim` columns."""
    return next(width for width in WIDTHS if width >= dim)


def choose(spec: ForwardSpec, k_len: int) -> Tiles:
    """Tiles for sequences of up to k_len keys."""
    widest = max(spec.qk_width, spec.v_width)
    if widest <= 64:
        return _narrow(spec, k_len)
    tiles = _largest(spec, consumers=2)
    if widest > 128:
        return replace(tiles, hold=60)
    if spec.mask_kind is MaskKind.FULL or tiles.kv % 32:
        return replace(tiles, hold=30)
    return replace(tiles, parts=2, first_block=FirstBlock.HALF, hold=50)


def _narrow(spec: ForwardSpec, k_len: int) -> Tiles:
    """At width 64 the softmax's latency counts: four consumers, until at long lengths the power limit asks for fewer bytes per FLOP. Where
    sequences may be short, tiles of 256 rows would be mostly empty."""
    full = spec.mask_kind is MaskKind.FULL
    if spec.is_ragged or (full and k_len > 4096):
        return replace(_largest(spec, consumers=3, most_kv=96), hold=60)
    if full and k_len <= 512:
        return _many(spec, Tiles(q=256, kv=48, stages=MOST_STAGES, o_columns=spec.v_width, hold=30))
    shared = QuerySource.SHARED
    return _many(spec, Tiles(q=256, kv=64, stages=MOST_STAGES, o_columns=spec.v_width, query_source=shared, hold=60))


def _many(spec: ForwardSpec, tiles: Tiles) -> Tiles:
    """Four consumers: few registers each."""
    found = budget.problems(spec, tiles)
    if found:
        raise LookupError(f"no tiles for four consumers: {spec}: {found[0]}")
    return tiles


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


def head_group(spec: ForwardSpec, k_len: int, heads: int) -> int:
    """Query heads visited together. Full: one at a time, since its tiles already share K and V. Masked: as many as L2 holds."""
    if spec.mask_kind is MaskKind.FULL:
        return 1
    per_kv_head = max(1, k_len * (spec.qk_width + spec.v_width) * spec.dtype.bytes)
    kv_heads = max(1, L2_FOR_KV_BYTES // per_kv_head)
    return max(1, min(heads, LARGEST_HEAD_GROUP, kv_heads * spec.heads_per_kv))
