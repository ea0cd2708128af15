"""A case as data, the call it makes of the public functions, and the check of everything that comes back.

The exact result is the oracle's, sequence by sequence on values of its own, so that the layout rules under test take no part in it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

import flash3
from flash3 import Mask, reference
from flash3.mask import FULL
from flash3.problem import Request
from tests.conformance import storage
from tests.conformance.storage import Storage
from tests.conformance.yardsticks import check_gradient, closed_form


@dataclass(frozen=True, kw_only=True)
class Case:
    """`heads`: of queries and keys. `dims`: head_dim, value_dim. `layout`: names of q's and k's storage; "paged" with page_size.

    spread: standard deviation of q's entries, the logits grow with it. leftpad and rows: of the caches.
    """

    q_lens: tuple[int, ...] = (33, 33)
    k_lens: tuple[int, ...] = (65, 65)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    layout: tuple[str, str] = ("dense", "dense")
    page_size: int = 16
    leftpad: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    mask: Mask = FULL
    scale: float | None = None
    softcap: float = 0.0
    sink: tuple[float, ...] | None = None
    spread: float = 1.0

    @property
    def cached(self) -> bool:
        return self.layout[1] in ("cache", "paged")

    def storages(self) -> tuple[Storage, Storage]:
        return self._storage(self.layout[0], self.q_lens), self._storage(self.layout[1], self.k_lens)

    def _storage(self, name: str, lengths: tuple[int, ...]) -> Storage:
        match name:
            case "paged":
                return storage.paged(lengths, self.page_size, self.leftpad, self.rows)
            case "cache":
                return storage.cache(lengths, self.leftpad, self.rows)
            case "packed beyond":
                return storage.packed(lengths, beyond=5)
            case _:
                return getattr(storage, name.replace(" ", "_"))(lengths)


def name_of(case: Case) -> str:
    """What differs from the default case."""
    plain = Case()
    changed = {f: getattr(case, f) for f in case.__dataclass_fields__ if getattr(case, f) != getattr(plain, f)}
    return " ".join(f"{f}={mask_name(v) if isinstance(v, Mask) else v}" for f, v in changed.items()).replace("torch.", "") or "default"


def mask_name(mask: Mask) -> str:
    plain = Mask()
    return ",".join(f"{f}{getattr(mask, f)}" for f in mask.__dataclass_fields__ if getattr(mask, f) != getattr(plain, f)) or "full"


@dataclass(frozen=True)
class Results:
    """out (tokens, heads, value_dim) and lse (tokens, heads) of all sequences, one after another; gradients where asked for."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    d_sink: Tensor | None = None


