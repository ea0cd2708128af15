"""Named workloads: names, areas, traffic, and the arithmetic of the roofline."""

from __future__ import annotations

import pytest
import torch

from flash3.bench import accuracy, roofline, workloads
from flash3.bench.case import make
from flash3.bench.catalogue import GROUPS, WORKLOADS, lognormal, select
from flash3.bench.workloads import describe_mask, even, parse, short_number
from flash3.mask import Mask
from flash3.problem import CPU, Device, DType, Task
from flash3.sequences import SequenceKind


def test_the_paper_s_grid() -> None:
    grid = select(["paper"])
    assert len(grid) == 36
    assert {w.q_len * w.batch for w in grid} == {16384}
    assert {w.heads_q * w.head_dim for w in grid} == {2048}
    w = WORKLOADS["paper/d128-full-4k"]
    assert w.flops(Task.FORWARD) == 4 * 4096**2 * 128 * 16 * 4
    assert w.flops(Task.BACKWARD) == 2.5 * w.flops(Task.FORWARD)
    causal = WORKLOADS["paper/d128-causal-4k"].flops(Task.FORWARD)
    assert causal == pytest.approx(w.flops(Task.FORWARD) / 2, rel=1e-3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_a_legal_call(name: str) -> None:
    """On paper in its own size, without tensors; and it says what it is."""
    w = WORKLOADS[name]
    problem = w.problem(Device("cuda", 0, (9, 0), 132, "x"))
    rounded = -(-w.k_len // w.page_size) * w.page_size if w.layout is SequenceKind.PAGED else w.k_len
    assert (problem.sizes.batch, problem.sizes.k_len) == (w.batch, rounded)
    assert 0 < w.area() <= sum(m * n for m, n in w.lengths)
    assert w.bytes(Task.BACKWARD) > w.bytes(Task.FORWARD) > 0
    assert str(w)


def test_area_is_what_the_mask_shows() -> None:
    w = workloads.Workload(
        name="x", lengths=((30, 30), (7, 20)), heads_q=3, heads_kv=1, head_dim=16, value_dim=32, mask=Mask(causal=True, left=5)
    )
    seen = sum(int(w.mask.dense(m, n).sum()) for m, n in w.lengths)
    assert w.area() == seen
    assert w.flops(Task.FORWARD) == 2 * (16 + 32) * seen * 3


def test_keys_that_nobody_sees_are_not_read() -> None:
    window = even("x", 1, 16, 1, 64, k_len=4096, mask=Mask(causal=True, left=15))
    everything = even("x", 1, 16, 1, 64, k_len=4096)
    assert window.bytes(Task.FORWARD) < 0.02 * everything.bytes(Task.FORWARD)


def test_shapes_spelled_out() -> None:
    w = parse("b=2,q=100,k=300,h=8,kv=2,d=64,dv=128,causal,left=9,softcap=30,sink,dtype=fp16,packed")
    assert (w.batch, w.q_len, w.k_len, w.heads_q, w.heads_kv, w.head_dim, w.value_dim) == (2, 100, 300, 8, 2, 64, 128)
    assert (w.mask, w.softcap, w.sink, w.dtype, w.layout) == (Mask(causal=True, left=9), 30.0, True, DType.FP16, SequenceKind.PACKED)
    w.problem(CPU)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("paperr", "groups: paper, short"),
        ("paper/d128-causl-4k", "did you mean .*paper/d128-causal-4k"),
        ("q=5", "at least q=N"),
        ("q=5,h=1,zz=3", "'zz=3' in .* must be one of b=N"),
        ("q=5,h=1,dtype=int3", "known: .*bfloat16"),
    ],
)
def test_unknown_names_list_the_known(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select([word])


def test_selection_and_small_words() -> None:
    assert len(select(["paper/*-causal-*", "paper/d64-causal-512"])) == 18
    assert {w.group for w in WORKLOADS.values()} == set(GROUPS)
    assert [short_number(n) for n in (512, 4096, 1 << 20, 1000)] == ["512", "4k", "1m", "1000"]
    assert describe_mask(Mask(causal=True, left=127)) == "window 127+0"
    lengths = lognormal(64, 65536)
    assert sum(m for m, _ in lengths) == 65536
    assert max(lengths)[0] > 4 * 65536 / 64


@pytest.mark.parametrize("name", ["packed/lognormal-64k-causal", "decode/b8-8k-paged", "models/gpt-oss-window", "window/chunks-of-8k"])
@pytest.mark.parametrize("task", list(Task))
def test_errors_are_found(name: str, task: Task) -> None:
    """A right result passes the check; one wrong number, in a row that is looked at, does not."""
    from flash3.bench.providers import Unsupported, providers

    w = WORKLOADS[name].small()
    case = make(w, task, torch.device("cpu"))
    try:
        prepared = providers()["flash3"].prepare(case)
    except Unsupported:
        assert (w.layout, task) == (SequenceKind.PAGED, Task.BACKWARD)
        return
    outputs = [t.clone() for t in prepared.outputs(prepared.call())]
    found = accuracy.errors(case, tuple(outputs))
    assert found is not None
    assert found.faults == ()
    outputs[0].view(-1, *outputs[0].shape[-2:])[0, 0, 0] += 1.0
    wrong = accuracy.errors(case, tuple(outputs))
    assert wrong is not None
    assert wrong.faults
    assert wrong.max_error > wrong.max_allowed


def test_bands_of_long_calls_move_the_mask() -> None:
    w = even("x", 1, 500, 1, 32, mask=Mask(causal=True, left=70), dtype=DType.FP32)
    case = make(w, Task.FORWARD, torch.device("cpu"))
    import flash3

    out = flash3.attention(case.request.q, case.request.k, case.request.v, mask=w.mask)
    found = accuracy.errors(case, (out,))
    assert found is not None
    assert not found.faults
    out[0, -1, 0, 0] += 0.5  # the last band
    assert accuracy.errors(case, (out,)).faults  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ roofline


def test_the_slowest_unit_sets_the_floor() -> None:
    rates = roofline.Rates(matmul=1e12, bandwidth=1e11, exp2=1e9)
    assert roofline.floor(rates, flops=2e12, num_bytes=1e9) == roofline.Floor(2.0, "matmuls")
    assert roofline.floor(rates, flops=1e9, num_bytes=5e11) == roofline.Floor(5.0, "memory")
    assert roofline.floor(rates, flops=1e9, num_bytes=1e9, exponentials=7e9) == roofline.Floor(7.0, "exponentials")
    assert roofline.Floor(2.0, "memory").fraction(4.0) == 0.5


def test_prefill_is_bound_by_matmuls_and_decoding_by_memory() -> None:
    rates = roofline.model_named("H200").rates(DType.BF16)
    prefill = roofline.floor_of(WORKLOADS["paper/d128-full-16k"], Task.FORWARD, rates)
    decode = roofline.floor_of(WORKLOADS["decode/b32-8k"], Task.FORWARD, rates)
    assert prefill.unit == "matmuls"
    assert prefill.seconds == pytest.approx(4 * 16384**2 * 2048 / 989e12)
    assert decode.unit == "memory"
    assert decode.seconds == pytest.approx(32 * 8192 * 8 * 256 * 2 / 4.8e12, rel=0.01)


def test_rates_of_this_machine_are_plausible() -> None:
    rates = roofline.measure(torch.device("cpu"), DType.FP32, seconds=0.02)
    assert 1e9 < rates.matmul < 1e14
    assert 1e8 < rates.bandwidth < 1e13


def test_unknown_device_models_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"h200, h100, b200.*got 'h900'"):
        roofline.model_named("h900")
    half, whole = (roofline.model_named("a100").rates(d).matmul for d in (DType.FP32, DType.BF16))
    assert half == whole / 2
