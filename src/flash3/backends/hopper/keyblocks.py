"""Which blocks of keys a work tile visits, right to left; the arithmetic itself is `mask.key_blocks`.

A tile that sees no key visits one block that the mask hides as a whole, so that O comes out as exactly 0 without a second path through
the kernel. That block lies past the end of dense keys, where TMA fills in zeros; ragged ones must not be read there (extents.py), so it
is their first.

Plain arithmetic: tests run it on ints, kernels on Int32 with their own `minimum` and `maximum`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import mask
from ...mask import MaskKind
from ...sequences import SequenceKind
from .tiles import ForwardSpec, Tiles, Turns


@dataclass
class TileBlocks:
    """For the producer: blocks first, first - 1, …, of which there is at least one."""

    first: Any
    count: Any


@dataclass
class KeyBlocks:
    """For a consumer. `first` is always masked; the blocks it passes over belong to its tile's other rows."""

    passed_right: Any
    first: Any
    right_edge: Any  # masked
    interior: Any  # every row sees every key
    left_edge: Any  # masked
    passed_left: Any
    first_half: Any = 0  # 1: of `first` only the left half is seen


def consumers_part(spec: ForwardSpec, tiles: Tiles) -> bool:
    """Whether each consumer walks its own blocks. With turns all walk the same ones, and without a mask they are the same."""
    return spec.mask_kind is not MaskKind.FULL and tiles.turns is Turns.FREE


def level_of(k_len: Any, tiles: Tiles, maximum: Callable[..., Any] = max, bit_length: Callable[[Any], Any] = int.bit_length) -> Any:
    """How long a sequence with queries is, in powers of two from 1: the bit length of its number of key blocks, which a tile costs at
    most."""
    return maximum(1, bit_length((k_len + tiles.kv - 1) // tiles.kv))


@dataclass(frozen=True)
class Walk:
    """The blocks of one work tile. k_len and the fields of bounds are ints, or a kernel's Int32."""

    spec: ForwardSpec
    tiles: Tiles
    q_block: Any
    k_len: Any
    bounds: mask.Bounds
    minimum: Any = min
    maximum: Any = max

    def _ranges(self, first_row: Any, rows: int) -> mask.KeyBlocks:
        # Rows past the end of the queries count too: then a consumer's blocks always lie within its tile's.
        last_row = first_row + (rows - 1)
        return mask.key_blocks(first_row, last_row, self.k_len, self.tiles.kv, self.bounds, self.spec.mask_kind, self.minimum, self.maximum)

    def of_tile(self) -> TileBlocks:
        """The blocks that any row of the tile sees."""
        tiles = self.tiles
        whole = self._ranges(self.q_block * tiles.queries, tiles.queries)
        count = whole.end - whole.begin
        empty = 1 - self.minimum(1, count)
        hidden = self.k_len // tiles.kv + 1 if self.spec.k_layout.kind is SequenceKind.DENSE else 0
        return TileBlocks(whole.end - 1 + empty * (hidden - whole.end + 1), count + empty)

    def of_consumer(self, consumer: Any) -> KeyBlocks:
        """One consumer's way through its tile's blocks."""
        tiles, minimum, maximum = self.tiles, self.minimum, self.maximum
        if self.spec.mask_kind is MaskKind.FULL:
            # Without keys interior is -1, which a loop takes for 0: a maximum would cost instructions in every step.
            last = (self.k_len + tiles.kv - 1) // tiles.kv - 1
            return KeyBlocks(0, maximum(last, 0), 0, last, 0, 0)
        whole = self._ranges(self.q_block * tiles.queries, tiles.queries)
        end_of_tile = maximum(whole.end, whole.begin + 1)
        part = whole
        if consumers_part(self.spec, tiles):
            mine = tiles.queries_per_consumer
            part = self._ranges(self.q_block * tiles.queries + consumer * mine, mine)
        begin = minimum(part.begin, end_of_tile - 1)
        end = maximum(part.end, begin + 1)
        first = end - 1
        full_begin = minimum(part.full_begin, first)
        full_end = maximum(full_begin, minimum(part.full_end, first))
        left_edge = full_begin - begin if self.spec.mask_kind is not MaskKind.CAUSAL else 0
        half = 0
        if consumers_part(self.spec, tiles):
            last_row = self.q_block * tiles.queries + (consumer + 1) * tiles.queries_per_consumer - 1
            _, seen = mask.visible_keys(last_row, self.k_len, self.bounds, self.spec.mask_kind, minimum, maximum)
            half = minimum(1, maximum(0, first * tiles.kv + tiles.kv // 2 + 1 - seen))
        return KeyBlocks(end_of_tile - end, first, first - full_end, full_end - full_begin, left_edge, begin - whole.begin, half)
