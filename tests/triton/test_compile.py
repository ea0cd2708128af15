"""The kernels compile for GPUs that are not there, within each one's registers and shared memory, and without spills where speed counts."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from flash3 import Mask
from flash3.backends.triton.plan import interpreted
from tests.triton import compiling

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(interpreted(), reason="interpreted kernels are not compiled")]

SHARED_BYTES = {(8, 0): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""What CUDA lets one block use: CUDA C++ Programming Guide, technical specifications per compute capability."""
CAPABILITIES = pytest.mark.parametrize("capability", SHARED_BYTES, ids=lambda c: f"sm_{c[0]}{c[1]}")
CALLS = {
    "d64": (64, 64, Mask()),
    "d64 causal": (64, 64, Mask(causal=True)),
    "d128 causal": (128, 128, Mask(causal=True)),
    "d128 window": (128, 128, Mask(left=64, right=32)),
    "d256 causal": (256, 256, Mask(causal=True)),
    "d192/128 chunk": (192, 128, Mask(chunk=100)),
}


def held(found: list[compiling.Facts], capability: tuple[int, int]) -> None:
    for kernel in found:
        print(kernel)
        assert kernel.registers <= compiling.MOST_REGISTERS
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@CAPABILITIES
@pytest.mark.parametrize("name", CALLS)
def test_dense(name: str, capability: tuple[int, int]) -> None:
    found = compiling.compiled(compiling.request(*CALLS[name]), capability)
    assert [k.kernel for k in found] == ["forward_kernel", "prepare_kernel", "dkdv_kernel", "dq_kernel"]
    held(found, capability)


@CAPABILITIES
def test_decoding(capability: tuple[int, int]) -> None:
    found = compiling.compiled(compiling.decoding(128), capability, backward=False)
    assert [k.kernel for k in found] == ["forward_kernel", "combine_kernel"]
    held(found, capability)


@CAPABILITIES
def test_packed(capability: tuple[int, int]) -> None:
    held(compiling.compiled(compiling.packed(128, Mask(causal=True)), capability), capability)
