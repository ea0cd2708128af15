"""The commands: exit codes, JSON, files, and errors that name what is known. All on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flash3.bench import check, session
from flash3.bench.providers import Prepared, Provider, providers
from flash3.cli import app
from flash3.settings import override

COMMANDS = ("bench", "tune", "explain", "compile", "check", "env", "demo")
QUICK = ("--device", "cpu", "--rounds", "2", "--ms", "0.01")


def run(*arguments: str, code: int = 0):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    text = run(command, "--help").stdout
    assert command in ("demo", "env") or f"flash3 {command} " in text.split("Examples:")[1]


def test_help_is_quick() -> None:
    """No torch, no rich pictures: what is heavy is imported when it runs."""
    code = "import sys; from flash3.cli import app; print([m for m in ('torch', 'matplotlib', 'rich.progress', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bench_prints_json_and_writes_files(tmp_path: Path) -> None:
    files = [tmp_path / f"run{suffix}" for suffix in (".json", ".csv", ".png", ".svg", ".html")]
    outputs = [word for file in files for word in ("-o", str(file))]
    result = run("bench", "smoke/full", *QUICK, "-p", "flash3", "-p", "naive", "-p", "fa3", "--json", *outputs)
    data = json.loads(result.stdout)
    assert [row["provider"] for row in data["rows"]] == ["flash3", "naive", "fa3"]
    assert json.loads(files[0].read_text()) == data
    assert all(file.stat().st_size > 100 for file in files)
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".csv", ".html", ".json", ".png", ".svg"]


def test_bench_prints_tables() -> None:
    text = run("bench", "smoke/window", *QUICK, "-t", "forward", "-t", "backward", "--solo", "--seconds", "0.02").stdout
    assert "smoke/window, backward" in text
    assert "not supported: it has no windows" in " ".join(text.split())
    many = run("bench", "smoke/full", *(f"b=1,q=1{i},h=1,d=32,dtype=fp32" for i in range(7)), *QUICK, "--no-check").stdout
    assert "shape, forward: T" in " ".join(many.split())  # TFLOP/s or TB/s, as the rates of this machine have it
    assert "b=1,q=1" in many


def test_bench_lists_what_there_is() -> None:
    text = run("bench", "--list").stdout
    for name in ("paper/d128-causal-16k", "models/gpt-oss-window", "flash3:hopper", "pallas"):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "papier"), "groups: paper"),
        (("bench", "smoke", "-p", "fa9"), "known: flash3, flash3:hopper"),
        (("bench", "smoke", "--device", "tpu"), "--device must be one of cpu"),
        (("bench", "smoke", "--l2", "hot"), "cold, warm or auto"),
        (("bench", "smoke", "-t", "sideways"), "forward or backward"),
        (("bench", "smoke", "-o", "x.gif"), ".json, .csv, .png, .svg, .html"),
        (("bench", "smoke", "--dtype", "int4"), "no dtype is called 'int4'"),
        (("explain", "smoke/full", "--device", "h900"), "h200, h100"),
        (("explain", "smoke/full", "--backend", "metal"), "backend must be one of hopper"),
        (("explain", "smoke/full", "-o", "x.json"), ".png, .svg"),
        (("compile", "nothing"), "no workload is called"),
        (("compile", "--lse", "maybe"), "both, with, without"),
        (("compile", "paper", "--device", "cpu"), "h200"),
        (("tune", "smoke/full", "--device", "cuda:7"), "--device must be one of cpu"),
        (("check", "--backend", "metal"), "backend must be one of"),
    ],
)
def test_wrong_questions_end_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, code=2)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["env", "check", "tune"])
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FLASH3_BACKEND", "hoper", "FLASH3_BACKEND must be one of hopper, triton, cpu or empty (the first that fits), got 'hoper'"),
        ("FLASH3_CHECK", "maybe", "FLASH3_CHECK must be 0 or 1, got 'maybe'"),
    ],
)
def test_a_misspelt_environment_is_refused_in_one_line(command: str, variable: str, value: str, message: str) -> None:
    """By every command, before it looks at what it was asked. Only a new process reads the environment."""
    arguments = [sys.executable, "-m", "flash3", command]
    done = subprocess.run(arguments, env={**os.environ, variable: value}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [message])


def test_check_goes_by_the_backend_that_is_set() -> None:
    where = torch.device("cpu")
    with override(backend="hopper"):
        assert check.backends_here(where, []) == ["hopper"]
        assert check.backends_here(where, ["cpu"]) == ["cpu"]
    assert check.backends_here(where, []) == ["cpu"]


def test_a_wrong_result_of_flash3_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(case):
        out = torch.zeros_like(case.request.q)
        return Prepared(lambda: out, lambda result: (result,))

    monkeypatch.setattr(
        session.Plan, "providers", property(lambda self: [Provider("flash3", "", zeros)], lambda self, value: None), raising=False
    )
    assert "max error" in run("bench", "smoke/full", *QUICK, code=1).stdout


def test_peers_alone_end_with_0() -> None:
    assert "naive" in run("bench", "smoke/full", *QUICK, "-p", "naive").stdout


def test_nothing_that_runs_ends_with_2() -> None:
    run("bench", "smoke/full", *QUICK, "-p", "fa3", code=2)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("bench", "smoke/full", *QUICK, "-p", "flash3", "-o", str(tmp_path / "file/run.json"), code=2)
    assert "file" in result.stderr


def test_a_failing_peer_ends_with_0() -> None:
    run("bench", "smoke/full", *QUICK, "-p", "flash3", "-p", "fa4", code=0)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """A real interrupt of a real process: exit code 130, and a whole file with the first workload in it."""
    path = tmp_path / "run.json"
    command = [
        sys.executable,
        "-m",
        "flash3",
        "bench",
        "smoke/full",
        "b=1,q=2048,h=8,d=64",
        "--device",
        "cpu",
        "--rounds",
        "50",
        "-o",
        str(path),
    ]
    here = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here would be ignored there
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    signal.signal(signal.SIGINT, here)
    end = time.monotonic() + 200
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
    data = json.loads(path.read_text())
    assert data["interrupted"] is True
    assert data["rows"][0]["workload"] == "smoke/full"
    assert len(data["rows"][0]["times_ms"]) == 50


# ------------------------------------------------------------------------------------------------ explain


def test_explain_needs_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    picture = tmp_path / "p.png"
    text = run("explain", "paper/d128-causal-4k", "--device", "h200", "-o", str(picture)).stdout
    for fact in (
        "hopper: yes",
        "cpu: no",
        "192 KB of shared memory",
        "31744 full, 2048 partial, 31744 skipped",
        "2048 tiles on 132 slots",
        "15.52 waves",
    ):
        assert fact in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
    (data,) = json.loads(run("explain", "paper/d128-causal-4k", "--device", "h200", "--json").stdout)
    assert data["backend"] == "hopper"
    assert data["footprint"]["registers"] == 240
    assert data["blocks"] == {"full": 31744, "partial": 2048, "skipped": 31744}
    assert 0.27 < data["floor_ms"] < data["predicted_ms"] < 0.3


def test_explain_of_what_nobody_serves_ends_with_1() -> None:
    text = run("explain", "fp8/d128-full-8k", "--device", "h200", code=1).stdout
    assert "cpu: no" in text
    assert "hopper: no" in text


def test_explain_on_the_cpu() -> None:
    (data,) = json.loads(run("explain", "b=1,q=300,h=2,d=32,causal,left=20,dtype=fp32", "--device", "cpu", "--json").stdout)
    assert data["backend"] == "cpu"
    assert data["rates"]["source"] == "measured"
    assert "fused" in data["answers"]["cpu"]


def test_schedules_are_fair() -> None:
    """Every tile once, no slot with two tiles at a time, and no tile waits while a slot is free."""
    from flash3.backends.base import Footprint
    from flash3.bench.catalogue import WORKLOADS
    from flash3.bench.schedule import simulate

    w = WORKLOADS["paper/d128-causal-2k"]
    footprint = Footprint(q_block=128, kv_block=128, head_group=4, threads=384)
    found = simulate(w, footprint, 132)
    assert len(found.jobs) == 8 * 16 * 16
    assert sum(job.cost for job in found.jobs) == 8 * 16 * sum(range(1, 17))
    ends = [0] * found.slots
    for job in found.jobs:
        assert ends[job.slot] == job.start == min(ends)
        ends[job.slot] += job.cost
    assert found.span == max(ends)
    assert 0.9 < found.busy <= 1
    assert [job.cost for job in found.jobs[:8]] == [16] * 4 + [15] * 4  # the longest of a group of heads first


def test_a_backward_is_explained_by_its_key_tiles() -> None:
    pytest.importorskip("cutlass")
    (data,) = json.loads(run("explain", "paper/d128-causal-2k", "-t", "backward", "--device", "h200", "--json").stdout)
    assert data["backend"] == "hopper"
    keys = data["footprint"]["kv_block"]
    assert data["footprint"]["by_keys"] is True
    assert data["schedule"]["tiles"] == 8 * 16 * 2048 // keys
    assert data["tiles"]["kv"] == keys


def test_blocks_are_counted_as_the_mask_says() -> None:
    from flash3.backends.base import Footprint
    from flash3.bench.explain import count
    from flash3.bench.workloads import parse

    w = parse("b=2,q=100,k=130,h=3,kv=1,d=64,causal,left=40")
    found = count(w, Footprint(q_block=32, kv_block=16))
    dense = w.mask.dense(100, 130)
    blocks = [dense[i : i + 32, j : j + 16] for i in range(0, 100, 32) for j in range(0, 130, 16)]
    touched = sum(bool(b.any()) for b in blocks) * 6
    assert found.full + found.partial == touched
    assert found.full <= sum(bool(b.all()) for b in blocks) * 6
    assert found.full + found.partial + found.skipped == len(blocks) * 6


# ------------------------------------------------------------------------------------------------ check, env, compile, tune


def test_check_of_this_machine() -> None:
    found = json.loads(run("check", "--device", "cpu", "--task", "forward", "--json").stdout)
    assert len(found) == 19
    assert all(one["ok"] and not one["refusal"] and one["max_error"] <= one["max_allowed"] for one in found)


def test_check_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    good = providers()["flash3:cpu"].prepare

    def off(case):
        made = good(case)
        return Prepared(made.call, lambda result: tuple(t + 1 for t in made.outputs(result)))

    monkeypatch.setattr(check, "providers", lambda: {"flash3:cpu": Provider("flash3:cpu", "", off)})
    monkeypatch.setattr(check, "GROUP", "check/gqa-prefill-2k")
    assert "0 of 1 are right" in run("check", "--device", "cpu", "-t", "forward", code=1).stdout


def test_env_is_for_bug_reports() -> None:
    data = json.loads(run("env", "--json").stdout)
    assert data["packages"]["torch"]
    assert re.fullmatch("[0-9a-f]{16}", data["kernel_sources"])
    assert data["backends"][0] == "hopper"
    assert str(Path.home()) not in run("env").stdout or str(Path.home()) == "/"


def test_compile_builds_each_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command and the cache; the compiler itself is replaced (tests/hopper compiles for real)."""
    pytest.importorskip("cutlass")
    from flash3.backends.hopper import compile as compiling
    from flash3.settings import override
    from flash3.tune import ahead

    built = []

    def build(spec, tiles, path, options=""):
        built.append((spec, tiles))
        path.write_bytes(repr((spec, tiles)).encode())

    monkeypatch.setattr(compiling, "build_object", build)
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", _InThisProcess)
    (tmp_path / "k").mkdir(mode=0o700)
    with override(cache_dir=str(tmp_path / "k")):
        first = json.loads(run("compile", "paper/d128-*", "fp8", "--device", "h200", "--lse", "with", "--json").stdout)
        again = json.loads(run("compile", "paper/d128-*", "--device", "h200", "--lse", "with", "--json").stdout)
    assert len(first["built"]) == len(built) == len(set(built)) == len(list((tmp_path / "k").glob("*.o"))) > 1
    assert len(first["refused"]) == 6
    assert again["built"] == []
    assert again["found"] == len(built)


