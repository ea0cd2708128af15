"""NVIDIA's disassembler from PyPI, which needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path


def run(name: str, *arguments: str) -> str:
    """What a tool of the package nvidia.cu13 prints."""
    import nvidia.cu13

    tool = Path(next(iter(nvidia.cu13.__path__))) / "bin" / name
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout


def disassembly(cubin: Path) -> str:
    return run("nvdisasm", "-c", str(cubin))
