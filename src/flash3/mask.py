"""Which keys a query row may see: causal, windows, chunks and offsets, as intervals and as ranges of key blocks.

Query row i sits at position p = i + q_offset, key j at position j + k_offset. Every condition admits an interval of positions
around p, their conjunction too, and both ends of that interval never move left as i grows. So the keys that a tile of rows
touches are one interval, and the blocks of keys fall into three runs, visited right to left:

    left edge (masked) | interior (every row sees every key: no mask) | right edge (masked)

`visible_keys` and `key_blocks` are plain arithmetic: they run on Python ints (tests, CPU) and on a kernel's 32-bit integers.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

UNBOUNDED = 1 << 30
"""A window this wide has no edge. Positions stay below 3·2**28, so that position + UNBOUNDED still fits 32 bits."""
MAX_POSITION = 1 << 28
"""Largest sequence length and largest magnitude of an offset."""


class MaskKind(enum.Enum):
    """What the mask asks of the code; the numbers (widths, offsets) are run-time values."""

    FULL = "full"
    CAUSAL = "causal"  # an upper bound only: keys at positions <= p + right
    WINDOW = "window"  # a lower bound, and perhaps an upper one
    CHUNK = "chunk"  # keys of p's own chunk, and perhaps a window too


@dataclass(frozen=True)
class Bounds:
    """A mask's numbers for one pair of lengths. Fields are ints, or a kernel's 32-bit integers."""

    left: Any
    right: Any
    chunk: Any
    q_offset: Any
    k_offset: Any


@dataclass(frozen=True)
class KeyBlocks:
    """Half-open ranges of block numbers: [begin, full_begin) masked, [full_begin, full_end) not masked, [full_end, end) masked."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


def visible_keys(
    row: Any, k_len: Any, bounds: Bounds, kind: MaskKind, minimum: Callable[..., Any] = min, maximum: Callable[..., Any] = max
) -> tuple[Any, Any]:
    """Keys [begin, end) that query `row` sees, 0 <= begin <= end <= k_len.

    `//` must round down, as it does for Python ints and for CuTe's Int32.
    """
    if kind is MaskKind.FULL:
        return 0, k_len
    own = row + bounds.q_offset - bounds.k_offset  # the key index at the row's own position
    end = minimum(k_len, own + bounds.right + 1)
    begin = 0
    if kind is not MaskKind.CAUSAL:
        begin = maximum(0, own - bounds.left)
    if kind is MaskKind.CHUNK:
        start = (row + bounds.q_offset) // bounds.chunk * bounds.chunk - bounds.k_offset
        begin = maximum(begin, start)
        end = minimum(end, start + bounds.chunk)
    begin = minimum(begin, k_len)
    return begin, maximum(begin, end)


