"""The search: a journal that survives kills, candidates that are checked, halving that keeps the right ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash3 import tuned
from flash3.backends.cpu.plan import CpuBackend
from flash3.backends.cpu.tiles import Method, Tiles
from flash3.backends.hopper import budget, heuristics, space
from flash3.backends.hopper.tiles import ForwardSpec
from flash3.bench import accuracy
from flash3.bench.catalogue import WORKLOADS, select
from flash3.bench.clock import Timing
from flash3.bench.roofline import model_named
from flash3.mask import MaskKind
from flash3.problem import CPU, Task
from flash3.settings import override
from flash3.tune import ahead, search
from flash3.tune.journal import Journal
from flash3.tune.search import Candidate, Tuner, entry, survivors

WINDOW = WORKLOADS["smoke/window"]


class FakeTuner(Tuner):
    """Time is a function of the tiles; every burst is counted."""

    bursts: int
    dies_after: int | None
    cost: Callable[[Any], float]
    by_batch: dict[int, Callable[[Any], float]]

    @classmethod
    def make(cls, journal: Journal, cost: Callable[[Any], float], dies_after: int | None = None, **more: Any) -> FakeTuner:
        tuner = cls(torch.device("cpu"), journal, **more)
        for name, value in (("bursts", 0), ("dies_after", dies_after), ("cost", cost), ("by_batch", {})):
            object.__setattr__(tuner, name, value)  # Tuner is frozen
        return tuner

    def clock(self, runs: Any, tiles: Any) -> Any:
        tuner = self

        class Clock:
            timing = Timing.WALL

            def burst_ms(self, count: int) -> float:
                object.__setattr__(tuner, "bursts", tuner.bursts + 1)
                if tuner.dies_after is not None and tuner.bursts > tuner.dies_after:
                    raise KeyboardInterrupt
                return tuner.by_batch.get(runs.case.workload.batch, tuner.cost)(tiles)

        return Clock()


def cost(tiles: Tiles | None) -> float:
    """Best: blocks of 128 × 256."""
    if tiles is None:
        return 2.0
    return 1.0 + abs(tiles.rows - 128) / 100 + abs(tiles.keys - 256) / 100


def test_the_fastest_is_found_and_written(tmp_path: Path) -> None:
    outcome = FakeTuner.make(Journal(None, "x"), cost).tune(WINDOW, Task.FORWARD)
    assert outcome.winner is not None
    assert outcome.winner.tiles == Tiles(method=Method.BLOCKS, rows=128, keys=256)
    assert outcome.gain == pytest.approx(2.0)
    assert len(outcome.candidates) == len(CpuBackend().tuning_space(WINDOW.problem(search._plain_device(outcome))))
    assert all(not c.fault for c in outcome.candidates)
    rungs = [c.rung for c in outcome.candidates]
    assert rungs.count(0) >= len(rungs) // 2 - 1  # half of them were timed once only
    found = entry(outcome, {"task": "forward"})
    assert found is not None
    assert found.tiles == tuned.encode(outcome.winner.tiles)
    assert found.evidence["gain"] == 2.0
    assert found.evidence["heuristic_ms"] == 2.0


def test_the_heuristic_stays_where_it_is_as_good() -> None:
    outcome = FakeTuner.make(Journal(None, "x"), lambda tiles: 1.0 if tiles else 1.005).tune(WINDOW, Task.FORWARD)
    assert outcome.winner is outcome.own
    assert outcome.gain == 1.0
    assert entry(outcome, {}) is None
    forward, backward = (tuned.Entry("cpu", {"task": t}, 1, 1, {}, {"workload": WINDOW.name, "task": t}) for t in ("forward", "backward"))
    table = tuned.Table("cpu").with_entry(forward).with_entry(backward)
    assert search.merged(table, [(outcome, None)]).entries == (backward,)  # what no longer wins goes


def test_who_is_ahead_once_by_luck_does_not_win() -> None:
    """Candidates look twice as fast until the last rung has decided."""
    least = 3 * 3 * 2 + 2 * 2  # bursts of the rung after it
    whole = FakeTuner.make(Journal(None, "x"), lambda tiles: 0.5 if tiles else 1.0, limit=4)
    assert whole.tune(WINDOW, Task.FORWARD).gain == pytest.approx(2.0)
    tuner = FakeTuner.make(Journal(None, "x"), lambda tiles: 0.5 if tiles and tuner.bursts <= whole.bursts - least else 1.0, limit=4)
    outcome = tuner.tune(WINDOW, Task.FORWARD)
    assert tuner.bursts == whole.bursts
    assert outcome.winner is outcome.own
    assert outcome.gain == 1.0


def test_who_is_behind_with_a_quarter_of_the_work_does_not_win() -> None:
    """An entry serves any batch."""
    workload = replace(WINDOW, lengths=WINDOW.lengths * 4)
    quarter = workload.quarter()
    assert quarter is not None
    assert quarter.lengths == WINDOW.lengths
    for behind, wins in ((1.0, True), (1.02, False)):
        tuner = FakeTuner.make(Journal(None, "x"), lambda tiles: 0.5 if tiles else 1.0, limit=2)
        object.__setattr__(tuner, "by_batch", {1: lambda tiles, behind=behind: behind if tiles else 1.0})
        outcome = tuner.tune(workload, Task.FORWARD)
        assert (outcome.winner is not outcome.own) == wins


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("b=9,q=100,h=8,kv=2,d=64", (2, 8, 2)),
        ("b=1,q=100,h=32,kv=8,d=64", (1, 8, 2)),
        ("b=3,q=100,h=4,d=64", (3, 1, 1)),
        ("b=3,q=100,h=12,kv=3,d=64", None),
    ],
)
def test_a_quarter(shape: str, expected: tuple[int, int, int] | None) -> None:
    (workload,) = select([shape])
    less = workload.quarter()
    assert (less and (less.batch, less.heads_q, less.heads_kv)) == expected


def test_time_that_is_up_leaves_the_rest_out() -> None:
    """Here after the third check, and after the first rung."""
    ticks = iter(range(1000))
    tuner = FakeTuner.make(Journal(None, "x"), cost, seconds=3.5, now=lambda: next(ticks))
    outcome = tuner.tune(WINDOW, Task.FORWARD)
    faults = [c.fault for c in outcome.candidates]
    assert faults[:3] == ["", "", ""]
    assert set(faults[3:]) == {search.TIME_IS_UP}
    assert not any(c.wrong for c in outcome.candidates)
    ticks = iter([0] * (2 + len(faults)) + [10] * 1000)
    outcome = FakeTuner.make(Journal(None, "x"), cost, seconds=3.5, now=lambda: next(ticks)).tune(WINDOW, Task.FORWARD)
    assert sorted({c.rung for c in outcome.candidates}) == [0, 1, 2]  # the second is the last, and then once more
    assert outcome.winner is not None


def test_a_candidate_that_hangs_ends_the_run_and_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ended = tmp_path / "t.journal", threading.Event()
    monkeypatch.setattr(search, "HANG_SECONDS", 0.5)  # the other checks here take no time

    def stuck(self: search.Runs, tiles: Any) -> str:
        if tiles is not None and tiles.rows == 128:
            assert ended.wait(60)
            raise KeyboardInterrupt  # the process ends here
        return ""

    monkeypatch.setattr(search.Runs, "fault", stuck)
    texts: list[str] = []
    tuner = FakeTuner.make(Journal(path, "x"), cost, end=lambda text: (texts.append(text), ended.set()))
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(WINDOW, Task.FORWARD)
    assert "run the same command again" in texts[-1]
    monkeypatch.setattr(search, "HANG_SECONDS", 60.0)
    monkeypatch.setattr(search.Runs, "fault", lambda self, tiles: "")
    again = FakeTuner.make(Journal(path, "x"), cost).tune(WINDOW, Task.FORWARD)
    hung = [c for c in again.candidates if c.fault]
    assert len(hung) == 1
    assert hung[0].wrong
    assert hung[0].fault.startswith(search.HANGS)


def test_gradients_of_a_long_call_are_checked_on_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "MOST_PAIRS", 100 * 100 * 2)
    monkeypatch.setattr(search, "LONGEST_CHECKED", 100)
    seen = []
    run = search.Runs.call

    def call(self: search.Runs, tiles: Any) -> Any:
        seen.append(self.case.workload.q_len)
        return run(self, tiles)

    monkeypatch.setattr(search.Runs, "call", call)
    outcome = FakeTuner.make(Journal(None, "x"), cost, limit=2).tune(WORKLOADS["smoke/causal"], Task.BACKWARD)
    assert [c.fault for c in outcome.candidates] == ["", ""]
    assert seen == [86, 86]


def test_wrong_candidates_are_out_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = CpuBackend.plan

    def sabotaged(self: CpuBackend, problem: Any, tiles: Any = None) -> Any:
        made = plan(self, problem, tiles)
        if tiles is None or tiles.rows != 128:
            return made

        def run(request: Any, out: Any, lse: Any) -> None:
            made.run(request, out, lse)
            out[0, -1] += 1

        return type(made)(backend="cpu", problem=problem, run=run, tiles=tiles)

    monkeypatch.setattr(CpuBackend, "plan", sabotaged)
    outcome = FakeTuner.make(Journal(None, "x"), cost).tune(WINDOW, Task.FORWARD)
    wrong = [c for c in outcome.candidates if c.fault]
    assert {c.tiles.rows for c in wrong} == {128}
    assert all("max error" in c.fault and c.ms is None for c in wrong)
    assert outcome.winner is not None
    assert outcome.winner.tiles.rows != 128


def test_what_does_not_compile_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(orders: Any, jobs: Any) -> Any:
        return (ahead.Done(o, False, 0.0, "no registers left" if o.tiles and o.tiles.rows == 128 else "") for o in orders)

    monkeypatch.setattr(search, "compile_all", compiler)
    outcome = FakeTuner.make(Journal(None, "x"), cost).tune(WINDOW, Task.FORWARD)
    assert {c.fault for c in outcome.candidates if c.fault} == {"does not compile: no registers left"}


@pytest.mark.parametrize("dies_after", [0, 60, 90])
def test_a_killed_run_goes_on(tmp_path: Path, dies_after: int) -> None:
    """Whatever was written before the kill is not measured again, and the result is the same."""
    path = tmp_path / "t.journal"
    whole = FakeTuner.make(Journal(None, "x"), cost)
    expected = whole.tune(WINDOW, Task.FORWARD)
    with pytest.raises(KeyboardInterrupt):
        FakeTuner.make(Journal(path, "x"), cost, dies_after).tune(WINDOW, Task.FORWARD)
    with path.open("a") as file:
        file.write('{"run": "x", "key": ["half')  # what a kill leaves
    again = FakeTuner.make(Journal(path, "x"), cost)
    outcome = again.tune(WINDOW, Task.FORWARD)
    assert outcome.winner is not None
    assert outcome.winner.tiles == expected.winner.tiles  # type: ignore[union-attr]
    assert again.bursts <= whole.bursts - (dies_after >= 90) * 50
    third = FakeTuner.make(Journal(path, "x"), cost)
    third.tune(WINDOW, Task.FORWARD)
    assert third.bursts == 0


def test_checks_are_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "t.journal", "x")
    FakeTuner.make(journal, cost, limit=4).tune(WINDOW, Task.FORWARD)
    monkeypatch.setattr(search.Runs, "fault", lambda self, tiles: pytest.fail("checked again"))
    FakeTuner.make(Journal(tmp_path / "t.journal", "x"), cost, limit=4).tune(WINDOW, Task.FORWARD)


def test_a_candidate_that_ends_processes_is_out_after_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash looks like from outside: the check was begun, and nothing more was written."""
    path = tmp_path / "t.journal"
    label = Candidate(CpuBackend().tuning_space(WINDOW.problem(CPU))[1], None).label  # type: ignore[arg-type]
    for attempt in (1, 2):
        Journal(path, "x").add(WINDOW.name, "forward", "cpu", "check", label, value={"attempts": attempt})
    outcome = FakeTuner.make(Journal(path, "x"), cost, limit=3).tune(WINDOW, Task.FORWARD)
    assert [bool(c.fault) for c in outcome.candidates] == [False, True, False]
    assert outcome.candidates[1].fault == search.ENDS_PROCESS


