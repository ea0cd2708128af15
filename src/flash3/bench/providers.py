"""Who computes attention: flash3 (its choice, or one backend by name), and everybody else that can be had.

A provider turns a case into a call. What it cannot do is `Unsupported` with the reason, and becomes a row of the table, as does any error.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import flash3

from ..dispatch import BACKENDS
from ..mask import Mask, MaskKind
from ..problem import Task
from ..sequences import SequenceKind
from .case import Case
from .workloads import Workload

MOST_SCORES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Elements of an S×S matrix that a provider which makes one may make."""


class Unsupported(Exception):
    """This provider cannot do this here; the message completes "no, "."""


@dataclass(frozen=True)
class Prepared:
    """A call without arguments.

    call: runs it once. outputs: from its result, (out,) or (dq, dk, dv) as torch tensors, shaped as q, k and v are (out with v's width).
    wait: for what runs beside torch's current stream. may_graph: whether CUDA graphs can capture it.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], tuple[Tensor, ...]]
    wait: Callable[[], object] | None = None
    may_graph: bool = True
    note: str = ""


@dataclass(frozen=True)
class Provider:
    name: str
    title: str
    prepare: Callable[[Case], Prepared]


_OTHERS: dict[str, Provider] = {}


def provider(name: str, title: str) -> Callable[[Callable[[Case], Prepared]], Callable[[Case], Prepared]]:
    """Register a function as the provider of that name."""

    def register(prepare: Callable[[Case], Prepared]) -> Callable[[Case], Prepared]:
        _OTHERS[name] = Provider(name, title, prepare)
        return prepare

    return register


def providers() -> dict[str, Provider]:
    """All of them. flash3's backends are those of the dispatcher: a new one is here at once."""
    ours = {"flash3": Provider("flash3", "flash3", functools.partial(_flash3, None))}
    for name in BACKENDS:
        ours[f"flash3:{name}"] = Provider(f"flash3:{name}", f"flash3, {name} backend", functools.partial(_flash3, name))
    return ours | _OTHERS


def select(words: list[str]) -> list[Provider]:
    """Providers by name; `sdpa` stands for all that start with `sdpa:`.

    Raises:
        ValueError: a name that is not known; the message lists the known ones.
    """
    known = providers()
    found: dict[str, Provider] = {}
    for word in words:
        chosen = [word] if word in known else [name for name in known if name.startswith(f"{word}:")]
        if not chosen:
            raise ValueError(f"no provider is called {word!r}; known: {', '.join(known)}")
        found.update((name, known[name]) for name in chosen)
    return list(found.values())


def is_ours(name: str) -> bool:
    return name.partition(":")[0] == "flash3"


def usual(device: torch.device) -> list[str]:
    """Who is asked where nobody is named."""
    return ["flash3", "sdpa:cudnn", "sdpa:flash", "fa3", "fa4"] if device.type == "cuda" else ["flash3", "sdpa:flash"]


# ------------------------------------------------------------------------------------------------ forward and backward of a torch function

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def prepared(case: Case, attend: Attend, note: str = "") -> Prepared:
    """The task of a case by a torch function (q, k, v) -> out, out shaped as q. The backward is timed alone."""
    q, k, v = case.qkv
    if case.task is Task.FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(q, k, v)

        return Prepared(forward, lambda out: (out,), note=note)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    # autograd runs a backward on the stream of its forward: no capture.
    return Prepared(lambda: torch.autograd.grad(out, leaves, case.d_out, retain_graph=True), tuple, may_graph=False, note=note)


def refuse(case: Case, **allowed: bool) -> None:
    """Refuse what a provider does not have: of packed, padded, paged, softcap, sink, float8, windows, each allowed only if named True."""
    w = case.workload
    needs = {
        "packed": w.layout is SequenceKind.PACKED,
        "padded": w.layout is SequenceKind.PADDED and any(n != w.k_len for _, n in w.lengths),
        "paged": w.layout is SequenceKind.PAGED,
        "softcap": w.softcap > 0,
        "sink": w.sink,
        "float8": w.dtype.is_float8,
        "windows": w.mask.kind in (MaskKind.WINDOW, MaskKind.CHUNK) or (w.mask.right is not None),
    }
    missing = [name for name, needed in needs.items() if needed and not allowed.get(name)]
    if missing:
        raise Unsupported(f"it has no {', no '.join(missing)}")


