"""From a checked problem to what the backward's compiled function takes. Pure Python."""

from __future__ import annotations

from ...mask import Mask
from ...problem import Sizes, Spec
from . import backward_budget
from .backward_tiles import BackwardSpec
from .launch import LOG2_E, mask_numbers
from .tiles import SequenceLayout


def backward_spec(spec: Spec, q_layout: SequenceLayout, k_layout: SequenceLayout, lse_gradient: bool) -> BackwardSpec:
    """The kernels that serve a Spec."""
    qk_width, v_width = backward_budget.widths_of(spec.head_dim, spec.value_dim, spec.softcap)
    return BackwardSpec(
        dtype=spec.dtype,
        out_dtype=spec.out_dtype,
        qk_width=qk_width,
        v_width=v_width,
        heads_per_kv=spec.heads_per_kv,
        mask_kind=spec.mask_kind,
        q_layout=q_layout,
        k_layout=k_layout,
        softcap=spec.softcap,
        sink=spec.sink,
        lse_gradient=lse_gradient,
        deterministic=spec.deterministic,
    )


def numbers(sizes: Sizes, mask: Mask, multiprocessors: int) -> tuple[float | int, ...]:
    """backward_operands.BackwardNumbers, as plain Python numbers."""
    scale_log2, tanh_scale = sizes.scale * LOG2_E, 0.0
    if sizes.softcap:
        scale_log2, tanh_scale = sizes.softcap * LOG2_E, 2 * LOG2_E * sizes.scale / sizes.softcap
    return sizes.scale, scale_log2, tanh_scale, *mask_numbers(mask), multiprocessors
