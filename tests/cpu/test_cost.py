"""What a call costs: memory linear in sequence length, work in proportion to the visited area. Counted, not timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash3.backends.cpu import plan
from flash3.mask import Mask
from flash3.problem import Problem, Request, Task
from tests.running import describe

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 1),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2, 3),
}
MATMULS = {torch.ops.aten.baddbmm.default, torch.ops.aten.baddbmm_.default, torch.ops.aten.bmm.default}


class Watch(TorchDispatchMode):
    """The largest tensor made, in bytes, and the multiply-adds of its matmuls (attention: QKᵀ and PV over all its rows and keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.work = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, min(t.untyped_storage().nbytes(), t.numel() * t.itemsize))
        if func in ATTENTION:
            q, k = args[ATTENTION[func][0]], args[ATTENTION[func][1]]
            self.work += 2 * q.numel() * k.shape[2]
        elif func in MATMULS:
            a, b = args[-2:]
            self.work += a.numel() * b.shape[-1]
        return result


def watch(request: Request, backward: bool = False) -> Watch:
    problem = Problem.of(replace(request, lse=True), describe)
    out, lse = torch.zeros(problem.out_shape, dtype=request.q.dtype), torch.zeros(problem.lse_shape)
    with Watch() as forward:
        plan.run_forward(request, out, lse)
    if not backward:
        return forward
    grads = plan.Gradients(d_out=out, **{f"d{n}": torch.empty_like(getattr(request, n)) for n in "qkv"})
    with Watch() as seen:
        plan.run_backward(replace(request, task=Task.BACKWARD), plan.Saved(out=out, lse=lse), grads)
    return seen


def request_of(length: int, **options: Any) -> Request:
    q, k, v = torch.randn(3, 1, length, 1, 8)
    return Request(q=q, k=k, v=v, **options)


KINDS = {
    "full": {},
    "causal": {"mask": Mask(causal=True)},
    "window": {"mask": Mask(left=1023, right=0)},
    "prefill on a cache": {"mask": Mask(causal=True, q_offset=64)},
    "softcap": {"softcap": 3.0},
    "capped window": {"softcap": 3.0, "mask": Mask(left=1023, right=0)},
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", KINDS)
def test_memory_is_linear(name: str, backward: bool) -> None:
    """At 16k tokens S would be 1 GB; the largest tensor is a mask of at most 512 rows (32 MB), or a step of the blocks."""
    length = 16384 if "window" in name or not backward else 4096
    if name == "softcap":
        length = 8192
    largest = watch(request_of(length, **KINDS[name]), backward).largest
    assert largest <= 512 * length * 4, f"a tensor of {largest / 2**20:.0f} MiB"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["fused", "blocks"])
def test_work_follows_the_area(softcap: float, backward: bool) -> None:
    length = 8192
    for mask in (
        Mask(left=1023, right=0),
        Mask(left=255, right=255),
        Mask(chunk=1024),
        Mask(causal=True, q_offset=100),
        Mask(left=63, right=0),
    ):
        request = request_of(length, mask=mask, softcap=softcap)
        done = watch(request, backward).work
        pairs = mask.area(length, length)
        needed = pairs * 8 * (5 if backward and softcap else 2)
        slack = length * 8 * (5 if backward and softcap else 2) * (800 if softcap else 130)
        assert needed <= done <= 1.3 * needed + slack, f"{mask}: {done / needed:.2f} times the visited area"


def test_hidden_keys_are_not_even_gathered() -> None:
    """One query with a window on a long cache touches its window only."""
    request = Request(q=torch.randn(1, 1, 2, 8), k=torch.randn(1, 50000, 2, 8), v=torch.randn(1, 50000, 2, 8), mask=Mask(left=99, right=0))
    for softcap in (0.0, 2.0):
        assert watch(replace(request, softcap=softcap)).largest <= 100 * 2 * 8 * 4 + 4096
