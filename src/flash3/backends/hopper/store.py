"""O and L on their way out. O goes from registers through this consumer's 64 rows of an own buffer, some columns at a time, and from
there by TMA, under the next tile's matmuls."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from ...sequences import SequenceKind
from . import storage
from .barriers import sync_output
from .extents import Extent, tile_of
from .fragments import LANES_PER_ROW, ROW_STEP, convert, scale_rows, scale_rows_or_clear
from .operands import Operands
from .schedule import WorkTile
from .tiles import ROWS_PER_CONSUMER, ForwardSpec, Tiles


def copy_to_smem(spec: ForwardSpec, tiles: Tiles):
    """Accumulator → rows in shared memory: stmatrix for 16 bit, pairs of columns for float32."""
    element = storage.ELEMENTS[spec.out_dtype]
    if element is Float32:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
    else:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element)
    return cute.make_tiled_copy_C(atom, storage.output_mma(spec, tiles, tiles.o_columns))


@dataclass
class OutputStore:
    atom: cute.CopyAtom
    tensor: cute.Tensor  # extents.rows_view of O
    rows: cute.Tensor  # this consumer's rows in shared memory
    copy: cute.TiledCopy
    to_smem: cute.Tensor  # this thread's part of them
    consumer: Int32
    first_warp: Boolean  # of its warpgroup: it talks to TMA
    lse: object
    first_row: Int32
    lane: Int32
    spec: cutlass.Constexpr[ForwardSpec]
    tiles: cutlass.Constexpr[Tiles]

    @staticmethod
    def create(ops: Operands, sO, thread, consumer, first_row, spec: ForwardSpec, tiles: Tiles):
        """`thread`: number among the consumers' threads."""
        copy = copy_to_smem(spec, tiles)
        rows = cute.local_tile(sO, (ROWS_PER_CONSUMER, tiles.o_columns), (consumer, 0, None))
        to_smem = copy.get_slice(thread).partition_D(sO)
        first_warp = Boolean(thread // 32 % 4 == 0)
        return OutputStore(
            ops.o.atom, ops.o.tma_tensor, rows, copy, to_smem, consumer, first_warp, ops.lse, first_row, thread % 32, spec, tiles
        )

    @cute.jit
    def write_output(self, O: cute.Tensor, inverse: cute.Tensor, tile: WorkTile, extent: Extent):
        if const_expr(self.spec.k_layout.kind is SequenceKind.DENSE):
            scale_rows(O, inverse)
        else:  # a row without keys may hold NaN: its P is 0, but whose V was that?
            scale_rows_or_clear(O, inverse)
        element = storage.ELEMENTS[self.spec.out_dtype]
        if const_expr(element is Float32):
            self.write_parts(O, tile, extent)
        else:
            rO = cute.make_rmem_tensor_like(O, element)
            convert(O, rO)
            self.write_parts(rO, tile, extent)

    @cute.jit
    def write_parts(self, rO: cute.Tensor, tile: WorkTile, extent: Extent):
        for part in cutlass.range_constexpr(self.spec.v_width // self.tiles.o_columns):
            self.write_part(rO, tile, extent, part)

    @cute.jit
    def write_part(self, rO: cute.Tensor, tile: WorkTile, extent: Extent, part: cutlass.Constexpr[int]):
        eighths = self.tiles.o_columns // 8
        columns = cute.make_tensor(rO.iterator + 4 * eighths * part, cute.make_layout(((2, 2, eighths), 1, 1)))
        if self.first_warp:  # the buffer may still be on its way out
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_output(self.consumer)
        cute.copy(self.copy, self.copy.retile(columns), self.to_smem[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        sync_output(self.consumer)
        if self.first_warp:
            self.send_part(tile, extent, part)

    @cute.jit
    def send_part(self, tile: WorkTile, extent: Extent, part: cutlass.Constexpr[int]):
        block = tile.q_block * self.tiles.consumers + self.consumer
        rows = tile_of(self.tensor, storage.output_tile(self.tiles), block, part, tile.head, extent, self.spec.q_layout)
        source, target = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.rows, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(self.atom, source[None, 0], target)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def write_lse(self, lse: cute.Tensor, tile: WorkTile, extent: Extent):
        if self.lane % LANES_PER_ROW == 0:
            for r in cutlass.range_constexpr(cute.size(lse)):
                query = tile.q_block * self.tiles.queries + self.tiles.query_of(self.first_row) + ROW_STEP // self.tiles.heads * r
                head = self.head_of(tile, r)
                if query < extent.length:
                    if const_expr(self.spec.q_layout.kind is SequenceKind.PACKED):
                        self.lse[head, extent.start + query] = lse[r]
                    else:
                        self.lse[tile.batch, head, extent.start + query] = lse[r]

    def head_of(self, tile: WorkTile, r: int) -> Int32:
        """The query head of this thread's row r."""
        heads = self.tiles.heads
        return tile.head if heads == 1 else tile.head * heads + (self.first_row + ROW_STEP * r) % heads
