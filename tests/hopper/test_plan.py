"""What the Hopper backend takes and refuses, and what it hands to a kernel: on descriptions and on CPU tensors, without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash3.backends.base import Refusal, Support
from flash3.backends.hopper import backward_budget, backward_launch, heuristics, launch
from flash3.backends.hopper.arguments import needs_columns, needs_zeros, with_columns
from flash3.backends.hopper.backward_tiles import BackwardTiles
from flash3.backends.hopper.plan import HopperBackend, gathered, with_empty_keys
from flash3.backends.hopper.tiles import DENSE, ForwardSpec, ScaleSign, SequenceLayout, Tiles
from flash3.mask import UNBOUNDED, Mask, MaskKind
from flash3.problem import Device, DType, Problem, Request, Task, TensorInfo
from flash3.sequences import Packed, Padded, Paged, SequenceKind

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")


def info(
    *shape: int, dtype: DType = DType.BF16, strides: tuple[int, ...] | None = None, device: Device = H200, aligned: bool = True
) -> TensorInfo:
    compact = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorInfo(dtype, shape, strides or compact, device, aligned)


def request(dtype: DType = DType.BF16, device: Device = H200, d: int = 128, dv: int = 128, **options: Any) -> Request:
    q = info(2, 300, 8, d, dtype=dtype, device=device)
    k, v = (info(2, 400, 2, n, dtype=dtype, device=device) for n in (d, dv))
    return Request(**{"q": q, "k": k, "v": v, "lse": True, **options})


def answer(r: Request) -> Support | Refusal:
    return HopperBackend().support(Problem.of(r))


def int32(*shape: int) -> TensorInfo:
    return info(*shape, dtype=DType.INT32)


PAGES = info(9, 16, 2, 128)


@pytest.mark.parametrize(
    "r",
    [
        request(),
        request(DType.FP16, mask=Mask(causal=True, left=100), softcap=3.0, scale=-1.0),
        request(d=8, dv=256, out_dtype=DType.FP32),
        request(sink=info(8, dtype=DType.FP32)),
        request(task=Task.BACKWARD, d=96, dv=40, deterministic=True),
        request(DType.FP16, task=Task.BACKWARD, d=192, softcap=1.0),
        request(q=info(700, 8, 128), q_sequences=Packed(cu_seqlens=int32(3)), k_sequences=Padded(lengths=int32(2), leftpad=int32(2))),
    ],
)
def test_supported(r: Request) -> None:
    pytest.importorskip("cutlass")
    assert isinstance(answer(r), Support)


@pytest.mark.parametrize(
    ("r", "word"),
    [
        (request(device=Device("cpu")), "Hopper"),
        (request(device=Device("cuda", 0, (8, 0), 108, "NVIDIA A100")), "A100"),
        (request(DType.FP32), "float32"),
        (request(DType.E4M3), "float8_e4m3fn"),
        (request(task=Task.BACKWARD, out_dtype=DType.FP32), "inputs' dtype"),
        (request(task=Task.BACKWARD, q=info(1, 8, 65536, 128), k=info(1, 8, 1, 128), v=info(1, 8, 1, 128)), "65535"),
        (
            request(
                task=Task.BACKWARD,
                k=info(9, 16, 2, 128),
                v=info(9, 16, 2, 128),
                k_sequences=Paged(page_table=int32(2, 4), lengths=int32(2)),
            ),
            "paged",
        ),
        (request(qv=info(2, 300, 8, 128)), "qv"),
    ],
)
def test_refused(r: Request, word: str) -> None:
    found = answer(r)
    assert isinstance(found, Refusal)
    assert word in found.reason


def test_copies_are_announced() -> None:
    pytest.importorskip("cutlass")
    r = request(q=info(2, 300, 8, 128, strides=(300 * 8 * 129, 8 * 129, 129, 1)))
    assert "copies q" in answer(r).note  # type: ignore[union-attr]
    assert "copies" not in answer(request(q=info(2, 300, 8, 128, strides=(0, 1024, 128, 1)))).note  # type: ignore[union-attr]


def test_pages_are_gathered() -> None:
    """Whatever a page table holds where no sequence reads: the copy has every sequence's own slots where its lengths say."""
    torch.manual_seed(0)
    pages = torch.randn(5, 4, 2, 8)
    layout = Paged(
        page_table=torch.tensor([[3, 0, 99], [1, -7, 99], [4, 2, 1]], dtype=torch.int32),
        lengths=torch.tensor([9, 6], dtype=torch.int32),
        leftpad=torch.tensor([2, 0], dtype=torch.int32),
        batch_index=torch.tensor([2, 0], dtype=torch.int32),
    )
    found = gathered(Request(q=torch.randn(2, 1, 4, 8), k=pages, v=2 * pages, k_sequences=layout))
    assert found.k_sequences == Padded(lengths=layout.lengths, leftpad=layout.leftpad)
    assert torch.equal(found.k[0, 2:9], pages[[4, 2, 1]].flatten(0, 1)[2:9])
    assert torch.equal(found.v[1, :6], 2 * pages[[3, 0]].flatten(0, 1)[:6])


