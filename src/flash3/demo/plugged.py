"""flash3 plugged into a transformers model: one attention function, registered under a name, for each of two ways to store a batch.

Both take a batch packed without padding, (1, total tokens): `transformers` calls them in every layer with the projected query,
key and value (1, heads, total, head_dim) and hands through the keyword that the caller gave to `model(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import flash3

from .paged import PagedCache

# transformers 5 looks for a FlashAttention package behind every name that contains "flash"; these avoid the word.
PAGED, PACKED = "f3_paged", "f3_packed"


@dataclass(frozen=True)
class Packed:
    """Where each sequence of a packed batch begins, and how long the longest is."""

    cu_seqlens: torch.Tensor
    longest: int

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Packed:
        return cls(torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device), max(counts))


@dataclass(frozen=True)
class PagedStep:
    """One step of a batch: its new tokens are packed, everything before them lies in the cache."""

    cache: PagedCache
    new: Packed
    rotary: flash3.Rotary
    backend: str | None


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences, packed; no cache."""

    sequences: Packed
    backend: str | None


def paged_attention(
    module: Any, query: Any, key: Any, value: Any, mask: None, *, scaling: float, paged_step: PagedStep, **_: Any
) -> tuple[torch.Tensor, None]:
    """Rotate q and k, append k and v to the pages, attend to everything in them: one call."""
    step = paged_step
    out: Any = flash3.attention_kvcache(
        tokens_first(query),
        step.cache.layer(module.layer_idx),
        k_new=tokens_first(key),
        v_new=tokens_first(value),
        rotary=step.rotary,
        cu_seqlens_q=step.new.cu_seqlens,
        max_seqlen_q=step.new.longest,
        mask=flash3.Mask(causal=True),
        scale=scaling,
        backend=step.backend,
    )
    return out.unsqueeze(0), None


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, mask: None, *, scaling: float, packed_batch: PackedBatch, **_: Any
) -> tuple[torch.Tensor, None]:
    """Every token attends to its own sequence, in both directions."""
    cu, longest = packed_batch.sequences.cu_seqlens, packed_batch.sequences.longest
    q, k, v = tokens_first(query), tokens_first(key), tokens_first(value)
    out: Any = flash3.attention_varlen(q, k, v, cu, cu, longest, longest, scale=scaling, backend=packed_batch.backend)
    return out.unsqueeze(0), None


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """(1, heads, total, head_dim) as flash3's packed layout (total, heads, head_dim); a view."""
    return x.squeeze(0).transpose(0, 1)


def no_mask(*_: Any, **__: Any) -> None:
    """flash3 knows the mask from its own arguments; transformers need not build one."""


for name, function in ((PAGED, paged_attention), (PACKED, packed_attention)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, no_mask)


class Unrotated(torch.nn.Module):
    """Stands where the model's rotary embedding was: cos 1, sin 0 leave q and k as they are, for flash3 to rotate."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.ones(1, 1, 1, dtype=x.dtype, device=x.device)
        return one, torch.zeros_like(one)


def rotary_tables(model: PreTrainedModel, positions: int) -> flash3.Rotary:
    """The model's own angles for positions 0 … positions - 1. It stores each angle twice, once for each half of a head."""
    like = model.get_input_embeddings().weight
    cos, sin = model.model.rotary_emb(like, torch.arange(positions, device=like.device)[None])
    half = cos.shape[-1] // 2
    return flash3.Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


@contextmanager
def paged_model(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's attention and rotary embedding are flash3's."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = Unrotated()
    with using(model, PAGED):
        try:
            yield
        finally:
            model.model.rotary_emb = rotary


@contextmanager
def using(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Inside, the model runs the attention registered under this name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
