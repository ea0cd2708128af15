"""The kernels compile for GPUs that are not there, within each one's registers and shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from flash3 import Mask
from flash3.backends.triton import heuristics
from flash3.backends.triton.plan import interpreted
from flash3.mask import MaskKind
from tests.triton import compiling

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(interpreted(), reason="interpreted kernels are not compiled")]

SHARED_BYTES = {(8, 0): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""What CUDA lets one block use: CUDA C++ Programming Guide, technical specifications per compute capability."""
CAPABILITIES = pytest.mark.parametrize("capability", SHARED_BYTES, ids=lambda c: f"sm_{c[0]}{c[1]}")
REGISTER_FILE = 65536
"""Of every one of these GPUs, for one block too."""
MOST_SPILLS = {"forward_kernel": 40, "prepare_kernel": 8, "dkdv_kernel": 140, "dq_kernel": 120, "combine_kernel": 0}
"""Instructions in the whole kernel; most of them stand at the edges of the mask. On sm_90, packed at d128, dkdv has 68."""
KERNELS = ["forward_kernel", "prepare_kernel", "dkdv_kernel", "dq_kernel"]
CAUSAL = Mask(causal=True)
OTHERS = {
    "d64 full": compiling.request(64, 64, Mask()),
    "d128 window, odd length": compiling.request(128, 128, Mask(left=64, right=32), rows=250),
    "d192/128 chunk, softcap": compiling.request(192, 128, Mask(chunk=100), softcap=30.0),
    "packed": compiling.packed(128, CAUSAL),
}


def held(found: list[compiling.Facts], capability: tuple[int, int]) -> None:
    for kernel in found:
        print(kernel)
        assert kernel.registers <= compiling.MOST_REGISTERS
        assert kernel.registers * kernel.threads <= REGISTER_FILE
        assert kernel.shared_bytes <= SHARED_BYTES[capability]
        assert kernel.spills <= MOST_SPILLS[kernel.kernel]
        assert not kernel.serialized


@CAPABILITIES
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_causal(dim: int, capability: tuple[int, int]) -> None:
    found = compiling.compiled(compiling.request(dim, dim, CAUSAL), capability)
    own_dv = heuristics.backward(capability, dim, 2, MaskKind.CAUSAL).dv is not None
    assert [k.kernel for k in found] == [name for name in KERNELS for _ in range(2 if own_dv and name == "dkdv_kernel" else 1)]
    held(found, capability)


@CAPABILITIES
def test_no_power_of_two(capability: tuple[int, int]) -> None:
    """A head stride of 72 numbers is no multiple of 16: that 8 divides it must be told, or each number is a load."""
    held(compiling.compiled(compiling.request(72, 72, CAUSAL), capability), capability)


@CAPABILITIES
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decoding(dim: int, capability: tuple[int, int]) -> None:
    found = compiling.compiled(compiling.decoding(dim), capability, backward=False)
    assert [k.kernel for k in found] == ["forward_kernel", "combine_kernel"]
    held(found, capability)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_and_layouts(name: str) -> None:
    found = compiling.compiled(OTHERS[name], (9, 0))
    assert list(dict.fromkeys(k.kernel for k in found)) == KERNELS
    held(found, (9, 0))
