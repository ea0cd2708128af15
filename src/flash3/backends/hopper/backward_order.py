"""The order of a deterministic backward: which key tile adds its share of a query block's dQ when, decided here and nowhere else.

Key tiles of a head go in groups of GROUP; groups one after another, and in a group so that tiles that run side by side meet a query block
at different times. Without a mask tile r of a group starts r steps of equal length further on and goes round, so block i is met first by
the tile that starts there, then by the one before it, and so on round. With a mask a tile starts where it is first seen, later tiles
further on: whoever started last meets a block first, the latest tile.

Blocks are launched group by group, and a group has fewer tiles than the GPU has multiprocessors. So when a tile waits, whoever it waits for
runs already or will be launched once earlier groups are done, which wait for none of these.

Plain arithmetic: tests run it on ints, kernels on Int32 with their own `minimum` and `maximum`.
"""

from dataclasses import dataclass
from typing import Any

from ... import mask
from ...mask import MaskKind

GROUP = 64


def place(index: Any, num_tiles: Any, columns: Any, minimum: Any = min, cluster: int = 1) -> tuple[Any, Any]:
    """(key tile, column) of the index-th block launched, of num_tiles tiles in each of so many columns (heads of sequences). Where blocks
    make clusters, of the index-th cluster: what is said here of tiles holds for those of a cluster together."""
    most = GROUP // cluster
    group = index // (most * columns)
    within = index - group * most * columns
    size = minimum(num_tiles - group * most, most)
    column = within // size
    return group * most + within - column * size, column


@dataclass
class Turns:
    """When one key tile has its turn. Fields are ints, or a kernel's Int32."""

    kv_block: Any
    num_kv_blocks: Any  # of the sequence
    num_q_blocks: Any
    k_len: Any
    bounds: mask.Bounds
    cluster: int = 1

    def group(self, minimum: Any = min) -> tuple[Any, Any, Any]:
        """First tile of this tile's group, how many it has, and which of them this one is."""
        most = GROUP // self.cluster
        first = self.kv_block // most * most
        return first, minimum(self.num_kv_blocks - first, most), self.kv_block - first

    def shift(self, kind: MaskKind, minimum: Any = min) -> Any:
        """How many blocks later than its first one this tile starts; it goes round."""
        if kind is not MaskKind.FULL:
            return 0
        _, size, member = self.group(minimum)
        return member * self.num_q_blocks // size

    def rank(self, q_block: Any, q: int, kv: int, kind: MaskKind, minimum: Any = min, maximum: Any = max) -> Any:
        """How many tiles add to a query block before this one."""
        first, size, member = self.group(minimum)
        if kind is MaskKind.FULL:
            foremost = ((q_block + 1) * size - 1) // self.num_q_blocks
            before = foremost - member
            return first + before + minimum(1, maximum(0, -before)) * size
        found = mask.key_blocks(q_block * q, q_block * q + (q - 1), self.k_len, kv, self.bounds, kind, minimum, maximum)
        earlier = maximum(0, minimum(found.end, first) - found.begin)
        return earlier + minimum(found.end, first + size) - 1 - self.kv_block
