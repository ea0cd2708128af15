"""Attention over a KV cache against a plain re-implementation: rotate, append, attend, token by token in Python."""

from dataclasses import replace

import pytest
import torch

import flash3
from flash3 import KVCache, Mask, Rotary, dispatch, reference
from flash3.flash_attn_interface import flash_attn_with_kvcache
from flash3.problem import Request
from tests.regressions.oracle import int32, random

CAPACITY, PAGE = 48, 4
HEADS, DIMS = (4, 2), (32, 24)
CAUSAL = Mask(causal=True)


class Store:
    """A cache of three sequences with random contents, NaN in every slot without a token; contiguous or in pages."""

    def __init__(self, lengths, device, paged=False, rows=None, leftpad=None):
        self.lengths = int32(*lengths, device=device)
        self.rows = list(range(len(lengths))) if rows is None else list(rows)
        count = max(self.rows) + 1
        self.table = None
        shape = count, CAPACITY
        if paged:
            per_row = CAPACITY // PAGE
            order = torch.randperm(count * per_row, generator=torch.Generator().manual_seed(3))
            self.table = order.int().view(count, per_row).to(device)
            shape = count * per_row, PAGE
        self.k, self.v = (torch.full((*shape, HEADS[1], d), torch.nan, device=device) for d in DIMS)
        self.leftpad = None if leftpad is None else int32(*leftpad, device=device)
        for i, n in enumerate(lengths):
            self.write(i, 0, [random(n, HEADS[1], d, dtype=torch.float32, device=device, seed=10 * i + d) for d in DIMS])
        self.batch_index = None if rows is None else int32(*rows, device=device)

    def _at(self, i, slot):
        row = self.rows[i]
        return (row, slot) if self.table is None else (int(self.table[row, slot // PAGE]), slot % PAGE)

    def write(self, i, start, kv):
        """Tokens of sequence i from slot `start` on."""
        for x, new in zip((self.k, self.v), kv, strict=True):
            for t, token in enumerate(new):
                x[self._at(i, start + t)] = token

    def read(self, i, stop):
        """k and v of sequence i up to slot `stop`, its left padding skipped."""
        first = 0 if self.leftpad is None else int(self.leftpad[i])
        return [torch.stack([x[self._at(i, s)] for s in range(first, stop)])[None] if stop > first else x[:0, :1] for x in (self.k, self.v)]

    def cache(self):
        return KVCache(self.k, self.v, self.lengths, page_table=self.table, batch_index=self.batch_index, leftpad=self.leftpad)

    def copy(self):
        other = object.__new__(Store)
        other.__dict__ = {**self.__dict__, "k": self.k.clone(), "v": self.v.clone()}
        return other


def rotated(x, rotary, position):
    """One token x (heads, d) at a position, as RoFormer has it: pair by pair."""
    x, out = x.double(), x.double().clone()
    half = rotary.cos.shape[1]
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if rotary.interleaved else (j, j + half)
        cos, sin = rotary.cos[position, j].double(), rotary.sin[position, j].double()
        out[:, a], out[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, a] * sin + x[:, b] * cos
    return out


def expected(store, q, new, rotary, mask, **options):
    """out, lse of each sequence; `store` gets the new tokens. q, and new = (k, v), are lists of (tokens, heads, d)."""
    results = []
    for i, own_q in enumerate(q):
        length = int(store.lengths[i])
        start = length if rotary is None or rotary.lengths is None else int(rotary.lengths[i])
        if new is not None:
            k, v = new[0][i], new[1][i]
            if rotary is not None:
                k = torch.stack([rotated(x, rotary, start + t) for t, x in enumerate(k)]).float() if len(k) else k
                step = 0 if mask == Mask() else 1
                own_q = torch.stack([rotated(x, rotary, start + t * step) for t, x in enumerate(own_q)]).float() if len(own_q) else own_q
            store.write(i, length, (k, v))
            length += len(k)
        k, v = (x.cpu() for x in store.read(i, length))
        results.append([x[0] for x in reference.attention(Request(q=own_q[None].cpu(), k=k, v=v, mask=mask, **options))])
    return results


def make_rotary(device, dim=16, interleaved=False, lengths=None, positions=64):
    angles = torch.outer(torch.arange(float(positions)), 100.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    return Rotary(angles.cos().to(device), angles.sin().to(device), interleaved=interleaved, lengths=lengths)


def draw(tokens, heads, dim, device, seed):
    return [random(n, heads, dim, dtype=torch.float32, device=device, seed=seed + i) for i, n in enumerate(tokens)]


def compare(out, lse, wanted):
    """out and lse as lists by sequence."""
    for ours, ours_lse, (exact, exact_lse) in zip(out, lse, wanted, strict=True):
        torch.testing.assert_close(ours.double().cpu(), exact, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(ours_lse.double().cpu(), exact_lse, rtol=1e-5, atol=2e-6)


ROTARIES = {
    "none": None,
    "half split": {"dim": 32},
    "interleaved": {"dim": 32, "interleaved": True},
    "part of the head": {"dim": 16},
    "part, interleaved": {"dim": 8, "interleaved": True},
    "own positions": {"dim": 16, "lengths": (20, 0, 7)},
}
PLACES = {
    "contiguous": {},
    "rows": {"rows": (4, 0, 2)},
    "leftpad": {"leftpad": (5, 0, 2)},
    "pages": {"paged": True},
    "pages, rows, leftpad": {"paged": True, "rows": (4, 0, 2), "leftpad": (5, 0, 2)},
}
MASKS = {"causal": CAUSAL, "full": Mask(), "window": Mask(left=6, right=0)}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("turn", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("new", [1, 5])
def test_append(new, place, turn, mask, device):
    """Dense q and new tokens: what comes out, what the cache holds then, and what must not have changed."""
    store = Store((9, 3, 17), device, **place)
    q, k, v = draw((new,) * 3, HEADS[0], DIMS[0], device, 1), *(draw((new,) * 3, HEADS[1], d, device, 50 + d) for d in DIMS)
    rotary = None
    if turn is not None:
        own = turn.get("lengths")
        rotary = make_rotary(device, **{**turn, "lengths": None if own is None else int32(*own, device=device)})
    mine, lengths, inputs = store.copy(), store.lengths.clone(), [torch.stack(x) for x in (q, k, v)]
    kept = [x.clone() for x in inputs]
    options = {"k_new": inputs[1], "v_new": inputs[2], "rotary": rotary, "mask": mask, "return_lse": True}
    out, lse = flash3.attention_kvcache(inputs[0], mine.cache(), **options)
    compare(out, lse, expected(store, q, (k, v), rotary, mask))
    torch.testing.assert_close(mine.k, store.k, rtol=1e-6, atol=1e-6, equal_nan=True)  # unused slots still NaN, others untouched
    assert torch.equal(mine.v.nan_to_num(7.0), store.v.nan_to_num(7.0))
    assert torch.equal(mine.lengths, lengths)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


@pytest.mark.parametrize("turn", [None, {"dim": 16}, {"dim": 32, "interleaved": True}], ids=["", "rotary", "interleaved"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("counts", [(1, 4, 2), (0, 6, 0), (3, 0, 1)], ids=str)
def test_packed_queries_and_new_tokens(counts, place, turn, device):
    """cu_seqlens_q packs q and the new tokens alike; rows past the last sequence change nothing."""
    store = Store((9, 3, 17), device, **place)
    q, k, v = draw(counts, HEADS[0], DIMS[0], device, 1), *(draw(counts, HEADS[1], d, device, 50 + d) for d in DIMS)
    rotary = None if turn is None else make_rotary(device, **turn)
    mine = store.copy()
    beyond = [torch.full((2, *x[0].shape[1:]), torch.nan, device=device) for x in (q, k, v)]
    packed = [torch.cat([*x, tail]) for x, tail in zip((q, k, v), beyond, strict=True)]
    starts = int32(0, *torch.tensor(counts).cumsum(0).tolist(), device=device)
    out, lse = flash3.attention_kvcache(
        packed[0], mine.cache(), k_new=packed[1], v_new=packed[2], rotary=rotary, cu_seqlens_q=starts, mask=CAUSAL, return_lse=True
    )
    wanted = expected(store, q, (k, v), rotary, CAUSAL)
    compare(out[: sum(counts)].split(counts), [x.T for x in lse.T[: sum(counts)].split(counts)], wanted)
    torch.testing.assert_close(mine.k, store.k, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(mine.v.nan_to_num(7.0), store.v.nan_to_num(7.0))


def test_new_tokens_unlike_the_queries(device):
    """More new keys than queries, and fewer; FlashAttention-3's cu_seqlens_k_new packs them on their own."""
    for counts, q_counts in (((4, 1, 6), (2, 2, 2)), ((1, 0, 2), (3, 3, 3))):
        store = Store((9, 3, 17), device, paged=True)
        q, k, v = draw(q_counts, HEADS[0], DIMS[0], device, 1), *(draw(counts, HEADS[1], d, device, 50 + d) for d in DIMS)
        mine = store.copy()
        starts = int32(0, *torch.tensor(counts).cumsum(0).tolist(), device=device)
        out, lse, *_ = flash_attn_with_kvcache(
            torch.stack(q), mine.k, mine.v, torch.cat(k), torch.cat(v), cache_seqlens=mine.lengths, page_table=mine.table,
            cu_seqlens_k_new=starts, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        compare(out, lse, expected(store, q, (k, v), None, CAUSAL))
        assert torch.equal(mine.k.nan_to_num(7.0), store.k.nan_to_num(7.0))


def test_rotary_of_flash_attention_3(device):
    """Its flag says interleaved by default, ours does not."""
    q, k, v = draw((2,) * 3, HEADS[0], DIMS[0], device, 1), *(draw((2,) * 3, HEADS[1], d, device, 50 + d) for d in DIMS)
    for names, interleaved in (({}, True), ({"rotary_interleaved": False}, False)):
        store = Store((9, 3, 17), device)
        mine, rotary = store.copy(), make_rotary(device, 16, interleaved)
        out, lse, *_ = flash_attn_with_kvcache(
            *(torch.stack(q), mine.k, mine.v, torch.stack(k), torch.stack(v)), rotary_cos=rotary.cos, rotary_sin=rotary.sin,
            cache_seqlens=mine.lengths, causal=True, return_softmax_lse=True, **names,
        )  # fmt: skip
        compare(out, lse, expected(store, q, (k, v), rotary, CAUSAL))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 12], [16, 4]], ids=lambda c: f"{len(c)} chunks")
def test_prompts_in_any_chunks(chunks, paged, device):
    """A prefill at once, in chunks, or token by token (decoding): the same outputs, the same cache."""
    q, k, v = (random(2, 20, h, d, dtype=torch.float32, device=device, seed=d) for h, d in zip((4, 2, 2), (32, 32, 24), strict=True))
    rotary = make_rotary(device, 32)
    turned = [
        torch.stack([torch.stack([rotated(x, rotary, t) for t, x in enumerate(row)]) for row in y]).float().to(device) for y in (q, k)
    ]
    wanted = flash3.attention(*turned, v, mask=CAUSAL)
    store = Store((0, 0), device, paged=paged)
    lengths, outs = int32(0, 0, device=device), []
    for q_, k_, v_ in zip(*(x.split(chunks, 1) for x in (q, k, v)), strict=True):
        cache = KVCache(store.k, store.v, lengths, page_table=store.table)
        outs.append(flash3.attention_kvcache(q_, cache, k_new=k_, v_new=v_, rotary=rotary, mask=CAUSAL))
        lengths = lengths + q_.shape[1]
    torch.testing.assert_close(torch.cat(outs, 1), wanted, rtol=1e-5, atol=2e-6)
    for i in range(2):
        for ours, theirs in zip(store.read(i, 20), (turned[1], v), strict=True):
            torch.testing.assert_close(ours[0], theirs[i], rtol=1e-5, atol=1e-6)


def test_num_splits_changes_nothing(device):
    store = Store((40, 3, 17), device, paged=True)
    q = random(3, 1, *(4, 32), dtype=torch.float32, device=device)
    wanted = flash3.attention_kvcache(q, store.cache(), mask=CAUSAL, return_lse=True)
    for splits in (0, 1, 2, 7):
        for ours, theirs in zip(
            flash3.attention_kvcache(q, store.cache(), mask=CAUSAL, return_lse=True, num_splits=splits), wanted, strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_options(device):
    """scale, softcap and sink reach the attention."""
    store = Store((9, 3, 17), device)
    q = draw((2,) * 3, HEADS[0], DIMS[0], device, 1)
    options = {"scale": 0.3, "softcap": 2.0, "sink": torch.linspace(-1, 1, 4, device=device)}
    out, lse = flash3.attention_kvcache(torch.stack(q), store.cache(), mask=CAUSAL, return_lse=True, **options)
    compare(out, lse, expected(store, q, None, None, CAUSAL, **{**options, "sink": options["sink"].cpu()}))


def _bad_calls(store, device):
    q, k, v = random(3, 2, 4, 32, dtype=torch.float32, device=device), *(torch.zeros(3, 2, 2, d, device=device) for d in DIMS)
    good = {"q": q, "cache": store.cache(), "k_new": k, "v_new": v, "mask": CAUSAL}
    rotary = make_rotary(device)
    return {
        "rank": {**good, "q": q[0]},
        "heads": {**good, "q": q[:, :, :3]},
        "head_dim": {**good, "q": q[..., :24]},
        "k alone": {**good, "v_new": None},
        "v alone": {**good, "k_new": None},
        "batch": {**good, "k_new": k[:2], "v_new": v[:2]},
        "new heads": {**good, "k_new": k[:, :, :1]},
        "new dim": {**good, "v_new": torch.zeros(3, 2, 2, 32, device=device)},
        "new rows": {**good, "v_new": v[:, :1]},
        "new dtype": {**good, "k_new": k.half(), "v_new": v.half()},
        "mask": {**good, "mask": torch.zeros(2, 17, device=device)},
        "scale": {**good, "scale": float("nan")},
        "sink": {**good, "sink": torch.zeros(3, device=device)},
        "backend": {**good, "backend": "abacus"},
        "rotary shape": {**good, "rotary": replace(rotary, sin=rotary.sin[:, :4])},
        "rotary too wide": {**good, "rotary": make_rotary(device, 48)},
        "rotary positions": {**good, "rotary": make_rotary(device, positions=18)},
        "rotary lengths": {**good, "rotary": make_rotary(device, lengths=int32(0, -1, 0, device=device))},
        "rotary alone": {"q": q, "cache": store.cache(), "rotary": rotary},
        "full": {**good, "cache": replace(store.cache(), lengths=int32(9, CAPACITY - 1, 17, device=device))},
        "negative": {**good, "cache": replace(store.cache(), lengths=int32(9, -1, 17, device=device))},
        "lengths dtype": {**good, "cache": replace(store.cache(), lengths=store.lengths.long())},
        "lengths shape": {**good, "cache": replace(store.cache(), lengths=store.lengths[:2])},
        "batch_index": {**good, "cache": replace(store.cache(), batch_index=int32(0, 1, 3, device=device))},
        "num_splits": {**good, "num_splits": -1},
        "cache": {**good, "cache": (store.k, store.v)},
        "gradient": {**good, "q": q.clone().requires_grad_()},
    }


@pytest.mark.parametrize("name", list(_bad_calls(Store((9, 3, 17), "cpu"), "cpu")))
def test_a_failed_call_leaves_the_cache_unchanged(name, device, monkeypatch):
    """Everything is checked before the first write, and nothing runs."""
    store = Store((9, 3, 17), device)
    before = [x.nan_to_num(7.0) for x in (store.k, store.v, store.lengths)]
    original, ran = dispatch.choose, []

    def spied(*arguments):
        plan = original(*arguments)
        return replace(plan, run=lambda *rest: ran.append(rest))

    monkeypatch.setattr(dispatch, "choose", spied)
    with flash3.settings.override(check_values=True), pytest.raises((TypeError, ValueError)):
        flash3.attention_kvcache(**_bad_calls(store, device)[name])
    assert not ran
    assert all(torch.equal(a, b.nan_to_num(7.0)) for a, b in zip(before, (store.k, store.v, store.lengths), strict=True))
