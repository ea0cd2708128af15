"""What compiles again and what does not: the key of a kernel, the fingerprint of the disk cache."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash3 import settings
from flash3.backends.hopper import plan
from flash3.backends.hopper.plan import HopperBackend
from flash3.backends.hopper.tiles import ForwardSpec, Tiles
from flash3.mask import Mask
from flash3.problem import Problem, Request
from flash3.sequences import Packed
from tests.hopper.test_plan import info, int32


def requests(d: int, mask: Mask, longest: int, count: int = 60) -> list[Request]:
    """Of one family: other batches, lengths and strides; heads in one ratio."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        batch, groups = draw.randint(1, 300), draw.randint(1, 16)
        q_len, k_len = draw.randint(1, longest), draw.randint(longest // 2 + 1, longest)
        pads = [8 * draw.randint(0, 3) for _ in range(3)]

        def rows(n: int, heads: int, pad: int, batch: int = batch) -> Any:
            row = heads * (d + pad)
            return info(batch, n, heads, d, strides=(n * row, row, d + pad, 1))

        q, k, v = rows(q_len, 2 * groups, pads[0]), rows(k_len, groups, pads[1]), rows(k_len, groups, pads[2])
        found.append(Request(q=q, k=k, v=v, mask=mask, lse=True))
    return found


def kernels_of(found: list[Request], monkeypatch: pytest.MonkeyPatch) -> set[tuple[ForwardSpec, Tiles]]:
    keys = set()

    def kernel(spec: ForwardSpec, tiles: Tiles) -> Any:
        keys.add((spec, tiles))
        return lambda *arguments: None

    monkeypatch.setattr(plan, "packed", lambda numbers: numbers)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    backend = HopperBackend(kernel)
    for r in found:
        backend.plan(Problem.of(r)).prepare(r)  # type: ignore[misc]
    return keys


@pytest.mark.parametrize("longest", [512, 1024, 2048, 16384])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, left=100), Mask(chunk=64)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_batch_lengths_and_strides_do_not_recompile(d: int, mask: Mask, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of one class (up to 512, 1k, 2k, more) share a kernel; so do window widths and offsets. Where few queries share a tile among
    the heads of a group, that is a second one."""
    found = kernels_of(requests(d, mask, longest), monkeypatch)
    assert len(found) <= 2
    assert len({(spec, replace(tiles, heads=1)) for spec, tiles in found}) == 1


def test_packed_batches_do_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do their total and their longest sequence."""
    found = []
    for batch, total, longest in ((1, 2100, 2049), (7, 5000, None), (64, 65536, 4000), (300, 9000, 3000)):
        q, k = info(total, 8, 128), info(total, 2, 128)
        side = Packed(cu_seqlens=int32(batch + 1), max_length=longest)
        found.append(Request(q=q, k=k, v=k, q_sequences=side, k_sequences=side, mask=Mask(causal=True, left=batch)))
    assert len(kernels_of(found, monkeypatch)) == 1


def test_a_later_process_loads_what_an_earlier_one_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real compiler, which the second one must not ask."""
    pytest.importorskip("cutlass")
    from flash3.backends.hopper import compile, heuristics

    spec = ForwardSpec(qk_width=32, v_width=32)
    tiles = heuristics.choose(spec, 4096)
    with settings.override(cache_dir=str(tmp_path)):
        compile._cache.cache_clear()
        compile.kernel(spec, tiles)
        compile._cache.cache_clear()
        monkeypatch.setattr(compile, "compile_forward", None)
        compile.kernel(spec, tiles)
    compile._cache.cache_clear()
    assert len(list(tmp_path.glob("*.o"))) == 1


def test_the_fingerprint_names_what_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from flash3.backends.hopper import compile

    before = compile.fingerprint()
    for name, value in (("toolkit", lambda: "cu99"), ("source_hash", lambda: "other"), ("TARGET", "other")):
        with monkeypatch.context() as m:
            m.setattr(compile, name, value)
            assert compile.fingerprint() != before
