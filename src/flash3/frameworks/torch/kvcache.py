"""Attention over a KV cache: rotate, append the new keys and values, attend. Plain torch around the attention operator.

The rules for positions, left padding and rotation are FlashAttention-3's (`flash_attn_with_kvcache`). No length is read back from a
GPU: positions are computed where the lengths live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ... import sequences
from ...mask import Mask
from ...problem import check_values
from ...sequences import Packed
from ...settings import settings
from . import recall
from .functions import check_tensors, length_bound, options, run_without_gradient
from .operators import Arguments
from .plans import prepared


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of earlier tokens, and how many of them each sequence has.

    k: (rows, capacity, heads_kv, head_dim), or with page_table (pages, page_size, heads_kv, head_dim); v likewise with value_dim.
    lengths: int32 (batch,), tokens stored so far, `leftpad` included. They are not changed by appending: the caller owns them.
    page_table: int32 (rows, pages per row); slot s of a row lies in page page_table[row, s // page_size].
    batch_index: int32 (batch,), the cache row of each sequence; default row i for sequence i.
    leftpad: int32 (batch,), slots to skip at the start of each row.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    _: KW_ONLY
    page_table: Tensor | None = None
    batch_index: Tensor | None = None
    leftpad: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding of q and of the new keys (Su et al., RoFormer).

    cos, sin: (positions, rotary_dim / 2), rotary_dim <= head_dim; the dimensions beyond rotary_dim stay as they are.
    interleaved: rotate pairs (0, 1), (2, 3) …; otherwise (0, rotary_dim / 2), (1, rotary_dim / 2 + 1) … (GPT-NeoX, Llama).
    lengths: int32 (batch,), position of the first new token; default the cache's lengths.
    """

    cos: Tensor
    sin: Tensor
    _: KW_ONLY
    interleaved: bool = False
    lengths: Tensor | None = None


