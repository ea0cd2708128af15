"""Issuing wgmma groups and waiting for them."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

wait_matmuls = warpgroup.wait_group
"""wait_matmuls(n): all but the n youngest groups of this warpgroup are done."""


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr[bool]):
    """acc (+)= a·b in the background, as one group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
