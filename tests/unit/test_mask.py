"""Mask: the plain arithmetic of `visible_keys`, `key_blocks` and `area` against `Mask.dense`, which is the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flash3.mask import FULL, MAX_POSITION, UNBOUNDED, Bounds, KeyBlocks, Mask, MaskKind, key_blocks, visible_keys

CONDITIONS = [
    {"causal": causal, "left": left, "right": right, "chunk": chunk}
    for causal, right in ((False, None), (False, 0), (False, 2), (True, None), (True, 2))
    for left in (None, 0, 1, 3)
    for chunk in (None, 1, 3, 4)
]
OFFSETS = [(None, 0), (0, 0), (0, 2), (-3, -1), (5, -2), (11, 3)]  # as a ring step has them: keys before, around and past the queries
LENGTHS = (0, 1, 3, 5, 8, 9)  # around the edges of blocks of 1, 3 and 4
BLOCKS = (1, 3, 4)


def name_of(mask: Mask) -> str:
    return f"{mask} kind={mask.kind.name}"


def every_tile(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """All (first, last) pairs with first <= last < rows."""
    first, last = np.triu_indices(rows)
    return first.astype(np.int64), last.astype(np.int64)


def per_block(seen: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, blocks): whether the row sees some key of the block; whether it sees a whole block's worth of keys there."""
    q_len, k_len = seen.shape
    count = -(-k_len // block)
    padded = np.zeros((q_len, count * block), dtype=bool)
    padded[:, :k_len] = seen
    tiles = padded.reshape(q_len, count, block)
    return tiles.any(-1), tiles.all(-1)


@pytest.mark.parametrize(("q_offset", "k_offset"), OFFSETS)
@pytest.mark.parametrize("kind", MaskKind)
def test_arithmetic_is_the_definition(kind: MaskKind, q_offset: int | None, k_offset: int) -> None:
    """Visible keys of every row, visited and interior blocks of every tile, and the area: exactly what the dense mask says."""
    masks = [Mask(**conditions, q_offset=q_offset, k_offset=k_offset) for conditions in CONDITIONS]
    masks = [mask for mask in masks if mask.kind is kind]
    assert masks
    for mask, q_len, k_len in itertools.product(masks, LENGTHS, LENGTHS):
        where = f"{name_of(mask)} q_len={q_len} k_len={k_len}"
        seen, bounds = mask.dense(q_len, k_len), mask.bounds(q_len, k_len)
        rows, keys = np.arange(q_len), np.arange(k_len)
        begin, end = (np.broadcast_to(x, q_len) for x in visible_keys(rows, k_len, bounds, kind, np.minimum, np.maximum))
        assert ((begin >= 0) & (begin <= end) & (end <= k_len)).all(), where
        assert (seen == ((keys >= begin[:, None]) & (keys < end[:, None]))).all(), where
        assert mask.area(q_len, k_len) == seen.sum(), where
        for block in BLOCKS:
            check_blocks(mask, seen, block, where)


def check_blocks(mask: Mask, seen: np.ndarray, block: int, where: str) -> None:
    q_len, k_len = seen.shape
    first, last = every_tile(q_len)
    found = key_blocks(first, last, k_len, block, mask.bounds(q_len, k_len), mask.kind, np.minimum, np.maximum)
    begin, full_begin, full_end, end = (
        np.broadcast_to(x, first.shape)[:, None] for x in (found.begin, found.full_begin, found.full_end, found.end)
    )
    assert ((begin <= full_begin) & (full_begin <= full_end) & (full_end <= end)).all(), f"{where} block={block}"

    some, whole = (np.concatenate([np.zeros((1, x.shape[1]), int), x.cumsum(0)]) for x in per_block(seen, block))
    visited = some[last + 1] - some[first] > 0  # by some row of the tile
    interior = whole[last + 1] - whole[first] == (last - first + 1)[:, None]  # all keys by all rows
    blocks = np.arange(visited.shape[1])
    assert (visited == ((blocks >= begin) & (blocks < end))).all(), f"{where} block={block}: visited is not what rows see"
    assert (interior == ((blocks >= full_begin) & (blocks < full_end))).all(), f"{where} block={block}: interior"
    assert ((begin == end)[:, 0] == ~visited.any(1)).all(), f"{where} block={block}: a tile that sees nothing visits nothing"


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=3, right=1, q_offset=7), Mask(causal=True, chunk=4)], ids=name_of)
def test_ints_give_what_arrays_give(mask: Mask) -> None:
    """The methods run on Python ints and return Python ints."""
    for q_len, k_len in itertools.product((1, 4, 9), (0, 5, 8)):
        bounds = mask.bounds(q_len, k_len)
        for row in range(q_len):
            begin, end = mask.visible(row, q_len, k_len)
            assert type(begin) is int
            assert type(end) is int
            assert mask.dense(q_len, k_len)[row].nonzero()[0].tolist() == list(range(begin, end))
        for first, last in itertools.combinations_with_replacement(range(q_len), 2):
            found = mask.key_blocks(first, last, q_len, k_len, 3)
            assert found == key_blocks(np.int64(first), np.int64(last), k_len, 3, bounds, mask.kind)
            assert isinstance(found, KeyBlocks)


