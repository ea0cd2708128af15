"""Objects built here, run elsewhere: `python -m benchmarks.objects [WORD ...]` compiles every configuration (of those whose name holds a
WORD) for sm_90a without a GPU into build/hopper, two at a time, and packs them into build/hopper.tar.xz (a few hundred KB).

On the GPU machine `kernel(name)` unpacks and loads them; no compiler runs there.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from .configurations import CONFIGURATIONS

FOLDER = Path(__file__).parent.parent / "build" / "hopper"
PACKED = FOLDER.with_suffix(".tar.xz")
FACTS = "facts.json"
JOBS = 2


def _build(name: str, snapshot: str) -> dict[str, Any]:
    """In a process of its own: ptxas's remarks go to the file descriptor."""
    source = (
        "import sys, pathlib; from flash3.backends.hopper.compile import build_object, TARGET; from benchmarks.configurations import "
        "CONFIGURATIONS as C; build_object(*C[sys.argv[1]], pathlib.Path(sys.argv[2]), TARGET + ' remarks{ptx}')"
    )
    start = time.time()
    command = ["nice", sys.executable, "-c", source, name, str(FOLDER / f"{name}.o")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": snapshot, "PYTHONSAFEPATH": "1"})
    if done.returncode:
        raise RuntimeError(f"{name} does not compile:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    text = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if registers is None or spills is None:
        raise RuntimeError(f"{name}: no report of registers and spills in\n{text}")
    return {
        "name": name,
        "registers": int(registers[1]),
        "spills": int(spills[1]) + int(spills[2]),
        "seconds": round(time.time() - start, 1),
    }


def build(words: list[str]) -> None:
    from flash3.backends.hopper.compile import source_hash

    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / FACTS
    facts = json.loads(path.read_text()) if path.exists() else {}
    if facts.get("sources") != source_hash():
        facts = {"sources": source_hash(), "kernels": {}}
    done = facts["kernels"]
    todo = [n for n in CONFIGURATIONS if n not in done and (not words or any(w in n for w in words))]
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as snapshot, concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        # The DSL reads sources again, by line, while it traces: compile files that nobody edits meanwhile.
        shutil.copytree(root / "src" / "flash3", Path(snapshot) / "flash3")
        shutil.copytree(root / "benchmarks", Path(snapshot) / "benchmarks")
        for fact in pool.map(functools.partial(_build, snapshot=snapshot), todo):
            done[fact["name"]] = fact
            path.write_text(json.dumps(facts, indent=1))
            print(f"{fact['name']:32s} registers {fact['registers']}  spills {fact['spills']}  {fact['seconds']} s", flush=True)
    with tarfile.open(PACKED, "w:xz") as tar:
        for file in [path, *(FOLDER / f"{n}.o" for n in done)]:
            tar.add(file, file.name)
    print(f"{len(done)} kernels, {PACKED.stat().st_size / 1024:.0f} KB in {PACKED}")


@functools.cache
def unpacked() -> dict[str, Any]:
    """Unpack where needed; the facts of what is there."""
    if PACKED.exists() and (not (FOLDER / FACTS).exists() or PACKED.stat().st_mtime > (FOLDER / FACTS).stat().st_mtime):
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(PACKED) as tar:
            tar.extractall(FOLDER, filter="data")
        os.utime(FOLDER / FACTS)
    facts: dict[str, Any] = json.loads((FOLDER / FACTS).read_text())
    return facts


def built_names() -> list[str]:
    return [name for name in CONFIGURATIONS if name in unpacked()["kernels"]]


@functools.cache
def kernel(name: str) -> Any:
    """The compiled function of a configuration."""
    from flash3.backends.hopper.compile import load_object

    unpacked()
    return load_object(FOLDER / f"{name}.o")


if __name__ == "__main__":
    build(sys.argv[1:])
