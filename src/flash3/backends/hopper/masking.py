"""−inf where a row does not see a key; and what a mask's numbers are for the tile at hand."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import mask
from ...mask import MaskKind
from .fragments import ROW_STEP, as_rows
from .operands import MaskNumbers
from .tiles import ForwardSpec, Tiles


def bounds_of(numbers: MaskNumbers, q_len: Int32, k_len: Int32) -> mask.Bounds:
    """The mask's numbers for one sequence."""
    q_offset = numbers.q_offset + numbers.bottom_right * (k_len - q_len)
    return mask.Bounds(numbers.left, numbers.right, numbers.chunk, q_offset, numbers.k_offset)


@dataclass
class FragmentMask:
    """For one thread: its rows' queries, counted from the tile's first, and columns first_column + 8j + {0, 1} of a block."""

    first_query: Int32  # of the first row; the second row's is ROW_STEP // heads further
    first_column: Int32
    tile_query: Int32  # the tile's first query in its sequence
    q_len: Int32
    k_len: Int32
    numbers: MaskNumbers
    spec: cutlass.Constexpr[ForwardSpec]
    tiles: cutlass.Constexpr[Tiles]

    @cute.jit
    def apply(self, S: cute.Tensor, first_key: Int32):
        rows = as_rows(S)
        bounds = bounds_of(self.numbers, self.q_len, self.k_len)
        for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
            query = self.tile_query + self.first_query + ROW_STEP // self.tiles.heads * r
            begin, end = mask.visible_keys(query, self.k_len, bounds, self.spec.mask_kind, cutlass.min, cutlass.max)
            first = first_key + self.first_column
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                column = (c // 2) * 8 + c % 2
                seen = column < end - first
                if const_expr(self.spec.mask_kind is MaskKind.WINDOW or self.spec.mask_kind is MaskKind.CHUNK):
                    seen = seen and column >= begin - first
                rows[r, c] = rows[r, c] if seen else -Float32.inf
