"""Objects built here, run elsewhere: `python -m benchmarks.objects [WORD ...]` compiles every configuration (of those whose name holds a
WORD) for sm_90a without a GPU into build/hopper, two at a time, and packs them into build/hopper.tar.xz (a few hundred KB).

On the GPU machine `kernel(name)` unpacks and loads them; no compiler runs there.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .backward_configurations import BACKWARD
from .configurations import CONFIGURATIONS
from .disassembly import disassembly

FOLDER = Path(os.environ.get("FLASH3_OBJECTS") or Path(__file__).parent.parent / "build" / "hopper")
PACKED = FOLDER.with_suffix(".tar.xz")
FACTS = "facts.json"
JOBS = 2
ALL: dict[str, Any] = CONFIGURATIONS | BACKWARD


def _build_one(name: str) -> dict[str, Any]:
    """Compile in this process; ptxas's remarks go to file descriptors 1 and 2, which are caught in a file meanwhile."""
    from flash3.backends.hopper import backward_compile, compile

    build_object = (backward_compile if name in BACKWARD else compile).build_object
    start = time.time()
    with tempfile.TemporaryFile() as caught:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(caught.fileno(), 1)
        os.dup2(caught.fileno(), 2)
        try:
            build_object(*ALL[name], FOLDER / f"{name}.o", compile.TARGET + " remarks{ptx}")
        finally:
            sys.stdout.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
        caught.seek(0)
        text = caught.read().decode(errors="replace")
    registers = re.findall(r"Used (\d+) registers", text)  # of each kernel in the object
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not registers or not spills:
        raise RuntimeError(f"{name}: no report of registers and spills in\n{text}")
    return {
        "name": name,
        "registers": max(map(int, registers)),
        "spills": sum(int(stores) + int(loads) for stores, loads in spills),
        "bulk_loads": bulk_loads(FOLDER / f"{name}.o"),
        "seconds": round(time.time() - start, 1),
    }


def bulk_loads(path: Path) -> list[int]:
    """Where in its kernels an object's bulk loads into shared memory stand, as sanitize.py knows them again."""
    data, found = path.read_bytes(), []
    for image in [match.start() for match in re.finditer(b"\x7fELF", data)][1:]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(data[image:])
            cubin.flush()
            text = disassembly(Path(cubin.name))
        found += [int(place, 16) for place in re.findall(r"/\*([0-9a-f]+)\*/[^;]*UBLKCP\.S\.G", text)]
    return found


def build(words: list[str]) -> None:
    from flash3.backends.hopper.compile import source_hash

    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / FACTS
    facts = json.loads(path.read_text()) if path.exists() else {}
    if facts.get("sources") != source_hash():
        facts = {"sources": source_hash(), "kernels": {}}
    done = facts["kernels"]
    todo = [n for n in ALL if n not in done and (not words or any(w in n for w in words))]
    for fact in _built(todo):
        done[fact["name"]] = fact
        path.write_text(json.dumps(facts, indent=1))
        print(f"{fact['name']:32s} registers {fact['registers']}  spills {fact['spills']}  {fact['seconds']} s", flush=True)
    with tarfile.open(PACKED, "w:xz") as tar:
        for file in [path, *(FOLDER / f"{n}.o" for n in done)]:
            tar.add(file, file.name)
    print(f"{len(done)} kernels, {PACKED.stat().st_size / 1024:.0f} KB in {PACKED}")


def _built(names: list[str]) -> Iterator[dict[str, Any]]:
    """Facts as they come from two workers."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as snapshot, concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        # The DSL reads sources again, by line, while it traces: compile files that nobody edits meanwhile.
        shutil.copytree(root / "src" / "flash3", Path(snapshot) / "flash3")
        shutil.copytree(root / "benchmarks", Path(snapshot) / "benchmarks")
        environment = os.environ | {"PYTHONPATH": snapshot, "PYTHONSAFEPATH": "1", "FLASH3_OBJECTS": str(FOLDER)}
        lanes = [names[i::JOBS] for i in range(JOBS)]
        facts: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        running = [pool.submit(_work, lane, environment, facts) for lane in lanes]
        for _ in lanes:
            yield from iter(facts.get, None)
        for work in running:
            work.result()


def _work(names: list[str], environment: dict[str, str], facts: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    command = [sys.executable, "-m", "benchmarks.objects", "--worker", *names]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                facts.put(json.loads(line))
        if worker.returncode:
            raise RuntimeError(f"a worker ended with {worker.returncode}")
    finally:
        facts.put(None)


@functools.cache
def unpacked() -> dict[str, Any]:
    """Unpack where needed; the facts of what is there."""
    if PACKED.exists():
        digest, mark = hashlib.sha256(PACKED.read_bytes()).hexdigest(), FOLDER / "unpacked"
        if not mark.exists() or mark.read_text() != digest:
            FOLDER.mkdir(parents=True, exist_ok=True)
            with tarfile.open(PACKED) as tar:
                tar.extractall(FOLDER, filter="data")
            mark.write_text(digest)
    facts: dict[str, Any] = json.loads((FOLDER / FACTS).read_text())
    return facts


def built_names() -> list[str]:
    return [name for name in ALL if name in unpacked()["kernels"]]


@functools.cache
def kernel(name: str) -> Any:
    """The compiled function of a configuration."""
    from flash3.backends.hopper import backward_compile, compile

    unpacked()
    return (backward_compile if name in BACKWARD else compile).load_object(FOLDER / f"{name}.o")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        for each in sys.argv[2:]:
            print(json.dumps(_build_one(each)), flush=True)
    else:
        build(sys.argv[1:])