def window_of(mask: Mask) -> tuple[int | None, int | None]:
    """(left, right) as FlashAttention takes them, for masks without chunks."""
    if mask.kind is MaskKind.CHUNK:
        raise Unsupported("it has no chunked masks")
    return mask.left, 0 if mask.causal else mask.right


# ------------------------------------------------------------------------------------------------ flash3


def _flash3(backend: str | None, case: Case) -> Prepared:
    r, w = case.request, case.workload
    if case.task is Task.BACKWARD and w.layout is SequenceKind.PAGED:
        raise Unsupported("attention over a cache of pages has no gradient")
    options: dict[str, Any] = {"mask": r.mask, "softcap": r.softcap, "sink": r.sink, "return_lse": True, "backend": backend}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        match w.layout:
            case SequenceKind.PACKED:
                cu = r.q_sequences.cu_seqlens, r.k_sequences.cu_seqlens  # type: ignore[union-attr]
                return flash3.attention_varlen(q, k, v, *cu, w.q_len, w.k_len, **options)[0]
            case SequenceKind.PADDED:
                lengths = r.k_sequences.lengths  # type: ignore[union-attr]
                return flash3.attention_varlen(q, k, v, None, None, None, None, seqused_k=lengths, **options)[0]
            case SequenceKind.PAGED:
                pages = r.k_sequences
                cache = flash3.KVCache(k, v, pages.lengths, page_table=pages.page_table)  # type: ignore[union-attr]
                return flash3.attention_kvcache(q, cache, **options)[0]
        return flash3.attention(q, k, v, **options)[0]

    try:
        return prepared(case, attend)
    except NotImplementedError as refusal:
        raise Unsupported(str(refusal)) from None


# ------------------------------------------------------------------------------------------------ torch


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


# ------------------------------------------------------------------------------------------------ FlashAttention


@provider("fa3", "FlashAttention-3, C++")
def _fa3(case: Case) -> Prepared:
    """By its module `flash_attn_interface`, or by the operators in the library that FA3_LIBRARY names (forward only)."""
    if case.device.type != "cuda":
        raise Unsupported("it needs an NVIDIA GPU")
    library = os.environ.get("FA3_LIBRARY")
    if library:
        return _fa3_operator(library, case)
    module = _fa3_module()
    if module is None:
        raise Unsupported("neither is the module flash_attn_interface installed, nor does FA3_LIBRARY name its library")
    refuse(case, packed=True, softcap=True, windows=True)
    w, r = case.workload, case.request
    left, right = (-1 if x is None else x for x in window_of(w.mask))
    options = {"causal": w.mask.causal, "window_size": (left, -1 if w.mask.causal else right), "softcap": w.softcap}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if w.layout is SequenceKind.PACKED:
            cu = r.q_sequences.cu_seqlens, r.k_sequences.cu_seqlens  # type: ignore[union-attr]
            return _first(module.flash_attn_varlen_func(q, k, v, *cu, max_seqlen_q=w.q_len, max_seqlen_k=w.k_len, **options))
        return _first(module.flash_attn_func(q, k, v, **options))

    return prepared(case, attend)


