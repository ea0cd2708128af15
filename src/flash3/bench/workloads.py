"""What is measured, by name: `paper/d128-causal-4k`, the group `paper`, a pattern `paper/*-causal-*`, or any shape spelled out,
`b=2,q=4096,h=32,kv=8,d=128,causal`. Tests, the benchmark and the tuner take their shapes from here.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import random
from collections.abc import Iterator, Mapping
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

    def problem(self, device: Device, task: Task = Task.FORWARD) -> Problem:
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
        return Problem.of(self.request(q, k, v, sink, arrays, task))

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


# ------------------------------------------------------------------------------------------------ the named ones

CAUSAL = Mask(causal=True)
PAPER_TOKENS, PAPER_HIDDEN = 16384, 2048


def even(
    name: str, batch: int, q_len: int, heads: int | tuple[int, int], dim: int | tuple[int, int], k_len: int | None = None, **more: object
) -> Workload:
    """Sequences of equal lengths. heads: (query, key) or both; dim: (head_dim, value_dim) or both."""
    h, kv = heads if isinstance(heads, tuple) else (heads, heads)
    d, dv = dim if isinstance(dim, tuple) else (dim, dim)
    lengths = ((q_len, q_len if k_len is None else k_len),) * batch
    return Workload(name=name, lengths=lengths, heads_q=h, heads_kv=kv, head_dim=d, value_dim=dv, **more)  # type: ignore[arg-type]


def paper() -> Iterator[Workload]:
    """The FlashAttention-3 paper's grid: 16k tokens in all, hidden size 2048, lengths 512 … 16k, three head dims, full and causal."""
    for dim in (64, 128, 256):
        for causal in (False, True):
            yield from (paper_cell(dim, causal, length) for length in (512, 1024, 2048, 4096, 8192, 16384))