def test_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "deep/t.journal"
    Journal(path, "a").add("w", "check", value={"fault": ""})
    assert Journal(path, "a").known("w", "check") == {"fault": ""}
    assert Journal(path, "b").known("w", "check") is None  # other sources
    path.write_bytes(path.read_bytes() + b"no json\n[]\n" + b'{"run": "a", "key"')
    journal = Journal(path, "a")
    assert len(journal) == 1
    journal.add("w", "other", value={"x": 1})
    assert Journal(path, "a").known("w", "other") == {"x": 1}
    journal.forget()
    assert not path.exists()
    assert journal.known("w", "check") is None


def test_halving_keeps_the_fast_and_the_own() -> None:
    candidates = [Candidate(n, None, times_ms=[float(n)]) for n in range(20, 0, -1)]  # type: ignore[arg-type]
    left = survivors(candidates, candidates[0])
    assert [c.tiles for c in left] == [*range(1, 11), 20]
    assert survivors(left[:3], left[0]) == sorted(left[:3], key=lambda c: c.tiles)


def test_backward_can_be_tuned() -> None:
    outcome = FakeTuner.make(Journal(None, "x"), cost, limit=3).tune(WORKLOADS["smoke/causal"], Task.BACKWARD)
    assert [c.fault for c in outcome.candidates] == ["", "", ""]


