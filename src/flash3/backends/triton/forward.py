"""Forward: FlashAttention-2, Algorithm 1, one program to a tile of query rows.

    O = 0, row_sum = 0, row_max = −inf
    for each block of keys that the tile sees:   S = Q Kᵀ;  row_max' = max(row_max, rowmax S);  P = exp2(c·S − c·row_max')
                                                 alpha = exp2(c·(row_max − row_max'));  O = alpha·O + P V;  row_sum = alpha·row_sum + rowsum P
    out = O / row_sum;  lse = scale·row_max + log row_sum                           (c = scale · log2 e; a negative scale negates Q)

Blocks at the edges of the mask come first, then those that every row sees in full, without a mask. A tile's rows are query rows, or, where
there are few, the rows of all query heads of one key head (PACK of them), row-major. Where there are few tiles, several programs share
one: each takes a part of its blocks and leaves O, row_max and row_sum, and `combine` merges them.

row_max stays in units of S, where it is exact: the LSE of scores around ±1e5 is then as good as float32 allows, and P everywhere.
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, exponent, extent_of, load_block, row_offsets, tanh, tile_pointers
from .masking import blocks_of_keys, seen_by, settled, step, walk


@triton.jit
def scores(q, k, scales, SPEC: tl.constexpr):
    """S, (rows, keys)."""
    S = tl.dot(q, tl.trans(k), input_precision=SPEC.precision)
    if SPEC.softcap:
        S = tanh(S * scales.capped)
    return S


@triton.jit
def probabilities(S, old_max, new_max, per_score, SPEC: tl.constexpr):
    """P relative to new_max, and alpha. In 16 bits with one instruction less, and relative to c·new_max rounded: the same for all of a row."""
    if SPEC.fused:
        shift = new_max * per_score
        return tl.exp2(exponent(S, per_score, shift[:, None])), tl.exp2(old_max * per_score - shift)
    else:
        return tl.exp2((S - new_max[:, None]) * per_score), tl.exp2((old_max - new_max) * per_score)


@triton.jit
def attend(state, q, k, v, at_k, own_k, kv_head, walked, sees, scales, SPEC: tl.constexpr, MASKED: tl.constexpr):
    """One of the two loops over key blocks; state is (O, row_max, row_sum)."""
    KEYS: tl.constexpr = SPEC.keys
    VALUES: tl.constexpr = SPEC.values
    O, row_max, row_sum = state
    count = walked.edges if MASKED else walked.interior
    for i in tl.range(0, count):
        first = step(walked, i, MASKED) * SPEC.keys.block
        key = first + tl.arange(0, SPEC.keys.block)
        exists = key < own_k.length
        S = scores(q, load_block(k, at_k, own_k, kv_head, first, exists, KEYS, MASKED), scales, SPEC)
        if MASKED:
            S = tl.where((key[None, :] >= sees[0][:, None]) & (key[None, :] < sees[1][:, None]), S, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(S, 1))
        anchor = new_max
        if MASKED:
            anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        P, alpha = probabilities(S, row_max, anchor, scales.per_score, SPEC)
        row_sum = row_sum * alpha + tl.sum(P, 1)
        values = load_block(v, at_k, own_k, kv_head, first, exists, VALUES, MASKED)
        O = tl.dot(P.to(values.dtype), values, O * alpha[:, None], input_precision=SPEC.precision)
        row_max = new_max
    return O, row_max, row_sum


@triton.jit
def finish(row_max, row_sum, sink, scales):
    """LSE, and what O is multiplied by. No keys: row_max −inf, row_sum 0. sink: one logit more, or None."""
    top = row_max * scales.top
    if sink is not None:
        highest = tl.maximum(top, sink)
        highest = tl.where(highest == -float("inf"), 0.0, highest)
        share = tl.exp2((top - highest) * LOG2_E)
        total = row_sum * share + tl.exp2((sink - highest) * LOG2_E)
    else:
        highest = tl.where(top == -float("inf"), 0.0, top)
        share = 1.0
        total = row_sum
    some = tl.where(total > 0, total, 1.0)
    return tl.where(total > 0, highest + tl.log(some), -float("inf")), share / some


@triton.jit
def forward_kernel(q, k, v, out, lse, sink, parts, at_q, at_k, bounds, scales, heads, blocks, SPEC: tl.constexpr):
    """Grid: (tiles of all heads and sequences, splits). heads: of query heads, PACK of them count as one. blocks: tiles of the longest
    sequence. parts: a Parts where keys are split; `out` then holds O of each split.
    """
    QUERIES: tl.constexpr = SPEC.queries
    OUTPUTS: tl.constexpr = SPEC.outputs
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % heads
    batch = tl.program_id(0) // blocks // heads
    if SPEC.mask.masked:
        block = blocks - 1 - block  # the longest first
    own_q, own_k = extent_of(at_q, batch), extent_of(at_k, batch)
    packed = block * SPEC.queries.block + tl.arange(0, SPEC.queries.block)
    rows, row_heads = packed // SPEC.pack, head * SPEC.pack + packed % SPEC.pack
    first_row = block * SPEC.queries.block // SPEC.pack
    last_row = ((block + 1) * SPEC.queries.block - 1) // SPEC.pack
    if first_row >= own_q.length:
        return
    kv_head = head * SPEC.pack // SPEC.heads_per_kv
    bounds = settled(bounds, own_q.length, own_k.length, SPEC)
    found = blocks_of_keys(first_row, tl.minimum(last_row, own_q.length - 1), own_k.length, bounds, SPEC)
    begin, end = found.begin, found.end
    if SPEC.split:
        share = tl.cdiv(end - begin, tl.num_programs(1))
        begin = tl.minimum(begin + tl.program_id(1) * share, end)
        end = tl.minimum(begin + share, end)
    walked = walk(found, begin, end)

    pointers, exists = tile_pointers(q, own_q, rows, row_heads, QUERIES)
    Q = tl.load(pointers, mask=exists, other=0.0)
    if SPEC.sign != 1:
        Q = (Q.to(tl.float32) * SPEC.sign).to(Q.dtype)
    O = tl.full((SPEC.queries.block, SPEC.values.width), 0.0, tl.float32)
    row_max = tl.full((SPEC.queries.block,), -float("inf"), tl.float32)
    row_sum = tl.full((SPEC.queries.block,), 0.0, tl.float32)
    state = (O, row_max, row_sum)
    sees = seen_by(rows, own_k.length, bounds, SPEC)
    state = attend(state, Q, k, v, at_k, own_k, kv_head, walked, sees, scales, SPEC, True)
    O, row_max, row_sum = attend(state, Q, k, v, at_k, own_k, kv_head, walked, sees, scales, SPEC, False)

    rounding = tl.full((SPEC.queries.block,), 1.0, tl.float32)
    if SPEC.fused:  # take out what rounding c·row_max put in, so that row_sum is relative to row_max itself
        anchor = tl.where(row_max == -float("inf"), 0.0, row_max)
        rounding = tl.exp2(-exponent(anchor, scales.per_score, anchor * scales.per_score))
        row_sum = row_sum * rounding
    exists = rows < own_q.length
    pointers, stored = tile_pointers(out, own_q, rows, row_heads, OUTPUTS)
    if SPEC.split:
        at = row_offsets(parts.row_max, own_q, rows, row_heads) + tl.program_id(1).to(tl.int64) * parts.row_stride
        tl.store(parts.row_max.start + at, row_max, mask=exists)
        tl.store(parts.row_sum + at, row_sum, mask=exists)
        pointers += tl.program_id(1).to(tl.int64) * parts.out_stride
        tl.store(pointers, O * rounding[:, None], mask=stored)
    else:
        extra = None
        if sink is not None:
            extra = tl.load(sink + row_heads)
        row_lse, weight = finish(row_max, row_sum, extra, scales)
        if lse is not None:
            tl.store(lse.start + row_offsets(lse, own_q, rows, row_heads), row_lse, mask=exists)
        tl.store(pointers, (O * (rounding * weight)[:, None]).to(out.start.dtype.element_ty), mask=stored)


@triton.jit
def combine_kernel(part, parts, out, lse, sink, at_q, scales, heads, rows, splits, SPEC: tl.constexpr):
    """Merge what the splits of each row left; part: Rows of their O. Grid: rows of the longest sequence × heads × sequences."""
    row = tl.program_id(0) % rows
    head = tl.program_id(0) // rows % heads
    own = extent_of(at_q, tl.program_id(0) // rows // heads)
    if row >= own.length:
        return
    split = tl.arange(0, SPEC.most_splits)
    columns = tl.arange(0, SPEC.values.width)
    stored = columns < SPEC.values.dim
    where = row_offsets(parts.row_max, own, row, head) + split.to(tl.int64) * parts.row_stride
    row_max = tl.load(parts.row_max.start + where, mask=split < splits, other=-float("inf"))
    row_sum = tl.load(parts.row_sum + where, mask=split < splits, other=0.0)
    pointers = part.start + row_offsets(part, own, row, head) + (split.to(tl.int64) * parts.out_stride)[:, None] + columns[None, :]
    O = tl.load(pointers, mask=(split < splits)[:, None] & stored[None, :], other=0.0)
    highest = tl.max(row_max, 0)
    weights = tl.exp2((row_max - tl.where(highest == -float("inf"), 0.0, highest)) * scales.per_score)
    extra = None
    if sink is not None:
        extra = tl.load(sink + head)
    row_lse, weight = finish(highest, tl.sum(row_sum * weights, 0), extra, scales)
    if lse is not None:
        tl.store(lse.start + row_offsets(lse, own, row, head), row_lse)
    merged = tl.sum(O * weights[:, None], 0) * weight
    tl.store(out.start + row_offsets(out, own, row, head) + columns, merged.to(out.start.dtype.element_ty), mask=stored)
