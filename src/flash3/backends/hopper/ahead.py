"""Compile ahead: the kernels of common calls, into the disk cache, so that no call waits for the compiler.

Calls are described without tensors and planned as ever; what asks for a kernel then gets its key written down.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator

from ...mask import Mask
from ...problem import Device, DType, Problem, Request, TensorInfo
from ...sequences import Packed, Padded, SequenceKind
from . import plan
from .tiles import ForwardSpec, Tiles

Key = tuple[ForwardSpec, Tiles]
DEVICE = Device("cuda", 0, plan.CAPABILITY, 132, "Hopper")
BATCH = 2
KEY_LENGTHS = (512, 1024, 2048, 16384)
"""One of each class of lengths that the heuristics tell apart."""


def requests(dtype: DType, head_dim: int, mask: Mask, heads_per_kv: int, layout: SequenceKind) -> Iterator[Request]:
    """Calls of one family: every class of lengths, prompts and single queries, with the LSE and without. PADDED: queries over a cache."""
    for k_len, queries, lse in itertools.product(KEY_LENGTHS, (1, None), (False, True)):
        q_len = queries or k_len
        packed = layout is SequenceKind.PACKED
        starts = Packed(cu_seqlens=_info(DType.INT32, BATCH + 1), max_length=q_len)
        ends = Packed(cu_seqlens=_info(DType.INT32, BATCH + 1), max_length=k_len)
        q = _info(dtype, *((BATCH * q_len,) if packed else (BATCH, q_len)), 2 * heads_per_kv, head_dim)
        k = _info(dtype, *((BATCH * k_len,) if packed else (BATCH, k_len)), 2, head_dim)
        if packed:
            yield Request(q=q, k=k, v=k, mask=mask, lse=lse, q_sequences=starts, k_sequences=ends)
        elif layout is SequenceKind.PADDED:
            yield Request(q=q, k=k, v=k, mask=mask, lse=lse, k_sequences=Padded(lengths=_info(DType.INT32, BATCH)))
        else:
            yield Request(q=q, k=k, v=k, mask=mask, lse=lse)


def _info(dtype: DType, *shape: int) -> TensorInfo:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorInfo(dtype, shape, strides, DEVICE)


def keys_of(calls: Iterable[Request]) -> list[Key]:
    """The kernels that these calls would ask for, each once."""
    found: dict[Key, None] = {}

    def written_down(spec: ForwardSpec, tiles: Tiles) -> plan.Kernel:
        found[spec, tiles] = None
        return lambda *arguments: None

    backend = plan.HopperBackend(written_down)
    for call in calls:
        prepare = backend.plan(Problem.of(call)).prepare
        assert prepare is not None
        prepare(call)
    return list(found)


def build(keys: list[Key], jobs: int) -> Iterator[tuple[Key, float]]:
    """Compile what the disk cache lacks, so many at a time; each key, as it is there, with the seconds it took."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        running = {pool.submit(_build_one, key): key for key in keys}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()


def _build_one(key: Key) -> float:
    start = time.perf_counter()
    plan.compiled(*key)
    return time.perf_counter() - start
