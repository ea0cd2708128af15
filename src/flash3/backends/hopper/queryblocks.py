"""Which blocks of queries a tile of keys visits, first to last; the arithmetic itself is `mask.query_blocks`.

Plain arithmetic: tests run it on ints, kernels on Int32 with their own `minimum` and `maximum`.
"""

from dataclasses import dataclass
from typing import Any

from ... import mask
from ...mask import MaskKind
from .backward_tiles import BackwardSpec, BackwardTiles, DqPath


@dataclass
class QueryBlocks:
    """Blocks first, first + 1, …: so many masked ones, so many whose rows see every key of the tile, so many masked ones. Where all are of
    one kind a walk may start `shift` blocks later and go round (backward_order)."""

    first: Any
    left_edge: Any
    interior: Any
    right_edge: Any
    shift: Any = 0

    def count(self):
        return self.left_edge + self.interior + self.right_edge

    def at(self, step: Any, minimum: Any = min, maximum: Any = max):
        """The block that comes after so many others."""
        block = step + self.shift
        beyond = minimum(1, maximum(0, block - self.count() + 1))
        return self.first + block - beyond * self.count()


def query_blocks(
    spec: BackwardSpec,
    tiles: BackwardTiles,
    walk: Any,
    q_len: Any,
    k_len: Any,
    bounds: mask.Bounds,
    minimum: Any = min,
    maximum: Any = max,
    shift: Any = 0,
) -> QueryBlocks:
    """For the tiles that walk together, number `walk`, of which one holds a key. Where the end of the keys cuts them there are none but
    masked blocks; rows past the end of the queries have L = +inf, which needs no mask."""
    keys = tiles.walk_keys
    first_key = walk * keys
    last_key = minimum(first_key + keys, k_len) - 1
    found = mask.query_blocks(first_key, last_key, q_len, tiles.q, bounds, spec.mask_kind, minimum, maximum)
    cut = minimum(1, maximum(0, first_key + keys - k_len))
    full_begin = found.full_begin + cut * (found.full_end - found.full_begin)
    right_edge = found.end - found.full_end if spec.mask_kind in (MaskKind.WINDOW, MaskKind.CHUNK) else 0
    return QueryBlocks(found.begin, full_begin - found.begin, found.full_end - full_begin, right_edge, shift)


def block_at(blocks: QueryBlocks, step: Any, spec: BackwardSpec, tiles: BackwardTiles, minimum: Any, maximum: Any):
    """blocks.at, where nothing is shifted at no cost."""
    if tiles.dq_path is DqPath.ORDERED and spec.mask_kind is MaskKind.FULL:
        return blocks.at(step, minimum, maximum)
    return blocks.first + step