def test_a_backend_without_a_space_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "backend_named", lambda name: object())
    with pytest.raises(NotImplementedError, match="cpu backend has no tuning space"):
        FakeTuner.make(Journal(None, "x"), cost).tune(WINDOW, Task.FORWARD)


# ------------------------------------------------------------------------------------------------ Hopper's space, without a GPU


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", [MaskKind.FULL, MaskKind.CAUSAL, MaskKind.WINDOW])
def test_hopper_s_space_is_legal(width: int, mask: MaskKind) -> None:
    spec = ForwardSpec(qk_width=width, v_width=width, mask_kind=mask)
    own = heuristics.choose(spec, 4096)
    found = space.legal(spec, own)
    assert found[0] == own
    assert len(found) == len(set(found)) > 10
    assert all(not budget.problems(spec, tiles) for tiles in found)
    distances = [space._distance(tiles, own) for tiles in found]
    assert distances == sorted(distances)
    assert {json.dumps(tuned.encode(tiles)) for tiles in found[:20]}


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_hopper_s_backward_space_is_legal(width: int, deterministic: bool) -> None:
    from flash3.backends.hopper import backward_budget, backward_space
    from flash3.backends.hopper.backward_tiles import BackwardSpec

    spec = BackwardSpec(qk_width=width, v_width=width, deterministic=deterministic)
    own = backward_budget.choose(spec, 4096)
    found = backward_space.legal(spec, own)
    assert found[0] == own
    assert len(found) == len(set(found)) >= (1 if deterministic else 3)
    assert all(not backward_budget.problems(spec, tiles) for tiles in found)


