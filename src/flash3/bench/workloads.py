"""A call that is measured, tuned, checked or explained, as a description: its sizes, work, traffic, and the request it stands for."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..mask import FULL, Mask, MaskKind
from ..problem import Device, DType, Problem, Request, Task, TensorInfo
from ..sequences import Dense, Packed, Padded, Paged, SequenceKind, Sequences

LETTERS = {1024: "k", 1024 * 1024: "m"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call, as a description.

    lengths: (queries, keys) of each sequence. Where all are equal and layout is DENSE, tensors are (batch, length, heads, dim); PACKED
    puts them one after another on both sides; PADDED and PAGED are a cache of keys with room for the longest, and dense queries.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    value_dim: int
    mask: Mask = FULL
    dtype: DType = DType.BF16
    layout: SequenceKind = SequenceKind.DENSE
    page_size: int = 128
    softcap: float = 0.0
    sink: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def q_len(self) -> int:
        """Of the longest sequence."""
        return max(m for m, _ in self.lengths)

    @property
    def k_len(self) -> int:
        return max(n for _, n in self.lengths)

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.split("/")[0]

    def area(self) -> int:
        """Visible (query, key) pairs of all sequences, of one head."""
        pairs = {pair: self.mask.area(*pair) for pair in set(self.lengths)}
        return sum(pairs[pair] for pair in self.lengths)

    def flops(self, task: Task) -> float:
        """Multiplications and additions of the matmuls on visible pairs: forward S = QKᵀ and PV; backward S, dP, dQ, dK and dV."""
        d, dv = self.head_dim, self.value_dim
        each = 2 * (d + dv) if task is Task.FORWARD else 2 * (3 * d + 2 * dv)
        return float(each * self.area() * self.heads_q)

    def bytes(self, task: Task) -> float:
        """Least traffic: each input read once (keys that no query sees are not), each output written once."""
        q, k = sum(m for m, _ in self.lengths), sum(_keys_seen(self.mask, m, n) for m, n in self.lengths)
        size, d, dv = self.dtype.bytes, self.head_dim, self.value_dim
        out = 2 if self.dtype.is_float8 else size
        kv, lse = size * k * self.heads_kv * (d + dv), 4 * q * self.heads_q
        if task is Task.FORWARD:
            return float(kv + q * self.heads_q * (size * d + out * dv) + lse)
        return float(2 * kv + q * self.heads_q * (2 * size * d + 2 * out * dv) + lse)

    def problem(self, device: Device, task: Task = Task.FORWARD, lse: bool = True) -> Problem:
        """The checked description, without tensors and without a GPU."""

        def info(shape: tuple[int, ...], dtype: DType) -> TensorInfo:
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            return TensorInfo(dtype, shape, strides, device)

        parts = self.storage()
        arrays = {
            name: info((len(values),) if name != "page_table" else _table_shape(values), DType.INT32) for name, values in parts.items()
        }
        q_shape, k_shape, v_shape = self.shapes()
        q, k, v = (info(shape, self.dtype) for shape in (q_shape, k_shape, v_shape))
        sink = info((self.heads_q,), DType.FP32) if self.sink else None
        return Problem.of(replace(self.request(q, k, v, sink, arrays, task), lse=lse))

    def request(self, q: Any, k: Any, v: Any, sink: Any, arrays: Mapping[str, Any], task: Task = Task.FORWARD) -> Request:
        """The call on given tensors (or descriptions); `arrays` has what `storage` names."""
        q_rows, k_rows = self._sequences(arrays)
        return Request(
            q=q, k=k, v=v, q_sequences=q_rows, k_sequences=k_rows, mask=self.mask, softcap=self.softcap, sink=sink, lse=True, task=task
        )

    def _sequences(self, arrays: Mapping[str, Any]) -> tuple[Sequences, Sequences]:
        match self.layout:
            case SequenceKind.PACKED:
                q = Packed(cu_seqlens=arrays["cu_seqlens_q"], max_length=self.q_len)
                return q, Packed(cu_seqlens=arrays["cu_seqlens_k"], max_length=self.k_len)
            case SequenceKind.PADDED:
                return Dense(), Padded(lengths=arrays["lengths"])
            case SequenceKind.PAGED:
                return Dense(), Paged(page_table=arrays["page_table"], lengths=arrays["lengths"])
        return Dense(), Dense()

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of q, k and v."""
        q: tuple[int, ...]
        k: tuple[int, ...]
        if self.layout is SequenceKind.PACKED:
            q, k = (sum(m for m, _ in self.lengths),), (sum(n for _, n in self.lengths),)
        else:
            q, k = (self.batch, self.q_len), (self.batch, self.k_len)
            if self.layout is SequenceKind.PAGED:
                k = (self.batch * self._pages_per_row, self.page_size)
        return (*q, self.heads_q, self.head_dim), (*k, self.heads_kv, self.head_dim), (*k, self.heads_kv, self.value_dim)

    @property
    def _pages_per_row(self) -> int:
        return -(-self.k_len // self.page_size)

    def storage(self) -> dict[str, list[int] | list[list[int]]]:
        """The values of the int32 arrays that the layout needs. Pages lie in random order."""
        q_lengths, k_lengths = ([pair[i] for pair in self.lengths] for i in (0, 1))
        match self.layout:
            case SequenceKind.PACKED:
                return {"cu_seqlens_q": [0, *accumulate(q_lengths)], "cu_seqlens_k": [0, *accumulate(k_lengths)]}
            case SequenceKind.PADDED:
                return {"lengths": k_lengths}
            case SequenceKind.PAGED:
                pages = list(range(self.batch * self._pages_per_row))
                random.Random(0).shuffle(pages)
                rows = [pages[i : i + self._pages_per_row] for i in range(0, len(pages), self._pages_per_row)]
                return {"lengths": k_lengths, "page_table": rows}
        return {}

    def small(self, longest: int = 200) -> Workload:
        """The same features in a size that is checked in milliseconds: lengths, windows, heads and pages shrink together."""
        factor = max(1, -(-max(self.q_len, self.k_len) // longest))

        def less(n: int | None) -> int | None:
            return n if n is None else -(-n // factor)

        lengths = tuple((-(-m // factor), -(-n // factor)) for m, n in self.lengths[:3])
        heads = min(self.heads_kv, 2)
        mask = replace(self.mask, left=less(self.mask.left), right=less(self.mask.right), chunk=less(self.mask.chunk))
        return replace(
            self,
            name=f"{self.name}, small",
            lengths=lengths,
            heads_q=heads * (self.heads_q // self.heads_kv),
            heads_kv=heads,
            mask=mask,
            page_size=16,
        )

    def quarter(self) -> Workload | None:
        """The same with a quarter of the sequences, else of the heads; None where there are fewer than four of both."""
        name = f"{self.name}, a quarter"
        if self.batch >= 4:
            return replace(self, name=name, lengths=self.lengths[: self.batch // 4])
        if self.heads_kv >= 4:
            return replace(self, name=name, heads_q=self.heads_q // self.heads_kv * (self.heads_kv // 4), heads_kv=self.heads_kv // 4)
        return None

    def __str__(self) -> str:
        lengths = f"{self.batch} × {self.q_len}" if self.q_len == self.k_len else f"{self.batch} × {self.q_len} queries, {self.k_len} keys"
        if len(set(self.lengths)) > 1:
            lengths = f"{self.batch} sequences of up to {self.q_len}, {sum(m for m, _ in self.lengths)} tokens"
        width = f"d{self.head_dim}" if self.head_dim == self.value_dim else f"d{self.head_dim}/{self.value_dim}"
        heads = f"{self.heads_q} heads" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv} heads"
        extras = [f"softcap {self.softcap:g}"] if self.softcap else []
        extras += ["sinks"] if self.sink else []
        layout = [] if self.layout is SequenceKind.DENSE else [self.layout.value]
        return ", ".join([lengths, heads, width, describe_mask(self.mask), self.dtype.value, *layout, *extras])


def _table_shape(rows: list[int] | list[list[int]]) -> tuple[int, int]:
    first = rows[0]
    assert isinstance(first, list)
    return len(rows), len(first)


def _keys_seen(mask: Mask, q_len: int, k_len: int) -> int:
    """Keys that any query of a sequence sees: one stretch, since both ends of a row's interval never move left."""
    if q_len == 0:
        return 0
    return max(0, mask.visible(q_len - 1, q_len, k_len)[1] - mask.visible(0, q_len, k_len)[0])


def describe_mask(mask: Mask) -> str:
    """A mask in a few letters."""
    match mask.kind:
        case MaskKind.FULL:
            return "full"
        case MaskKind.CHUNK:
            return f"chunks of {mask.chunk}{' causal' if mask.causal else ''}"
        case MaskKind.WINDOW:
            return f"window {mask.left}+{0 if mask.causal else mask.right if mask.right is not None else '∞'}"
    return "causal" if mask.causal else f"right {mask.right}"


def short_number(n: int) -> str:
    """4096 -> 4k."""
    for unit in sorted(LETTERS, reverse=True):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{LETTERS[unit]}"
    return str(n)


def even(
    name: str, batch: int, q_len: int, heads: int | tuple[int, int], dim: int | tuple[int, int], k_len: int | None = None, **more: object
) -> Workload:
    """Sequences of equal lengths. heads: (query, key) or both; dim: (head_dim, value_dim) or both."""
    h, kv = heads if isinstance(heads, tuple) else (heads, heads)
    d, dv = dim if isinstance(dim, tuple) else (dim, dim)
    lengths = ((q_len, q_len if k_len is None else k_len),) * batch
    return Workload(name=name, lengths=lengths, heads_q=h, heads_kv=kv, head_dim=d, value_dim=dv, **more)  # type: ignore[arg-type]


NUMBERS = {"b": 1, "q": 0, "k": 0, "h": 0, "kv": 0, "d": 128, "dv": 0, "left": -1, "right": -1, "chunk": 0, "softcap": 0, "page": 128}
FLAGS = ("causal", "sink", "packed", "padded", "paged")


def parse(text: str) -> Workload:
    """A shape spelled out: numbers b q k h kv d dv left right chunk softcap page dtype, and words causal sink packed padded paged.

    Raises:
        ValueError: a word that is not known, or no q and h.
    """
    numbers, flags, dtype = dict(NUMBERS), set(), DType.BF16
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "dtype":
            dtype = dtype_named(value)
        elif name in NUMBERS and value.lstrip("-").isdigit():
            numbers[name] = int(value)
        elif part.strip() in FLAGS:
            flags.add(part.strip())
        else:
            raise ValueError(f"{part!r} in {text!r} must be one of {', '.join(f'{n}=N' for n in NUMBERS)}, dtype=NAME, {', '.join(FLAGS)}")
    n = numbers
    if n["q"] < 1 or n["h"] < 1 or n["b"] < 1:
        raise ValueError(f"{text!r} needs at least q=N (queries) and h=N (heads), all positive")
    wide: dict[str, Any] = {
        "left": None if n["left"] < 0 else n["left"],
        "right": None if n["right"] < 0 else n["right"],
        "chunk": n["chunk"] or None,
    }
    layout = next((kind for kind in SequenceKind if kind.value in flags), SequenceKind.DENSE)
    return even(
        text,
        n["b"],
        n["q"],
        (n["h"], n["kv"] or n["h"]),
        (n["d"], n["dv"] or n["d"]),
        k_len=n["k"] or n["q"],
        mask=Mask(causal="causal" in flags, **wide),
        dtype=dtype,
        layout=layout,
        softcap=float(n["softcap"]),
        sink="sink" in flags,
        page_size=n["page"],
    )


def dtype_named(name: str) -> DType:
    """A dtype by its name or a short one.

    Raises:
        ValueError: no such dtype; the message lists them.
    """
    known = {**{d.value: d for d in DType if d is not DType.INT32}, **{d.name.lower(): d for d in DType if d is not DType.INT32}}
    if name not in known:
        raise ValueError(f"no dtype is called {name!r}; known: {', '.join(known)}")
    return known[name]
