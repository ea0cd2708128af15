"""What the grid of benchmarks.forward leaves out: `python -m benchmarks.features [--json FILE] [SECTION ...]` (needs build/hopper.tar.xz).

packed     64 sequences of lognormal lengths, 64k tokens in all, beside dense attention of the same FLOPs and FlashAttention-3's varlen
window     a window of 4k keys in 64k tokens beside full causal attention: the ratio of times and that of visited areas
shared     few queries of grouped heads with and without the heads of a group in one tile
outliers   RMSE against float64 on N(0, 1) + N(0, 100)·Bernoulli(0.001), 1×4096, 8 heads of 128: of the inputs in float64 (the paper's
           table; mostly the rounding of the inputs), and of the rounded inputs

Times are interleaved medians as in benchmarks.forward; FlashAttention-3 runs where FA3_LIBRARY names it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from flash3 import reference
from flash3.mask import Mask
from flash3.problem import Request
from flash3.sequences import Packed

from .calls import prepare_named
from .objects import unpacked
from .timing import Run, fa3, interleaved, ready

TOKENS, SEQUENCES = 65536, 64
PACKED_CELLS = ((64, 32, True), (128, 16, False), (128, 16, True), (256, 8, True), (128, 4, False), (128, 4, True))
"""(head dim, heads, causal)"""
WINDOW, WINDOWED = 4096, 65536
ROUNDS, MILLISECONDS = 7, 4.0
OUTLIER_GOALS = {torch.float16: 1.624e-4, torch.bfloat16: 1.320e-3}
"""What FlashAttention-3 reaches on this distribution, and so the most that is allowed."""
Rows = list[dict[str, Any]]
Peer = Callable[..., Run]


def lognormal_lengths(count: int = SEQUENCES, total: int = TOKENS, sigma: float = 1.0, seed: int = 0) -> list[int]:
    """Lengths of `count` sequences, `total` in all."""
    draw = random.Random(seed)
    weights = [draw.lognormvariate(0.0, sigma) for _ in range(count)]
    lengths = [max(1, int(w / sum(weights) * total)) for w in weights]
    lengths[0] += total - sum(lengths)
    return lengths


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def medians(makers: dict[str, Callable[[], Run]]) -> dict[str, float]:
    """Milliseconds."""
    return {name: statistics.median(t) for name, t in interleaved(ready(makers, graph=False), ROUNDS, MILLISECONDS).items()}


def launch(request: Request, name: str) -> Run:
    return prepare_named(request, name)[0]


def packed(theirs: Peer | None) -> Rows:
    """Rates count visible pairs only, so that tiles cut by the end of a sequence cost."""
    rows = []
    lengths = lognormal_lengths()
    area = sum(n * n for n in lengths)
    like = round(area / TOKENS / 128) * 128  # dense sequences of this length have as many FLOPs per token
    count, starts, longest = round(TOKENS / like), starts_of(lengths), max(lengths)
    arrays = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    sequences = Packed(cu_seqlens=starts, max_length=longest)
    for d, heads, causal in PACKED_CELLS:
        name, mask = f"{d}_{'causal' if causal else 'full'}", Mask(causal=causal)
        q, k, v = (randn(TOKENS, heads, d) for _ in range(3))
        dense = [randn(count, like, heads, d) for _ in range(3)]
        request = Request(q=q, k=k, v=v, q_sequences=sequences, k_sequences=sequences, mask=mask)
        beside = Request(q=dense[0], k=dense[1], v=dense[2], mask=mask)
        makers: dict[str, Callable[[], Run]] = {
            "packed": lambda r=request, n=name: launch(r, f"{n}_packed"),
            "dense": lambda r=beside, n=name: launch(r, n),
        }
        if theirs:
            makers["fa3"] = lambda t=(q, k, v), c=causal: theirs(*t, c, **arrays)
        work = {"packed": area, "fa3": area, "dense": count * like * like}
        rates = {n: 4 * d * heads * work[n] / (2 if causal else 1) / t / 1e9 for n, t in medians(makers).items()}
        ratio = rates["packed"] / rates["dense"]
        rows.append({"d": d, "heads": heads, "causal": causal, "dense_length": like, "tflops": rates, "ratio": ratio})
    return rows


def window(theirs: Peer | None) -> Rows:
    q, k, v = (randn(1, WINDOWED, 8, 128) for _ in range(3))
    narrow, whole = Mask(causal=True, left=WINDOW - 1), Mask(causal=True)
    makers: dict[str, Callable[[], Run]] = {
        "window": lambda: launch(Request(q=q, k=k, v=v, mask=narrow), "128_window"),
        "causal": lambda: launch(Request(q=q, k=k, v=v, mask=whole), "128_causal"),
    }
    if theirs:
        makers |= {"fa3 window": lambda: theirs(q, k, v, True, left=WINDOW - 1), "fa3 causal": lambda: theirs(q, k, v, True)}
    times = medians(makers)
    areas = narrow.area(WINDOWED, WINDOWED) / whole.area(WINDOWED, WINDOWED)
    return [{"ms": times, "times": times["window"] / times["causal"], "areas": areas}]


def shared(theirs: Peer | None) -> Rows:
    rows = []
    batch, kv_heads, group, k_len = 16, 8, 4, 4096
    k, v = (randn(batch, k_len, kv_heads, 128) for _ in range(2))
    for q_len in (1, 8, 32, 96, 192):
        q = randn(batch, q_len, kv_heads * group, 128)
        request = Request(q=q, k=k, v=v, mask=Mask(causal=True))
        makers: dict[str, Callable[[], Run]] = {
            "shared": lambda r=request: launch(r, "128_causal_shared"),
            "apart": lambda r=request: launch(r, "128_causal_gqa"),
        }
        if theirs:
            makers["fa3"] = lambda q=q: theirs(q, k, v, True)
        times = medians(makers)
        rows.append({"q_len": q_len, "ms": times, "speedup": times["apart"] / times["shared"]})
    return rows


def outliers(theirs: Peer | None) -> Rows:
    rows = []
    for dtype, name in ((torch.float16, "128_full_fp16"), (torch.bfloat16, "128_full")):
        torch.manual_seed(0)
        exact = [_with_outliers(1, 4096, 8, 128) for _ in range(3)]
        q, k, v = (t.to(dtype) for t in exact)
        run, out, _ = prepare_named(Request(q=q, k=k, v=v), name)
        run()
        outs = {"flash3": out}
        if theirs:
            found = theirs(q, k, v, False)()
            outs["fa3"] = found if isinstance(found, torch.Tensor) else found[0]
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "goal": OUTLIER_GOALS[dtype]}
        for of, inputs in (("rmse", exact), ("rmse_of_rounded", (q, k, v))):
            want, _ = reference.attention(Request(q=inputs[0], k=inputs[1], v=inputs[2]))
            row[of] = {n: _rmse(o, want) for n, o in outs.items()}
        rows.append(row)
    return rows


def _with_outliers(*shape: int) -> torch.Tensor:
    base, large = (torch.randn(*shape, device="cuda", dtype=torch.float64) for _ in range(2))
    return base + 10.0 * large * (torch.rand(*shape, device="cuda") < 0.001)


def _rmse(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return (ours.double() - exact).square().mean().sqrt().item()


SECTIONS: dict[str, Callable[[Peer | None], Rows]] = {"packed": packed, "window": window, "shared": shared, "outliers": outliers}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("sections", nargs="*", choices=[[], *SECTIONS], metavar="SECTION")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    library = os.environ.get("FA3_LIBRARY")
    theirs = fa3(library) if library else None
    result: dict[str, Any] = {"sources": unpacked()["sources"], "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in a.sections or SECTIONS:
        result[name] = SECTIONS[name](theirs)
        for row in result[name]:
            print(name, "  ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
        torch.cuda.empty_cache()
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_shown(number)}" for key, number in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
