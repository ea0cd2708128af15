"""Plans that are compiled for a GPU that is not there, and what came out: registers, spills and shared memory of every kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from flash3 import Mask
from flash3.backends.base import Gradients, Saved
from flash3.backends.triton.plan import TritonBackend
from flash3.problem import Device, Problem, Request, Task
from flash3.sequences import Packed, Paged
from tests.running import describe

MULTIPROCESSORS = 108
MOST_REGISTERS = 255


@dataclass(frozen=True)
class Facts:
    kernel: str
    threads: int
    registers: int
    spills: int  # loads and stores of local memory in the code
    shared_bytes: int
    serialized: bool  # ptxas gave up on asynchronous matmuls (sm_90)


class Driver:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # one cache for each target

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def only_compiled(capability: tuple[int, int]) -> Iterator[list[triton.compiler.CompiledKernel]]:
    """Inside, launches compile for this capability and do not run; they are in the list."""
    found: list[triton.compiler.CompiledKernel] = []
    run, driver = JITFunction.run, triton.runtime.driver
    before = driver._active

    def compile_only(self, *arguments, grid, warmup, **names):
        found.append(run(self, *arguments, grid=grid, warmup=True, **names))

    JITFunction.run = compile_only
    driver.set_active(Driver(capability))
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before  # reset_active would look for a GPU


def _tool(name: str, *options: str, code: bytes) -> str:
    """What one of the tools that come with Triton says of a file."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(code)
        command = [Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name, *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def facts(kernel: triton.compiler.CompiledKernel) -> Facts:
    code = kernel.asm["cubin"]
    registers = re.search(r"REG:(\d+)", _tool("cuobjdump", "-res-usage", code=code))
    spills = re.findall(r"\b(?:STL|LDL)\b", _tool("nvdisasm", code=code))
    log = ""
    if kernel.metadata.target.arch == 90:
        log = _tool("ptxas", "-v", "-arch=sm_90a", "-o", "/dev/null", code=kernel.asm["ptx"].encode())
    assert registers is not None
    return Facts(kernel.name, 32 * kernel.metadata.num_warps, int(registers[1]), len(spills), kernel.metadata.shared, "serialized" in log)


def request(d: int, value_dim: int, mask: Mask, heads: int = 2, rows: int = 256, **options: object) -> Request:
    """Dense, as many rows as keys, two key heads, bfloat16."""
    q, k, v = (torch.empty(1, rows, h, w, dtype=torch.bfloat16) for h, w in ((heads, d), (2, d), (2, value_dim)))
    return Request(q=q, k=k, v=v, mask=mask, lse=True, **options)


def packed(d: int, mask: Mask) -> Request:
    dense, starts = request(d, d, mask), torch.tensor([0, 256], dtype=torch.int32)
    at = Packed(cu_seqlens=starts, max_length=256)
    return replace(dense, q=dense.q[0], k=dense.k[0], v=dense.v[0], q_sequences=at, k_sequences=at)


def decoding(d: int) -> Request:
    """One query of eight heads over a long paged cache: packed heads, split keys."""
    q = torch.empty(1, 1, 8, d, dtype=torch.bfloat16)
    k, v = (torch.empty(512, 16, 1, d, dtype=torch.bfloat16) for _ in range(2))
    table, lengths = torch.zeros(1, 512, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return Request(q=q, k=k, v=v, k_sequences=Paged(page_table=table, lengths=lengths), mask=Mask(causal=True))


def compiled(call: Request, capability: tuple[int, int], backward: bool = True) -> list[Facts]:
    """Every kernel of a call's forward and backward."""
    problem = Problem.of(call, describe)
    gpu = Device("cuda", 0, capability, MULTIPROCESSORS, f"sm_{capability[0]}{capability[1]}")
    problem = replace(problem, device=gpu)
    out = torch.empty(problem.out_shape, dtype=getattr(torch, problem.spec.out_dtype.value))
    lse = torch.empty(problem.lse_shape)
    with only_compiled(capability) as found:
        TritonBackend().plan(problem).run(call, out, lse)
        if backward:
            grads = Gradients(d_out=torch.empty_like(out), **{f"d{n}": torch.empty_like(getattr(call, n)) for n in "qkv"})
            plan = TritonBackend().plan(replace(problem, spec=replace(problem.spec, task=Task.BACKWARD)))
            plan.run(replace(call, task=Task.BACKWARD), Saved(out=out, lse=lse), grads)
    return [facts(kernel) for kernel in found]
