"""Problem.of: what a good call becomes, and every error a bad one meets, each naming argument, value and what is allowed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flash3.mask import MAX_POSITION, Mask, MaskKind
from flash3.problem import (
    Device,
    DType,
    Problem,
    Request,
    ScaleKind,
    Task,
    TensorInfo,
    check_differentiable,
    check_options,
    check_values,
    default_scale,
)
from flash3.sequences import Packed, Padded, Paged, SequenceKind

CPU = Device("cpu")
GPU = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")


def tensor(*shape: int, dtype: DType | str = DType.FP16, device: Device = CPU) -> TensorInfo:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorInfo(dtype, shape, strides, device)


def int32(*shape: int) -> TensorInfo:
    return tensor(*shape, dtype=DType.INT32)


def dense(**changes: Any) -> Request:
    """Batch 2, 5 queries, 7 keys, 4 query and 2 key heads, head_dim 64, value_dim 32; then the changes."""
    good = Request(q=tensor(2, 5, 4, 64), k=tensor(2, 7, 2, 64), v=tensor(2, 7, 2, 32))
    return replace(good, **changes)


def packed(**changes: Any) -> Request:
    good = dense(
        q=tensor(9, 4, 64),
        k=tensor(12, 2, 64),
        v=tensor(12, 2, 32),
        q_sequences=Packed(cu_seqlens=int32(4), max_length=5),
        k_sequences=Packed(cu_seqlens=int32(4)),
    )
    return replace(good, **changes)


def cached(**changes: Any) -> Request:
    """Keys in a contiguous cache of 2 rows and 16 slots."""
    return replace(dense(k=tensor(2, 16, 2, 64), v=tensor(2, 16, 2, 32), k_sequences=Padded(lengths=int32(2))), **changes)


def paged(**changes: Any) -> Request:
    good = dense(k=tensor(10, 4, 2, 64), v=tensor(10, 4, 2, 32), k_sequences=Paged(page_table=int32(2, 6), lengths=int32(2)))
    return replace(good, **changes)


def float8(**changes: Any) -> Request:
    e4m3 = DType.E4M3
    return dense(q=tensor(2, 5, 4, 64, dtype=e4m3), k=tensor(2, 7, 2, 64, dtype=e4m3), v=tensor(2, 7, 2, 32, dtype=e4m3), **changes)


# ---------------------------------------------------------------- good calls


def test_dense() -> None:
    problem = Problem.of(dense(mask=Mask(causal=True), sink=tensor(4, dtype=DType.FP32), lse=True, softcap=2))
    spec, sizes = problem.spec, problem.sizes
    assert (spec.task, spec.dtype, spec.out_dtype, spec.mask_kind) == (Task.FORWARD, DType.FP16, DType.FP16, MaskKind.CAUSAL)
    assert (spec.head_dim, spec.value_dim, spec.heads_per_kv) == (64, 32, 2)
    assert (spec.sink, spec.lse, spec.softcap, spec.qv, spec.deterministic, spec.scales) == (True, True, True, False, False, ScaleKind.NONE)
    assert (sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.q_len, sizes.k_len, sizes.total_q, sizes.page_size) == (2, 4, 2, 5, 7, 10, 0)
    assert (sizes.scale, sizes.softcap) == (0.125, 2.0)
    assert problem.out_shape == (2, 5, 4, 32)
    assert problem.lse_shape == (2, 4, 5)


def test_packed() -> None:
    problem = Problem.of(packed())
    assert (problem.spec.q_sequences, problem.spec.k_sequences) == (SequenceKind.PACKED, SequenceKind.PACKED)
    assert (problem.sizes.batch, problem.sizes.q_len, problem.sizes.k_len, problem.sizes.total_q) == (3, 5, 12, 9)
    assert problem.out_shape == (9, 4, 32)
    assert problem.lse_shape == (4, 9)


def test_max_length_never_exceeds_the_storage() -> None:
    assert Problem.of(packed(q_sequences=Packed(cu_seqlens=int32(4), max_length=1 << 40))).sizes.q_len == 9


def test_paged() -> None:
    problem = Problem.of(paged())
    assert (problem.sizes.k_len, problem.sizes.page_size, problem.spec.k_sequences) == (24, 4, SequenceKind.PAGED)


def test_rows_may_be_chosen() -> None:
    problem = Problem.of(cached(k=tensor(5, 16, 2, 64), v=tensor(5, 16, 2, 32), k_sequences=Padded(lengths=int32(2), batch_index=int32(2))))
    assert problem.sizes.batch == 2


@pytest.mark.parametrize(
    "request_",
    [
        dense(q=tensor(0, 5, 4, 64), k=tensor(0, 7, 2, 64), v=tensor(0, 7, 2, 32)),
        dense(q=tensor(2, 0, 4, 64)),
        dense(k=tensor(2, 0, 2, 64), v=tensor(2, 0, 2, 32)),
        packed(q=tensor(0, 4, 64)),
        packed(q_sequences=Packed(cu_seqlens=int32(1)), k_sequences=Packed(cu_seqlens=int32(1))),
    ],
)
def test_emptiness_is_legal(request_: Request) -> None:
    assert Problem.of(request_).out_shape == (*request_.q.shape[:-1], 32)


def test_scale() -> None:
    assert default_scale(dense()) == 0.125
    for scale in (0, -2.5, np.float32(0.5), 3e38):
        assert Problem.of(dense(scale=scale)).sizes.scale == float(scale)


def test_float8() -> None:
    problem = Problem.of(float8(k_scale=tensor(2, 2, dtype=DType.FP32)))
    assert problem.spec.out_dtype is DType.BF16
    assert problem.spec.scales is ScaleKind.HEAD
    assert Problem.of(float8(out_dtype=DType.FP16)).spec.out_dtype is DType.FP16


def test_qv_may_be_wide() -> None:
    wide = {"v": tensor(2, 7, 2, 512), "qv": tensor(2, 5, 4, 512)}
    assert Problem.of(dense(**wide)).spec.qv


def test_info_describes_every_tensor() -> None:
    """`info` turns the framework's tensors into descriptions, those inside the layouts too."""
    named = packed(sink="sink", q="q", q_sequences=Packed(cu_seqlens="cu", max_length=5))
    known = {"q": tensor(9, 4, 64), "sink": tensor(4, dtype=DType.FP32), "cu": int32(4)}
    assert Problem.of(named, lambda t: known.get(t, t) if isinstance(t, str) else t) == Problem.of(packed(sink=known["sink"]))


