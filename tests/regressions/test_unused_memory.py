"""Reported failures of other kernels: what lies outside a sequence reached the result. FA is Dao-AILab/flash-attention."""

import pytest
import torch

from flash3 import Mask
from flash3.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from flash3.problem import Request
from flash3.sequences import Packed, Paged
from tests.regressions.oracle import int32, judge, random

POISON = [torch.nan, torch.inf, -torch.inf]


def _past(cache, lengths, value):
    """The cache with `value` past each row's length."""
    cache = cache.clone()
    for row, length in enumerate(lengths):
        cache[row, length:] = value
    return cache


@pytest.mark.parametrize("poison", POISON)
def test_nan_past_the_cache_lengths(device, poison):
    """Row 1, FA#1745: b=2, q (2, 3, 1, 64) fp16, cache_seqlens [1, 3], K and V NaN past the length. As with zeros there."""
    lengths = 1, 3
    q, k, v = (random(2, n, 1, 64, dtype=torch.float16, device=device, seed=i) for i, n in enumerate((3, 8, 8)))
    for causal in (False, True):
        run = lambda value, causal=causal: flash_attn_with_kvcache(  # noqa: E731
            q, _past(k, lengths, value), _past(v, lengths, value), cache_seqlens=int32(*lengths, device=device), causal=causal,
            return_softmax_lse=True,
        )  # fmt: skip
        out, lse, *_ = run(poison)
        wanted, wanted_lse, *_ = run(0.0)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)
        for i, n in enumerate(lengths):
            one = Request(q=q[i : i + 1], k=k[i : i + 1, :n], v=v[i : i + 1, :n], mask=Mask(causal=causal))
            judge(one, out[i : i + 1], lse[i : i + 1])


@pytest.mark.parametrize("poison", POISON)
def test_nan_past_the_used_lengths(device, poison):
    """Row 2, FA#2374: varlen decode, 4 queries, 8 heads d64, cache 128, seqused_k [32, 64, 96, 48], NaN and Inf past it."""
    used = 32, 64, 96, 48
    q = random(4, 8, 64, device=device)
    k, v = (_past(random(4, 128, 8, 64, device=device, seed=i), used, poison).flatten(0, 1) for i in (1, 2))
    starts = int32(0, 1, 2, 3, 4, device=device), int32(0, 128, 256, 384, 512, device=device)
    seqused = int32(*used, device=device)
    out, lse = flash_attn_varlen_func(q, k, v, *starts, 1, 128, seqused_k=seqused, causal=True, return_attn_probs=True)
    judge(
        Request(q=q, k=k, v=v, q_sequences=Packed(cu_seqlens=starts[0]), k_sequences=Packed(cu_seqlens=starts[1], used=seqused)), out, lse
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("poison", POISON)
def test_nan_in_a_page_that_no_sequence_lists(device, poison):
    """Row 2, FA#2374, second half: a page that no table lists, and one that lies past every length, hold NaN and Inf."""
    k, v = (random(6, 16, 1, 64, device=device, seed=i) for i in (1, 2))
    for x in (k, v):
        x[5] = poison  # in no table
        x[4] = poison  # listed, past the length
    q, table, lengths = random(2, 1, 2, 64, device=device), int32(0, 1, 4, 2, 3, 4, device=device).view(2, 3), int32(32, 20, device=device)
    out, lse, *_ = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True)
    judge(Request(q=q, k=k, v=v, k_sequences=Paged(page_table=table, lengths=lengths), mask=Mask(causal=True)), out, lse)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("q_len", [1, 5, 13])
def test_nan_in_the_last_page(device, poison, q_len):
    """Row 3, flashinfer#941: page size 4, kv_len 13, NaN in the last page's three unused slots."""
    k, v = (random(4, 4, 2, 64, device=device, seed=i) for i in (1, 2))
    k[3, 1:], v[3, 1:] = poison, poison
    q, table, lengths = random(1, q_len, 4, 64, device=device), int32(0, 1, 2, 3, device=device)[None], int32(13, device=device)
    for causal in (True, False):
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=causal, return_softmax_lse=True)
        judge(Request(q=q, k=k, v=v, k_sequences=Paged(page_table=table, lengths=lengths), mask=Mask(causal=causal)), out, lse)


def test_same_lengths_in_caches_of_different_capacity(device):
    """Row 33, FA#1417: the same cache_seqlens, another capacity of the cache: the same result."""
    lengths = int32(100, 37, 1, device=device)
    q, k, v = (random(3, n, h, 64, device=device, seed=i) for i, (n, h) in enumerate(((1, 8), (100, 2), (100, 2))))
    results = []
    for capacity in (100, 128, 1000):
        room = torch.full((3, capacity - 100, 2, 64), torch.nan, device=device, dtype=k.dtype)
        caches = torch.cat([k, room], 1), torch.cat([v, room], 1)
        results.append(flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True, num_splits=1, return_softmax_lse=True)[:2])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    for i, n in enumerate((100, 37, 1)):
        judge(Request(q=q[i : i + 1], k=k[i : i + 1, :n], v=v[i : i + 1, :n]), results[0][0][i : i + 1], results[0][1][i : i + 1])
