"""From a checked problem to what the compiled function takes: normal form of the Spec, and the run-time numbers. Pure Python."""

from __future__ import annotations

import math

from ...mask import Mask
from ...problem import Sizes, Spec
from . import heuristics
from .tiles import ForwardSpec, ScaleSign, SequenceLayout, Tiles

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-120
"""A smaller scale is 0: scores times it are, in float32."""


def scale_sign(scale: float) -> ScaleSign:
    if abs(scale) < SMALLEST_SCALE:
        return ScaleSign.ZERO
    return ScaleSign.POSITIVE if scale > 0 else ScaleSign.NEGATIVE


def forward_spec(spec: Spec, scale: float, q_layout: SequenceLayout, k_layout: SequenceLayout) -> ForwardSpec:
    """The kernel that serves a Spec."""
    return ForwardSpec(
        dtype=spec.dtype,
        out_dtype=spec.out_dtype,
        qk_width=heuristics.width_of(spec.head_dim),
        v_width=heuristics.width_of(spec.value_dim),
        heads_per_kv=spec.heads_per_kv,
        mask_kind=spec.mask_kind,
        q_layout=q_layout,
        k_layout=k_layout,
        scale_sign=ScaleSign.POSITIVE if spec.softcap else scale_sign(scale),  # tanh takes the sign in
        softcap=spec.softcap,
        sink=spec.sink,
        lse=spec.lse,
    )


def mask_numbers(mask: Mask) -> tuple[int, ...]:
    """operands.MaskNumbers, as plain Python numbers."""
    bounds = mask.bounds(0, 0)
    return bounds.left, bounds.right, bounds.chunk, bounds.q_offset, bounds.k_offset, int(mask.q_offset is None)


def numbers(spec: ForwardSpec, tiles: Tiles, sizes: Sizes, mask: Mask, multiprocessors: int) -> tuple[float | int, ...]:
    """operands.Numbers, as plain Python numbers."""
    if spec.softcap:
        scale_log2, tanh_scale = sizes.softcap * LOG2_E, 2 * LOG2_E * sizes.scale / sizes.softcap
    else:
        scale_log2, tanh_scale = (abs(sizes.scale) * LOG2_E if spec.scale_sign is not ScaleSign.ZERO else 1.0), 0.0
    return (
        scale_log2,
        tanh_scale,
        *mask_numbers(mask),
        max(1, heuristics.head_group(spec, sizes.k_len, sizes.batch * sizes.heads_q) // tiles.heads),
        multiprocessors,
        heuristics.first_level(tiles, sizes, multiprocessors),
    )