def attention_kvcache(
    q: Tensor,
    cache: KVCache,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary: Rotary | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache, after appending new keys and values to it in place. Inference only: no gradient.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim) with cu_seqlens_q.
        cache: earlier keys and values. k_new and v_new are written into its k and v, from slot lengths[i] on.
        k_new: (batch, seqlen_new, heads_kv, head_dim), or packed by cu_seqlens_q (total_q, heads_kv, head_dim).
        v_new: likewise with value_dim.
        rotary: rotates k_new, and q: row i at position lengths + i under any mask, all rows at position lengths without one.
        cu_seqlens_q: int32 (batch + 1,), for packed q.
        max_seqlen_q: as in `attention_varlen`.
        mask: aligned so that the last query meets the last key, the appended ones included.
        num_splits: parts to split the keys into, for speed only; None lets the backend choose.
        scale, softcap, sink, return_lse, backend: as in `attention`.

    Returns:
        out like q with value_dim; with return_lse (out, lse), lse float32 (batch, heads_q, seqlen_q) or (heads_q, total_q).
        Slots beyond a sequence's length, and pages no sequence lists, never count.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `attention`; the cache is then unchanged.
    """
    longest = length_bound("max_seqlen_q", max_seqlen_q)
    tensors: tuple[Tensor, ...] = ()
    said = None
    if k_new is None and v_new is None and rotary is None and num_splits is None and isinstance(cache, KVCache):
        given = (q, cache.k, cache.v, sink, cu_seqlens_q, cache.lengths, cache.leftpad, cache.batch_index, cache.page_table)
        tensors = tuple([t for t in given if t is not None])
        options_ = (mask, scale, type(scale), softcap, type(softcap), return_lse, backend, longest)
        said = recall.saying("kvcache", *options_, *[t is None for t in given])
        path = recall.find(said, tensors)
        if path is not None:
            return path(*tensors)
    _check_cache(cache)
    check_tensors(q=q, **{name: t for name, t in (("k_new", k_new), ("v_new", v_new), ("sink", sink)) if t is not None})
    new = NewTokens(k_new, v_new, cu_seqlens_q if k_new is not None and k_new.dim() == 3 else None)
    if torch.is_grad_enabled():
        for name, t in (("q", q), ("cache.k", cache.k), ("cache.v", cache.v), ("k_new", k_new), ("v_new", v_new), ("sink", sink)):
            if t is not None and t.requires_grad:
                raise ValueError(f"{name} requires a gradient, but attention over a cache has none: call it under torch.no_grad()")
    arguments = Arguments(
        q,
        cache.k,
        cache.v,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=longest,
        backend=backend,
        **options(mask, scale, softcap),
    )
    if num_splits is not None and not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be an int or None, got {num_splits!r} of type {type(num_splits).__name__}")
    if num_splits is not None and num_splits < 0:
        raise ValueError(f"num_splits must be >= 0 or None, got {num_splits}")
    result = attend(arguments, cache, new, rotary, return_lse)
    recall.remember(said, tensors, over(arguments, cache, cache.lengths), return_lse)
    return result


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Keys and values to append: (batch, seqlen_new, heads_kv, dim), or packed by cu_seqlens; None: nothing to append."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None = None

    def check(self, cache: KVCache) -> None:
        """Raises ValueError or TypeError where they do not fit the cache."""
        if (self.k is None) != (self.v is None):
            raise ValueError(f"k_new and v_new go together, got k_new={_shape(self.k)} and v_new={_shape(self.v)}")
        if self.k is None or self.v is None:
            return
        batch = cache.lengths.shape[0]
        for name, t, kept in (("k_new", self.k, cache.k), ("v_new", self.v, cache.v)):
            rows = t.shape[:1] if self.cu_seqlens is not None else (batch, *t.shape[1:2])
            wanted = (*rows, *kept.shape[-2:])
            if tuple(t.shape) != tuple(wanted):
                raise ValueError(f"{name} must have shape {tuple(wanted)} to fit the cache {tuple(kept.shape)}, got {tuple(t.shape)}")
            if t.dtype != kept.dtype:
                raise TypeError(f"{name} must have the cache's dtype {kept.dtype}, got {t.dtype}")
            if t.device != kept.device:
                raise ValueError(f"{name} is on {t.device}, the cache on {kept.device}: all tensors must be on one device")
        if self.k.shape[:-1] != self.v.shape[:-1]:
            raise ValueError(f"k_new has shape {tuple(self.k.shape)} and v_new {tuple(self.v.shape)}: all but the last must be equal")
        if self.cu_seqlens is not None:
            _check_int32("cu_seqlens_k_new", self.cu_seqlens, (batch + 1,), cache)

    def lengths(self) -> Tensor | int:
        """How many tokens each sequence gains."""
        if self.k is None:
            return 0
        return _lengths(self.k, self.cu_seqlens)


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | int:
    return x.shape[1] if cu_seqlens is None else cu_seqlens.diff()


def _shape(t: Tensor | None) -> tuple[int, ...] | None:
    return None if t is None else tuple(t.shape)


def attend(arguments: Arguments, cache: KVCache, new: NewTokens, rotary: Rotary | None, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate, append, attend: `arguments` still lacks the cache's lengths and layout. All checks come before the first write."""
    _check_cache(cache)
    check_tensors(q=arguments.q)
    new.check(cache)
    if rotary is not None:
        _check_rotary(rotary, new, arguments.q, cache)
    arguments = over(arguments, cache, cache.lengths if new.k is None else (cache.lengths + new.lengths()).to(torch.int32))
    arguments.check_types()
    if new.k is not None and not torch.compiler.is_compiling():
        _check_before_writing(arguments, cache, new, rotary)
    k_new, v_new = new.k, new.v
    if rotary is not None and k_new is not None:
        start = cache.lengths if rotary.lengths is None else rotary.lengths
        at = positions(arguments.q, arguments.cu_seqlens_q, start, _is_masked(arguments))
        arguments = arguments._replace(q=rotate(arguments.q, rotary, at))
        k_new = rotate(k_new, rotary, positions(k_new, new.cu_seqlens, start, True))
    if k_new is not None and v_new is not None:
        append(cache.k, cache.v, k_new, v_new, cache.lengths, cache.batch_index, cache.page_table, new.cu_seqlens)
    return run_without_gradient(arguments, return_lse)


