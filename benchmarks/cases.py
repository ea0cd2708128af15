"""Requests that a configuration has to get right: lengths at and off tile edges, masks with other numbers, layouts, poisoned storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from flash3.backends.hopper.tiles import ForwardSpec, ScaleSign, SequenceLayout
from flash3.mask import Mask, MaskKind
from flash3.problem import Request
from flash3.sequences import Dense, Packed, Padded, SequenceKind, Sequences

EVEN = (
    (1, 2, 128, 128),
    (2, 3, 113, 257),
    (1, 2, 1, 1),
    (1, 2, 127, 129),
    (2, 2, 500, 500),
    (2, 4, 1024, 1024),
    (1, 2, 300, 1111),
    (3, 5, 640, 640),
    (2, 2, 3, 700),
)
"""(batch, key heads, queries, keys)"""
UNEVEN = ((1, 2, 300, 77), (2, 2, 257, 64))
"""More queries than keys: with a mask, rows without keys."""
FEW = ((2, 3, 113, 257), (1, 2, 640, 640), (1, 2, 1500, 1700), (1, 2, 300, 77))
RAGGED = (
    ((5, 5), (128, 128), (1, 1), (300, 301), (0, 7), (64, 0), (257, 1030)),
    ((1, 900), (129, 127), (0, 0), (640, 640)),
    tuple((7 * i % 150, 11 * i % 170) for i in range(70)),
)
"""(queries, keys) of each sequence; the last batch is longer than a warp is wide."""
LARGE = (2, 7, 4133, 4133)
NAN = float("nan")

MASKS = {
    MaskKind.FULL: (Mask(),),
    MaskKind.CAUSAL: (
        Mask(causal=True),
        Mask(right=37),
        Mask(causal=True, q_offset=-40),
        Mask(right=200, q_offset=0, k_offset=150),
    ),
    MaskKind.WINDOW: (
        Mask(left=64, right=0),
        Mask(left=0, right=1),
        Mask(left=130, right=200),
        Mask(left=100),
        Mask(causal=True, left=300, q_offset=90),
    ),
    MaskKind.CHUNK: (
        Mask(chunk=64),
        Mask(chunk=100, causal=True),
        Mask(chunk=300, left=50),
        Mask(chunk=1000, right=20, q_offset=-300),
    ),
}
"""One kind of kernel serves all of these: their numbers are run-time values."""


@dataclass(frozen=True)
class Maker:
    """Random requests for one spec, of its dtype, widths and options."""

    spec: ForwardSpec
    seed: int = 1

    def tensor(self, *shape: int, sharpness: float = 1.0) -> Tensor:
        t = torch.randn(*shape, device="cuda") * sharpness
        return t.to(getattr(torch, self.spec.dtype.value))

    def request(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, q_rows: Sequences, k_rows: Sequences) -> Request:
        spec = self.spec
        scale = {ScaleSign.POSITIVE: None, ScaleSign.NEGATIVE: -0.21, ScaleSign.ZERO: 0.0}[spec.scale_sign]
        sink = torch.randn(q.shape[-2], device="cuda") * 3 if spec.sink else None
        out = None if spec.out_dtype is spec.dtype else spec.out_dtype
        return Request(
            q=q,
            k=k,
            v=v,
            q_sequences=q_rows,
            k_sequences=k_rows,
            mask=mask,
            scale=scale,
            softcap=13.0 if spec.softcap else 0.0,
            sink=sink,
            lse=True,
            out_dtype=out,
        )

    def dense(self, shape: tuple[int, int, int, int], mask: Mask, less: int = 0, sharp: bool = False) -> Request:
        """`less`: head dims narrower than the tile by so much."""
        torch.manual_seed(self.seed)
        b, heads, m, n = shape
        width, value = (max(8, w - less) for w in (self.spec.qk_width, self.spec.v_width))
        q = self.tensor(b, m, heads * self.spec.heads_per_kv, width, sharpness=6.0 if sharp else 1.0)
        k, v = self.tensor(b, n, heads, width, sharpness=3.0 if sharp else 1.0), self.tensor(b, n, heads, value)
        return self.request(q, k, v, mask, Dense(), Dense())

    def ragged(self, lengths: Sequence[tuple[int, int]], mask: Mask) -> Request:
        """Each side in its layout; what belongs to no sequence is NaN."""
        torch.manual_seed(self.seed)
        spec, heads = self.spec, 2
        q_lengths, k_lengths = [m for m, _ in lengths], [n for _, n in lengths]
        if spec.q_layout.kind is SequenceKind.DENSE:
            q_lengths = [max(q_lengths)] * len(lengths)
        (q,), q_rows = self._stored(q_lengths, spec.q_layout, heads * spec.heads_per_kv, (spec.qk_width,))
        (k, v), k_rows = self._stored(k_lengths, spec.k_layout, heads, (spec.qk_width, spec.v_width))
        return self.request(q, k, v, mask, q_rows, k_rows)

    def _stored(self, lengths: list[int], layout: SequenceLayout, heads: int, widths: tuple[int, ...]) -> tuple[list[Tensor], Sequences]:
        if layout.kind is SequenceKind.DENSE:
            return [self.tensor(len(lengths), lengths[0], heads, w) for w in widths], Dense()
        if layout.kind is SequenceKind.PACKED:
            return self._packed(lengths, layout, heads, widths)
        return self._padded(lengths, layout, heads, widths)

    def _packed(self, lengths: list[int], layout: SequenceLayout, heads: int, widths: tuple[int, ...]) -> tuple[list[Tensor], Packed]:
        room = 3 if layout.used else 0
        starts = [0, *accumulate(n + room for n in lengths)]
        storage = [torch.full((starts[-1] + 5, heads, w), NAN, device="cuda", dtype=self.tensor(1).dtype) for w in widths]
        for start, n in zip(starts, lengths, strict=False):
            for t in storage:
                t[start : start + n] = self.tensor(n, heads, t.shape[-1])
        return storage, Packed(cu_seqlens=_int32(starts), used=_int32(lengths) if layout.used else None)

    def _padded(self, lengths: list[int], layout: SequenceLayout, heads: int, widths: tuple[int, ...]) -> tuple[list[Tensor], Padded]:
        count = len(lengths)
        pads = [(5 * i) % 37 if layout.leftpad else 0 for i in range(count)]
        rows = [(count - i) if layout.batch_index else i for i in range(count)]
        storage = [
            torch.full(
                (count + 1 if layout.batch_index else count, max(lengths) + 40, heads, w), NAN, device="cuda", dtype=self.tensor(1).dtype
            )
            for w in widths
        ]
        for row, pad, n in zip(rows, pads, lengths, strict=True):
            for t in storage:
                t[row, pad : pad + n] = self.tensor(n, heads, t.shape[-1])
        return storage, Padded(
            lengths=_int32([pad + n for pad, n in zip(pads, lengths, strict=True)]),
            leftpad=_int32(pads) if layout.leftpad else None,
            batch_index=_int32(rows) if layout.batch_index else None,
        )


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def cases(spec: ForwardSpec) -> Iterator[tuple[str, Request]]:
    """Named requests."""
    make = Maker(spec)
    first, *others = MASKS[spec.mask_kind]
    if spec.is_ragged:
        for i, lengths in enumerate(RAGGED):
            for mask in (first, *others):
                yield f"batch {i} {mask}", make.ragged(lengths, mask)
        return
    for shape in EVEN if spec.mask_kind is MaskKind.FULL else EVEN + UNEVEN:
        yield str(shape), make.dense(shape, first)
    yield "sharp", make.dense((2, 3, 1500, 1500), first, sharp=True)
    r = make.dense((1, 3, 1111, 2000), first)
    steps = torch.linspace(13, 1, r.k.shape[1], device="cuda", dtype=r.k.dtype)[:, None, None]
    yield "scores that outgrow their maximum in block after block", replace(r, k=r.k * steps)
    for mask in others:
        for shape in FEW:
            yield f"{shape} {mask}", make.dense(shape, mask)
    yield "narrower", make.dense((2, 2, 300, 300), first, less=24)
    r = make.dense((2, 2, 200, 330), first)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (r.q, r.k, r.v))
    yield "heads first", replace(r, q=q, k=k, v=v)
    yield "batch stride 0", replace(r, k=r.k[:1].expand_as(r.k), v=r.v[:1].expand_as(r.v))
    yield "no keys", replace(r, k=r.k[:, :0], v=r.v[:, :0])


def large(spec: ForwardSpec) -> Request:
    """Many tiles for each block."""
    mask = MASKS[spec.mask_kind][0]
    if spec.is_ragged:
        return Maker(spec, seed=3).ragged([((977 * i) % 2100, (1201 * i) % 2300) for i in range(1, 24)], mask)
    return Maker(spec, seed=3).dense(LARGE, mask)


def part_of(request: Request, batch: int, head: int) -> Request:
    """One head of one sequence of a dense request."""
    group = request.q.shape[2] // request.k.shape[2]
    kv = head // group
    return replace(
        request,
        q=request.q[batch : batch + 1, :, head : head + 1],
        k=request.k[batch : batch + 1, :, kv : kv + 1],
        v=request.v[batch : batch + 1, :, kv : kv + 1],
        sink=None if request.sink is None else request.sink[head : head + 1],
    )