@pytest.mark.parametrize("name", ["h100", "a100", "l40s", "b200"])
@pytest.mark.parametrize("workload", ["paper/d64-full-4k", "paper/d128-causal-4k", "paper/d256-full-4k"])
def test_triton_s_space_is_legal(name: str, workload: str) -> None:
    """For every GPU: its own choice first, and what the shared memory cannot hold left out."""
    from flash3.backends.triton import space as triton_space
    from flash3.backends.triton.plan import TritonBackend

    backend, problem = TritonBackend(), WORKLOADS[workload].problem(model_named(name).device)
    found = backend.tuning_space(problem)
    assert found[0] == backend.plan(problem).tiles
    assert len(found) == len(set(found)) > 5
    width, capability = problem.spec.head_dim, problem.device.capability
    assert capability is not None
    assert all(not triton_space.problems(tiles, capability, width, 2) for tiles in found[1:])
    assert backend.footprint(problem).q_block == found[0].rows
    with pytest.raises(NotImplementedError, match="forward only"):
        backend.tuning_space(WORKLOADS[workload].problem(model_named(name).device, Task.BACKWARD))


def test_orders_share_kernels() -> None:
    from flash3.tune.command import orders_of

    device = model_named("h200").device
    grid = [w for w in WORKLOADS.values() if w.group in ("paper", "fp8")]
    orders, refused = orders_of(grid, [Task.FORWARD], device, "hopper")
    assert 6 < len(orders) < 20
    assert len(refused) == 6
    assert all("float8" in reason for reason in refused.values())
    more, _ = orders_of(grid[:1], [Task.FORWARD], device, "hopper", space=5)
    assert len(more) == 5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_common_calls_find_their_kernels_compiled(dim: int, causal: bool) -> None:
    """Other batches, heads and lengths of the same classes ask for kernels of the group `common`."""
    from flash3.backends.hopper.plan import HopperBackend
    from flash3.tune.command import orders_of

    device, backend = model_named("h200").device, HopperBackend()
    orders, _ = orders_of(select(["common"]), [Task.FORWARD], device, "hopper", lse=(False, True))
    compiled = {(o.problem.spec, o.tiles) for o in orders}
    mask = ",causal" if causal else ""
    for shape in ("b=3,q=700,h=5", "b=1,q=9000,h=16", "b=5,q=1,k=4096,h=8", "b=2,q=300,h=4,packed"):
        (workload,) = select([f"{shape},d={dim}{mask}"])
        for lse in (False, True):
            problem = workload.problem(device, Task.FORWARD, lse)
            assert (problem.spec, backend.plan(problem).tiles) in compiled


def test_compiling_in_other_processes_tells_what_fails(tmp_path: Path) -> None:
    """Through real processes: tiles that the budget refuses reach no compiler."""
    from flash3.tune.ahead import Order, compile_all

    workload, device = WORKLOADS["paper/d128-full-4k"], model_named("h200").device
    orders = [Order("cpu", "cpu", WINDOW.problem(device)), Order("bad", "hopper", workload.problem(device), "no tiles")]
    with override(cache_dir=str(tmp_path)):
        results = list(compile_all(orders, jobs=1))
    assert [(r.order.label, r.built) for r in results] == [("cpu", False), ("bad", False)]
    assert results[0].error == ""
    assert results[1].error


def test_triton_kernels_are_not_compiled_ahead() -> None:
    """Its first launch does it: an order would only seem to be done."""
    from flash3.tune.command import orders_of

    orders, refused = orders_of(select(["paper/d64-full-512"]), [Task.FORWARD], model_named("a100").device, None)
    assert orders == []
    assert "first launched" in refused["paper/d64-full-512 forward"]
