"""API.md's truth table: which keys a row sees, recovered through the public functions of every layout by making V one-hot."""

from dataclasses import dataclass

import pytest
import torch

import flash3
from flash3 import Mask
from tests.conformance.storage import cumulated, int32, paged

NONE: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    q_len: int
    k_len: int
    mask: Mask
    first: tuple[int, ...]  # keys that row 0 sees
    last: tuple[int, ...]


TABLE = [
    Row(3, 5, Mask(causal=True), (0, 1, 2), (0, 1, 2, 3, 4)),
    Row(5, 3, Mask(causal=True), NONE, (0, 1, 2)),
    Row(4, 4, Mask(left=1, right=0), (0,), (2, 3)),
    Row(4, 4, Mask(left=0, right=1), (0, 1), (3,)),
    Row(2, 8, Mask(chunk=4, causal=True), (4, 5, 6), (4, 5, 6, 7)),
    Row(3, 3, Mask(causal=True, q_offset=0, k_offset=2), NONE, (0,)),
    *(Row(7, 0, mask, NONE, NONE) for mask in (Mask(), Mask(causal=True), Mask(left=2), Mask(chunk=3))),
    # and a few more: unbounded by None and by -1, chunks that begin inside, offsets that see nothing or everything
    Row(3, 5, Mask(causal=True, left=-1, right=-1), (0, 1, 2), (0, 1, 2, 3, 4)),
    Row(3, 5, Mask(causal=True, left=1), (1, 2), (3, 4)),
    Row(3, 7, Mask(chunk=5), (0, 1, 2, 3, 4), (5, 6)),
    Row(2, 6, Mask(left=2, q_offset=0), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),
    Row(2, 6, Mask(right=2, q_offset=0), (0, 1, 2), (0, 1, 2, 3)),
    Row(2, 6, Mask(causal=True, q_offset=-5), NONE, NONE),
    Row(2, 6, Mask(left=3, q_offset=100), NONE, NONE),
    Row(3, 6, Mask(chunk=4, q_offset=-2, k_offset=-3), (0, 1, 2), (3, 4, 5)),
]


def by_attention(q, k, v, **options):
    return flash3.attention(q[None], k[None], v[None], **options)[0]


def by_packed(q, k, v, **options):
    """Second of three sequences; the others are in the way."""
    q, k, v = (torch.cat([x[:1], x, x[:1]]) if len(x) else x for x in (q, k, v))
    room = int(len(k) > 0)
    starts = cumulated([1, len(q) - 2, 1]).to(q.device), cumulated([room, len(k) - 2 * room, room]).to(q.device)
    return flash3.attention_varlen(q, k, v, *starts, len(q), len(k), **options)[1:-1]


def by_padded(q, k, v, **options):
    """More rows and slots than the sequence has."""
    grown = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)])[None] for x in (q, k, v)]
    used = {"seqused_q": int32([len(q)], q.device), "seqused_k": int32([len(k)], q.device)}
    return flash3.attention_varlen(*grown, None, None, None, None, **used, **options)[0, : len(q)]


def by_cache(q, k, v, **options):
    grown = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)])[None] for x in (k, v)]
    return flash3.attention_kvcache(q[None], flash3.KVCache(*grown, int32([len(k)], q.device)), **options)[0]


def by_pages(q, k, v, **options):
    at = paged([len(k)], 3)
    cache = flash3.KVCache(*(at.put([x.cpu()]).to(x.device) for x in (k, v)), *(at.arguments[n].to(q.device) for n in ("lengths",)),
                           page_table=at.arguments["page_table"].to(q.device))  # fmt: skip
    return flash3.attention_kvcache(q[None], cache, **options)[0]


WAYS = [by_attention, by_packed, by_padded, by_cache, by_pages]


def weights(way, backend, row, **options):
    """Each row's weight for each key: (q_len, k_len), by one-hot values."""
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, 1, 64, generator=g).to(backend.device, backend.dtype) for n in (row.q_len, row.k_len))
    v = torch.eye(row.k_len, 8, device=backend.device, dtype=backend.dtype)[:, None]
    return backend.serve(lambda: way(q, k, v, mask=row.mask, backend=backend.name, **options))[:, 0, : row.k_len].float().cpu()


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r.q_len}x{r.k_len} {r.first} {r.last}")
def test_row(row, way, backend):
    seen = [tuple(w.nonzero()[:, 0].tolist()) for w in weights(way, backend, row)]
    assert (seen[0], seen[-1]) == (row.first, row.last)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r.q_len}x{r.k_len} {r.first} {r.last}")
def test_scale_zero_is_the_mean_of_the_visible(row, way, backend):
    for keys, w in zip((row.first, row.last), weights(way, backend, row, scale=0.0)[[0, -1]], strict=True):
        wanted = torch.zeros(row.k_len)
        wanted[list(keys)] = 1 / max(1, len(keys))
        torch.testing.assert_close(w, wanted, rtol=1e-3, atol=0)


def test_no_queries(backend):
    """The table's row 0 × 7: any mask, an empty result."""
    for mask in (Mask(), Mask(causal=True), Mask(left=1), Mask(chunk=2)):
        assert weights(by_attention, backend, Row(0, 7, mask, NONE, NONE)).shape == (0, 7)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_every_row_of_every_mask(way, backend):
    """All of the mask, not only its first and last row, as the definition has it."""
    masks = [
        Mask(causal=True),
        Mask(left=2, right=1),
        Mask(causal=True, chunk=3),
        Mask(left=1, q_offset=1, k_offset=-2),
        Mask(right=-1, left=3),
    ]
    for mask in masks:
        for q_len, k_len in ((8, 8), (5, 8), (8, 5), (1, 7)):
            row = Row(q_len, k_len, mask, NONE, NONE)
            assert torch.equal(weights(way, backend, row) > 0, torch.from_numpy(mask.dense(q_len, k_len))), (mask, q_len, k_len)
