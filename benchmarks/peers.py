"""The other attention kernels, each as: (q, k, v, causal) → a function without arguments that runs it once. Forward only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Run = Callable[[], Any]
Peer = Callable[..., Run]
"""(q, k, v, causal) → Run."""


def sdpa(backend: SDPBackend) -> Peer:
    """torch's scaled_dot_product_attention on one backend."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Run:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        grouped = q.shape[2] != k.shape[2]

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=grouped)

        return run

    return prepare


def fa3(library: str) -> Peer:
    """FlashAttention-3's C++ kernels out of a shared library with the operator sgl_kernel::fwd, whose arguments go by position.

    Beyond a Peer: `left`, the width of a window, and the operator's optional arguments by name (cu_seqlens_q, max_seqlen_q, …).
    """
    torch.ops.load_library(library)
    operator = torch.ops.sgl_kernel.fwd.default
    names = [argument.name for argument in operator._schema.arguments]
    optional = names[3 : names.index("softmax_scale")]  # between v and the scale: caches, lengths, pages, rotary, descales

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, left: int = -1, **given: object) -> Run:
        if unknown := given.keys() - set(optional):
            raise ValueError(f"the operator has no arguments {sorted(unknown)}; it has {optional}")
        # softmax_scale, causal, window ×2, chunk, softcap, rotary interleaved, scheduler metadata, splits, pack_gqa, sm_margin, sinks
        settings = (q.shape[-1] ** -0.5, causal, left, 0 if causal else -1, 0, 0.0, True, None, 1, None, 0, None)
        arguments = (q, k, v, *(given.get(name) for name in optional), *settings)
        return lambda: operator(*arguments)

    return prepare


def fa4() -> Peer:
    """flash-attn-4: CuTe DSL, its Hopper path."""
    from flash_attn.cute.interface import _flash_attn_fwd

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Run:
        return lambda: _flash_attn_fwd(q, k, v, causal=causal, softmax_scale=q.shape[-1] ** -0.5)

    return prepare


def available() -> tuple[dict[str, Peer], list[str]]:
    """Peers that can run here, and a sentence for each that cannot."""
    found = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    missing = []
    library = os.environ.get("FA3_LIBRARY")
    if library:
        found["fa3"] = fa3(library)
    else:
        missing.append("fa3: FA3_LIBRARY does not name its library")
    try:
        found["fa4"] = fa4()
    except ImportError as error:
        missing.append(f"fa4: {error}")
    return found, missing