def test_a_tile_past_the_keys_visits_nothing() -> None:
    """A ring step whose window has passed all its keys. (Once: one block too many when k_len is no multiple of the block.)"""
    for mask in (Mask(left=0, right=0, q_offset=10), Mask(left=2, q_offset=10), Mask(chunk=4, q_offset=12)):
        found = mask.key_blocks(0, 1, 2, 5, 4)
        assert found.begin == found.full_begin == found.full_end == found.end


TRUTH = [  # API.md: q_len, k_len, mask, what row 0 sees, what the last row sees
    (3, 5, Mask(causal=True), range(3), range(5)),
    (5, 3, Mask(causal=True), range(0), range(3)),
    (4, 4, Mask(left=1, right=0), range(1), range(2, 4)),
    (4, 4, Mask(left=0, right=1), range(2), range(3, 4)),
    (2, 8, Mask(chunk=4, causal=True), range(4, 7), range(4, 8)),
    (3, 3, Mask(causal=True, q_offset=0, k_offset=2), range(0), range(1)),
    (7, 0, Mask(), range(0), range(0)),
]


@pytest.mark.parametrize(("q_len", "k_len", "mask", "first", "last"), TRUTH)
def test_truth_table(q_len: int, k_len: int, mask: Mask, first: range, last: range) -> None:
    seen = mask.dense(q_len, k_len)
    assert seen.shape == (q_len, k_len)
    for row, keys in ((0, first), (q_len - 1, last)):
        assert seen[row].nonzero()[0].tolist() == list(keys)
        begin, end = mask.visible(row, q_len, k_len)
        assert list(range(begin, end)) == list(keys)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=1, right=0), Mask(chunk=4)], ids=name_of)
def test_no_queries(mask: Mask) -> None:
    assert mask.dense(0, 7).shape == (0, 7)
    assert mask.area(0, 7) == 0


def test_a_window_of_w_tokens_sees_w_keys() -> None:
    """The window that ends at the query itself is left = W - 1, not W (transformers#39408)."""
    for width in (1, 2, 5):
        for mask in (Mask(causal=True, left=width - 1), Mask(left=width - 1, right=0)):
            assert mask.dense(12, 12).sum(1).tolist() == [min(i + 1, width) for i in range(12)]


def test_windows_as_wide_as_the_sequence_are_causal() -> None:
    """FA#1133."""
    size = 16384
    for left in (-1, size, size - 1):
        assert Mask(left=left, right=0).area(size, size) == Mask(causal=True).area(size, size) == size * (size + 1) // 2
    assert Mask(left=size - 2, right=0).area(size, size) == size * (size + 1) // 2 - 1


def test_minus_one_is_none() -> None:
    """TransformerEngine#3528."""
    assert Mask(causal=True, left=-1, right=-1) == Mask(causal=True)
    assert Mask(left=-1) == Mask(right=-1) == Mask(left=None, right=None) == FULL
    assert Mask(left=UNBOUNDED) == FULL
    assert Mask(left=UNBOUNDED - 1).kind is MaskKind.WINDOW


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (Mask(), MaskKind.FULL),
        (Mask(q_offset=3, k_offset=1), MaskKind.FULL),
        (Mask(causal=True), MaskKind.CAUSAL),
        (Mask(right=2), MaskKind.CAUSAL),
        (Mask(left=2), MaskKind.WINDOW),
        (Mask(causal=True, left=2), MaskKind.WINDOW),
        (Mask(chunk=4, left=2), MaskKind.CHUNK),
    ],
)
def test_kind(mask: Mask, kind: MaskKind) -> None:
    assert mask.kind is kind


