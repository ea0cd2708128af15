"""Where the tokens of a batch lie, said by the tests themselves: what the library's own layout rules are held against.

A storage's tokens are its dimensions before (heads, dim), flattened; `tokens[i]` lists those of sequence i, in order. Every other token
is poison: NaN and infinities.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNLISTED = 1 << 20
"""What a page table holds where no page is: it must never be followed."""


@dataclass(frozen=True)
class Storage:
    shape: tuple[int, ...]  # before (heads, dim)
    tokens: list[Tensor]  # int64, one per sequence
    arguments: dict[str, object] = field(default_factory=dict)  # cu_seqlens, max_seqlen, seqused, lengths, leftpad, …

    def put(self, values: list[Tensor]) -> Tensor:
        """A tensor that holds values[i] (length, heads, dim) as sequence i, and poison elsewhere."""
        heads, dim = values[0].shape[1:]
        stored = torch.full((*self.shape, heads, dim), torch.nan, dtype=values[0].dtype, device=values[0].device)
        flat = stored.flatten(0, -3)
        flat[::3], flat[1::3] = torch.inf, -torch.inf
        flat[1::2] = torch.nan
        for index, value in zip(self.tokens, values, strict=True):
            flat[index.to(flat.device)] = value
        return stored

    def take(self, stored: Tensor) -> Tensor:
        """All sequences of (…, heads, dim), one after another: (tokens, heads, dim)."""
        return stored.flatten(0, -3)[torch.cat(self.tokens).to(stored.device)]

    def outside(self, stored: Tensor) -> Tensor:
        """What lies outside every sequence: (tokens, heads, dim)."""
        flat = stored.flatten(0, -3)
        free = torch.ones(len(flat), dtype=torch.bool)
        free[torch.cat(self.tokens)] = False
        return flat[free.to(flat.device)]


def int32(values, device=None) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def cumulated(lengths) -> Tensor:
    return int32([0, *itertools.accumulate(lengths)])


def dense(lengths) -> Storage:
    assert len(set(lengths)) <= 1, "dense sequences are equally long"
    longest = max(lengths, default=0)
    return Storage((len(lengths), longest), [torch.arange(longest) + i * longest for i in range(len(lengths))])


def packed(lengths, beyond=0) -> Storage:
    """One after another; `beyond` rows at the end belong to no sequence."""
    starts = cumulated(lengths)
    tokens = [torch.arange(a, b) for a, b in itertools.pairwise(starts.tolist())]
    return Storage((sum(lengths) + beyond,), tokens, {"cu_seqlens": starts, "max_seqlen": max(lengths, default=0)})


def packed_used(lengths) -> Storage:
    """Packed, each with a few rows that are not used."""
    room = [n + 1 + i % 3 for i, n in enumerate(lengths)]
    starts = cumulated(room)
    tokens = [torch.arange(start, start + n) for start, n in zip(starts.tolist(), lengths, strict=False)]
    return Storage((sum(room),), tokens, {"cu_seqlens": starts, "max_seqlen": max(room, default=0), "seqused": int32(lengths)})


def padded(lengths) -> Storage:
    capacity = max(lengths, default=0) + 3
    tokens = [torch.arange(n) + i * capacity for i, n in enumerate(lengths)]
    return Storage((len(lengths), capacity), tokens, {"seqused": int32(lengths)})


def cache(lengths, leftpad=None, rows=None) -> Storage:
    """Rows of a contiguous KV cache; rows[i] holds sequence i, from slot leftpad[i] on."""
    pads = leftpad or [0] * len(lengths)
    capacity = max((n + pad for n, pad in zip(lengths, pads, strict=True)), default=0) + 2
    own = rows or list(range(len(lengths)))
    count = len(lengths) if rows is None else max(rows) + 2
    tokens = [row * capacity + pad + torch.arange(n) for row, pad, n in zip(own, pads, lengths, strict=True)]
    return Storage((count, capacity), tokens, _cache_arguments(lengths, leftpad, rows))


def paged(lengths, page_size, leftpad=None, rows=None, seed=0) -> Storage:
    """Pages in shuffled order, some listed nowhere; table entries beyond a sequence's last page name pages that do not exist."""
    pads = leftpad or [0] * len(lengths)
    needed = [-(-(n + pad) // page_size) for n, pad in zip(lengths, pads, strict=True)]
    count = sum(needed) + 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    own = rows or list(range(len(lengths)))
    table = torch.full((len(lengths) if rows is None else max(rows) + 2, max(needed, default=0) + 1), UNLISTED, dtype=torch.int32)
    tokens = []
    for row, pad, n, pages in zip(own, pads, lengths, needed, strict=True):
        listed, order = torch.tensor(order[:pages], dtype=torch.int64), order[pages:]
        table[row, :pages] = listed
        slots = torch.arange(pad, pad + n)
        tokens.append(listed[slots // page_size] * page_size + slots % page_size)
    return Storage((count, page_size), tokens, {**_cache_arguments(lengths, leftpad, rows), "page_table": table})


def _cache_arguments(lengths, leftpad, rows) -> dict[str, object]:
    pads = leftpad or [0] * len(lengths)
    arguments = {"lengths": int32(n + pad for n, pad in zip(lengths, pads, strict=True))}
    if leftpad is not None:
        arguments["leftpad"] = int32(leftpad)
    if rows is not None:
        arguments["batch_index"] = int32(rows)
    return arguments