def test_pages_are_announced() -> None:
    pytest.importorskip("cutlass")
    r = request(k=info(9, 16, 2, 128), v=info(9, 16, 2, 128), k_sequences=Paged(page_table=int32(2, 4), lengths=int32(2)))
    assert "gathers the pages" in answer(r).note  # type: ignore[union-attr]


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        HopperBackend().plan(Problem.of(request()), Tiles(q=128, kv=128, stages=3, o_columns=128))


@pytest.mark.parametrize(
    ("scale", "sign", "scale_log2"),
    [
        (0.5, ScaleSign.POSITIVE, 0.5),
        (-2.0, ScaleSign.NEGATIVE, 2.0),
        (0.0, ScaleSign.ZERO, 1 / math.log2(math.e)),
        (1e-40, ScaleSign.ZERO, None),
    ],
)
def test_scale(scale: float, sign: ScaleSign, scale_log2: float | None) -> None:
    p = Problem.of(request(scale=scale))
    spec = launch.forward_spec(p.spec, p.sizes.scale, SequenceLayout(), SequenceLayout())
    assert spec.scale_sign is sign
    if scale_log2 is not None:
        tiles = HopperBackend().plan(p).tiles
        assert launch.numbers(spec, tiles, p.sizes, p.mask, 132)[0] == pytest.approx(scale_log2 * math.log2(math.e))


def test_a_softcap_takes_the_sign_of_the_scale_in() -> None:
    p = Problem.of(request(scale=-0.5, softcap=10.0))
    spec = launch.forward_spec(p.spec, p.sizes.scale, SequenceLayout(), SequenceLayout())
    assert spec.scale_sign is ScaleSign.POSITIVE
    scale_log2, tanh_scale, *_ = launch.numbers(spec, HopperBackend().plan(p).tiles, p.sizes, p.mask, 132)
    assert scale_log2 == pytest.approx(10 * math.log2(math.e))
    assert tanh_scale == pytest.approx(2 * math.log2(math.e) * -0.05)


def test_numbers_of_a_mask() -> None:
    mask = Mask(left=5, k_offset=3)
    p = Problem.of(request(mask=mask))
    spec = launch.forward_spec(p.spec, p.sizes.scale, SequenceLayout(), SequenceLayout())
    numbers = launch.numbers(spec, HopperBackend().plan(p).tiles, p.sizes, mask, 132)
    assert numbers[2:8] == (5, UNBOUNDED, UNBOUNDED, 0, 3, 1)  # left, right, chunk, q_offset, k_offset, bottom_right
    numbers = launch.numbers(spec, HopperBackend().plan(p).tiles, p.sizes, replace(mask, q_offset=7), 132)
    assert numbers[5:8] == (7, 3, 0)


def test_head_dims_of_one_width_share_a_kernel() -> None:
    specs = set()
    for d in (72, 80, 96):
        p = Problem.of(request(d=d, dv=d, mask=Mask(causal=True)))
        specs.add(launch.forward_spec(p.spec, p.sizes.scale, SequenceLayout(), SequenceLayout()))
    (spec,) = specs
    assert isinstance(spec, ForwardSpec)
    assert (spec.qk_width, spec.mask_kind, spec.heads_per_kv) == (96, MaskKind.CAUSAL, 4)


def test_numbers_of_a_backward() -> None:
    """The scale goes along with its sign; a softcap's factor takes its place in the exponent."""
    p = Problem.of(request(task=Task.BACKWARD, scale=-0.5, mask=Mask(left=7, q_offset=3)))
    numbers = backward_launch.numbers(p.sizes, p.mask, 132)
    assert numbers[:3] == (-0.5, pytest.approx(-0.5 * math.log2(math.e)), 0.0)
    assert numbers[3:] == (7, UNBOUNDED, UNBOUNDED, 3, 0, 0, 132)
    p = Problem.of(request(task=Task.BACKWARD, scale=-0.5, softcap=10.0))
    scale, scale_log2, tanh_scale, *_ = backward_launch.numbers(p.sizes, p.mask, 132)
    assert (scale, scale_log2) == (-0.5, pytest.approx(10 * math.log2(math.e)))
    assert tanh_scale == pytest.approx(2 * math.log2(math.e) * -0.05)


