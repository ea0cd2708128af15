"""Tiles → layouts and matmuls of the backward: pure functions, called on the host and again inside the kernels (see storage.py)."""

import math

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .backward_tiles import CONSUMERS, KEYS_PER_CONSUMER, BackwardSpec, BackwardTiles, Split
from .storage import ELEMENTS, smem_layout

WIDEST_WITH_FOUR = 128
"""Columns of a matmul in a kernel of four warpgroups: ptxas knows only of the 128 registers that a thread has at entry."""


def q_layout(spec: BackwardSpec, tiles: BackwardTiles, stages: int):
    return smem_layout(ELEMENTS[spec.dtype], tiles.q, spec.qk_width, stages)


def do_layout(spec: BackwardSpec, tiles: BackwardTiles, stages: int):
    return smem_layout(ELEMENTS[spec.dtype], tiles.q, spec.v_width, stages)


def k_layout(spec: BackwardSpec, tiles: BackwardTiles, stages: int):
    return smem_layout(ELEMENTS[spec.dtype], tiles.kv, spec.qk_width, stages)


def v_layout(spec: BackwardSpec, tiles: BackwardTiles, stages: int):
    return smem_layout(ELEMENTS[spec.dtype], tiles.kv, spec.v_width, stages)


def gradient_layout(spec: BackwardSpec, width: int):
    """One consumer's rows of dK or dV on their way out, in the place of K or V."""
    return smem_layout(ELEMENTS[spec.dtype], KEYS_PER_CONSUMER, width, 1)


def half_of_k_layout(spec: BackwardSpec, tiles: BackwardTiles):
    """Of the other block of a cluster, the columns whose dQ this one makes."""
    return smem_layout(ELEMENTS[spec.dtype], tiles.kv, spec.qk_width // 2, 1)


def ds_layout(spec: BackwardSpec, tiles: BackwardTiles):
    """(queries, keys, stages), keys contiguous; a consumer's 64 keys are one swizzle atom. In a cluster behind the stages of this block's
    dS those of the other's."""
    atom = smem_layout(ELEMENTS[spec.dtype], 8, KEYS_PER_CONSUMER, 1)
    return cute.tile_to_shape(cute.select(atom, mode=[0, 1]), (tiles.q, tiles.kv, tiles.cluster * tiles.ds_stages), order=(0, 1, 2))


def scores_mma(spec: BackwardSpec, tiles: BackwardTiles):
    """Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ: 64 keys of each consumer are the rows."""
    shared = warpgroup.OperandSource.SMEM
    return _mma(spec, OperandMajorMode.K, OperandMajorMode.K, _key_rows(tiles), (KEYS_PER_CONSUMER, tiles.q), shared)


def _key_rows(tiles: BackwardTiles) -> tuple[int, int, int]:
    return (tiles.kv // KEYS_PER_CONSUMER, 1, 1)


def gradient_mma(spec: BackwardSpec, tiles: BackwardTiles, width: int):
    """dV += Pᵀ·dO and dK += dSᵀ·Q: Pᵀ and dSᵀ are the registers that Sᵀ came in."""
    registers = warpgroup.OperandSource.RMEM
    if tiles.split is Split.ROLES and width > WIDEST_WITH_FOUR:
        width = math.gcd(width, WIDEST_WITH_FOUR)
    return _mma(spec, OperandMajorMode.K, OperandMajorMode.MN, _key_rows(tiles), (KEYS_PER_CONSUMER, width), registers)


def dq_mma(spec: BackwardSpec, tiles: BackwardTiles):
    """dQ = dS·K, 64 rows of each of two consumers or half the columns; or dQᵀ = Kᵀ·dSᵀ, 64 columns of each. Split.ROLES: in the main
    kernel there is one consumer for it (half_dq_mma)."""
    shared, K, MN = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.MN
    if tiles.dq_transposed:
        return _mma(spec, MN, K, (CONSUMERS, 1, 1), (KEYS_PER_CONSUMER, tiles.q), shared)
    if tiles.split is Split.ROLES:
        return _mma(spec, K, MN, (1, CONSUMERS, 1), (tiles.q, spec.qk_width // CONSUMERS), shared)
    return _mma(spec, K, MN, (CONSUMERS, 1, 1), (KEYS_PER_CONSUMER, spec.qk_width), shared)


def half_dq_mma(spec: BackwardSpec, tiles: BackwardTiles):
    """dQ = dS·K, half the columns: as one of dq_mma's two consumers."""
    tile = tiles.q, spec.qk_width // CONSUMERS
    return _mma(spec, OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), tile, warpgroup.OperandSource.SMEM)


def dq_shape(spec: BackwardSpec, tiles: BackwardTiles) -> tuple[int, int]:
    """What dq_mma computes."""
    return (spec.qk_width, tiles.q) if tiles.dq_transposed else (tiles.q, spec.qk_width)


def _mma(spec, a_major, b_major, atoms, tile, a_source):
    element = ELEMENTS[spec.dtype]
    return hopper.make_trivial_tiled_mma(element, element, a_major, b_major, Float32, atoms, tile, a_source)