class _InThisProcess:
    """As ProcessPoolExecutor, without processes."""

    def __init__(self, *_: object, **__: object) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.pool = ThreadPoolExecutor(1)

    def __enter__(self):
        return self.pool.__enter__()

    def __exit__(self, *error: object) -> None:
        self.pool.__exit__(*error)  # type: ignore[arg-type]


def test_tune_writes_a_table_that_calls_take(tmp_path: Path) -> None:
    from flash3 import tuned
    from flash3.bench.catalogue import WORKLOADS
    from flash3.dispatch import choose
    from flash3.problem import CPU
    from flash3.settings import override

    table, picture = tmp_path / "mine.json", tmp_path / "space.png"
    quick = ("--device", "cpu", "--rounds", "1", "--ms", "0.01", "--limit", "6", "--table", str(table))
    data = json.loads(run("tune", "smoke/window", *quick, "-o", str(picture), "--json").stdout)
    (found,) = data["workloads"]
    assert len(found["candidates"]) == 6
    assert sum(one["winner"] for one in found["candidates"]) == 1
    assert picture.exists()
    assert not list(tmp_path.glob("*.journal"))
    tuned.forget()
    with override(tuned=str(table)):
        tiles = choose(WORKLOADS["smoke/window"].problem(CPU)).tiles
    assert tuned.encode(tiles) == found["winner"]
    tuned.write(table, tuned.Table("another device"))
    assert "is of another device" in " ".join(run("tune", "smoke/window", *quick, code=2).stderr.split())


@pytest.mark.parametrize("where", ["folder.json", "file/x.json"])
def test_outputs_that_cannot_be_written_are_refused_before_measuring(where: str, tmp_path: Path) -> None:
    from flash3.bench.command import checked_outputs

    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"--output .*{where}"):
        checked_outputs([tmp_path / where], (".json",))
    assert checked_outputs([tmp_path / "new" / "x.json"], (".json",))
