"""compute-sanitizer over the built kernels: `python -m benchmarks.sanitize [WORD ...]` (needs build/hopper.tar.xz and compute-sanitizer).

memcheck and racecheck, every configuration on two small requests, several processes side by side. What the kernels compute is checked by
benchmarks.gpu_check.

racecheck follows an mbarrier only through the lanes that arrive at it. A stage is given back by one lane of each warp, after a barrier of
the consumer; racecheck then takes what the other lanes have read of a bulk load (the L and D of the backward) for a race with the load of
the next round, also where __syncwarp stands in between, but not where all 32 lanes arrive (benchmarks/racecheck_ring.cu shows it). Reports
whose write is a bulk load are therefore counted and not held against a kernel.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

from flash3.backends.hopper.tiles import ForwardSpec
from flash3.problem import Request, Task

from .backward_configurations import BACKWARD
from .configurations import CONFIGURATIONS

TOOLS = ("memcheck", "racecheck")
LANES = 6
DEADLINE_SECONDS = 200
FOUND = 9
"""Exit status of compute-sanitizer where it reports something."""
DENSE = ((1, 2, 130, 200), (2, 1, 3, 70))
RAGGED = (((5, 5), (130, 140), (0, 7), (64, 0)), ((200, 129),))


def run(names: list[str]) -> None:
    for name in names:
        (backward if name in BACKWARD else forward)(name)
        print(f"ran {name}", flush=True)


def forward(name: str) -> None:
    import torch

    from .calls import prepare_named

    spec, _ = CONFIGURATIONS[name]
    for request in small(spec):
        launch, out, _ = prepare_named(replace(request, lse=spec.lse), name)
        launch()
        torch.cuda.synchronize()
        if out.isnan().any():
            raise RuntimeError(f"{name}: NaN in the output")


def backward(name: str) -> None:
    import torch

    from . import backward_check as check

    spec, _ = BACKWARD[name]
    for request in small(check.requests_like(spec)):
        request = replace(request, task=Task.BACKWARD, deterministic=spec.deterministic)
        launch, found = check.gradients_of(request, name, check.saved_by_oracle(request), *check.arriving(request, spec))
        launch()
        torch.cuda.synchronize()
        if any(t is not None and t.isnan().any() for t in found):
            raise RuntimeError(f"{name}: NaN in a gradient")


def small(spec: ForwardSpec) -> list[Request]:
    from .cases import MASKS, Maker

    make, mask = Maker(spec), MASKS[spec.mask_kind][0]
    return [make.ragged(batch, mask) for batch in RAGGED] if spec.is_ragged else [make.dense(shape, mask) for shape in DENSE]


def unexpected(text: str, bulk_loads: set[int]) -> tuple[list[str], int]:
    """Races that racecheck reports where something else than a bulk load writes, and how many it reports of bulk loads."""
    others, explained = [], 0
    for report in re.split(r"^=+ Error: Race reported", text, flags=re.MULTILINE)[1:]:
        writes = {int(place, 16) for place in re.findall(r"Write access at \S+\+0x([0-9a-f]+)", report)}
        if writes and writes <= bulk_loads:
            explained += 1
        else:
            others.append(report[:400])
    return others, explained


def main(words: list[str]) -> None:
    from .objects import built_names, unpacked

    names = [n for n in built_names() if not words or any(w in n for w in words)]
    lanes = [lane for lane in (names[i::LANES] for i in range(LANES)) if lane]
    running = []
    for tool in TOOLS:
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "100000"]
        for lane in lanes:
            command = ["compute-sanitizer", *options, sys.executable, "-m", "benchmarks.sanitize", "--run", *lane]
            running.append((tool, lane, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    clean = True
    for tool, lane, process in running:
        try:
            text, _ = process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\n(no end within the deadline)"
        ran = re.findall(r"^ran (\S+)$", text, re.MULTILINE)
        others, explained = unexpected(text, {place for name in lane for place in unpacked()["kernels"][name]["bulk_loads"]})
        good = ran == lane and not others and (process.returncode == 0 or (process.returncode == FOUND and explained > 0))
        clean = clean and good
        note = f" ({explained} reports of bulk loads)" if explained else ""
        print(f"{'ok ' if good else 'BAD'} {tool} {len(ran)} of {len(lane)} kernels{note}: {' '.join(ran)}", flush=True)
        if not good:
            print("\n".join(others[:5] or text.splitlines()[:40]))
    sys.exit(not clean)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        main(sys.argv[1:])
