"""One attention call: what it asks (Request), and what that means once checked (Problem = Spec + Sizes). No GPU, no framework.

Every user error is raised here, before anything is launched: `Problem.of(request, info)` looks at shapes, types and strides only,
`check_values` at lengths and page tables where they may be read.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from . import sequences
from .mask import MAX_POSITION, Mask, MaskKind
from .sequences import Dense, Packed, Padded, Paged, SequenceKind, Sequences, map_tensors


class DType(enum.Enum):
    FP64 = "float64"
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"
    E4M3 = "float8_e4m3fn"
    E5M2 = "float8_e5m2"
    INT32 = "int32"

    @property
    def bytes(self) -> int:
        return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}.get(self.value, 1)

    @property
    def is_float8(self) -> bool:
        return self in (DType.E4M3, DType.E5M2)


INPUT_DTYPES = (DType.FP16, DType.BF16, DType.FP32, DType.FP64, DType.E4M3, DType.E5M2)


class Task(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class ScaleKind(enum.Enum):
    """How FP8 inputs are scaled."""

    NONE = "none"
    HEAD = "head"  # one float32 per sequence and key head


@dataclass(frozen=True)
class Device:
    """Where tensors live: type ("cpu", "cuda", "meta"), index, compute capability and multiprocessors of a GPU."""

    type: str
    index: int = 0
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.type


CPU = Device("cpu")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its data. `strides` count elements; dtype is a DType, or the framework's own name for any other type."""

    dtype: DType | str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Device = CPU
    aligned: bool = True  # its start is a multiple of 16 bytes

    @property
    def type_name(self) -> str:
        return self.dtype.value if isinstance(self.dtype, DType) else self.dtype


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call, as the user means it. Tensors are the framework's, or TensorInfo.

    q (batch, q_len, heads_q, head_dim) or packed (total, heads_q, head_dim); k and v as their layout says; qv, where given, has q's
    shape with v's width and adds qv·vᵀ to the scores. q_scale, k_scale, v_scale: float32 (batch, heads_kv), for FP8.
    """

    q: Any
    k: Any
    v: Any
    q_sequences: Sequences = field(default_factory=Dense)
    k_sequences: Sequences = field(default_factory=Dense)
    mask: Mask = field(default_factory=Mask)
    scale: float | None = None
    softcap: float = 0.0
    sink: Any = None
    qv: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    lse: bool = False
    deterministic: bool = False
    out_dtype: DType | None = None
    task: Task = Task.FORWARD

    def map_tensors(self, change: Callable[[Any], Any]) -> Request:
        """The same request with `change` applied to each tensor."""
        names = ("q", "k", "v", "sink", "qv", "q_scale", "k_scale", "v_scale")
        tensors = {name: change(getattr(self, name)) for name in names if getattr(self, name) is not None}
        return replace(
            self,
            q_sequences=map_tensors(self.q_sequences, change),
            k_sequences=map_tensors(self.k_sequences, change),
            **tensors,
        )


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What changes the generated code. With a backend's tiles it is the key of a compiled kernel."""

    task: Task
    dtype: DType
    out_dtype: DType
    head_dim: int
    value_dim: int
    heads_per_kv: int
    mask_kind: MaskKind
    q_sequences: SequenceKind
    k_sequences: SequenceKind
    softcap: bool
    sink: bool
    qv: bool
    lse: bool
    deterministic: bool
    scales: ScaleKind


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Run-time numbers. q_len and k_len bound every sequence of the batch; page_size is 0 without pages."""

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    k_len: int
    total_q: int
    page_size: int
    scale: float
    softcap: float


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A checked call: enough to choose a backend, plan, predict and explain, without data and without a GPU."""

    spec: Spec
    sizes: Sizes
    mask: Mask
    device: Device
    q: TensorInfo
    k: TensorInfo
    v: TensorInfo

    @property
    def out_shape(self) -> tuple[int, ...]:
        """q's shape with value_dim."""
        return (*self.q.shape[:-1], self.spec.value_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, q_len), packed (heads_q, total_q)."""
        z = self.sizes
        return (z.heads_q, z.total_q) if self.spec.q_sequences is SequenceKind.PACKED else (z.batch, z.heads_q, z.q_len)

    @classmethod
    def of(cls, request: Request, info: Callable[[Any], TensorInfo] = lambda tensor: tensor) -> Problem:
        """Check a request and describe it. `info` turns the framework's tensors into TensorInfo.

        Raises:
            TypeError: an argument of the wrong type, or tensors whose dtypes do not go together.
            ValueError: a shape, size or number outside what is allowed; the message names argument, value and what is.
        """
        check_options(request.mask, request.scale, request.softcap)
        r = request.map_tensors(info)
        _check_tensors(r)
        _check_range(r)
        batch = _check_layouts(r)
        _check_extras(r, batch)
        spec, sizes = _spec(r), _sizes(r, batch)
        _check_limits(sizes)
        return cls(spec=spec, sizes=sizes, mask=r.mask, device=r.q.device, q=r.q, k=r.k, v=r.v)


def default_scale(request: Request) -> float:
    """head_dim ** -0.5 of the query/key width, unless the request names a scale."""
    return request.q.shape[-1] ** -0.5 if request.scale is None else float(request.scale)


def check_options(mask: Any, scale: Any, softcap: Any) -> None:
    """The arguments that are no tensors.

    Raises:
        TypeError: mask is no Mask, scale or softcap no number.
        ValueError: scale or softcap not finite, softcap negative.
    """
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a flash3.Mask or None, got {type(mask).__name__}: additive or boolean mask tensors are not supported; "
            "say what is visible with Mask(causal=…, left=…, right=…, chunk=…)"
        )
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None and name == "scale":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
        if not _is_finite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    if softcap < 0:
        raise ValueError(f"softcap must be >= 0 (0 is off), got {softcap}")


FLOAT32_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
"""Smallest normal and largest float32: below float64, scores are computed in it."""


def _check_range(r: Request) -> None:
    if r.q.dtype is DType.FP64:
        return
    smallest, largest = FLOAT32_RANGE
    if abs(default_scale(r)) > largest:
        raise ValueError(f"scale must be within ±{largest:.3g} (float32), got {r.scale}")
    if r.softcap and not smallest <= r.softcap <= largest:
        raise ValueError(f"softcap must be 0 (off) or from {smallest:.3g} to {largest:.3g} (float32), got {r.softcap}")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def check_differentiable(dtype: DType | str, has_qv: bool) -> None:
    """To be asked where a gradient is wanted.

    Raises:
        ValueError: float8 inputs, or qv: these have no gradient.
    """
    if isinstance(dtype, DType) and dtype.is_float8:
        raise ValueError(f"requires_grad: {dtype.value} inputs have no gradient; detach q, k and v, or use bfloat16 or float16")
    if has_qv:
        raise ValueError("requires_grad: attention with qv has no gradient; detach its inputs")


def _check_tensors(r: Request) -> None:
    q, k, v = r.q, r.k, r.v
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in INPUT_DTYPES:
            allowed = ", ".join(d.value for d in INPUT_DTYPES)
            raise TypeError(f"{name} has dtype {t.type_name}; allowed: {allowed}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.type_name}, {k.type_name} and {v.type_name}")
    _check_ranks(r)
    for name, t in (("k", k), ("v", v)):
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}: all tensors must be on one device")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if v.shape[-2] != heads_kv:
        raise ValueError(f"k has {heads_kv} heads and v {v.shape[-2]}: they must be equal")
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(f"q has {heads_q} heads and k {heads_kv}: the query heads must be a multiple of the key heads")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]} and k {k.shape[-1]}: they must be equal")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}: all but the last dimension must be equal")
    step = 16 if q.dtype.is_float8 else 8
    for name, t in (("head_dim (last dimension of q and k)", q), ("value_dim (last dimension of v)", v)):
        largest = 512 if t is v and r.qv is not None else 256
        if t.shape[-1] % step or not 0 < t.shape[-1] <= largest:
            raise ValueError(f"{name} must be a multiple of {step} from {step} to {largest} for {q.type_name}, got {t.shape[-1]}")


def _check_ranks(r: Request) -> None:
    for name, t, layout in (("q", r.q, r.q_sequences), ("k", r.k, r.k_sequences), ("v", r.v, r.k_sequences)):
        words = {
            SequenceKind.PACKED: ("(total, heads, dim)", 3),
            SequenceKind.PAGED: ("(pages, page_size, heads, dim)", 4),
        }
        shape, rank = words.get(layout.kind, ("(batch, seqlen, heads, dim)", 4))
        if len(t.shape) != rank:
            raise ValueError(f"{name} must have {rank} dimensions {shape}, got shape {t.shape}")


def _check_int32(name: str, t: TensorInfo, shape: tuple[int, ...], device: Device) -> None:
    if t.dtype is not DType.INT32:
        raise TypeError(f"{name} must be int32, got {t.type_name}")
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {t.shape}")
    if t.device != device:
        raise ValueError(f"{name} is on {t.device}, q on {device}: all tensors must be on one device")


def _check_packed(name: str, layout: Packed, device: Device) -> int:
    cu = layout.cu_seqlens
    if len(cu.shape) != 1 or cu.shape[0] < 1:
        raise ValueError(f"cu_seqlens_{name} must have shape (batch + 1,), got {cu.shape}")
    _check_int32(f"cu_seqlens_{name}", cu, cu.shape, device)
    batch = cu.shape[0] - 1
    if layout.used is not None:
        _check_int32(f"seqused_{name}", layout.used, (batch,), device)
    longest = layout.max_length
    if longest is not None and longest < 0:
        raise ValueError(f"max_seqlen_{name} must be >= 0, got {longest}")
    return batch


def _check_rows(layout: Padded | Paged, batch: int, device: Device) -> None:
    for name in ("lengths", "leftpad", "batch_index"):
        if getattr(layout, name) is not None:
            _check_int32(name, getattr(layout, name), (batch,), device)
    if isinstance(layout, Paged):
        table = layout.page_table
        if len(table.shape) != 2:
            raise ValueError(f"page_table must have shape (batch, pages per sequence), got {table.shape}")
        _check_int32("page_table", table, table.shape, device)


def _batch_of(name: str, t: TensorInfo, layout: Sequences) -> int:
    match layout:
        case Packed():
            return _check_packed(name, layout, t.device)
        case Padded() | Paged():
            if len(layout.lengths.shape) != 1:
                raise ValueError(f"lengths must have shape (batch,), got {layout.lengths.shape}")
            return layout.lengths.shape[0]
        case _:
            return t.shape[0]


def _check_layouts(r: Request) -> int:
    """The batch size, on which queries and keys must agree."""
    q, k = r.q, r.k
    if isinstance(r.q_sequences, Paged) or getattr(r.q_sequences, "batch_index", None) is not None:
        raise ValueError("the queries must be Dense, Packed, or Padded without batch_index: out and lse have one row per query row")
    batch = _batch_of("q", q, r.q_sequences)
    batch_k = _batch_of("k", k, r.k_sequences)
    if batch != batch_k:
        raise ValueError(f"the queries have batch size {batch} and the keys {batch_k}: they must be equal")
    for name, t, layout in (("q", q, r.q_sequences), ("k", k, r.k_sequences)):
        if isinstance(layout, Padded | Paged):
            _check_rows(layout, batch, q.device)
            rows = layout.page_table.shape[0] if isinstance(layout, Paged) else t.shape[0]
            if layout.batch_index is None and rows != batch:
                what = "page_table" if isinstance(layout, Paged) else name
                raise ValueError(f"{what} has {rows} rows for a batch of {batch}; give batch_index to choose rows")
            if isinstance(layout, Paged) and t.shape[1] == 0:
                raise ValueError(f"page_size (second dimension of {name}) must be >= 1, got shape {t.shape}")
    return batch


def _check_extras(r: Request, batch: int) -> None:
    q, heads_kv = r.q, r.k.shape[-2]
    if r.sink is not None:
        if r.sink.dtype is not DType.FP32:
            raise TypeError(f"sink must be float32, got {r.sink.type_name}")
        if r.sink.shape != (q.shape[-2],):
            raise ValueError(f"sink must have shape (heads_q,) = ({q.shape[-2]},), got {r.sink.shape}")
    if r.qv is not None:
        wanted = (*q.shape[:-1], r.v.shape[-1])
        if r.qv.shape != wanted or r.qv.dtype != q.dtype:
            raise ValueError(f"qv must have shape {wanted} and dtype {q.type_name}, got {r.qv.shape} {r.qv.type_name}")
    for name in ("q_scale", "k_scale", "v_scale"):
        t = getattr(r, name)
        if t is None:
            continue
        if t.dtype is not DType.FP32:
            raise TypeError(f"{name} must be float32, got {t.type_name}")
        if t.shape != (batch, heads_kv):
            raise ValueError(f"{name} must have shape (batch, heads_kv) = ({batch}, {heads_kv}), got {t.shape}")
        if not q.dtype.is_float8:
            raise ValueError(f"{name} is for float8 inputs, q is {q.type_name}")
    for name in ("sink", "qv", "q_scale", "k_scale", "v_scale"):
        t = getattr(r, name)
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}: all tensors must be on one device")
    if r.out_dtype is not None and (r.out_dtype.is_float8 or r.out_dtype is DType.INT32):
        raise ValueError(f"out_dtype must be float16, bfloat16, float32 or float64, got {r.out_dtype.value}")


def _spec(r: Request) -> Spec:
    scaled = any(s is not None for s in (r.q_scale, r.k_scale, r.v_scale))
    out = r.out_dtype or (DType.BF16 if r.q.dtype.is_float8 else r.q.dtype)
    heads_q, heads_kv = r.q.shape[-2], r.k.shape[-2]
    return Spec(
        task=r.task,
        dtype=r.q.dtype,
        out_dtype=out,
        head_dim=r.q.shape[-1],
        value_dim=r.v.shape[-1],
        heads_per_kv=heads_q // heads_kv if heads_kv else 1,
        mask_kind=r.mask.kind,
        q_sequences=r.q_sequences.kind,
        k_sequences=r.k_sequences.kind,
        softcap=r.softcap > 0,
        sink=r.sink is not None,
        qv=r.qv is not None,
        lse=r.lse,
        deterministic=r.deterministic,
        scales=ScaleKind.HEAD if scaled else ScaleKind.NONE,
    )


def _longest(t: TensorInfo, layout: Sequences) -> int:
    match layout:
        case Packed():
            return t.shape[0] if layout.max_length is None else min(layout.max_length, t.shape[0])
        case Paged():
            return layout.page_table.shape[1] * t.shape[1]
        case _:
            return t.shape[1]


def _sizes(r: Request, batch: int) -> Sizes:
    q_len = _longest(r.q, r.q_sequences)
    return Sizes(
        batch=batch,
        heads_q=r.q.shape[-2],
        heads_kv=r.k.shape[-2],
        q_len=q_len,
        k_len=_longest(r.k, r.k_sequences),
        total_q=r.q.shape[0] if isinstance(r.q_sequences, Packed) else batch * q_len,
        page_size=r.k.shape[1] if isinstance(r.k_sequences, Paged) else 0,
        scale=default_scale(r),
        softcap=float(r.softcap),
    )


def _check_limits(z: Sizes) -> None:
    for name, length in (("query", z.q_len), ("key", z.k_len)):
        if length > MAX_POSITION:
            raise ValueError(f"the longest {name} sequence has room for {length} tokens; the limit is {MAX_POSITION}")


def check_values(request: Request) -> None:
    """Validate lengths and page tables by value. They are read: call it for host memory, or in checking mode.

    Raises:
        ValueError: decreasing or out-of-range cu_seqlens, lengths beyond their storage, pages or rows that do not exist.
    """
    sequences.check_values("q", request.q.shape, request.q_sequences)
    sequences.check_values("k", request.k.shape, request.k_sequences)