def _fa3_module() -> Any:
    """The real one: `flash3.install` puts flash3 under the same name."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    module = importlib.import_module("flash_attn_interface")
    return None if module.__name__.startswith("flash3") else module


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple | list) else result


@functools.cache
def _fa3_forward(library: str) -> tuple[Any, tuple[str, ...]]:
    """The operator sgl_kernel::fwd and the names of its arguments, which go by position."""
    torch.ops.load_library(library)
    operator = torch.ops.sgl_kernel.fwd.default
    return operator, tuple(argument.name for argument in operator._schema.arguments)


def _fa3_operator(library: str, case: Case) -> Prepared:
    if case.task is Task.BACKWARD:
        raise Unsupported("the library that FA3_LIBRARY names has the forward only")
    refuse(case, packed=True, padded=True, paged=True, softcap=True, windows=True, float8=True)
    operator, names = _fa3_forward(library)
    w, r = case.workload, case.request
    left, right = (-1 if x is None else x for x in window_of(w.mask))
    values: dict[str, Any] = {
        "q": r.q, "k": r.k, "v": r.v, "softmax_scale": w.head_dim**-0.5, "is_causal": w.mask.causal, "causal": w.mask.causal,
        "window_size_left": left, "window_size_right": -1 if w.mask.causal else right, "attention_chunk": 0, "softcap": w.softcap,
        "is_rotary_interleaved": True, "rotary_interleaved": True, "num_splits": 0 if w.q_len < 16 else 1, "sm_margin": 0,
        "cu_seqlens_q": getattr(r.q_sequences, "cu_seqlens", None), "cu_seqlens_k": getattr(r.k_sequences, "cu_seqlens", None),
        "seqused_k": getattr(r.k_sequences, "lengths", None), "page_table": getattr(r.k_sequences, "page_table", None),
    }  # fmt: skip
    if w.layout is SequenceKind.PACKED:
        values |= {"max_seqlen_q": w.q_len, "max_seqlen_k": w.k_len}
    arguments = [values.get(name) for name in names]
    return Prepared(lambda: operator(*arguments), lambda result: (_first(result),))


@provider("fa4", "FlashAttention-4, CuTe DSL")
def _fa4(case: Case) -> Prepared:
    if case.device.type != "cuda":
        raise Unsupported("it needs an NVIDIA GPU")
    refuse(case, packed=True, softcap=True, windows=True)
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        raise Unsupported(f"the package flash-attn-4 is not installed ({error})") from None
    w, r = case.workload, case.request
    left, right = window_of(w.mask)
    options: dict[str, Any] = {"causal": w.mask.kind is MaskKind.CAUSAL, "softcap": w.softcap}
    if w.mask.kind is MaskKind.WINDOW:
        options["window_size"] = (left, right)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if w.layout is SequenceKind.PACKED:
            cu = r.q_sequences.cu_seqlens, r.k_sequences.cu_seqlens  # type: ignore[union-attr]
            return _first(interface.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options))
        return _first(interface.flash_attn_func(q, k, v, **options))

    return prepared(case, attend)


# ------------------------------------------------------------------------------------------------ JAX


@provider("pallas", "JAX Pallas")
def _pallas(case: Case) -> Prepared:
    """jax.experimental.pallas.ops.gpu.attention.mha, on JAX's own stream: the host's clock times it, with a wait at each burst's end."""
    refuse(case)
    w = case.workload
    if case.device.type != "cuda" or case.task is Task.BACKWARD:
        raise Unsupported("here it runs the forward on a GPU")
    if w.heads_q != w.heads_kv or w.head_dim != w.value_dim or w.q_len != w.k_len:
        raise Unsupported("it has no grouped heads, no second head dim and no second length")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the memory for itself
    try:
        import jax
        from jax.experimental.pallas.ops.gpu import attention
    except ImportError as error:
        raise Unsupported(f"the package jax is not installed ({error})") from None
    q, k, v = (jax.dlpack.from_dlpack(x.detach()) for x in case.qkv)
    causal, scale = w.mask.causal, 1 / math.sqrt(w.head_dim)
    attend = jax.jit(lambda q, k, v: attention.mha(q, k, v, None, sm_scale=scale, causal=causal))
    last: list[Any] = [None]

    def call() -> Any:
        last[0] = attend(q, k, v)
        return last[0]

    return Prepared(call, lambda out: (torch.utils.dlpack.from_dlpack(out),), wait=lambda: last[0].block_until_ready(), may_graph=False)
