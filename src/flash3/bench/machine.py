"""What the numbers depend on: versions, device, and the state of its clocks and power."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__, dispatch
from ..dispatch import BACKENDS
from ..settings import VARIABLES

PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "nvidia-cudnn-cu13",
    "flash-attn-4",
    "jax",
    "numpy",
    "transformers",
)


@dataclass(frozen=True)
class State:
    """A GPU at one moment; None where it cannot be read."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    celsius: int | None = None

    def __str__(self) -> str:
        parts = [
            f"{value:.0f} {unit}"
            for value, unit in ((self.sm_mhz, "MHz"), (self.memory_mhz, "MHz memory"), (self.power_watts, "W"), (self.celsius, "°C"))
            if value is not None
        ]
        limit = f" of {self.power_limit_watts:.0f} W allowed" if self.power_limit_watts is not None else ""
        return (", ".join(parts) + limit) or "not known"


QUERIES = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def state(device: torch.device) -> State:
    """By nvidia-ml-py where it is installed, else by nvidia-smi, else nothing."""
    if device.type != "cuda":
        return State()
    for read in (_by_nvml, _by_smi):
        with contextlib.suppress(Exception):  # a missing library, driver or permission: clocks are an extra, no reason to stop
            return read(device)
    return State()


def _by_nvml(device: torch.device) -> State:
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        return State(
            sm_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            memory_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            power_watts=pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            power_limit_watts=pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            celsius=pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        )
    finally:
        pynvml.nvmlShutdown()


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _by_smi(device: torch.device) -> State:
    if shutil.which("nvidia-smi") is None:
        return State()
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader,nounits", f"--id={_uuid(device)}"]
    return parse_smi(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)


def parse_smi(line: str) -> State:
    """One line of nvidia-smi's CSV, in the order of QUERIES; what it cannot tell ("[N/A]") is None."""
    values: list[float | None] = []
    for word in line.strip().split(","):
        try:
            values.append(float(word))
        except ValueError:
            values.append(None)
    sm, memory, power, limit, celsius = (values + [None] * len(QUERIES))[: len(QUERIES)]
    return State(_whole(sm), _whole(memory), power, limit, _whole(celsius))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of those installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def kernel_sources() -> str:
    """A short hash of all that the kernels are made of, to tell the code of two reports apart."""
    root = Path(dispatch.__file__).parent
    files = [*sorted((root / "backends").rglob("*.py")), *(root / f"{name}.py" for name in ("mask", "problem", "sequences"))]
    text = hashlib.sha256()
    for file in files:
        text.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return text.hexdigest()[:16]


def describe(device: torch.device) -> dict[str, Any]:
    """Everything that a reader of the numbers may ask."""
    about: dict[str, Any] = {
        "flash3": __version__,
        "kernel_sources": kernel_sources(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions(),
        "device": device_name(device),
    }
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        about |= {
            "capability": f"{facts.major}.{facts.minor}",
            "multiprocessors": facts.multi_processor_count,
            "memory_gib": round(facts.total_memory / 2**30, 1),
            "l2_mib": round(facts.L2_cache_size / 2**20, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        load = os.getloadavg() if hasattr(os, "getloadavg") else ()
        about |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability(), "load": load}
    return about


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return models[0] if models else platform.processor() or "cpu"


def environment() -> dict[str, Any]:
    """`flash3 env`: what a bug report needs."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        **describe(torch.device("cpu")),
        "executable": sys.executable.replace(str(Path.home()), "~"),
        "backends": list(BACKENDS),
        "cpu": device_name(torch.device("cpu")),
        "gpus": [{**describe(gpu), "state": asdict(state(gpu))} for gpu in gpus],
        "settings": {v.name: os.environ[v.name] for v in VARIABLES if v.name in os.environ},
    }
