"""Attention of other packages: FlashAttention-3 and -4, JAX Pallas."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mask import MaskKind
from ..problem import Task
from ..sequences import SequenceKind
from .case import Case
from .providers import Prepared, Unsupported, prepared, provider, refuse, window_of


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


def fa3_launch(library: str, **values: Any) -> Callable[[], Any]:
    """A call of the operator with these of its arguments by name; the others are None or off.

    Raises:
        ValueError: it has no argument of that name.
    """
    operator, names = _fa3_forward(library)
    if unknown := values.keys() - set(names):
        raise ValueError(f"the operator has no arguments {sorted(unknown)}; it has {names}")
    off = {"window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0, "num_splits": 1, "sm_margin": 0}
    off |= {"is_causal": False, "is_rotary_interleaved": True, "softmax_scale": values["q"].shape[-1] ** -0.5}
    arguments = [values.get(name, off.get(name)) for name in names]
    return lambda: operator(*arguments)


def _fa3_operator(library: str, case: Case) -> Prepared:
    if case.task is Task.BACKWARD:
        raise Unsupported("the library that FA3_LIBRARY names has the forward only")
    refuse(case, packed=True, padded=True, paged=True, softcap=True, windows=True, float8=True)
    w, r = case.workload, case.request
    left, right = (-1 if x is None else x for x in window_of(w.mask))
    values: dict[str, Any] = {"q": r.q, "k": r.k, "v": r.v, "is_causal": w.mask.causal, "softcap": w.softcap}
    values |= {"window_size_left": left, "window_size_right": -1 if w.mask.causal else right, "num_splits": 0 if w.q_len < 16 else 1}
    match w.layout:
        case SequenceKind.PACKED:
            values |= {"cu_seqlens_q": r.q_sequences.cu_seqlens, "cu_seqlens_k": r.k_sequences.cu_seqlens}  # type: ignore[union-attr]
            values |= {"max_seqlen_q": w.q_len, "max_seqlen_k": w.k_len}
        case SequenceKind.PADDED | SequenceKind.PAGED:
            values |= {"seqused_k": r.k_sequences.lengths, "page_table": getattr(r.k_sequences, "page_table", None)}  # type: ignore[union-attr]
    return Prepared(fa3_launch(library, **values), lambda result: (_first(result),))


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
            longest = {"max_seqlen_q": w.q_len, "max_seqlen_k": w.k_len}
            return _first(interface.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **longest, **options))
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