def over(arguments: Arguments, cache: KVCache, lengths: Tensor) -> Arguments:
    """With the cache's layout."""
    return arguments._replace(seqused_k=lengths, leftpad=cache.leftpad, batch_index=cache.batch_index, page_table=cache.page_table)


def _is_masked(a: Arguments) -> bool:
    """Under a mask queries have positions of their own; without one all stand at the first new token's (FlashAttention-3's rule)."""
    return a.causal or any(width is not None for width in (a.left, a.right, a.chunk))


def _check_cache(cache: KVCache) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a flash3.KVCache, got {type(cache).__name__}")
    check_tensors(**{"cache.k": cache.k, "cache.v": cache.v, "cache.lengths": cache.lengths})
    if cache.lengths.dtype != torch.int32 or cache.lengths.dim() != 1:
        raise TypeError(f"cache.lengths must be int32 (batch,), got {cache.lengths.dtype} {tuple(cache.lengths.shape)}")


def _check_int32(name: str, t: Tensor, shape: tuple[int, ...], cache: KVCache) -> None:
    check_tensors(**{name: t})
    if t.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {t.dtype}")
    if tuple(t.shape) != shape or t.device != cache.k.device:
        raise ValueError(f"{name} must have shape {shape} on {cache.k.device}, got {tuple(t.shape)} on {t.device}")


def _check_rotary(rotary: Rotary, new: NewTokens, q: Tensor, cache: KVCache) -> None:
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a flash3.Rotary or None, got {type(rotary).__name__}")
    if new.k is None:
        raise ValueError("rotary needs k_new and v_new: it rotates q together with the keys that are appended")
    check_tensors(**{"rotary.cos": rotary.cos, "rotary.sin": rotary.sin})
    if rotary.cos.shape != rotary.sin.shape or rotary.cos.dim() != 2 or 2 * rotary.cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary.cos and rotary.sin must have shape (positions, rotary_dim / 2) with rotary_dim <= head_dim = {q.shape[-1]}, "
            f"got {tuple(rotary.cos.shape)} and {tuple(rotary.sin.shape)}"
        )
    for name, t in (("rotary.cos", rotary.cos), ("rotary.sin", rotary.sin)):
        if not t.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}: all tensors must be on one device")
    if rotary.lengths is not None:
        _check_int32("rotary.lengths", rotary.lengths, tuple(cache.lengths.shape), cache)


def _check_before_writing(arguments: Arguments, cache: KVCache, new: NewTokens, rotary: Rotary | None) -> None:
    """Whatever the attention would refuse is refused before the cache is touched."""
    request = arguments.request()
    prepared(arguments, request)
    if arguments.q.device.type != "cpu" and not settings.check_values:
        return
    if new.k is not None and new.cu_seqlens is not None:
        sequences.check_values("k_new", new.k.shape, Packed(cu_seqlens=new.cu_seqlens))
    check_values(request)
    for name, lengths in (("cache.lengths", cache.lengths), ("rotary.lengths", rotary.lengths if rotary else None)):
        if lengths is not None and any(n < 0 for n in lengths.tolist()):
            raise ValueError(f"{name} must be >= 0, got {lengths.tolist()}")
    _check_slots(cache, new)
    if rotary is not None:
        start = cache.lengths if rotary.lengths is None else rotary.lengths
        ends = start + new.lengths()
        if _is_masked(arguments):  # then the queries advance too
            ends = torch.maximum(ends, start + _lengths(arguments.q, arguments.cu_seqlens_q))
        last = max(ends.tolist(), default=0)
        if last > rotary.cos.shape[0]:
            raise ValueError(f"rotary.cos has {rotary.cos.shape[0]} positions, but a token comes to position {last - 1}")


def _check_slots(cache: KVCache, new: NewTokens) -> None:
    """No two new tokens go to one place, which would keep either. (Sequences may share what they only read.)"""
    if new.k is None or new.k.shape[0] == 0 or cache.lengths.shape[0] == 0:
        return
    row, slot = _slots(cache.k, new.k, cache.lengths, cache.batch_index, cache.page_table, new.cu_seqlens)
    place = (row * cache.k.stride(0) + slot * cache.k.stride(1)).flatten()
    if new.cu_seqlens is not None:
        place = place[: int(new.cu_seqlens[-1])]
    found, counts = place.unique(return_counts=True)
    if len(found) < len(place):
        where = int((place == found[counts.argmax()]).nonzero()[0])
        what = "row" if cache.page_table is None else "page"
        raise ValueError(
            f"k_new has several tokens for slot {int(slot.flatten()[where])} of {what} {int(row.flatten()[where])} of the cache: "
            f"sequences that share a {what} cannot both append to it"
        )