def test_a_backward_plan_has_tiles_for_its_widths() -> None:
    backend = HopperBackend()
    for d, dv, q, kv in ((64, 64, 128, 128), (96, 128, 64, 128), (192, 128, 64, 64)):
        tiles = backend.plan(Problem.of(request(task=Task.BACKWARD, d=d, dv=dv))).tiles
        assert (tiles.q, tiles.kv) == (q, kv)
    with pytest.raises(ValueError, match="queries and keys"):
        backend.plan(Problem.of(request(task=Task.BACKWARD, d=64, dv=64)), BackwardTiles(q=64))


@pytest.mark.parametrize("softcap", [False, True])
def test_every_box_of_ragged_rows_holds_a_column(softcap: bool) -> None:
    """TMA reads a box without one where nothing is mapped. The backward's tiles may be much wider than the head dim."""
    packed, dims = SequenceLayout(kind=SequenceKind.PACKED), range(8, 257, 8)
    padded = 0
    for d in dims:
        rows = torch.ones(3, 1, d, dtype=torch.bfloat16)
        assert not needs_columns(d, heuristics.width_of(d), packed, 2)
        for dv in dims:
            width, v_width = backward_budget.widths_of(d, dv, softcap)
            box = 64 if width % 64 == 0 else 32
            for layouts in ((packed, DENSE), (DENSE, packed), (packed, packed)):
                wanted = needs_zeros(d, width, layouts, 2)
                q, k = with_columns(rows, rows, width) if wanted else (rows, rows)
                padded += wanted
                assert q.shape == k.shape
                assert q.shape[-1] > width - box
                assert (q[..., :d] == 1).all()
                assert (q[..., d:] == 0).all()
            assert not needs_zeros(d, width, (DENSE, DENSE), 2)
            assert not needs_columns(dv, v_width, packed, 2)
    assert padded


def tiles_for(group: int, q_len: int, **options: Any) -> Tiles:
    q, k = info(2, q_len, 4 * group, 128), info(2, 4096, 4, 128)
    return HopperBackend().plan(Problem.of(Request(q=q, k=k, v=k, lse=True, **options))).tiles


@pytest.mark.parametrize(
    ("group", "q_len", "heads"),
    [(8, 1, 8), (8, 16, 8), (8, 64, 8), (8, 128, 1), (8, 4096, 1), (8, 129, 8), (7, 1, 1), (12, 1, 4), (128, 1, 64), (4, 500, 1)],
)
def test_heads_share_tiles_where_that_saves_some(group: int, q_len: int, heads: int) -> None:
    for mask in (Mask(), Mask(causal=True)):
        tiles = tiles_for(group, q_len, mask=mask)
        assert tiles.heads == heads
        tiles_apart, tiles_shared = -(-q_len // tiles.q) * group, -(-q_len // tiles.queries) * (group // heads)
        assert tiles_shared <= tiles_apart


def test_heads_that_do_not_divide_a_tile_are_refused() -> None:
    fitting = HopperBackend().plan(Problem.of(request())).tiles
    for heads in (0, 3, 8):
        with pytest.raises(ValueError, match="heads must divide 4"):
            HopperBackend().plan(Problem.of(request()), replace(fitting, heads=heads))


def test_a_request_without_keys() -> None:
    """Its own keys' storage has no row, which TMA could not describe."""
    q, k = torch.randn(5, 4, 16), torch.randn(0, 2, 16)
    found = with_empty_keys(Request(q=q, k=k, v=k[..., :8], k_sequences=Packed(cu_seqlens=torch.zeros(4, dtype=torch.int32))), 3)
    assert found.k.shape == (3, 1, 2, 16)
    assert found.v.shape == (3, 1, 2, 8)
    assert found.k_sequences.lengths.tolist() == [0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(("heads", "levels"), [(1, True), (4, True), (8, False), (16, False)])
def test_sequences_are_ordered_where_few_tiles_come_to_each_block(heads: int, levels: bool) -> None:
    """64k tokens in 64 sequences, none longer than 8192: 64 blocks of 128 keys, seven bits."""
    t, rows = info(65536, heads, 128), Packed(cu_seqlens=int32(65), max_length=8192)
    p = Problem.of(Request(q=t, k=t, v=t, q_sequences=rows, k_sequences=rows, mask=Mask(causal=True)))
    spec = launch.forward_spec(p.spec, p.sizes.scale, SequenceLayout(kind=rows.kind), SequenceLayout(kind=rows.kind))
    numbers = launch.numbers(spec, HopperBackend().plan(p).tiles, p.sizes, p.mask, 132)
    assert numbers[-1] == (7 if levels else 1)
