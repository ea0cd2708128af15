"""Attention that torch itself has: SDPA on each of its backends, FlexAttention, and plain tensor code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from ..mask import Mask, MaskKind
from ..sequences import SequenceKind
from .case import Case
from .providers import MOST_SCORES, Prepared, Unsupported, prepared, provider, refuse
from .workloads import Workload


def _sdpa(kind: SDPBackend, case: Case) -> Prepared:
    w = case.workload
    dense_mask = kind in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    refuse(case, packed=True, windows=dense_mask)
    if kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) and case.device.type != "cuda":
        raise Unsupported("it needs an NVIDIA GPU")
    scores = w.q_len * w.k_len * (w.batch * w.heads_q if kind is SDPBackend.MATH else 1)
    if (kind is SDPBackend.MATH or w.mask.kind not in (MaskKind.FULL, MaskKind.CAUSAL)) and scores > MOST_SCORES[case.device.type]:
        raise Unsupported(f"its S×S matrix would have {scores:.1e} elements")

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how = _sdpa_mask(w.mask, q.shape[1], k.shape[1], case.device)
        grouped = q.shape[2] != k.shape[2]
        out: Tensor = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=grouped, **how)
        return out.transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            if w.layout is not SequenceKind.PACKED:
                return one(q, k, v)
            q_lengths, k_lengths = (list(lengths) for lengths in zip(*w.lengths, strict=True))
            parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
            return torch.cat([one(*(x[None] for x in part))[0] for part in parts])

    return prepared(case, attend, "a loop over the sequences" if w.layout is SequenceKind.PACKED else "")


def _sdpa_mask(mask: Mask, q_len: int, k_len: int, device: torch.device) -> dict[str, Any]:
    if mask.kind is MaskKind.FULL or (mask.kind is MaskKind.CAUSAL and q_len == 1):
        return {}
    if mask.kind is MaskKind.CAUSAL:
        return {"is_causal": True} if q_len == k_len else {"attn_mask": bias.causal_lower_right(q_len, k_len)}
    return {"attn_mask": visible(mask, q_len, k_len, device)}


@functools.lru_cache(maxsize=2)
def visible(mask: Mask, q_len: int, k_len: int, device: torch.device) -> Tensor:
    """The mask as a bool tensor (q_len, k_len)."""
    return torch.from_numpy(mask.dense(q_len, k_len)).to(device)


for _name, _kind in {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}.items():
    provider(f"sdpa:{_name}", f"torch SDPA, {_name}")(functools.partial(_sdpa, _kind))


@provider("naive", "plain torch: matmul, softmax, matmul")
def _naive(case: Case) -> Prepared:
    refuse(case, softcap=True, windows=True)
    w = case.workload
    if (scores := w.batch * w.heads_q * w.q_len * w.k_len) > MOST_SCORES[case.device.type]:
        raise Unsupported(f"its S×S matrix would have {scores:.1e} elements")
    hidden = None if w.mask.kind is MaskKind.FULL else ~visible(w.mask, w.q_len, w.k_len, case.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5
        if w.softcap:
            scores = torch.tanh(scores / w.softcap) * w.softcap
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return prepared(case, attend)


@provider("flex", "FlexAttention, compiled")
def _flex(case: Case) -> Prepared:
    refuse(case, packed=True, softcap=True, windows=True)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    w, r = case.workload, case.request
    packed = w.layout is SequenceKind.PACKED
    q_total, k_total = (r.q.shape[0], r.k.shape[0]) if packed else (w.q_len, w.k_len)
    blocks = None
    if packed or w.mask.kind is not MaskKind.FULL:
        rule = _packed_rule(w, case.device) if packed else _rule(w.mask, w.q_len, w.k_len)
        blocks = create_block_mask(rule, None, None, q_total, k_total, device=case.device, _compile=case.device.type == "cuda")
    cap = w.softcap
    change = (lambda s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    torch._dynamo.reset()  # each shape is a compilation of its own; after eight of one function, the next would not be compiled at all
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None] if packed else x for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, score_mod=change, block_mask=blocks, enable_gqa=w.heads_q != w.heads_kv)
        out = out.transpose(1, 2)
        return out[0] if packed else out

    return prepared(case, attend)


def _rule(mask: Mask, q_len: int, k_len: int) -> Callable[..., Tensor]:
    """FlexAttention's mask_mod."""
    b = mask.bounds(q_len, k_len)

    def rule(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        p, key = i + b.q_offset, j + b.k_offset
        seen = (key <= p + b.right) & (key >= p - b.left)
        return seen & (key // b.chunk == p // b.chunk) if mask.chunk is not None else seen

    return rule


def _packed_rule(w: Workload, device: torch.device) -> Callable[..., Tensor]:
    """The same inside each sequence."""
    if w.mask.chunk is not None or any(m != n for m, n in w.lengths):
        raise Unsupported("packed sequences here have neither chunks nor unequal lengths of queries and keys")
    owner = torch.repeat_interleave(torch.arange(w.batch), torch.tensor([m for m, _ in w.lengths])).to(device)
    b = w.mask.bounds(0, 0)

    def rule(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (owner[i] == owner[j]) & (j <= i + b.right) & (j >= i - b.left)

    return rule