def positions(x: Tensor, cu_seqlens: Tensor | None, start: Tensor, advancing: bool) -> Tensor:
    """Position of each token: its sequence's start, plus its index in the sequence if `advancing`. int64 (batch, seqlen) or (total,)."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], device=x.device) if advancing else torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
        return start[:, None] + index
    sequence, index = tokens(cu_seqlens, x.shape[0])
    return start[sequence] + index if advancing else start[sequence].long()


def tokens(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence and index within it of each of `total` packed tokens; tokens past the last sequence repeat its last one."""
    token = torch.arange(total, device=cu_seqlens.device)
    token = torch.minimum(token, cu_seqlens[-1] - 1).clamp(min=0)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=False).clamp(max=cu_seqlens.shape[0] - 2)
    return sequence, token - cu_seqlens[sequence]


def rotate(x: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """x (…, heads, head_dim) rotated at `position` (…), computed in float32."""
    half = rotary.cos.shape[1]
    position = position.clamp(max=rotary.cos.shape[0] - 1)  # only tokens past every sequence can be beyond
    cos, sin = (t[position].unsqueeze(-2).float() for t in (rotary.cos, rotary.sin))
    turned = x[..., : 2 * half].float()
    if rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        mixed = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        mixed = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((mixed.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    lengths: Tensor,
    batch_index: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Token t of sequence i goes to slot lengths[i] + t."""
    if k_new.shape[0] == 0 or lengths.shape[0] == 0:
        return
    row, slot = _slots(k_cache, k_new, lengths, batch_index, page_table, cu_seqlens)
    for cache, new in ((k_cache, k_new), (v_cache, v_new)):
        cache.index_put_((row, slot), _valid(new, cache, cu_seqlens, row, slot).to(cache.dtype))


def _slots(
    k_cache: Tensor, k_new: Tensor, lengths: Tensor, batch_index: Tensor | None, page_table: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row (or page) of the cache and slot in it that each new token goes to."""
    if cu_seqlens is None:
        sequence = torch.arange(k_new.shape[0], device=k_new.device)[:, None].expand(k_new.shape[:2])
        index = torch.arange(k_new.shape[1], device=k_new.device).expand(k_new.shape[:2])
    else:
        sequence, index = tokens(cu_seqlens, k_new.shape[0])
    slot = lengths[sequence] + index
    row = sequence if batch_index is None else batch_index[sequence].long()
    if page_table is not None:
        page_size = k_cache.shape[1]
        page = (slot // page_size).clamp(max=page_table.shape[1] - 1)
        row, slot = page_table[row, page].long(), slot % page_size
    return row, slot.long()


def _valid(new: Tensor, cache: Tensor, cu_seqlens: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    """Rows past the last packed sequence write what its last token writes, to the same slot; without any token, what is there."""
    if cu_seqlens is None:
        return new
    total = cu_seqlens[-1]
    token = torch.minimum(torch.arange(new.shape[0], device=new.device), total - 1).clamp(min=0)
    kept = cache[row.clamp(0, cache.shape[0] - 1), slot.clamp(0, cache.shape[1] - 1)]
    return torch.where(total > 0, new[token], kept.to(new.dtype))


def _define_append() -> Callable[..., None]:
    schema = (
        "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor lengths, Tensor? batch_index, "
        "Tensor? page_table, Tensor? cu_seqlens) -> ()"
    )
    torch.library.define("flash3::append", schema)
    torch.library.impl("flash3::append", ("cpu", "cuda"), _append)
    torch.library.register_fake("flash3::append", lambda *arguments: None)
    overload: Callable[..., None] = torch.ops.flash3.append.default
    return overload


append = _define_append()
