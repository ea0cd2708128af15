"""Tables of tuned tiles: written whole, read once, believed only where they fit."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flash3
from flash3 import tuned
from flash3.backends.cpu.plan import CpuBackend
from flash3.backends.cpu.tiles import Method, Tiles
from flash3.backends.hopper.plan import HopperBackend
from flash3.backends.hopper.tiles import SequenceLayout, Turns
from flash3.backends.hopper.tiles import Tiles as HopperTiles
from flash3.bench.catalogue import WORKLOADS
from flash3.bench.roofline import model_named
from flash3.bench.workloads import even
from flash3.mask import Mask
from flash3.problem import CPU, DType, Task
from flash3.settings import override
from flash3.tuned import Entry, Table

H200 = model_named("h200").device
WORKLOAD = even("x", 1, 1000, 4, 64, mask=Mask(left=99, right=0), dtype=DType.FP32)
MINE = Tiles(method=Method.BLOCKS, rows=64, keys=128)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tuned.forget()
    yield
    tuned.forget()


def entry_for(backend, workload, device, tiles, **changes) -> Entry:
    problem = workload.problem(device)
    key = tuned.encode(backend.tuning_key(problem))
    entry = Entry(backend.name, key, problem.sizes.q_len, tuned.reach(problem.mask, problem.sizes), tuned.encode(tiles))
    return replace(entry, **changes)


def written(path: Path, *entries: Entry, device: str = "cpu") -> str:
    tuned.write(path, Table(device, entries))
    return str(path)


def test_a_table_survives_the_file(tmp_path: Path) -> None:
    entry = entry_for(CpuBackend(), WORKLOAD, CPU, MINE)
    table = Table("cpu", (entry,))
    tuned.write(tmp_path / "a/t.json", table)
    assert tuned.read(tmp_path / "a/t.json") == table
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["t.json"]
    tuned.write(tmp_path / "a/t.json", Table("cpu"))
    assert tuned.read(tmp_path / "a/t.json").entries == ()


def test_the_plan_takes_the_table_first(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", entry_for(CpuBackend(), WORKLOAD, CPU, MINE))
    problem = WORKLOAD.problem(CPU)
    assert CpuBackend().plan(problem).tiles is None
    with override(tuned=path):
        plan = CpuBackend().plan(problem)
        assert plan.tiles == MINE
        assert path in plan.notes[0]
        assert CpuBackend().plan(problem, Tiles(method=Method.FUSED, rows=128)).tiles.rows == 128  # what is given is stronger
        assert CpuBackend().plan(replace(WORKLOAD, softcap=3.0).problem(CPU)).tiles is None  # another kernel
    with override(tuned=tuned.OFF):
        assert CpuBackend().plan(problem).tiles is None


def test_a_changed_setting_changes_remembered_calls(tmp_path: Path) -> None:
    q = torch.randn(1, 1000, 4, 64)
    path = written(tmp_path / "t.json", entry_for(CpuBackend(), WORKLOAD, CPU, replace(MINE, rows=8)))
    before = flash3.attention(q, q, q, mask=WORKLOAD.mask)
    with override(tuned=path):
        assert f"the tuned table {path}" in str(flash3.explain(q, q, q, mask=WORKLOAD.mask))
        after = flash3.attention(q, q, q, mask=WORKLOAD.mask)
    torch.testing.assert_close(before, after)
    assert not torch.equal(before, after)  # by other blocks


@pytest.mark.parametrize(("q_len", "served"), [(1000, True), (700, True), (2000, True), (2100, False), (400, False)])
def test_lengths_nearby_are_served(tmp_path: Path, q_len: int, served: bool) -> None:
    path = written(tmp_path / "t.json", entry_for(CpuBackend(), WORKLOAD, CPU, MINE))
    other = even("y", 3, q_len, 8, 64, mask=WORKLOAD.mask, dtype=DType.FP32)
    with override(tuned=path):
        assert (CpuBackend().plan(other.problem(CPU)).tiles == MINE) is served


def test_the_nearest_of_several() -> None:
    entries = tuple(Entry("b", {}, n, n, {"n": n}) for n in (512, 1024, 4096))
    assert Table("x", entries).nearest("b", {}, 800, 800).tiles == {"n": 1024}
    assert Table("x", entries).nearest("b", {}, 600, 600).tiles == {"n": 512}
    assert Table("x", entries).nearest("b", {}, 100, 100) is None
    assert Table("x", entries).nearest("c", {}, 512, 512) is None
    again = Table("x", entries).with_entry(Entry("b", {}, 512, 512, {"n": 0}))
    assert len(again.entries) == 3
    assert again.nearest("b", {}, 512, 512).tiles == {"n": 0}


@pytest.mark.parametrize(
    ("tiles", "why"),
    [
        ({"method": "blocks", "rows": 0, "keys": 5}, "rows must be from 1"),
        ({"method": "magic", "rows": 64}, "magic"),
        ({"method": "fused", "rows": 64, "warps": 4}, "no warps"),
        ({"method": "fused", "rows": "64"}, "'64' is no int"),
        ({"method": "fused", "rows": True}, "True is no int"),
        ({}, "rows"),
    ],
)
def test_what_does_not_fit_is_ignored_with_a_warning(tmp_path: Path, tiles: dict, why: str) -> None:
    path = written(tmp_path / "t.json", replace(entry_for(CpuBackend(), WORKLOAD, CPU, MINE), tiles=tiles))
    with override(tuned=path):
        with pytest.warns(RuntimeWarning, match=f"ignores tuned tiles .*{why}"):
            assert CpuBackend().plan(WORKLOAD.problem(CPU)).tiles is None
        with warnings.catch_warnings():  # once is enough
            warnings.simplefilter("error")
            CpuBackend().plan(WORKLOAD.problem(CPU))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 7, "device": "cpu", "entries": []}', '{"format": 1, "device": "cpu", "entries": [{"x": 1}]}']
)
def test_a_bad_file_is_no_reason_to_stop(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with override(tuned=str(path)), pytest.warns(RuntimeWarning, match="without a table"):
        assert CpuBackend().plan(WORKLOAD.problem(CPU)).tiles is None
    with pytest.raises(ValueError, match=r"t\.json is no table"):
        tuned.read(path)
    with override(tuned=str(tmp_path / "none.json")), pytest.warns(RuntimeWarning, match="finds no table"):
        CpuBackend().plan(WORKLOAD.problem(CPU))


def test_hopper_takes_its_table_and_holds_it_against_the_budget(tmp_path: Path) -> None:
    backend, workload = HopperBackend(), WORKLOADS["paper/d128-causal-4k"]
    problem = workload.problem(H200)
    own = backend.plan(problem).tiles
    other = replace(own, parts=1, hold=37)
    too_large = replace(own, stages=9)
    path = written(tmp_path / "t.json", entry_for(backend, workload, H200, other), device="NVIDIA H200")
    with override(tuned=path):
        assert backend.plan(problem).tiles == other
        assert backend.footprint(problem).smem_bytes == backend.footprint(problem, other).smem_bytes
        assert backend.plan(workload.problem(model_named("h100").device)).tiles == own  # another device's table
        assert backend.plan(WORKLOADS["paper/d128-full-4k"].problem(H200)).tiles != other
    tuned.forget()
    written(tmp_path / "t.json", entry_for(backend, workload, H200, too_large), device="NVIDIA H200")
    with override(tuned=path), pytest.warns(RuntimeWarning, match="shared memory"):
        assert backend.plan(problem).tiles == own


def test_tiles_survive_json() -> None:
    tiles = HopperTiles(q=128, kv=96, stages=2, o_columns=64, turns=Turns.PING_PONG, hold=30)
    assert tuned.decode(HopperTiles, json.loads(json.dumps(tuned.encode(tiles)))) == tiles
    layout = SequenceLayout(leftpad=True)
    assert tuned.decode(SequenceLayout, tuned.encode(layout)) == layout


@pytest.mark.parametrize("table", sorted(tuned.FOLDER.glob("*.json")), ids=lambda p: p.name)
def test_shipped_tables_are_good(table: Path) -> None:
    """Every entry of a shipped table decodes, fits, and stands under the name of its device."""
    found = tuned.read(table)
    assert table.name == f"{tuned.slug(found.device)}.json"
    device = next(m.device for n in ("h200", "h100") if (m := model_named(n)).device.name == found.device)
    for entry in found.entries:
        workload = WORKLOADS[entry.evidence["workload"]]
        problem = workload.problem(device, Task(entry.evidence.get("task", "forward")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tuned.encode(HopperBackend().plan(problem).tiles) == entry.tiles


def test_names_of_files() -> None:
    assert tuned.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert tuned.shipped("NVIDIA H200").name == "nvidia-h200.json"


def _write_for_ever(path: Path) -> None:
    entries = tuple(Entry("b", {}, n, n, {"n": n}) for n in range(1, 400))
    for n in range(10**6):
        tuned.write(path, Table("cpu", entries[: 1 + n % len(entries)]))


def test_a_killed_writer_leaves_a_whole_table(tmp_path: Path) -> None:
    """A process that does nothing but write is killed in the middle; a reader meanwhile and afterwards sees whole tables only."""
    path = tmp_path / "t.json"
    tuned.write(path, Table("cpu"))
    writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(path,), daemon=True)
    writer.start()
    seen = 0
    end = time.monotonic() + 20
    while seen < 30 and time.monotonic() < end:
        seen += bool(tuned.read(path).entries)
    os.kill(writer.pid, 9)
    writer.join()
    assert seen == 30
    assert tuned.read(path).device == "cpu"


@pytest.mark.parametrize("wrong", [{"q_len": "a"}, {"reach": None}, {"spec": []}, {"tiles": 3}, {"backend": 1}], ids=str)
def test_an_entry_of_wrong_types_is_no_entry(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    entry = {"backend": "cpu", "spec": {}, "q_len": 1, "reach": 1, "tiles": {}, "evidence": {}} | wrong
    path.write_text(json.dumps({"format": tuned.FORMAT, "device": "cpu", "entries": [entry]}))
    with pytest.raises(ValueError, match=f"no table of tuned tiles .*{next(iter(wrong))}"):
        tuned.read(path)