class Call:
    """A case with values in a backend's memory."""

    def __init__(self, case: Case, backend) -> None:
        self.case, self.backend = case, backend
        self.dtype = case.dtype or backend.dtype
        self.q_at, self.k_at = case.storages()
        self._generator = torch.Generator().manual_seed(zlib.crc32(name_of(case).encode()))
        (hq, hk), (d, dv) = case.heads, case.dims
        self.q = [self._random(n, hq, d) * case.spread for n in case.q_lens]
        self.k, self.v = ([self._random(n, hk, width) for n in case.k_lens] for width in (d, dv))
        self.d_out = [self._random(n, hq, dv) for n in case.q_lens]
        self.d_lse = [self._random(n, hq, dtype=torch.float32) for n in case.q_lens]
        self.sink = None if case.sink is None else torch.tensor(case.sink)

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(dtype or self.dtype)

    def stored(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v in their storages, and the sink, on the backend's device."""
        tensors = self.q_at.put(self.q), self.k_at.put(self.k), self.k_at.put(self.v)
        return (*(t.to(self.backend.device) for t in tensors), None if self.sink is None else self.sink.to(self.backend.device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """out and lse by the public function for this layout."""
        case, device = self.case, self.backend.device
        options = {
            "mask": case.mask, "scale": case.scale, "softcap": case.softcap, "sink": sink, "return_lse": True, "backend": self.backend.name,
        }  # fmt: skip
        at_q, at_k = (
            {name: x.to(device) if isinstance(x, Tensor) else x for name, x in at.arguments.items()} for at in (self.q_at, self.k_at)
        )
        if case.cached:
            packed = {"cu_seqlens_q": at_q["cu_seqlens"], "max_seqlen_q": at_q["max_seqlen"]} if at_q else {}
            return flash3.attention_kvcache(q, flash3.KVCache(k, v, at_k.pop("lengths"), **at_k), **packed, **options)
        if not at_q and not at_k:
            return flash3.attention(q, k, v, **options)
        starts = at_q.get("cu_seqlens"), at_k.get("cu_seqlens"), at_q.get("max_seqlen"), at_k.get("max_seqlen")
        used = {"seqused_q": at_q.get("seqused"), "seqused_k": at_k.get("seqused")}
        return flash3.attention_varlen(q, k, v, *starts, **used, **options)

    @cached_property
    def requests(self) -> list[Request]:
        """Each sequence alone, dense."""
        c = self.case
        return [
            Request(q=q[None], k=k[None], v=v[None], mask=c.mask, scale=c.scale, softcap=c.softcap, sink=self.sink)
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def by_oracle(self, attention, gradients=None) -> Results:
        """The oracle's (or plain torch's) results in the shape of ours."""
        outs, lses = zip(*(attention(r) for r in self.requests), strict=True)
        forward = torch.cat([o[0] for o in outs]), torch.cat([lse[0].T for lse in lses])
        if gradients is None:
            return Results(*forward)
        parts = [gradients(r, d_out[None], d_lse.T[None]) for r, d_out, d_lse in zip(self.requests, self.d_out, self.d_lse, strict=True)]
        d_sink = None if self.sink is None else torch.stack([p[3] for p in parts]).sum(0)
        return Results(*forward, *(torch.cat([p[i][0] for p in parts]) for i in range(3)), d_sink)

    def run(self) -> Results:
        """Forward alone."""
        out, lse = self.backend.serve(lambda: self.attend(*self.stored()))
        assert out.dtype == self.dtype
        assert lse.dtype == torch.float32
        return self.delivered(out, lse)

    def run_with_gradients(self) -> Results:
        """Forward and backward; the gradients arrive through out and through the lse, poisoned outside the sequences."""
        leaves = [t.requires_grad_() for t in self.stored() if t is not None]
        q, k, v, sink = (*leaves, None)[:4]
        out, lse = self.backend.serve(lambda: self.attend(q, k, v, sink))
        d_out = self.q_at.put(self.d_out)
        d_lse = self.q_at.put([d[..., None] for d in self.d_lse])[..., 0].transpose(-1, -2)
        arriving = [d_out.to(out.device), d_lse.to(out.device)]
        dq, dk, dv, *rest = self.backend.serve(lambda: torch.autograd.grad([out, lse], leaves, arriving))
        for name, grad, leaf, at in (("dq", dq, q, self.q_at), ("dk", dk, k, self.k_at), ("dv", dv, v, self.k_at)):
            assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype), name
            assert (at.outside(grad) == 0).all(), f"{name} outside every sequence must be 0"
        forward = self.delivered(out.detach(), lse.detach())
        d_sink = rest[0].cpu() if rest else None
        return Results(forward.out, forward.lse, self.q_at.take(dq).cpu(), self.k_at.take(dk).cpu(), self.k_at.take(dv).cpu(), d_sink)

    def delivered(self, out: Tensor, lse: Tensor) -> Results:
        """Shapes, and zeros outside the sequences, are checked on the way."""
        *rows, heads, _ = out.shape
        assert tuple(rows) == self.q_at.shape
        assert tuple(lse.shape) == (*rows[:-1], heads, rows[-1])
        by_token = lse.transpose(-1, -2)[..., None]
        assert (self.q_at.outside(out) == 0).all(), "rows outside every sequence must be 0"
        assert torch.isneginf(self.q_at.outside(by_token)).all(), "the LSE outside every sequence must be -inf"
        return Results(self.q_at.take(out).cpu(), self.q_at.take(by_token)[..., 0].cpu())


def check_forward(case: Case, backend) -> None:
    """Run a case and hold out and lse against the oracle."""
    call = Call(case, backend)
    _compare_forward(call.run(), call.by_oracle(reference.attention), call.by_oracle(reference.plain))


def check_gradients(case: Case, backend) -> None:
    """Run a case forward and backward and hold everything against the oracle. A backend without the backward shows its forward."""
    call = Call(case, backend)
    try:
        ours = call.run_with_gradients()
    except pytest.skip.Exception:
        check_forward(case, backend)
        raise
    exact, plain = call.by_oracle(reference.attention, reference.gradients), call.by_oracle(reference.plain, reference.plain_gradients)
    _compare_forward(ours, exact, plain)
    closed = call.by_oracle(reference.plain, closed_form) if call.dtype in (torch.float32, torch.float64) else None
    for name in ("dq", "dk", "dv", "d_sink"):
        if getattr(ours, name) is not None:
            check_gradient(name, *(getattr(r, name) for r in (ours, exact, plain)), None if closed is None else getattr(closed, name))


def _compare_forward(ours: Results, exact: Results, plain: Results) -> None:
    assert (ours.out[torch.isneginf(ours.lse)] == 0).all(), "a row without keys must be exactly 0"
    for name in ("out", "lse"):
        reference.check(name, getattr(ours, name), getattr(exact, name), getattr(plain, name))