def key_blocks(
    first_row: Any,
    last_row: Any,
    k_len: Any,
    block: int,
    bounds: Bounds,
    kind: MaskKind,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> KeyBlocks:
    """Blocks of `block` keys that the rows first_row..last_row (inclusive) visit. Nothing to see: begin == end.

    A block is interior when every one of these rows sees all its keys; a block cut by the end of the sequence is never interior.
    """
    leftmost, first_end = visible_keys(first_row, k_len, bounds, kind, minimum, maximum)
    last_begin, rightmost = visible_keys(last_row, k_len, bounds, kind, minimum, maximum)
    begin = leftmost // block
    sees = minimum(1, rightmost - leftmost)  # 0 when these rows see no key at all
    end = begin + sees * ((rightmost + block - 1) // block - begin)
    full_begin = minimum(end, (last_begin + block - 1) // block)
    full_end = maximum(full_begin, minimum(end, first_end // block))
    return KeyBlocks(begin, full_begin, full_end, end)


@dataclass(frozen=True)
class QueryBlocks:
    """The same four numbers for the blocks of query rows that a tile of keys meets."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


def visible_rows(
    key: Any, bounds: Bounds, kind: MaskKind, minimum: Callable[..., Any] = min, maximum: Callable[..., Any] = max
) -> tuple[Any, Any]:
    """Query rows [begin, end) that see `key`: `visible_keys` the other way round, not clipped to the rows that there are.

    None where the mask has no such edge. Both ends never move left as the key grows.
    """
    own = key + bounds.k_offset - bounds.q_offset  # the row at the key's own position
    begin = None if kind is MaskKind.FULL else own - bounds.right
    end = own + bounds.left + 1 if kind is MaskKind.WINDOW or kind is MaskKind.CHUNK else None
    if kind is MaskKind.CHUNK:
        start = (key + bounds.k_offset) // bounds.chunk * bounds.chunk - bounds.q_offset
        begin = maximum(begin, start)
        end = minimum(end, start + bounds.chunk)
    return begin, end


def query_blocks(
    first_key: Any,
    last_key: Any,
    q_len: Any,
    block: int,
    bounds: Bounds,
    kind: MaskKind,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> QueryBlocks:
    """Blocks of `block` query rows that see any of the keys first_key..last_key (inclusive). Nothing to see: begin == end.

    A block is interior when every one of its rows sees all these keys. Rows of the last block past q_len count as rows: whoever walks
    the blocks hides them by other means.
    """
    count = (q_len + block - 1) // block
    if kind is MaskKind.FULL:
        return QueryBlocks(0, 0, count, count)

    def clipped(row: Any) -> Any:
        return count * block if row is None else minimum(maximum(row, 0), count * block)

    first_begin, first_end = map(clipped, visible_rows(first_key, bounds, kind, minimum, maximum))
    last_begin, last_end = map(clipped, visible_rows(last_key, bounds, kind, minimum, maximum))
    begin = first_begin // block
    sees = minimum(1, maximum(0, last_end - first_begin))
    end = begin + sees * ((last_end + block - 1) // block - begin)
    full_begin = minimum(end, (last_begin + block - 1) // block)
    full_end = maximum(full_begin, minimum(end, first_end // block))
    return QueryBlocks(begin, full_begin, full_end, end)


def _whole(name: str, value: Any, lowest: int | None) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        # A traced program's int may stand for any number: operator.index would make it a constant.
        number = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        kind = "an integer" if name == "k_offset" else "an integer or None"
        raise TypeError(f"{name} must be {kind}, got {value!r} of type {type(value).__name__}") from None
    if lowest is not None and number < lowest:
        allowed = "None, -1 (unbounded) or an integer >= 0" if name in ("left", "right") else f"an integer >= {lowest}"
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def _offset(name: str, value: Any) -> int:
    number = _whole(name, value, None)
    if abs(number) > MAX_POSITION:
        raise ValueError(f"{name} must be within ±{MAX_POSITION}, got {number}")
    return number


def _width(name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = _whole(name, value, -1)
    return None if number == -1 or number >= UNBOUNDED else number


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys each query sees. Conditions combine by AND; no condition at all is full attention.

    Args:
        causal: keys at positions <= p.
        left: keys at positions >= p - left (inclusive). None or -1: unbounded.
        right: keys at positions <= p + right (inclusive). None or -1: unbounded.
        chunk: keys in p's own chunk, positions chunk*floor(p/chunk) … chunk*floor(p/chunk) + chunk - 1.
        q_offset: position of query row 0. None: k_len - q_len of each sequence, so that the last query meets the last key.
        k_offset: position of key 0.

    A window of W tokens that ends at the query itself is `Mask(causal=True, left=W - 1)`.

    Raises:
        TypeError: a value is not an integer (causal: not a bool).
        ValueError: a width below -1, a chunk below 1, or an offset beyond ±2**28.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    q_offset: int | None = None
    k_offset: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.causal, (bool, np.bool_)):
            raise TypeError(f"causal must be True or False, got {self.causal!r}")
        settle = object.__setattr__  # the dataclass is frozen; these are its normal forms
        settle(self, "causal", bool(self.causal))
        settle(self, "left", _width("left", self.left))
        settle(self, "right", _width("right", self.right))
        settle(self, "chunk", None if self.chunk is None else _whole("chunk", self.chunk, 1))
        settle(self, "q_offset", None if self.q_offset is None else _offset("q_offset", self.q_offset))
        settle(self, "k_offset", _offset("k_offset", self.k_offset))

    @property
    def kind(self) -> MaskKind:
        if self.chunk is not None:
            return MaskKind.CHUNK
        if self.left is not None:
            return MaskKind.WINDOW
        return MaskKind.CAUSAL if self.causal or self.right is not None else MaskKind.FULL

    def bounds(self, q_len: Any, k_len: Any) -> Bounds:
        """The numbers for a sequence of q_len queries and k_len keys; unbounded widths become UNBOUNDED."""
        return Bounds(
            left=UNBOUNDED if self.left is None else self.left,
            right=0 if self.causal else UNBOUNDED if self.right is None else self.right,
            chunk=UNBOUNDED if self.chunk is None else min(self.chunk, UNBOUNDED),
            q_offset=k_len - q_len if self.q_offset is None else self.q_offset,
            k_offset=self.k_offset,
        )

    def visible(self, row: int, q_len: int, k_len: int) -> tuple[int, int]:
        """Keys [begin, end) that query `row` of a sequence sees."""
        return visible_keys(row, k_len, self.bounds(q_len, k_len), self.kind)

    def key_blocks(self, first_row: int, last_row: int, q_len: int, k_len: int, block: int) -> KeyBlocks:
        """Blocks of `block` keys that rows first_row..last_row (inclusive) visit; see the module's `key_blocks`."""
        return key_blocks(first_row, last_row, k_len, block, self.bounds(q_len, k_len), self.kind)

    def dense(self, q_len: int, k_len: int) -> np.ndarray:
        """The mask as a bool array (q_len, k_len), True where the key is visible: straight from the definition, for small cases."""
        q_offset = k_len - q_len if self.q_offset is None else self.q_offset
        p = (np.arange(q_len, dtype=np.int64) + q_offset)[:, None]
        key = (np.arange(k_len, dtype=np.int64) + self.k_offset)[None, :]
        seen = np.ones((q_len, k_len), dtype=bool)
        if self.causal:
            seen &= key <= p
        if self.left is not None:
            seen &= key >= p - self.left
        if self.right is not None:
            seen &= key <= p + self.right
        if self.chunk is not None:
            seen &= key // self.chunk == p // self.chunk
        return seen

    def area(self, q_len: int, k_len: int) -> int:
        """How many (query, key) pairs are visible: the work, in units of 4·d multiply-add flops forward."""
        rows = np.arange(q_len, dtype=np.int64)
        begin, end = visible_keys(rows, k_len, self.bounds(q_len, k_len), self.kind, np.minimum, np.maximum)
        return int(np.sum(np.broadcast_to(end - begin, rows.shape)))

    def __and__(self, other: Mask) -> Mask:
        """Both masks at once: a key is visible when both admit it.

        Raises:
            ValueError: different offsets, or chunk sizes of which neither divides the other (their overlap is no chunk).
        """
        if not isinstance(other, Mask):
            return NotImplemented
        if self.kind is MaskKind.FULL:
            return other
        if other.kind is MaskKind.FULL:
            return self
        mine, theirs = (self.q_offset, self.k_offset), (other.q_offset, other.k_offset)
        if mine != theirs:
            raise ValueError(f"cannot combine masks with different (q_offset, k_offset): {mine} and {theirs}")
        return Mask(
            causal=self.causal or other.causal,
            left=_narrower(self.left, other.left),
            right=_narrower(self.right, other.right),
            chunk=_common_chunk(self.chunk, other.chunk),
            q_offset=self.q_offset,
            k_offset=self.k_offset,
        )


def _narrower(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _common_chunk(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    small, large = sorted((a, b))
    if large % small:
        raise ValueError(f"cannot combine chunk={a} with chunk={b}: one must divide the other")
    return small


FULL = Mask()
"""Every query sees every key."""
