"""compute-sanitizer over the built kernels: `python -m benchmarks.sanitize [WORD ...]` (needs build/hopper.tar.xz and compute-sanitizer).

memcheck and racecheck, every configuration on two small requests, several processes side by side. What the kernels compute is checked by
benchmarks.gpu_check.
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


def main(words: list[str]) -> None:
    from .objects import built_names

    names = [n for n in built_names() if not words or any(w in n for w in words)]
    lanes = [lane for lane in (names[i::LANES] for i in range(LANES)) if lane]
    running = []
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.sanitize", "--run"]
        for lane in lanes:
            process = subprocess.Popen([*command, *lane], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running.append((tool, lane, process))
    clean = True
    for tool, lane, process in running:
        try:
            text, _ = process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\n(no end within the deadline)"
        ran = re.findall(r"^ran (\S+)$", text, re.MULTILINE)
        good = process.returncode == 0 and ran == lane
        clean = clean and good
        print(f"{'ok ' if good else 'BAD'} {tool} {len(ran)} of {len(lane)} kernels: {' '.join(ran)}", flush=True)
        if not good:
            print("\n".join(text.splitlines()[:40]))
    sys.exit(not clean)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        main(sys.argv[1:])