# ---------------------------------------------------------------- bad calls

FP32_SCALE = tensor(2, 2, dtype=DType.FP32)

BAD_VALUES = [
    # ranks and shapes
    (dense(q=tensor(5, 4, 64)), "q must have 4 dimensions (batch, seqlen, heads, dim), got shape (5, 4, 64)"),
    (dense(k=tensor(2, 7, 2, 1, 64)), "k must have 4 dimensions"),
    (dense(v=tensor(14, 64)), "v must have 4 dimensions"),
    (packed(q=tensor(1, 9, 4, 64)), "q must have 3 dimensions (total, heads, dim), got shape (1, 9, 4, 64)"),
    (paged(k=tensor(40, 2, 64)), "k must have 4 dimensions (pages, page_size, heads, dim), got shape (40, 2, 64)"),
    (dense(k=tensor(2, 7, 2, 32)), "q has head_dim 64 and k 32: they must be equal"),
    (dense(v=tensor(2, 8, 2, 32)), "k has shape (2, 7, 2, 64) and v (2, 8, 2, 32): all but the last dimension must be equal"),
    (packed(k=tensor(2046, 2, 64), v=tensor(2045, 2, 64)), "k has shape (2046, 2, 64) and v (2045, 2, 64)"),
    (dense(k=tensor(3, 7, 2, 64), v=tensor(3, 7, 2, 32)), "the queries have batch size 2 and the keys 3"),
    (packed(k_sequences=Packed(cu_seqlens=int32(3))), "the queries have batch size 3 and the keys 2"),
    # heads
    (dense(q=tensor(2, 5, 5, 64)), "q has 5 heads and k 2: the query heads must be a multiple of the key heads"),
    (dense(q=tensor(2, 5, 1, 64)), "q has 1 heads and k 2"),
    (dense(k=tensor(2, 7, 0, 64), v=tensor(2, 7, 0, 32)), "q has 4 heads and k 0"),
    (dense(v=tensor(2, 7, 4, 32)), "k has 2 heads and v 4: they must be equal"),
    # widths
    (dense(q=tensor(2, 5, 4, 60), k=tensor(2, 7, 2, 60)), "head_dim (last dimension of q and k) must be a multiple of 8 from 8 to 256"),
    (dense(q=tensor(2, 5, 4, 264), k=tensor(2, 7, 2, 264)), "for float16, got 264"),
    (dense(q=tensor(2, 5, 4, 0), k=tensor(2, 7, 2, 0)), "got 0"),
    (dense(v=tensor(2, 7, 2, 36)), "value_dim (last dimension of v) must be a multiple of 8 from 8 to 256 for float16, got 36"),
    (dense(v=tensor(2, 7, 2, 512)), "value_dim (last dimension of v) must be a multiple of 8 from 8 to 256 for float16, got 512"),
    (
        dense(**{n: tensor(2, 7, 2, 24, dtype=DType.E5M2) for n in "kv"}, q=tensor(2, 5, 4, 24, dtype=DType.E5M2)),
        "must be a multiple of 16 from 16 to 256 for float8_e5m2, got 24",
    ),
    # numbers
    (dense(scale=float("nan")), "scale must be finite, got nan"),
    (dense(scale=float("-inf")), "scale must be finite, got -inf"),
    (dense(scale=10**400), "scale must be finite, got 1000"),
    (dense(softcap=float("inf")), "softcap must be finite, got inf"),
    (dense(softcap=-1.0), "softcap must be >= 0 (0 is off), got -1.0"),
    # layouts
    (packed(q_sequences=Packed(cu_seqlens=int32(2, 2))), "cu_seqlens_q must have shape (batch + 1,), got (2, 2)"),
    (packed(k_sequences=Packed(cu_seqlens=int32(0))), "cu_seqlens_k must have shape (batch + 1,), got (0,)"),
    (packed(k_sequences=Packed(cu_seqlens=int32(4), used=int32(4))), "seqused_k must have shape (3,), got (4,)"),
    (packed(q_sequences=Packed(cu_seqlens=int32(4), max_length=-1)), "max_seqlen_q must be >= 0, got -1"),
    (cached(k_sequences=Padded(lengths=int32(2, 1))), "lengths must have shape (batch,), got (2, 1)"),
    (cached(k_sequences=Padded(lengths=int32(2), leftpad=int32(3))), "leftpad must have shape (2,), got (3,)"),
    (cached(k_sequences=Padded(lengths=int32(2), batch_index=int32(1))), "batch_index must have shape (2,), got (1,)"),
    (cached(k=tensor(5, 16, 2, 64), v=tensor(5, 16, 2, 32)), "k has 5 rows for a batch of 2; give batch_index to choose rows"),
    (paged(k_sequences=Paged(page_table=int32(3, 6), lengths=int32(2))), "page_table has 3 rows for a batch of 2"),
    (paged(k_sequences=Paged(page_table=int32(6), lengths=int32(2))), "page_table must have shape (batch, pages per sequence), got (6,)"),
    (paged(k=tensor(10, 0, 2, 64), v=tensor(10, 0, 2, 32)), "page_size (second dimension of k) must be >= 1, got shape (10, 0, 2, 64)"),
    (
        dense(q_sequences=Paged(page_table=int32(2, 1), lengths=int32(2))),
        "the queries must be Dense, Packed, or Padded without batch_index",
    ),
    (dense(q_sequences=Padded(lengths=int32(2), batch_index=int32(2))), "the queries must be Dense, Packed, or Padded without batch_index"),
    (dense(k=tensor(2, 1 << 40, 2, 64), v=tensor(2, 1 << 40, 2, 32)), f"the longest key sequence has room for {1 << 40} tokens; the limit"),
    (dense(q=tensor(2, MAX_POSITION + 1, 4, 64)), f"the longest query sequence has room for {MAX_POSITION + 1} tokens"),
    # extras
    (dense(sink=tensor(2, dtype=DType.FP32)), "sink must have shape (heads_q,) = (4,), got (2,)"),
    (dense(qv=tensor(2, 5, 4, 64)), "qv must have shape (2, 5, 4, 32) and dtype float16, got (2, 5, 4, 64) float16"),
    (dense(qv=tensor(2, 5, 4, 32, dtype=DType.BF16)), "qv must have shape (2, 5, 4, 32) and dtype float16"),
    (float8(k_scale=tensor(2, 4, dtype=DType.FP32)), "k_scale must have shape (batch, heads_kv) = (2, 2), got (2, 4)"),
    (dense(v_scale=FP32_SCALE), "v_scale is for float8 inputs, q is float16"),
    (dense(out_dtype=DType.E4M3), "out_dtype must be float16, bfloat16, float32 or float64, got float8_e4m3fn"),
    (dense(out_dtype=DType.INT32), "out_dtype must be float16, bfloat16, float32 or float64, got int32"),
    # devices
    (dense(k=tensor(2, 7, 2, 64, device=GPU)), "k is on NVIDIA H200, q on cpu: all tensors must be on one device"),
    (dense(sink=tensor(4, dtype=DType.FP32, device=GPU)), "sink is on NVIDIA H200, q on cpu"),
    (cached(k_sequences=Padded(lengths=tensor(2, dtype=DType.INT32, device=GPU))), "lengths is on NVIDIA H200, q on cpu"),
]

