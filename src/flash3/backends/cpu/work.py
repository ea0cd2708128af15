"""One piece of work: sequences of equal lengths as a dense batch, and which blocks of keys a tile of its queries visits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...mask import Bounds, MaskKind, key_blocks, visible_keys
from .tiles import Tiles


@dataclass(frozen=True)
class Visibility:
    """Which keys the rows of one work see. Key indices count from the first key of the slice at hand (`narrowed`)."""

    kind: MaskKind
    bounds: Bounds
    q_len: int
    k_len: int

    def span(self) -> tuple[int, int]:
        """The keys [begin, end) that any row sees: both ends of a row's interval never move left."""
        if self.q_len == 0:
            return 0, 0
        begin, end = self.visible(0)[0], self.visible(self.q_len - 1)[1]
        return begin, max(begin, end)

    def live_rows(self) -> tuple[int, int]:
        """The rows [first, stop) that see any key: one stretch, since a row's interval, before it is clipped, holds its own position."""
        if self.q_len == 0 or self.k_len == 0:
            return 0, 0
        if all(begin < end for begin, end in (self.visible(0), self.visible(self.q_len - 1))):
            return 0, self.q_len
        begin, end = self.rows()
        live = (begin < end).flatten().nonzero()
        return (int(live[0]), int(live[-1]) + 1) if len(live) else (0, 0)

    def is_full(self) -> bool:
        """Every row sees every key."""
        return self.visible(0)[1] == self.k_len and self.visible(self.q_len - 1)[0] == 0

    def is_square_causal(self) -> bool:
        """Row i sees keys 0 … i, as many keys as rows. (Ends move by at most one key a row: the first and the last row tell.)"""
        return self.q_len == self.k_len and self.visible(0) == (0, 1) and self.visible(self.q_len - 1) == (0, self.k_len)

    def visible(self, row: int) -> tuple[int, int]:
        """Keys [begin, end) that one row sees."""
        return visible_keys(row, self.k_len, self.bounds, self.kind)

    def narrowed(self, begin: int, end: int) -> Visibility:
        """The same rows over the keys [begin, end) alone."""
        b = self.bounds
        shifted = Bounds(b.left, b.right, b.chunk, b.q_offset, b.k_offset + begin)
        return Visibility(self.kind, shifted, self.q_len, end - begin)

    def for_rows(self, first: int, stop: int) -> Visibility:
        """Rows first … stop - 1 alone."""
        b = self.bounds
        return Visibility(self.kind, Bounds(b.left, b.right, b.chunk, b.q_offset + first, b.k_offset), stop - first, self.k_len)

    def rows(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last visible key of every row, as columns (q_len, 1)."""
        index = np.arange(self.q_len, dtype=np.int64)
        ends = visible_keys(index, self.k_len, self.bounds, self.kind, np.minimum, np.maximum)
        begin, end = (torch.from_numpy(np.broadcast_to(e, index.shape).copy())[:, None] for e in ends)
        return begin, end


@dataclass(frozen=True)
class Work:
    """Equal-length sequences: q (batch, heads_q, q_len, head_dim), k and v (batch, heads_kv, k_len, ·), qv like q with v's width."""

    q: Tensor
    k: Tensor
    v: Tensor
    sees: Visibility
    scale: float
    softcap: float = 0.0
    sink: Tensor | None = None
    qv: Tensor | None = None
    sizes: Tiles | None = None  # None: as the lengths suggest


@dataclass(frozen=True)
class Block:
    """Keys [begin, end); `hidden` (rows, keys) is True where the mask forbids, None where every row sees every key."""

    begin: int
    end: int
    hidden: Tensor | None


@dataclass
class Tiling:
    """Tiles of `rows` queries, blocks of `keys` keys: the loops of Algorithms 1 and 2."""

    sees: Visibility
    rows: int
    keys: int
    _ends: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Row ranges [first, stop)."""
        for first in range(0, self.sees.q_len, self.rows):
            yield first, min(first + self.rows, self.sees.q_len)

    def blocks(self, first: int, stop: int) -> Iterator[Block]:
        """The key blocks that rows first … stop - 1 visit; blocks no row sees are never touched."""
        sees = self.sees
        found = key_blocks(first, stop - 1, sees.k_len, self.keys, sees.bounds, sees.kind)
        for j in range(found.begin, found.end):
            begin, end = j * self.keys, min((j + 1) * self.keys, sees.k_len)
            interior = found.full_begin <= j < found.full_end
            yield Block(begin, end, None if interior or sees.kind is MaskKind.FULL else self._hidden(first, stop, begin, end))

    def _hidden(self, first: int, stop: int, begin: int, end: int) -> Tensor:
        if self._ends is None:
            self._ends = self.sees.rows()
        row_begin, row_end = self._ends
        keys = torch.arange(begin, end)
        return (keys < row_begin[first:stop]) | (keys >= row_end[first:stop])
