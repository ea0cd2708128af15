"""What a machine can do, and what that allows: time >= max(matmul FLOPs / matmul rate, bytes / bandwidth, exponentials / their rate)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..frameworks.torch.describe import dtype_of
from ..problem import Device, DType, Task
from .clock import EventClock, WallClock
from .workloads import Workload

TERA = 1e12


@dataclass(frozen=True)
class Rates:
    """matmul: FLOP/s in the dtype at hand; bandwidth: bytes/s, reads and writes together; exp2: results/s, 0 where unknown."""

    matmul: float
    bandwidth: float
    exp2: float = 0.0
    source: str = "measured"


@dataclass(frozen=True)
class Floor:
    """The least time of a piece of work, and which unit sets it."""

    seconds: float
    unit: str

    def fraction(self, seconds: float) -> float:
        """How much of the possible speed a run reached."""
        return self.seconds / seconds


def floor(rates: Rates, flops: float, num_bytes: float, exponentials: float = 0.0) -> Floor:
    """The slowest of the units decides."""
    times = {"matmuls": flops / rates.matmul, "memory": num_bytes / rates.bandwidth}
    if rates.exp2:
        times["exponentials"] = exponentials / rates.exp2
    unit = max(times, key=lambda name: times[name])
    return Floor(times[unit], unit)


def floor_of(workload: Workload, task: Task, rates: Rates) -> Floor:
    """Of a workload, if nothing that the mask hides were computed."""
    return floor(rates, workload.flops(task), workload.bytes(task), float(workload.area() * workload.heads_q))


# ------------------------------------------------------------------------------------------------ measured in the same run


def measure(device: torch.device, dtype: DType, seconds: float = 0.15) -> Rates:
    """The rates that torch's own matmul and copy reach here: a square matmul and a copy far larger than any cache."""
    on_gpu = device.type == "cuda"
    kind = dtype_of(dtype) if dtype.bytes > 1 else torch.bfloat16
    n, size = (8192, 1 << 30) if on_gpu else (1024, 1 << 26)
    a, b = (torch.randn(n, n, device=device, dtype=kind) for _ in range(2))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    matmul, copy = _fastest(lambda: a @ b, on_gpu, seconds), _fastest(lambda: target.copy_(source), on_gpu, seconds)
    factor = 2 if dtype.bytes == 1 else 1  # FP8 tensor cores are twice as fast; torch has no plain FP8 matmul
    return Rates(factor * 2 * n**3 / matmul, 2 * size / copy)


def _fastest(call: Callable[[], object], on_gpu: bool, seconds: float) -> float:
    """Seconds of one call, the fastest of several bursts."""
    clock = EventClock(call) if on_gpu else WallClock(call)
    clock.burst_ms(1)
    each = max(clock.burst_ms(1), 1e-3)
    count = max(1, int(seconds * 1e3 / 5 / each))
    return min(clock.burst_ms(count) for _ in range(5)) / 1e3


# ------------------------------------------------------------------------------------------------ from the datasheet


@dataclass(frozen=True)
class Model:
    """A device that need not be here. teraflops: dense, in 16 bits; terabytes: of memory, per second; clock_mhz: boost."""

    device: Device
    teraflops: float
    terabytes: float
    l2_bytes: int
    clock_mhz: int
    fp8: bool = False

    def rates(self, dtype: DType) -> Rates:
        """In a dtype. exp2: 16 results a clock and multiprocessor, on every NVIDIA GPU named here."""
        factor = {1: 2.0 if self.fp8 else 1.0, 2: 1.0, 4: 0.5}.get(dtype.bytes, 0.03)
        exp2 = 16.0 * self.device.multiprocessors * self.clock_mhz * 1e6
        return Rates(self.teraflops * factor * TERA, self.terabytes * TERA, exp2, "datasheet")


def _model(name: str, capability: tuple[int, int], sms: int, *facts: float, fp8: bool = False) -> Model:
    teraflops, terabytes, l2_mib, mhz = facts
    return Model(Device("cuda", 0, capability, sms, name), teraflops, terabytes, int(l2_mib) << 20, int(mhz), fp8)


MODELS: dict[str, Model] = {
    "h200": _model("NVIDIA H200", (9, 0), 132, 989, 4.8, 60, 1980, fp8=True),
    "h100": _model("NVIDIA H100 80GB HBM3", (9, 0), 132, 989, 3.35, 50, 1980, fp8=True),
    "b200": _model("NVIDIA B200", (10, 0), 148, 2250, 8.0, 126, 1965, fp8=True),
    "a100": _model("NVIDIA A100-SXM4-80GB", (8, 0), 108, 312, 2.04, 40, 1410),
    "l40s": _model("NVIDIA L40S", (8, 9), 142, 362, 0.864, 96, 2520, fp8=True),
    "rtx4090": _model("NVIDIA GeForce RTX 4090", (8, 9), 128, 165, 1.008, 72, 2520, fp8=True),
}
"""By the name that `--device` takes. Rates are the vendor's, at boost clock; a real card under load stays below them."""


def model_named(name: str) -> Model:
    """A device model.

    Raises:
        ValueError: no such model; the message lists the known ones.
    """
    if name.lower() not in MODELS:
        raise ValueError(f"device must be cpu, cuda (the one here) or one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name.lower()]
