"""FlashAttention-3's own names, parameters, defaults and return values, on flash3.

    from flash3.flash_attn_interface import flash_attn_func      # instead of: from flash_attn_interface import …

or `flash3.install()` once, and `import flash_attn_interface` finds this module. `scheduler_metadata`, `pack_gqa`, `sm_margin` and
`num_splits` tune FlashAttention-3's kernels; they never change a result, and a backend that has no use for one ignores it. After
FlashAttention-3's parameters come keyword-only ones that its forks have: `s_aux` (or `sinks`), one extra logit per head in the
softmax's denominator, and `out`, a tensor to write the result into.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from .frameworks.torch import recall
from .frameworks.torch.functions import attention, attention_varlen, check_tensors, length_bound, options, run
from .frameworks.torch.kvcache import KVCache, NewTokens, Rotary, attend, over
from .frameworks.torch.merging import merge
from .frameworks.torch.operators import Arguments
from .mask import MAX_POSITION, Mask

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
]

Window = tuple[int | None, int | None] | list[int]
Result = Tensor | tuple[Tensor, ...]


def _mask(causal: bool, window_size: Window | None, attention_chunk: int) -> Mask:
    if window_size is None:
        window_size = (None, None)
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"window_size must be (left, right), got {window_size!r} of type {type(window_size).__name__}")
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size!r}")
    return _remembered_mask(bool(causal), *window_size, attention_chunk or None)


@functools.lru_cache(maxsize=256, typed=True)
def _remembered_mask(causal: bool, left: int | None, right: int | None, chunk: int | None) -> Mask:
    return Mask(causal=causal, left=left, right=right, chunk=chunk)


def _scale(q: Tensor, qv: Tensor | None, softmax_scale: float | None) -> float:
    """FlashAttention-3 counts the width of qv too."""
    if softmax_scale is not None:
        return softmax_scale
    return (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5


def _is_plain(q: Tensor, qv: Tensor | None, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None) -> bool:
    """Neither qv nor scales. FlashAttention-3 reads the descales for float8 only; callers pass them always."""
    if q_descale is None and k_descale is None and v_descale is None:
        return qv is None
    check_tensors(q=q)
    return qv is None and not _is_float8(q)


def _is_float8(q: Tensor) -> bool:
    return q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _scales(q: Tensor, **descale: Tensor | None) -> dict[str, Any]:
    return descale if _is_float8(q) else dict.fromkeys(descale)


def _sink(s_aux: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    if s_aux is None and sinks is None:
        return None
    if s_aux is not None and sinks is not None:
        raise ValueError("s_aux and sinks are two names of one argument: give one of them")
    name, given = ("sinks", sinks) if s_aux is None else ("s_aux", s_aux)
    check_tensors(**{name: given})
    assert given is not None
    return given.float()


def _deliver(result: Result, out: Tensor | None) -> Result:
    """The result, in the caller's own tensor if there is one."""
    if out is None:
        return result
    check_tensors(out=out)
    value, *rest = result if isinstance(result, tuple) else (result,)
    if value.requires_grad:
        raise ValueError("out cannot be given where a gradient is wanted: call under torch.no_grad(), or without out")
    if out.shape != value.shape:
        raise ValueError(f"out must have shape {tuple(value.shape)}, got {tuple(out.shape)}")
    out.copy_(value)
    return (out, *rest) if rest else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Result:
    """Attention of q (batch, seqlen_q, heads_q, d) over k, v (batch, seqlen_k, heads_kv, d); see `flash3.attention`.

    Returns out, with return_attn_probs (out, lse): lse float32 (batch, heads_q, seqlen_q).
    """
    mask, sink = _mask(causal, window_size, attention_chunk), _sink(s_aux, sinks)
    if _is_plain(q, qv, q_descale, k_descale, v_descale):
        result = attention(
            q,
            k,
            v,
            mask=mask,
            scale=softmax_scale,
            softcap=softcap,
            sink=sink,
            return_lse=return_attn_probs,
            deterministic=deterministic,
        )
        return _deliver(result, out)
    check_tensors(q=q, k=k, v=v)
    scales = _scales(q, q_scale=q_descale, k_scale=k_descale, v_scale=v_descale)
    numbers = options(mask, _scale(q, qv, softmax_scale), softcap)
    arguments = Arguments(q, k, v, qv=qv, sink=sink, deterministic=deterministic, **scales, **numbers)
    return _deliver(run(arguments, return_attn_probs), out)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of one tensor qkv: (batch, seqlen, 3, heads, d), or (batch, seqlen, heads_q + 2·heads_kv, d) with num_heads_q.

    Raises:
        ValueError: another shape, or num_heads_q missing or not fitting.
    """
    check_tensors(qkv=qkv)
    if qkv.dim() == 5 and qkv.shape[-3] == 3:
        q, k, v = qkv.unbind(dim=-3)
    elif qkv.dim() == 4 and num_heads_q is not None and 0 < num_heads_q < qkv.shape[2] and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=-2)
    else:
        raise ValueError(
            "qkv must have shape (batch, seqlen, 3, heads, d), or (batch, seqlen, heads_q + 2·heads_kv, d) with num_heads_q, "
            f"got {tuple(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Result:
    """Attention of packed sequences, q (total_q, heads_q, d), k, v (total_k, heads_kv, d); see `flash3.attention_varlen`.

    Returns out, with return_attn_probs (out, lse): lse float32 (heads_q, total_q).
    """
    mask, sink = _mask(causal, window_size, attention_chunk), _sink(s_aux, sinks)
    if _is_plain(q, qv, q_descale, k_descale, v_descale):
        result = attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            mask=mask,
            scale=softmax_scale,
            softcap=softcap,
            sink=sink,
            return_lse=return_attn_probs,
            deterministic=deterministic,
        )
        return _deliver(result, out)
    check_tensors(q=q, k=k, v=v)
    arguments = Arguments(
        q,
        k,
        v,
        qv=qv,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=length_bound("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=length_bound("max_seqlen_k", max_seqlen_k),
        deterministic=deterministic,
        **_scales(q, q_scale=q_descale, k_scale=k_descale, v_scale=v_descale),
        **options(mask, _scale(q, qv, softmax_scale), softcap),
    )
    return _deliver(run(arguments, return_attn_probs), out)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Result:
    """Attention of new queries over a cache, after appending k and v to it in place; see `flash3.attention_kvcache`. No gradient.

    cache_seqlens: an int, int32 (batch,), or None: the caches are full. Returns out, with return_softmax_lse (out, lse, out_accum,
    lse_accum): FlashAttention-3 hands out the parts of a split here, which are empty tensors in flash3.
    """
    mask, sink, longest = _mask(causal, window_size, attention_chunk), _sink(s_aux, sinks), length_bound("max_seqlen_q", max_seqlen_q)
    tensors: tuple[Tensor, ...] = ()
    said = None
    nothing_new = k is None and v is None and rotary_cos is None and rotary_sin is None and cu_seqlens_k_new is None
    if nothing_new and isinstance(cache_seqlens, Tensor) and _is_plain(q, qv, q_descale, k_descale, v_descale):
        kinds = (q, k_cache, v_cache, sink, cu_seqlens_q, cache_seqlens, cache_leftpad, cache_batch_idx, page_table)
        tensors = tuple([t for t in kinds if t is not None])
        options_ = (mask, softmax_scale, type(softmax_scale), softcap, type(softcap), return_softmax_lse, longest)
        said = recall.saying("flash_attn_with_kvcache", *options_, *[t is None for t in kinds])
        path = recall.find(said, tensors)
        if path is not None:
            return _with_empty_parts(_deliver(path(*tensors), out), q)
    given = {"k": k, "v": v, "qv": qv, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "page_table": page_table}
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **{name: x for name, x in given.items() if x is not None})
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), _length(cache_seqlens), dtype=torch.int32, device=k_cache.device)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together: give both or neither")
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, interleaved=rotary_interleaved, lengths=rotary_seqlens)
    arguments = Arguments(
        q.detach(),
        k_cache.detach(),
        v_cache.detach(),
        qv=None if qv is None else qv.detach(),
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=longest,
        **_scales(q, q_scale=q_descale, k_scale=k_descale, v_scale=v_descale),
        **options(mask, _scale(q, qv, softmax_scale), softcap),
    )
    cache = KVCache(arguments.k, arguments.v, cache_seqlens, page_table=page_table, batch_index=cache_batch_idx, leftpad=cache_leftpad)
    new = NewTokens(None if k is None else k.detach(), None if v is None else v.detach(), cu_seqlens_k_new if k is not None else None)
    result = attend(arguments, cache, new, rotary, return_softmax_lse)
    recall.remember(said, tensors, over(arguments, cache, cache_seqlens), return_softmax_lse)
    return _with_empty_parts(_deliver(result, out), q)


def _with_empty_parts(result: Result, q: Tensor) -> Result:
    """(out, lse, out_accum, lse_accum)"""
    return (*result, q.new_empty(0), q.new_empty(0)) if isinstance(result, tuple) else result


def _length(cache_seqlens: Any) -> int:
    """One length for all; torch would cut a fraction off in silence."""
    length = None if isinstance(cache_seqlens, bool) else length_bound("cache_seqlens", cache_seqlens)
    if length is None:
        raise TypeError(f"cache_seqlens must be an int, a tensor or None, got {cache_seqlens!r}")
    if not 0 <= length <= MAX_POSITION:
        raise ValueError(f"cache_seqlens must be within 0 and {MAX_POSITION}, got {length}")
    return length


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results: out_partial (splits, batch, seqlen, heads, d), lse_partial float32 (splits, batch, seqlen, heads).

    Packed: (splits, total, heads, d) and (splits, total, heads). Returns (out, lse), lse (batch, seqlen, heads) or (total, heads).
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial, **({} if out is None else {"out": out}))
    merged, lse = merge(out_partial, lse_partial.transpose(-1, -2), out_dtype=out_dtype if out is None else out.dtype)
    given = _deliver(merged, out)
    assert isinstance(given, Tensor)
    return given, lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A schedule to pass to `flash_attn_with_kvcache`: int32 (1,), the number of splits asked for (0: chosen per call).

    flash3 schedules inside its kernels, so there is nothing to prepare; stale or foreign metadata can not change a result.
    """
    return torch.full((1,), num_splits, dtype=torch.int32, device=cache_seqlens.device)


def install() -> None:
    """Let `import flash_attn_interface` find this module, so that programs written for FlashAttention-3 run unchanged.

    Call it before they import it.

    Raises:
        RuntimeError: another `flash_attn_interface` is already imported; its users hold its functions.
    """
    ours = sys.modules[__name__]
    present = sys.modules.setdefault("flash_attn_interface", ours)
    if present is not ours:
        where = getattr(present, "__file__", "elsewhere")
        raise RuntimeError(f"flash_attn_interface is already imported from {where}: call flash3.install() earlier")
