"""The named workloads: the paper's grid, one group per feature, shapes of real models, and small ones for a CPU.

A name (`paper/d128-causal-4k`), a group (`paper`), a pattern (`paper/*-causal-*`) or a shape spelled out
(`b=2,q=4096,h=32,kv=8,d=128,causal`) selects. Tests, the benchmark and the tuner take their shapes from here.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..mask import FULL, Mask
from ..problem import DType
from ..sequences import SequenceKind
from .workloads import Workload, describe_mask, even, parse, short_number

CAUSAL = Mask(causal=True)
PAPER_TOKENS, PAPER_HIDDEN = 16384, 2048


def paper() -> Iterator[Workload]:
    """The FlashAttention-3 paper's grid: 16k tokens in all, hidden size 2048, lengths 512 … 16k, three head dims, full and causal."""
    for dim in (64, 128, 256):
        for causal in (False, True):
            yield from (paper_cell(dim, causal, length) for length in (512, 1024, 2048, 4096, 8192, 16384))


def paper_cell(dim: int, causal: bool, length: int) -> Workload:
    """One cell of the paper's grid."""
    mask = CAUSAL if causal else FULL
    name = f"paper/d{dim}-{describe_mask(mask)}-{short_number(length)}"
    return even(name, PAPER_TOKENS // length, length, PAPER_HIDDEN // dim, dim, mask=mask)


def lognormal(count: int, total: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Lengths like those of documents: lognormal with sigma 1, `total` tokens in all."""
    draws = random.Random(seed)
    weights = [draws.lognormvariate(0, 1) for _ in range(count)]
    lengths = [max(1, int(total * w / sum(weights))) for w in weights]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple((n, n) for n in lengths)


def _features() -> Iterator[Workload]:
    yield from (even(f"short/d128-causal-{s}", 64, s, 16, 128, mask=CAUSAL) for s in (64, 128, 256))
    yield from (even(f"long/d128-causal-{short_number(s)}", 1, s, 16, 128, mask=CAUSAL) for s in (32768, 65536, 131072))
    yield from (even(f"gqa/prefill-{short_number(s)}", 1, s, (32, 8), 128, mask=CAUSAL) for s in (2048, 8192, 32768))
    yield even("gqa/chunk-of-a-prompt", 1, 2048, (32, 8), 128, k_len=32768, mask=CAUSAL)
    packed = lognormal(64, 65536)
    for mask in (FULL, CAUSAL):
        name = f"packed/lognormal-64k-{describe_mask(mask)}"
        yield Workload(
            name=name, lengths=packed, heads_q=16, heads_kv=16, head_dim=128, value_dim=128, mask=mask, layout=SequenceKind.PACKED
        )
    for width, total in ((1024, 16384), (4096, 65536)):
        yield even(f"window/{short_number(width)}-of-{short_number(total)}", 1, total, 16, 128, mask=Mask(causal=True, left=width - 1))
    yield even("window/chunks-of-8k", 1, 65536, 16, 128, mask=Mask(causal=True, chunk=8192))
    for batch, keys in ((1, 8192), (1, 131072), (8, 8192), (32, 8192)):
        name = f"decode/b{batch}-{short_number(keys)}"
        yield even(name, batch, 1, (32, 8), 128, k_len=keys, mask=CAUSAL, layout=SequenceKind.PADDED)
    yield even("decode/b8-8k-paged", 8, 1, (32, 8), 128, k_len=8192, mask=CAUSAL, layout=SequenceKind.PAGED)
    yield even("decode/b8-8k-speculative", 8, 4, (32, 8), 128, k_len=8192, mask=CAUSAL, layout=SequenceKind.PADDED)
    for dim in (64, 128, 256):
        for mask in (FULL, CAUSAL):
            yield even(f"fp8/d{dim}-{describe_mask(mask)}-8k", 2, 8192, PAPER_HIDDEN // dim, dim, mask=mask, dtype=DType.E4M3)


def _models() -> Iterator[Workload]:
    """Prefill of one layer."""
    yield even("models/llama-3-8b", 1, 8192, (32, 8), 128, mask=CAUSAL)
    yield even("models/llama-3-70b", 1, 8192, (64, 8), 128, mask=CAUSAL)
    yield even("models/qwen3-32b", 1, 8192, (64, 8), 128, mask=CAUSAL)
    yield even("models/qwen3-30b-a3b", 1, 8192, (32, 4), 128, mask=CAUSAL)
    yield even("models/deepseek-v3", 1, 4096, 128, (192, 128), mask=CAUSAL)
    yield even("models/gemma-2-9b-window", 1, 8192, (16, 8), 256, mask=Mask(causal=True, left=4095), softcap=50.0)
    yield even("models/gemma-2-9b-global", 1, 8192, (16, 8), 256, mask=CAUSAL, softcap=50.0)
    yield even("models/gpt-oss-window", 1, 8192, (64, 8), 64, mask=Mask(causal=True, left=127), sink=True)
    yield even("models/gpt-oss-global", 1, 8192, (64, 8), 64, mask=CAUSAL, sink=True)
    yield even("models/video-diffusion", 1, 32768, 24, 128)


def _common() -> Iterator[Workload]:
    """One call of each class of lengths that heuristics tell apart, prompts and single queries: what `flash3 compile` compiles unasked."""
    for dim, mask, layout in itertools.product((64, 128), (FULL, CAUSAL), (SequenceKind.DENSE, SequenceKind.PACKED)):
        for keys, one in itertools.product((512, 1024, 2048, 16384), (False, True)):
            name = f"common/d{dim}-{describe_mask(mask)}-{layout.value}-{short_number(keys)}{'-one-query' if one else ''}"
            yield even(name, 2, 1 if one else keys, 8, dim, k_len=keys, mask=mask, layout=layout)


def _small() -> Iterator[Workload]:
    """For a CPU: seconds, not hours."""
    yield even("cpu/full", 1, 4096, 8, 64, dtype=DType.FP32)
    yield even("cpu/causal", 1, 4096, 8, 64, mask=CAUSAL, dtype=DType.FP32)
    yield even("cpu/causal-gqa", 1, 4096, (8, 2), 64, mask=CAUSAL, dtype=DType.FP32)
    lengths = tuple((n, n) for n in (1100, 37, 512, 803, 256, 64, 1000, 324))
    shape: dict[str, Any] = {"heads_q": 8, "heads_kv": 8, "head_dim": 64, "value_dim": 64}
    yield Workload(name="cpu/packed-causal", lengths=lengths, **shape, mask=CAUSAL, dtype=DType.FP32, layout=SequenceKind.PACKED)
    yield even("cpu/window-1k", 1, 4096, 8, 64, mask=Mask(left=1023, right=0), dtype=DType.FP32)
    yield even("cpu/window-1k-of-16k", 1, 16384, 8, 64, mask=Mask(left=1023, right=0), dtype=DType.FP32)
    yield even("smoke/full", 2, 200, 4, 64, dtype=DType.FP32)
    yield even("smoke/causal", 1, 256, (4, 2), 64, mask=CAUSAL, dtype=DType.FP32)
    yield even("smoke/window", 1, 300, 2, 32, mask=Mask(left=60, right=10), dtype=DType.FP32)


CHECKED = (
    *(f"paper/d{dim}-{mask}-4k" for dim in (64, 128, 256) for mask in ("full", "causal")),
    "gqa/prefill-2k",
    "gqa/chunk-of-a-prompt",
    "packed/lognormal-64k-full",
    "packed/lognormal-64k-causal",
    "window/1k-of-16k",
    "window/chunks-of-8k",
    "decode/b8-8k",
    "decode/b8-8k-paged",
    "decode/b8-8k-speculative",
    "models/deepseek-v3",
    "models/gemma-2-9b-window",
    "models/gpt-oss-window",
    "fp8/d128-causal-8k",
)
"""One for each feature; the group `check` has them in a small size."""


WORKLOADS: dict[str, Workload] = {w.name: w for w in (*paper(), *_features(), *_models(), *_common(), *_small())}
WORKLOADS |= {w.name: w for w in (replace(WORKLOADS[name].small(), name=f"check/{name.replace('/', '-')}") for name in CHECKED)}
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(w.group for w in WORKLOADS.values()))


def select(words: list[str]) -> list[Workload]:
    """The workloads that words name, each once, in the order of the words.

    Raises:
        ValueError: a word names nothing; the message lists the groups and the nearest names.
    """
    found: dict[str, Workload] = {}
    for word in words:
        chosen = (
            [parse(word)] if "=" in word else [w for w in WORKLOADS.values() if word in (w.name, w.group) or fnmatch.fnmatch(w.name, word)]
        )
        if not chosen:
            near = difflib.get_close_matches(word, WORKLOADS, n=4, cutoff=0.3)
            also = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(
                f"no workload is called {word!r}; groups: {', '.join(GROUPS)}, or a shape such as b=2,q=4096,h=16,d=128,causal{also}"
            )
        found.update((w.name, w) for w in chosen)
    return list(found.values())
