"""Who computes attention: flash3 (its choice, or one backend by name), and everybody else that can be had.

A provider turns a case into a call. What it cannot do is `Unsupported` with the reason, and becomes a row of the table, as does any error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flash3

from ..dispatch import BACKENDS
from ..mask import Mask, MaskKind
from ..problem import Task
from ..sequences import SequenceKind
from .case import Case

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


_PEERS: dict[str, Provider] = {}
PEER_MODULES = ("torch_peers", "other_peers")
"""Their functions register themselves."""


def provider(name: str, title: str) -> Callable[[Callable[[Case], Prepared]], Callable[[Case], Prepared]]:
    """Register a function as the provider of that name."""

    def register(prepare: Callable[[Case], Prepared]) -> Callable[[Case], Prepared]:
        _PEERS[name] = Provider(name, title, prepare)
        return prepare

    return register


def providers() -> dict[str, Provider]:
    """All of them. flash3's backends are those of the dispatcher: a new one is here at once."""
    ours = {"flash3": Provider("flash3", "flash3", functools.partial(_flash3, None))}
    for name in BACKENDS:
        ours[f"flash3:{name}"] = Provider(f"flash3:{name}", f"flash3, {name} backend", functools.partial(_flash3, name))
    for module in PEER_MODULES:
        importlib.import_module(f"{__package__}.{module}")
    return ours | _PEERS


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
