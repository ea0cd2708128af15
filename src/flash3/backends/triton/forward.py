"""Forward: FlashAttention-2, Algorithm 1, one program to a tile of query rows.

    O = 0, row_sum = 0, row_max = −inf
    for each block of keys that it sees:   S = Q Kᵀ;  row_max' = max(row_max, rowmax S);  P = exp2(c·(S − row_max'))
                                           alpha = exp2(c·(row_max − row_max'));  O = alpha·O + P V;  row_sum = alpha·row_sum + rowsum P
    out = O / row_sum;  lse = scale·row_max + log row_sum                           (c = scale · log2 e; a negative scale negates Q)

Blocks that every row sees in full come first, without a mask; then those at the edges of the mask. (The other way round ptxas serializes
the matmuls of sm_90.) A tile's rows are query rows, or, where there are few, the rows of all query heads of one key head, row-major
(`SPEC.pack` of them). Where there are few tiles, several programs share one: each takes a part of its blocks and leaves O, row_max and
row_sum, and `combine_kernel` merges them.

row_max stays in units of S and is subtracted before anything is multiplied: softmax is then shift invariant at scores of any size. (One
fused multiply-add instead would round c·row_max: at 1e5 every P of a row were off by 0.3 %, and no longer 1 where there is one key.)
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, extent_of, load_block, own_tile, row_offsets, tanh, tile_pointers
from .masking import Bounds, blocks_of_keys, seen_by, settled, step, walk

NUMBERS = ("q_len", "k_len", "left", "right", "chunk", "q_offset", "k_offset", "heads", "heads_kv", "blocks", "splits")
"""Another value of these is no other kernel."""


@triton.jit
def scores(q, k, scales, SPEC: tl.constexpr):
    """S, (rows, keys)."""
    S = tl.dot(q, tl.trans(k), input_precision=SPEC.precision)
    if SPEC.softcap:
        S = tanh(S * scales.capped)
    return S


@triton.jit
def attend(state, q, k, v, k_tma, v_tma, at_k, own_k, kv_head, walked, sees, scales, SPEC: tl.constexpr, MASKED: tl.constexpr):
    """One of the two loops over key blocks; state is (O, row_max, row_sum)."""
    KEYS: tl.constexpr = SPEC.keys
    VALUES: tl.constexpr = SPEC.values
    O, row_max, row_sum = state
    CUT: tl.constexpr = MASKED and not SPEC.even
    count = walked.edges if MASKED else walked.interior
    for i in tl.range(0, count):
        first = step(walked, i, MASKED) * SPEC.keys.block
        key = first + tl.arange(0, SPEC.keys.block)
        exists = key < own_k.length
        S = scores(q, load_block(k, k_tma, at_k, own_k, kv_head, first, exists, KEYS, CUT), scales, SPEC)
        if MASKED:
            S = tl.where((key[None, :] >= sees[0][:, None]) & (key[None, :] < sees[1][:, None]), S, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(S, 1))
        anchor = new_max
        if MASKED:
            anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        P = tl.exp2((S - anchor[:, None]) * scales.per_score)
        alpha = tl.exp2((row_max - anchor) * scales.per_score)
        row_sum = row_sum * alpha + tl.sum(P, 1)
        values = load_block(v, v_tma, at_k, own_k, kv_head, first, exists, VALUES, CUT)
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


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q,
    k,
    v,
    k_tma,
    v_tma,
    out,
    lse,
    sink,
    parts,
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
    SPEC: tl.constexpr,
):
    """Grid: (tiles of all heads and sequences, splits). heads: of query heads, PACK of them count as one. blocks: tiles of the longest
    sequence. parts: a Parts where keys are split; `out` then holds O of each split.
    """
    QUERIES: tl.constexpr = SPEC.queries
    OUTPUTS: tl.constexpr = SPEC.outputs
    block, head, batch = own_tile(blocks, heads, SPEC.mask.masked)
    own_q, own_k = extent_of(at_q, batch, q_len), extent_of(at_k, batch, k_len)
    packed = block * SPEC.queries.block + tl.arange(0, SPEC.queries.block)
    rows, row_heads = packed // SPEC.pack, head * SPEC.pack + packed % SPEC.pack
    first_row = block * SPEC.queries.block // SPEC.pack
    last_row = ((block + 1) * SPEC.queries.block - 1) // SPEC.pack
    if first_row >= own_q.length:
        return
    kv_head = head * SPEC.pack // SPEC.heads_per_kv
    bounds = settled(Bounds(left, right, chunk, q_offset, k_offset), own_q.length, own_k.length, SPEC)
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
    state = attend(state, Q, k, v, k_tma, v_tma, at_k, own_k, kv_head, walked, sees, scales, SPEC, False)
    if SPEC.edges:
        state = attend(state, Q, k, v, k_tma, v_tma, at_k, own_k, kv_head, walked, sees, scales, SPEC, True)
    O, row_max, row_sum = state

    exists = rows < own_q.length
    pointers, stored = tile_pointers(out, own_q, rows, row_heads, OUTPUTS)
    if SPEC.split:
        at = row_offsets(parts, own_q, rows, row_heads) + tl.program_id(1).to(tl.int64) * parts.split_stride
        tl.store(parts.start + at, row_max, mask=exists)
        tl.store(parts.row_sum + at, row_sum, mask=exists)
        pointers += tl.program_id(1).to(tl.int64) * parts.out_stride
        tl.store(pointers, O, mask=stored)
    else:
        extra = None
        if sink is not None:
            extra = tl.load(sink + row_heads)
        row_lse, weight = finish(row_max, row_sum, extra, scales)
        if lse is not None:
            tl.store(lse.start + row_offsets(lse, own_q, rows, row_heads), row_lse, mask=exists)
        tl.store(pointers, (O * weight[:, None]).to(out.start.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=NUMBERS)
def combine_kernel(part, parts, out, lse, sink, at_q, q_len, scales, heads, splits, SPEC: tl.constexpr):
    """Merge what the splits of each row left; part: Rows of their O. Grid: rows of the longest sequence × heads × sequences."""
    row = tl.program_id(0) % q_len
    head = tl.program_id(0) // q_len % heads
    own = extent_of(at_q, tl.program_id(0) // q_len // heads, q_len)
    if row >= own.length:
        return
    split = tl.arange(0, SPEC.most_splits)
    columns = tl.arange(0, SPEC.values.width)
    stored = columns < SPEC.values.dim
    where = row_offsets(parts, own, row, head) + split.to(tl.int64) * parts.split_stride
    row_max = tl.load(parts.start + where, mask=split < splits, other=-float("inf"))
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