def test_values_are_settled() -> None:
    """Equal masks are equal and hash alike, whatever integer type they were made of."""
    assert Mask(causal=np.True_, left=np.int32(3), chunk=np.int64(8)) == Mask(causal=True, left=3, chunk=8)
    assert hash(Mask(left=np.int16(3))) == hash(Mask(left=3))
    assert type(Mask(left=np.int32(3)).left) is int


BAD = [
    ({"left": -2}, ValueError, "left must be None, -1 (unbounded) or an integer >= 0, got -2"),
    ({"right": -7}, ValueError, "right must be None, -1 (unbounded) or an integer >= 0, got -7"),
    ({"chunk": 0}, ValueError, "chunk must be an integer >= 1, got 0"),
    ({"chunk": -1}, ValueError, "chunk must be an integer >= 1, got -1"),
    ({"left": 1.5}, TypeError, "left must be an integer or None, got 1.5 of type float"),
    ({"left": "3"}, TypeError, "left must be an integer or None, got '3' of type str"),
    ({"right": True}, TypeError, "right must be an integer, got True"),
    ({"chunk": 4.0}, TypeError, "chunk must be an integer or None, got 4.0 of type float"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"causal": None}, TypeError, "causal must be True or False, got None"),
    ({"q_offset": 0.5}, TypeError, "q_offset must be an integer or None, got 0.5 of type float"),
    ({"k_offset": None}, TypeError, "k_offset must be an integer, got None of type NoneType"),
    ({"q_offset": MAX_POSITION + 1}, ValueError, f"q_offset must be within ±{MAX_POSITION}, got {MAX_POSITION + 1}"),
    ({"k_offset": -MAX_POSITION - 1}, ValueError, f"k_offset must be within ±{MAX_POSITION}, got {-MAX_POSITION - 1}"),
]


@pytest.mark.parametrize(("values", "error", "message"), BAD)
def test_bad_values(values: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Mask(**values)
    assert message in str(caught.value)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        Mask(True)  # type: ignore[misc]


def test_and_is_both() -> None:
    masks = [Mask(**c, q_offset=2, k_offset=1) for c in CONDITIONS if c["chunk"] != 3]  # chunks 1 and 4: one divides the other
    for a, b in itertools.product(masks[::3], masks[::2]):
        both = a & b
        assert (both.dense(5, 7) == (a.dense(5, 7) & b.dense(5, 7))).all(), f"{a} & {b}"
        assert both == b & a


def test_full_is_neutral() -> None:
    window = Mask(left=2, q_offset=4)
    assert FULL & window == window & FULL == window
    assert Mask(q_offset=9) & window == window  # where nothing is hidden, offsets mean nothing


def test_and_refuses_what_has_no_mask() -> None:
    with pytest.raises(ValueError, match=r"different \(q_offset, k_offset\): \(None, 0\) and \(3, 0\)"):
        Mask(causal=True) & Mask(causal=True, q_offset=3)
    with pytest.raises(ValueError, match="chunk=4 with chunk=6: one must divide the other"):
        Mask(chunk=4) & Mask(chunk=6)
    with pytest.raises(TypeError):
        Mask(causal=True) & True  # type: ignore[operator]
    assert (Mask(chunk=4) & Mask(chunk=8)).chunk == 4


@pytest.mark.parametrize("block", [1, 128])
@pytest.mark.parametrize("kind", MaskKind)
def test_largest_numbers_fit_32_bits(kind: MaskKind, block: int) -> None:
    """Lengths, offsets and widths at their limits: 32-bit integers give what Python's unbounded ones do."""
    edges = (-MAX_POSITION, 0, MAX_POSITION)
    widths = (0, MAX_POSITION, UNBOUNDED - 1, UNBOUNDED)
    chunks = (1, 3, MAX_POSITION, UNBOUNDED) if kind is MaskKind.CHUNK else (UNBOUNDED,)
    lengths = (1, MAX_POSITION - 1, MAX_POSITION)
    with np.errstate(over="raise"):
        for left, right, chunk, q_offset, k_offset, k_len in itertools.product(widths, widths, chunks, edges, edges, lengths):
            numbers = (left, right, chunk, q_offset, k_offset)
            narrow = Bounds(*map(np.int32, numbers))
            for first, last in ((0, 0), (0, MAX_POSITION - 1), (MAX_POSITION - 1, MAX_POSITION - 1)):
                wide = key_blocks(first, last, k_len, block, Bounds(*numbers), kind)
                assert wide == key_blocks(np.int32(first), np.int32(last), np.int32(k_len), np.int32(block), narrow, kind)
