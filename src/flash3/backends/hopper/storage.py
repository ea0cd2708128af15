"""Tiles → layouts, matmuls and TMA atoms. Pure functions, called on the host and again inside the kernel: an MMA or a layout built
on the host and read in the kernel does not survive the way."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...problem import DType
from .tiles import ROWS_PER_CONSUMER, ForwardSpec, QuerySource, Tiles

ELEMENTS = {DType.BF16: BFloat16, DType.FP16: Float16, DType.FP32: Float32}


def smem_layout(element, rows: int, columns: int, stages: int):
    """Row-major tiles with the widest swizzle that the columns allow: (rows, columns, stages)."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, element, columns)
    atom = warpgroup.make_smem_layout_atom(kind, element)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def q_layout(spec: ForwardSpec, rows: int):
    return smem_layout(ELEMENTS[spec.dtype], rows, spec.qk_width, 1)


def k_layout(spec: ForwardSpec, tiles: Tiles, stages: int):
    return smem_layout(ELEMENTS[spec.dtype], tiles.kv, spec.qk_width, stages)


def v_layout(spec: ForwardSpec, tiles: Tiles, stages: int):
    return smem_layout(ELEMENTS[spec.dtype], tiles.kv, spec.v_width, stages)


def o_layout(spec: ForwardSpec, tiles: Tiles, rows: int):
    return smem_layout(ELEMENTS[spec.out_dtype], rows, tiles.o_columns, 1)


def transposed(sV, columns: int, rows: int, stages: int):
    """The same bytes as (columns, rows, stages): Vᵀ, the B operand of P·V."""
    return cute.composition(sV, cute.make_ordered_layout((columns, rows, stages), order=(1, 0, 2)))


def scores_mma(spec: ForwardSpec, tiles: Tiles, keys: int | None = None):
    """S = Q·Kᵀ, 64 rows per consumer, for one part of a block's keys, or for so many."""
    source = {QuerySource.REGISTERS: warpgroup.OperandSource.RMEM, QuerySource.SHARED: warpgroup.OperandSource.SMEM}
    return _mma(spec, tiles, OperandMajorMode.K, keys or tiles.kv // tiles.parts, source[tiles.query_source])


def output_mma(spec: ForwardSpec, tiles: Tiles, columns: int | None = None):
    """O += P·V. With `columns`, the layout of that many columns of O, for the way out."""
    return _mma(spec, tiles, OperandMajorMode.MN, columns or spec.v_width, warpgroup.OperandSource.RMEM)


def _mma(spec, tiles, b_major, columns, a_source):
    element = ELEMENTS[spec.dtype]
    return hopper.make_trivial_tiled_mma(
        element,
        element,
        OperandMajorMode.K,
        b_major,
        Float32,
        (tiles.consumers, 1, 1),
        (ROWS_PER_CONSUMER, columns),
        a_source,
    )


def query_rows(tiles: Tiles, rows: int):
    """So many rows of a query tile as TMA counts them: where heads share a tile, pairs (head, query)."""
    return rows if tiles.heads == 1 else (tiles.heads, rows // tiles.heads)


def output_tile(tiles: Tiles):
    """What a consumer sends at once."""
    return query_rows(tiles, ROWS_PER_CONSUMER), tiles.o_columns


def tma_load(mX, layout, tile):
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, cute.select(layout, mode=[0, 1]), tile)


def tma_store(mX, layout, tile):
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, cute.select(layout, mode=[0, 1]), tile)
