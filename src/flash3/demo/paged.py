"""A paged KV cache for a whole model: pages from one pool, handed out as the sequences grow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import flash3


class PagedCache:
    """K and V of every layer in pages, and one page table that all layers share.

    A page is taken from the pool when a sequence's next token has no slot. The pool is shuffled, as it is in a server that has
    run for a while: neighbouring slots of a sequence lie in pages far apart, and sequences interleave.

    Args:
        layers, heads, head_dim: of the model's keys and values.
        batch: number of sequences.
        capacity: most tokens that one sequence may reach.
        like: a tensor of the model's dtype, on its device.
        page_size: slots in a page.
    """

    def __init__(self, *, layers: int, heads: int, head_dim: int, batch: int, capacity: int, like: torch.Tensor, page_size: int = 16):
        self.page_size = page_size
        self.pages_per_sequence = -(-capacity // page_size)
        num_pages = batch * self.pages_per_sequence
        self.free = list(range(num_pages))
        random.Random(0).shuffle(self.free)
        storage = (layers, num_pages, page_size, heads, head_dim)
        # Not zeros: a slot that no token has filled must never be read, so what it holds may not matter.
        self.k = like.new_full(storage, float("nan"))
        self.v = like.new_full(storage, float("nan"))
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = [0] * batch
        self.page_table = torch.zeros(batch, self.pages_per_sequence, dtype=torch.int32, device=like.device)
        self.device_lengths = torch.zeros(batch, dtype=torch.int32, device=like.device)

    def reserve(self, counts: Sequence[int]) -> None:
        """Give every sequence the pages that its next `counts` tokens need.

        Raises:
            ValueError: a sequence would outgrow `capacity`.
        """
        for row, (length, count, pages) in enumerate(zip(self.lengths, counts, self.pages, strict=True)):
            needed = -(-(length + count) // self.page_size)
            if needed > self.pages_per_sequence:
                limit = self.pages_per_sequence * self.page_size
                raise ValueError(f"sequence {row} would have {length + count} tokens; the cache holds {limit}")
            if needed > len(pages):
                pages += [self.free.pop() for _ in range(needed - len(pages))]
                self.page_table[row, :needed] = torch.tensor(pages, dtype=torch.int32)

    def layer(self, index: int) -> flash3.KVCache:
        """One layer's cache as the attention call takes it: pages, lengths before this step, page table."""
        return flash3.KVCache(self.k[index], self.v[index], self.device_lengths, page_table=self.page_table)

    def advance(self, counts: Sequence[int]) -> None:
        """Every layer has appended `counts` tokens: they count from now on."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.device_lengths.copy_(torch.tensor(self.lengths, dtype=torch.int32))
