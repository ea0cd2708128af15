"""What the Triton backend supports and chooses, and dispatch's order: no Triton, no GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from flash3 import Mask, dispatch
from flash3.backends.base import Refusal, Support
from flash3.backends.triton import heuristics
from flash3.backends.triton.plan import Forward, TritonBackend, interpreted
from flash3.backends.triton.tiles import MaskCode, Tiles
from flash3.mask import MaskKind, key_blocks
from flash3.problem import Device, DType, Problem, Request, Task, TensorInfo
from flash3.settings import settings

pytestmark = pytest.mark.skipif(interpreted(), reason="interpreted kernels run on the CPU")
GPUS = {
    "A100": Device("cuda", 0, (8, 0), 108, "A100"),
    "L40": Device("cuda", 0, (8, 9), 142, "L40"),
    "H100": Device("cuda", 0, (9, 0), 132, "H100"),
    "B200": Device("cuda", 0, (10, 0), 148, "B200"),
}


def problem(device: Device, dtype: DType = DType.BF16, rows: int = 512, keys: int = 512, heads: int = 8, **options: object) -> Problem:
    q, k = (TensorInfo(dtype, (1, n, h, 64), (n * h * 64, h * 64, 64, 1), device) for n, h in ((rows, heads), (keys, 2)))
    return Problem.of(Request(q=q, k=k, v=k, **options))


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_from_ampere_on(name: str) -> None:
    for task in Task:
        assert isinstance(TritonBackend().support(replace_task(problem(GPUS[name]), task)), Support)


def replace_task(p: Problem, task: Task) -> Problem:
    return replace(p, spec=replace(p.spec, task=task))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (problem(Device("cpu")), "on a GPU"),
        (problem(Device("cuda", 0, (7, 5), 40, "T4")), "8.0 or newer"),
        (problem(GPUS["A100"], DType.FP64), "float64"),
        (problem(GPUS["A100"], DType.E4M3), "float8_e4m3fn"),
        (problem(GPUS["A100"], out_dtype=DType.FP64), "output"),
    ],
    ids=["cpu", "T4", "float64", "float8", "float64 out"],
)
def test_refusals_say_why(refused: Problem, reason: str) -> None:
    answer = TritonBackend().support(refused)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def test_copies_are_told() -> None:
    p = problem(GPUS["A100"])
    assert "copies" not in str(TritonBackend().support(p))
    odd = replace(p, k=replace(p.k, strides=(512 * 2 * 65, 2 * 65, 65, 1)), v=replace(p.v, aligned=False))
    assert "copies k, v, whose rows do not start at multiples of 16 bytes" in str(TritonBackend().support(odd))


def test_order_of_backends() -> None:
    """Hopper's own kernels first, these elsewhere, the CPU last; a setting or an argument overrides."""
    assert list(dispatch.BACKENDS) == ["hopper", "triton", "cpu"]
    found = dispatch.explain(problem(GPUS["A100"]))
    assert found.backend == "triton"
    assert "hopper: no" in str(found)
    assert "triton: yes, bfloat16 kernels  <- runs" in str(found)
    assert dispatch.explain(problem(GPUS["H100"]), "triton").backend == "triton"
    with settings.override(backend="triton"):
        assert dispatch.explain(problem(GPUS["H100"])).backend == "triton"
    on_cpu = dispatch.explain(problem(Device("cpu")))
    assert on_cpu.backend == "cpu"
    assert "triton: no, its tensors must be on a GPU" in str(on_cpu)


def test_the_environment_names_a_backend() -> None:
    """FLASH3_BACKEND is obeyed, and not replaced by another that could."""
    code = "import torch, flash3; x = torch.zeros(1, 4, 2, 16); print(flash3.explain(x, x, x))"
    paths = os.pathsep.join(p for p in sys.path if p)
    for name, line in (("cpu", "cpu: yes"), ("triton", "triton: no, its tensors must be on a GPU")):
        environment = os.environ | {"FLASH3_BACKEND": name, "PYTHONPATH": paths}
        shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        assert f"only {name}, by backend= or FLASH3_BACKEND:\n  {line}" in shown


def test_few_rows_share_a_tile_and_few_tiles_share_out_their_keys() -> None:
    decoding = Forward.of(problem(GPUS["A100"], rows=1, keys=1 << 16), None)
    assert decoding.pack == 4
    assert decoding.tiles.rows == 16
    assert decoding.splits == 108  # two programs to a multiprocessor
    assert Forward.of(problem(GPUS["A100"], rows=1, keys=256), None).splits == 1
    training = Forward.of(problem(GPUS["A100"], rows=1 << 15, keys=1 << 15), None)
    assert (training.pack, training.splits) == (1, 1)


def test_tiles_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="tiles must be a BackwardTiles or None"):
        TritonBackend().plan(replace_task(problem(GPUS["A100"]), Task.BACKWARD), Tiles(64, 64, 4, 2))


def test_every_width_has_tiles() -> None:
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
        for dim in range(8, 257, 8):
            width = heuristics.width_of(dim)
            assert dim <= width <= 256
            for kind in MaskKind:
                assert heuristics.forward(capability, width, 2, kind).rows >= 32
                assert heuristics.backward(capability, width, 2, kind).dkdv.keys >= 32


def test_the_turned_mask_sees_the_same_pairs() -> None:
    """blocks_of_queries walks `key_blocks` of a mask with queries and keys exchanged: here on ints, against the dense mask."""
    for mask in (
        Mask(),
        Mask(causal=True),
        Mask(right=3),
        Mask(left=4, right=2),
        Mask(causal=True, chunk=5),
        Mask(chunk=4, q_offset=3, k_offset=1),
    ):
        for q_len, k_len in ((1, 1), (9, 13), (16, 7), (20, 33)):
            seen = mask.dense(q_len, k_len)
            bounds = mask.bounds(q_len, k_len)
            turned = replace(bounds, left=bounds.right, right=bounds.left, q_offset=bounds.k_offset, k_offset=bounds.q_offset)
            for first in range(0, k_len, 4):
                last = min(first + 4, k_len) - 1
                found = key_blocks(first, last, q_len, 4, turned, MaskCode.of(mask).turned_kind)
                tile = seen[:, first : last + 1]
                for block in range(-(-q_len // 4)):
                    rows = tile[4 * block : 4 * block + 4]
                    if rows.any():
                        assert found.begin <= block < found.end, (mask, q_len, k_len, first, block)
                    if found.full_begin <= block < found.full_end:
                        assert len(rows) == 4
                        assert rows.all()
