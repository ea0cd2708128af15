"""Backward: FlashAttention-2, Algorithm 2, in three kernels without atomics: the same inputs always give the same bits.

    prepare   for each row:                delta = rowsum(dO ∘ O) − dLSE, and its LSE in two parts: P = exp2(c·(S − row_max) − log_sum)
    dkdv      for each block of keys:      for each tile of rows that sees it, of every query head of its key head:
                                           Pᵀ, dPᵀ = V dOᵀ;  dV += Pᵀ dO;  dSᵀ = Pᵀ ∘ (dPᵀ − delta) [∘ (1 − (S / softcap)²)];  dK += dSᵀ Q
    dq        for each tile of rows:       for each block of keys that it sees:   dQ += dS K

dK and dQ are multiplied by the scale at the end. Scores are computed twice: 7 matmuls where Algorithm 2 has 5, but dQ needs no sum across
programs. dkdv makes dK, dV or both: where both do not fit into the registers, two launches, and 8 matmuls.

The saved LSE is float32: beyond `coarse` its rounding would show in P (at 1e5 by 0.4 %). A tile of rows that reaches it makes its maxima
and sums again. Only rows whose LSE they reproduce take them: in a ring the keys at hand are a part of the row's, and the saved LSE is that
of all. Every other row has row_max 0, and its LSE for log_sum.
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, extent_of, load_block, load_by_pointers, own_tile, row_offsets, tanh, tile_pointers
from .forward import NUMBERS, scores
from .masking import Bounds, blocks_of_keys, blocks_of_queries, seen_by, settled, step, walk

SAME_LSE = tl.constexpr(2.0**-20)
"""How far two float32 LSEs of the same row may be apart, relatively: their rounding, and that of the scores by another order of sums."""


@triton.jit
def row_statistics(q, k, at_k, own_q, own_k, head, rows, bounds, scales, SPEC: tl.constexpr):
    """Row maximum (of c·S's sign) and sum of P over all keys of a tile of rows, by a plain loop."""
    QUERIES: tl.constexpr = SPEC.queries
    KEYS: tl.constexpr = SPEC.keys
    row_max = tl.full((SPEC.queries.block,), -float("inf"), tl.float32)
    row_sum = tl.full((SPEC.queries.block,), 0.0, tl.float32)
    begin, end = seen_by(rows, own_k.length, bounds, SPEC)
    pointers, exists = tile_pointers(q, own_q, rows, head, QUERIES)
    Q = tl.load(pointers, mask=exists, other=0.0)
    last = tl.minimum(tl.max(rows, 0), own_q.length - 1)
    found = blocks_of_keys(tl.min(rows, 0), last, own_k.length, bounds, SPEC)
    for i in tl.range(found.begin, found.end):
        first = i * SPEC.keys.block
        key = first + tl.arange(0, SPEC.keys.block)
        K = load_by_pointers(k, at_k, own_k, head // SPEC.heads_per_kv, first, key < own_k.length, KEYS, True)
        S = scores(Q, K, scales, SPEC)
        sees = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        S = tl.where(sees, S * SPEC.sign, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(S, 1))
        anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        P = tl.exp2((S - anchor[:, None]) * (SPEC.sign * scales.per_score))
        row_sum = row_sum * tl.exp2((row_max - anchor) * (SPEC.sign * scales.per_score)) + tl.sum(P, 1)
        row_max = new_max
    return row_max * SPEC.sign, row_sum


@triton.jit
def two_parts(lse, row_max, row_sum, sink, head, scales):
    """row_max and log_sum, where these reproduce the LSE; else 0 and the LSE (log2)."""
    anchor = tl.where(row_sum > 0, row_max, 0.0)
    top = anchor * scales.top
    total = row_sum
    if sink is not None:
        total += tl.exp2((tl.load(sink + head) - top) * LOG2_E)
    log_sum = tl.log2(tl.where(total > 0, total, 1.0))
    same = (row_sum > 0) & (tl.abs(top + log_sum / LOG2_E - lse) <= tl.abs(lse) * SAME_LSE)
    return tl.where(same, anchor, 0.0), tl.where(same, log_sum, lse * LOG2_E)


@triton.jit(do_not_specialize=NUMBERS)
def prepare_kernel(
    q,
    k,
    out,
    d_out,
    lse,
    d_lse,
    sink,
    stats,
    at_q,
    at_k,
    q_len,
    k_len,
    left,
    right,
    chunk,
    q_offset,
    k_offset,
    scales,
    heads,
    blocks,
    coarse,
    SPEC: tl.constexpr,
):
    """Fills stats. Rows without keys get the log_sum +inf: their P is 0."""
    OUTPUTS: tl.constexpr = SPEC.outputs
    block, head, batch = own_tile(blocks, heads, False)
    own_q, own_k = extent_of(at_q, batch, q_len), extent_of(at_k, batch, k_len)
    if block * SPEC.queries.block >= own_q.length:
        return
    rows = block * SPEC.queries.block + tl.arange(0, SPEC.queries.block)
    exists = rows < own_q.length
    pointers, stored = tile_pointers(out, own_q, rows, head, OUTPUTS)
    O = tl.load(pointers, mask=stored, other=0.0).to(tl.float32)
    pointers, stored = tile_pointers(d_out, own_q, rows, head, OUTPUTS)
    delta = tl.sum(O * tl.load(pointers, mask=stored, other=0.0).to(tl.float32), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse.start + row_offsets(d_lse, own_q, rows, head), mask=exists, other=0.0)
    row_lse = tl.load(lse.start + row_offsets(lse, own_q, rows, head), mask=exists, other=-float("inf"))
    seen = row_lse > -float("inf")
    row_lse = tl.where(seen, row_lse, 0.0)
    row_max = tl.full((SPEC.queries.block,), 0.0, tl.float32)
    log_sum = row_lse * LOG2_E
    bounds = settled(Bounds(left, right, chunk, q_offset, k_offset), own_q.length, own_k.length, SPEC)
    if tl.max(tl.abs(row_lse), 0) > coarse:
        maxima, sums = row_statistics(q, k, at_k, own_q, own_k, head, rows, bounds, scales, SPEC)
        row_max, log_sum = two_parts(row_lse, maxima, sums, sink, head, scales)
    at = row_offsets(stats, own_q, rows, head)
    tl.store(stats.start + at, row_max, mask=exists)
    tl.store(stats.log_sum + at, tl.where(seen, log_sum, float("inf")), mask=exists)
    tl.store(stats.delta + at, tl.where(seen, delta, 0.0), mask=exists)


@triton.jit
def through_softcap(dS, S, SPEC: tl.constexpr):
    """dS of the scores before they were capped: S is tanh here."""
    if SPEC.softcap:
        return dS * (1 - S * S)
    else:
        return dS


@triton.jit
def load_statistics(stats, at, exists, CUT: tl.constexpr):
    """row_max, log_sum and delta of rows by one load. (By three, every warp would copy all of them, four bytes at a time.)"""
    part = tl.arange(0, 4)
    pointers = stats.start + (tl.minimum(part, 2).to(tl.int64) * stats.part_stride)[:, None] + at[None, :]
    if CUT:
        nothing = tl.where(part == 1, float("inf"), 0.0)[:, None] + tl.zeros_like(at).to(tl.float32)[None, :]
        found = tl.load(pointers, mask=exists[None, :], other=nothing)
    else:
        found = tl.load(pointers)
    even, odd = tl.split(tl.reshape(tl.trans(found), (found.shape[1], 2, 2)))
    row_max, delta = tl.split(even)
    log_sum, _ = tl.split(odd)
    return row_max, log_sum, delta


@triton.jit
def gather_dkdv(
    state,
    k,
    v,
    q,
    d_out,
    q_tma,
    d_out_tma,
    stats,
    own_q,
    head,
    at_q,
    walked,
    keys,
    k_len,
    bounds,
    scales,
    SPEC: tl.constexpr,
    MASKED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """One of the two loops over the tiles of rows of one query head; state is (dK, dV). DK, DV: those that are wanted.

    EARLY: dP's matmul before the exponentials. Measured faster beyond width 64, slower there; at edges that are cut it would spill.
    Edges that are cut are not pipelined: with two pipelined loops of unlike loads ptxas serializes the matmuls of sm_90.
    """
    QUERIES: tl.constexpr = SPEC.queries
    OUTPUTS: tl.constexpr = SPEC.outputs
    dK, dV = state
    CUT: tl.constexpr = MASKED and not SPEC.even
    EARLY: tl.constexpr = SPEC.keys.width > 64 and not CUT
    count = walked.edges if MASKED else walked.interior
    for i in tl.range(0, count, num_stages=1 if CUT else None):
        first = step(walked, i, MASKED) * SPEC.queries.block
        rows = first + tl.arange(0, SPEC.queries.block)
        at = row_offsets(stats, own_q, rows, head)
        exists = rows < own_q.length
        if MASKED:
            begin, end = seen_by(rows, k_len, bounds, SPEC)
            exists = exists & (begin < end)  # whatever the gradient of a row without keys holds, it does not count
        Q = load_block(q, q_tma, at_q, own_q, head, first, exists, QUERIES, CUT)
        dO = load_block(d_out, d_out_tma, at_q, own_q, head, first, exists, OUTPUTS, CUT)
        S = tl.dot(k, tl.trans(Q), input_precision=SPEC.precision)
        if EARLY and DK:
            dP = tl.dot(v, tl.trans(dO), input_precision=SPEC.precision)
        if SPEC.softcap:
            S = tanh(S * scales.capped)
        row_max, log_sum, delta = load_statistics(stats, at, exists, CUT)
        P = tl.exp2((S - row_max[None, :]) * scales.per_score - log_sum[None, :])
        if MASKED:
            P = tl.where((keys[:, None] >= begin[None, :]) & (keys[:, None] < end[None, :]), P, 0.0)
        if DV:
            dV = tl.dot(P.to(dO.dtype), dO, dV, input_precision=SPEC.precision)
        if DK:
            if not EARLY:
                dP = tl.dot(v, tl.trans(dO), input_precision=SPEC.precision)
            dS = through_softcap(P * (dP - delta[None, :]), S, SPEC)
            dK = tl.dot(dS.to(Q.dtype), Q, dK, input_precision=SPEC.precision)
    return dK, dV


@triton.jit(do_not_specialize=NUMBERS)
def dkdv_kernel(
    q,
    k,
    v,
    d_out,
    q_tma,
    d_out_tma,
    dk,
    dv,
    stats,
    at_q,
    at_k,
    q_len,
    k_len,
    left,
    right,
    chunk,
    q_offset,
    k_offset,
    scales,
    scale,
    heads_kv,
    blocks,
    SPEC: tl.constexpr,
):
    """Grid: blocks of keys of all key heads and sequences."""
    KEYS: tl.constexpr = SPEC.keys
    VALUES: tl.constexpr = SPEC.values
    DK: tl.constexpr = dk is not None
    DV: tl.constexpr = dv is not None
    block, kv_head, batch = own_tile(blocks, heads_kv, False)
    own_q, own_k = extent_of(at_q, batch, q_len), extent_of(at_k, batch, k_len)
    first = block * SPEC.keys.block
    if first >= own_k.length:
        return
    bounds = settled(Bounds(left, right, chunk, q_offset, k_offset), own_q.length, own_k.length, SPEC)
    keys = first + tl.arange(0, SPEC.keys.block)
    last = tl.minimum(first + SPEC.keys.block, own_k.length) - 1
    found = blocks_of_queries(first, last, own_q.length, bounds, SPEC)
    walked = walk(found, found.begin, found.end)
    K = load_by_pointers(k, at_k, own_k, kv_head, first, keys < own_k.length, KEYS, True)
    V = load_by_pointers(v, at_k, own_k, kv_head, first, keys < own_k.length, VALUES, True)
    state = (tl.full((SPEC.keys.block, SPEC.keys.width), 0.0, tl.float32), tl.full((SPEC.keys.block, SPEC.values.width), 0.0, tl.float32))
    k_len = own_k.length
    for member in tl.range(0, SPEC.heads_per_kv):
        head = kv_head * SPEC.heads_per_kv + member
        state = gather_dkdv(
            state, K, V, q, d_out, q_tma, d_out_tma, stats, own_q, head, at_q, walked, keys, k_len, bounds, scales, SPEC, False, DK, DV
        )
        if SPEC.edges:
            state = gather_dkdv(
                state, K, V, q, d_out, q_tma, d_out_tma, stats, own_q, head, at_q, walked, keys, k_len, bounds, scales, SPEC, True, DK, DV
            )
    dK, dV = state
    if dk is not None:
        pointers, stored = tile_pointers(dk, own_k, keys, kv_head, KEYS)
        tl.store(pointers, (dK * scale).to(dk.start.dtype.element_ty), mask=stored)
    if dv is not None:
        pointers, stored = tile_pointers(dv, own_k, keys, kv_head, VALUES)
        tl.store(pointers, dV.to(dv.start.dtype.element_ty), mask=stored)


@triton.jit
def gather_dq(
    dQ,
    q,
    d_out,
    row_max,
    log_sum,
    delta,
    k,
    v,
    k_tma,
    v_tma,
    at_k,
    own_k,
    kv_head,
    walked,
    sees,
    scales,
    SPEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One of the two loops over key blocks."""
    KEYS: tl.constexpr = SPEC.keys
    VALUES: tl.constexpr = SPEC.values
    CUT: tl.constexpr = MASKED and not SPEC.even
    count = walked.edges if MASKED else walked.interior
    for i in tl.range(0, count):
        first = step(walked, i, MASKED) * SPEC.keys.block
        key = first + tl.arange(0, SPEC.keys.block)
        exists = key < own_k.length
        K = load_block(k, k_tma, at_k, own_k, kv_head, first, exists, KEYS, CUT)
        V = load_block(v, v_tma, at_k, own_k, kv_head, first, exists, VALUES, CUT)
        S = scores(q, K, scales, SPEC)
        P = tl.exp2((S - row_max[:, None]) * scales.per_score - log_sum[:, None])
        if MASKED:
            P = tl.where((key[None, :] >= sees[0][:, None]) & (key[None, :] < sees[1][:, None]), P, 0.0)
        dP = tl.dot(d_out, tl.trans(V), input_precision=SPEC.precision)
        dS = through_softcap(P * (dP - delta[:, None]), S, SPEC)
        dQ = tl.dot(dS.to(K.dtype), K, dQ, input_precision=SPEC.precision)
    return dQ


@triton.jit(do_not_specialize=NUMBERS)
def dq_kernel(
    q,
    k,
    v,
    d_out,
    k_tma,
    v_tma,
    dq,
    stats,
    at_q,
    at_k,
    q_len,
    k_len,
    left,
    right,
    chunk,
    q_offset,
    k_offset,
    scales,
    scale,
    heads,
    blocks,
    SPEC: tl.constexpr,
):
    """Grid: tiles of rows of all query heads and sequences."""
    QUERIES: tl.constexpr = SPEC.queries
    OUTPUTS: tl.constexpr = SPEC.outputs
    block, head, batch = own_tile(blocks, heads, SPEC.mask.masked)
    own_q, own_k = extent_of(at_q, batch, q_len), extent_of(at_k, batch, k_len)
    first_row = block * SPEC.queries.block
    if first_row >= own_q.length:
        return
    rows = first_row + tl.arange(0, SPEC.queries.block)
    exists = rows < own_q.length
    bounds = settled(Bounds(left, right, chunk, q_offset, k_offset), own_q.length, own_k.length, SPEC)
    last_row = tl.minimum(first_row + SPEC.queries.block, own_q.length) - 1
    found = blocks_of_keys(first_row, last_row, own_k.length, bounds, SPEC)
    walked = walk(found, found.begin, found.end)
    at = row_offsets(stats, own_q, rows, head)
    row_max = tl.load(stats.start + at, mask=exists, other=0.0)
    log_sum = tl.load(stats.log_sum + at, mask=exists, other=float("inf"))
    delta = tl.load(stats.delta + at, mask=exists, other=0.0)
    sees = seen_by(rows, own_k.length, bounds, SPEC)
    Q = load_by_pointers(q, at_q, own_q, head, first_row, exists, QUERIES, True)
    dO = load_by_pointers(d_out, at_q, own_q, head, first_row, exists & (sees[0] < sees[1]), OUTPUTS, True)
    kv_head = head // SPEC.heads_per_kv
    dQ = tl.full((SPEC.queries.block, SPEC.queries.width), 0.0, tl.float32)
    dQ = gather_dq(dQ, Q, dO, row_max, log_sum, delta, k, v, k_tma, v_tma, at_k, own_k, kv_head, walked, sees, scales, SPEC, False)
    if SPEC.edges:
        dQ = gather_dq(dQ, Q, dO, row_max, log_sum, delta, k, v, k_tma, v_tma, at_k, own_k, kv_head, walked, sees, scales, SPEC, True)
    pointers, stored = tile_pointers(dq, own_q, rows, head, QUERIES)
    tl.store(pointers, (dQ * scale).to(dq.start.dtype.element_ty), mask=stored)