def paper_cell(dim: int, causal: bool, length: int) -> Workload:
    """One cell of the paper's grid."""
    mask = CAUSAL if causal else FULL
    name = f"paper/d{dim}-{describe_mask(mask)}-{short_number(length)}"
    return even(name, PAPER_TOKENS // length, length, PAPER_HIDDEN // dim, dim, mask=mask)


def lognormal(count: int, total: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Lengths like those of documents: lognormal with sigma 1, `total` tokens in all."""
    draws = random.Random(seed)
    weights = [draws.lognormvariate(0, 1) for _ in range(count)]
    lengths = [max(1, int(total * w / sum(weights))) for w in weights]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple((n, n) for n in lengths)


def _features() -> Iterator[Workload]:
    yield from (even(f"short/d128-causal-{s}", 64, s, 16, 128, mask=CAUSAL) for s in (64, 128, 256))
    yield from (even(f"long/d128-causal-{short_number(s)}", 1, s, 16, 128, mask=CAUSAL) for s in (32768, 65536, 131072))
    yield from (even(f"gqa/prefill-{short_number(s)}", 1, s, (32, 8), 128, mask=CAUSAL) for s in (2048, 8192, 32768))
    yield even("gqa/chunk-of-a-prompt", 1, 2048, (32, 8), 128, k_len=32768, mask=CAUSAL)
    packed = lognormal(64, 65536)
    for mask in (FULL, CAUSAL):
        name = f"packed/lognormal-64k-{describe_mask(mask)}"
        yield Workload(
            name=name, lengths=packed, heads_q=16, heads_kv=16, head_dim=128, value_dim=128, mask=mask, layout=SequenceKind.PACKED
        )
    for width, total in ((1024, 16384), (4096, 65536)):
        yield even(f"window/{short_number(width)}-of-{short_number(total)}", 1, total, 16, 128, mask=Mask(causal=True, left=width - 1))
    yield even("window/chunks-of-8k", 1, 65536, 16, 128, mask=Mask(causal=True, chunk=8192))
    for batch, keys in ((1, 8192), (1, 131072), (8, 8192), (32, 8192)):
        name = f"decode/b{batch}-{short_number(keys)}"
        yield even(name, batch, 1, (32, 8), 128, k_len=keys, mask=CAUSAL, layout=SequenceKind.PADDED)
    yield even("decode/b8-8k-paged", 8, 1, (32, 8), 128, k_len=8192, mask=CAUSAL, layout=SequenceKind.PAGED)
    yield even("decode/b8-8k-speculative", 8, 4, (32, 8), 128, k_len=8192, mask=CAUSAL, layout=SequenceKind.PADDED)
    for dim in (64, 128, 256):
        for mask in (FULL, CAUSAL):
            yield even(f"fp8/d{dim}-{describe_mask(mask)}-8k", 2, 8192, PAPER_HIDDEN // dim, dim, mask=mask, dtype=DType.E4M3)


def _models() -> Iterator[Workload]:
    """Prefill of one layer."""
    yield even("models/llama-3-8b", 1, 8192, (32, 8), 128, mask=CAUSAL)
    yield even("models/llama-3-70b", 1, 8192, (64, 8), 128, mask=CAUSAL)
    yield even("models/qwen3-32b", 1, 8192, (64, 8), 128, mask=CAUSAL)
    yield even("models/qwen3-30b-a3b", 1, 8192, (32, 4), 128, mask=CAUSAL)
    yield even("models/deepseek-v3", 1, 4096, 128, (192, 128), mask=CAUSAL)
    yield even("models/gemma-2-9b-window", 1, 8192, (16, 8), 256, mask=Mask(causal=True, left=4095), softcap=50.0)
    yield even("models/gemma-2-9b-global", 1, 8192, (16, 8), 256, mask=CAUSAL, softcap=50.0)
    yield even("models/gpt-oss-window", 1, 8192, (64, 8), 64, mask=Mask(causal=True, left=127), sink=True)
    yield even("models/gpt-oss-global", 1, 8192, (64, 8), 64, mask=CAUSAL, sink=True)
    yield even("models/video-diffusion", 1, 32768, 24, 128)


def _small() -> Iterator[Workload]:
    """For a CPU: seconds, not hours."""
    yield even("cpu/full", 1, 4096, 8, 64, dtype=DType.FP32)
    yield even("cpu/causal", 1, 4096, 8, 64, mask=CAUSAL, dtype=DType.FP32)
    yield even("cpu/causal-gqa", 1, 4096, (8, 2), 64, mask=CAUSAL, dtype=DType.FP32)
    lengths = tuple((n, n) for n in (1100, 37, 512, 803, 256, 64, 1000, 324))
    shape: dict[str, Any] = {"heads_q": 8, "heads_kv": 8, "head_dim": 64, "value_dim": 64}
    yield Workload(name="cpu/packed-causal", lengths=lengths, **shape, mask=CAUSAL, dtype=DType.FP32, layout=SequenceKind.PACKED)
    yield even("cpu/window-1k", 1, 4096, 8, 64, mask=Mask(left=1023, right=0), dtype=DType.FP32)
    yield even("cpu/window-1k-of-16k", 1, 16384, 8, 64, mask=Mask(left=1023, right=0), dtype=DType.FP32)
    yield even("smoke/full", 2, 200, 4, 64, dtype=DType.FP32)
    yield even("smoke/causal", 1, 256, (4, 2), 64, mask=CAUSAL, dtype=DType.FP32)
    yield even("smoke/window", 1, 300, 2, 32, mask=Mask(left=60, right=10), dtype=DType.FP32)


CHECKED = (
    *(f"paper/d{dim}-{mask}-4k" for dim in (64, 128, 256) for mask in ("full", "causal")),
    "gqa/prefill-2k",
    "gqa/chunk-of-a-prompt",
    "packed/lognormal-64k-full",
    "packed/lognormal-64k-causal",
    "window/1k-of-16k",
    "window/chunks-of-8k",
    "decode/b8-8k",
    "decode/b8-8k-paged",
    "decode/b8-8k-speculative",
    "models/deepseek-v3",
    "models/gemma-2-9b-window",
    "models/gpt-oss-window",
    "fp8/d128-causal-8k",
)
"""One for each feature; the group `check` has them in a small size."""


WORKLOADS: dict[str, Workload] = {w.name: w for w in (*paper(), *_features(), *_models(), *_small())}
WORKLOADS |= {w.name: w for w in (replace(WORKLOADS[name].small(), name=f"check/{name.replace('/', '-')}") for name in CHECKED)}
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(w.group for w in WORKLOADS.values()))


def select(words: list[str]) -> list[Workload]:
    """The workloads that words name, each once, in the order of the words.

    Raises:
        ValueError: a word names nothing; the message lists the groups and the nearest names.
    """
    found: dict[str, Workload] = {}
    for word in words:
        chosen = (
            [parse(word)] if "=" in word else [w for w in WORKLOADS.values() if word in (w.name, w.group) or fnmatch.fnmatch(w.name, word)]
        )
        if not chosen:
            near = difflib.get_close_matches(word, WORKLOADS, n=4, cutoff=0.3)
            also = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(
                f"no workload is called {word!r}; groups: {', '.join(GROUPS)}, or a shape such as b=2,q=4096,h=16,d=128,causal{also}"
            )
        found.update((w.name, w) for w in chosen)
    return list(found.values())


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