BAD_TYPES = [
    (
        dense(q=tensor(2, 5, 4, 64, dtype="int64")),
        "q has dtype int64; allowed: float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2",
    ),
    (dense(v=tensor(2, 7, 2, 32, dtype=DType.INT32)), "v has dtype int32; allowed"),
    (dense(k=tensor(2, 7, 2, 64, dtype=DType.BF16)), "q, k and v must have one dtype, got float16, bfloat16 and float16"),
    (dense(mask=None), "mask must be a flash3.Mask or None, got NoneType"),
    (dense(mask=np.zeros((5, 7), np.float32)), "mask must be a flash3.Mask or None, got ndarray: additive or boolean mask tensors"),
    (dense(mask=True), "mask must be a flash3.Mask or None, got bool"),
    (dense(scale="0.5"), "scale must be a number, got '0.5' of type str"),
    (dense(scale=True), "scale must be a number, got True of type bool"),
    (dense(softcap=None), "softcap must be a number, got None of type NoneType"),
    (dense(softcap=1j), "softcap must be a number, got 1j of type complex"),
    (packed(q_sequences=Packed(cu_seqlens=tensor(4, dtype="int64"))), "cu_seqlens_q must be int32, got int64"),
    (packed(k_sequences=Packed(cu_seqlens=int32(4), used=tensor(3, dtype=DType.FP32))), "seqused_k must be int32, got float32"),
    (cached(k_sequences=Padded(lengths=tensor(2, dtype="int64"))), "lengths must be int32, got int64"),
    (paged(k_sequences=Paged(page_table=tensor(2, 6, dtype="int64"), lengths=int32(2))), "page_table must be int32, got int64"),
    (dense(sink=tensor(4)), "sink must be float32, got float16"),
    (float8(q_scale=tensor(2, 2)), "q_scale must be float32, got float16"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_VALUES, ids=[message[:40] for _, message in BAD_VALUES])
def test_bad_value(bad: Request, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Problem.of(bad)


@pytest.mark.parametrize(("bad", "message"), BAD_TYPES, ids=[message[:40] for _, message in BAD_TYPES])
def test_bad_type(bad: Request, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        Problem.of(bad)


def test_options_without_tensors() -> None:
    check_options(Mask(), None, 0.0)
    with pytest.raises(TypeError, match="scale must be a number"):
        check_options(Mask(), "big", 0.0)


def test_no_gradient_of_float8_or_qv() -> None:
    check_differentiable(DType.BF16, has_qv=False)
    with pytest.raises(ValueError, match="requires_grad: float8_e4m3fn inputs have no gradient"):
        check_differentiable(DType.E4M3, has_qv=False)
    with pytest.raises(ValueError, match="requires_grad: attention with qv has no gradient"):
        check_differentiable(DType.FP16, has_qv=True)


def test_values_of_both_layouts_are_checked() -> None:
    """BUGS 9: lengths that add up to more keys than there are."""
    cu_q, cu_k = np.array([0, 0, 0, 1023], np.int32), np.array([0, 0, 1, 2046], np.int32)
    good = packed(
        q=tensor(1023, 4, 64),
        k=tensor(2046, 2, 64),
        v=tensor(2046, 2, 64),
        q_sequences=Packed(cu_seqlens=cu_q),
        k_sequences=Packed(cu_seqlens=cu_k),
    )
    check_values(good)
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 2046, but k has only 2045 rows"):
        check_values(replace(good, k=tensor(2045, 2, 64)))
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 1023, but q has only 1000 rows"):
        check_values(replace(good, q=tensor(1000, 4, 64)))


@pytest.mark.parametrize("change", [{"scale": 1e39}, {"scale": -1e300}, {"softcap": 1e300}, {"softcap": 1e-45}])
def test_numbers_beyond_float32(change: dict[str, float]) -> None:
    """Scores of narrower types are computed in float32: there such a number would be inf or 0."""
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=rf"{name} must be .*float32.*{re.escape(str(value))}"):
        Problem.of(dense(**change))
    wide = {n: tensor(2, 5, 4, 64, dtype=DType.FP64) for n in ("q", "k", "v")}
    assert Problem.of(dense(**wide, **change)).sizes.softcap == change.get("softcap", 0.0)
