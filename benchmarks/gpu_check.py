"""Numerics of the built kernels on a GPU: `python -m benchmarks.gpu_check [WORD ...]` (needs build/hopper.tar.xz from benchmarks.objects).

Every configuration against the oracle (flash3.reference, float64), with plain torch in the same dtype as the yardstick: outputs and unused
storage full of NaN, LSE to float32 rounding, repeated launches bitwise equal (50 of them on one larger request). Each group runs in a
process of its own with a deadline: a kernel that hangs ends its group, not the run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .backward_configurations import BACKWARD
from .configurations import CONFIGURATIONS

LANES = 14
DEADLINE_SECONDS = 240
GOOD = Path(tempfile.gettempdir()) / "flash3-good.txt"
"""Names that passed, for forward.py."""
REPEATS = 50
LSE_TOLERANCE = 1e-5


def check(name: str, request: object, repeats: int) -> tuple[float, list[str]]:
    """Error over what is allowed, and what is wrong."""
    import torch

    from flash3 import reference

    from .calls import prepare_named

    launch, out, lse = prepare_named(request, name)
    launch()
    torch.cuda.synchronize()
    first, first_lse = out.clone(), None if lse is None else lse.clone()
    wrong = []
    for _ in range(repeats):
        out.fill_(torch.nan)
        launch()
        if not torch.equal(out, first) or (lse is not None and not torch.equal(lse, first_lse)):
            wrong.append("launches differ")
            break
    want, want_lse = reference.attention(request)
    plain, _ = reference.plain(request)
    report = reference.compare(first, want, plain)
    wrong += report.faults
    if first_lse is not None:
        wrong += lse_faults(first_lse, want_lse)
    return report.max_error / max(report.max_allowed, 1e-12), wrong


def lse_faults(ours: object, exact: object) -> list[str]:
    import torch

    if not torch.equal(ours.isneginf(), exact.isneginf()):
        return [f"LSE is -inf in {int(ours.isneginf().sum())} places, should be in {int(exact.isneginf().sum())}"]
    seen = ~exact.isneginf()
    error = (ours.double() - exact)[seen].abs()
    allowed = LSE_TOLERANCE * exact[seen].abs().clamp_min(1.0)
    worst = (error - allowed).max().item() if error.numel() else 0.0
    return [] if worst <= 0 else [f"LSE off by {error.max().item():.1e}"]


def check_large(name: str) -> list[str]:
    """A larger request: two heads (ragged: all) against the oracle, 50 launches bitwise equal."""
    import torch

    from flash3 import reference

    from .calls import prepare_named
    from .cases import large, part_of

    spec, _ = CONFIGURATIONS[name]
    request = large(spec)
    if spec.is_ragged:
        return check(name, request, REPEATS)[1]
    launch, out, _ = prepare_named(request, name)
    launch()
    first = out.clone()
    for _ in range(REPEATS):
        out.fill_(torch.nan)
        launch()
        if not torch.equal(out, first):
            return ["launches differ"]
    wrong = []
    for batch, head in ((0, 0), (request.q.shape[0] - 1, request.q.shape[2] - 1)):
        part = part_of(request, batch, head)
        want, _ = reference.attention(part)
        ours = first[batch : batch + 1, :, head : head + 1]
        wrong += reference.compare(ours, want, reference.plain(part)[0]).faults
    return wrong


def check_all(name: str) -> tuple[float, list[str], int]:
    """Every case of a configuration: the worst error over what is allowed, what is wrong, how many cases."""
    from .cases import cases

    worst, wrong, count = 0.0, [], 0
    for title, request in cases(CONFIGURATIONS[name][0]):
        ratio, faults = check(name, request, repeats=5)
        worst, count = max(worst, ratio), count + 1
        wrong += [f"{title}: {fault}" for fault in faults]
    wrong += [f"large: {fault}" for fault in check_large(name)]
    return worst, wrong, count + 1


def run(names: list[str]) -> None:
    from . import backward_check

    for name in names:
        start = time.time()
        worst, wrong, count = backward_check.check_all(name) if name in BACKWARD else check_all(name)
        word = "BAD" if wrong else "ok "
        line = f"{word} {name:28s} {count:3d} cases  error/allowed {worst:.2f}  {time.time() - start:4.1f} s  "
        print(line + "; ".join(wrong[:3]) + (f" … {len(wrong)} in all" if len(wrong) > 3 else ""), flush=True)


def main(words: list[str]) -> None:
    from .objects import built_names

    names = [n for n in built_names() if not words or any(w in n for w in words)]
    lanes = [lane for lane in (names[i::LANES] for i in range(LANES)) if lane]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run"]
    running = [subprocess.Popen([*command, *lane], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for lane in lanes]
    end, good = time.time() + DEADLINE_SECONDS, []
    for process, lane in zip(running, lanes, strict=True):
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"{process.communicate()[0]}\nBAD {' '.join(lane)}: no end within {DEADLINE_SECONDS} s after the lines above"
        shown = [line for line in text.splitlines() if line.startswith(("ok", "BAD"))]
        if process.returncode not in (0, -9):
            shown.append(f"BAD {' '.join(lane)}: exit {process.returncode}: {' | '.join(text.splitlines()[-6:])}")
        print("\n".join(shown), flush=True)
        good += [line.split()[1] for line in shown if line.startswith("ok")]
    GOOD.write_text("\n".join(good))
    print(f"{len(good)} of {len(names)} configurations are right")
    sys.exit(len(good) != len(names))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        main(sys.argv[1:])
