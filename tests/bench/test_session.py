"""A run: rows for everybody, errors as rows, interrupts, and what becomes of the report."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from flash3.bench import catalogue, machine, page, pictures, providers, results, session
from flash3.bench.protocol import Interleaved, Solo
from flash3.bench.providers import Prepared, Provider, Unsupported
from flash3.bench.results import Report, Row, Subject
from flash3.problem import Task

CPU = torch.device("cpu")
QUICK = Interleaved(rounds=3, budget_ms=0.01)


def broken(case):
    raise RuntimeError("no such kernel\nfor you")


def unable(case):
    raise Unsupported("it has no windows")


def sloppy(case):
    """A wrong result."""
    out = torch.zeros(*case.request.q.shape[:-1], case.request.v.shape[-1])
    return Prepared(lambda: out, lambda result: (result,))


def plan(*who, **more):
    options = {"interleaved": QUICK, **more}
    return session.Plan(catalogue.select(["smoke/window"]), [Task.FORWARD], list(who), CPU, **options)


OURS = providers.select(["flash3"])[0]


def test_everything_becomes_a_row() -> None:
    report = session.run(plan(OURS, *providers.select(["naive"]), Provider("broken", "", broken), Provider("unable", "", unable)))
    rows = {row.provider: row for row in report.rows}
    assert len(rows["flash3"].times_ms) == len(rows["naive"].times_ms) == 3
    assert rows["flash3"].max_error < rows["flash3"].max_allowed
    assert rows["broken"].error == "failed: RuntimeError: no such kernel for you"
    assert rows["unable"].error == "not supported: it has no windows"
    assert report.wrong() == []
    assert report.rates["float32"]["source"] == "measured"
    (subject,) = report.subjects
    assert subject.floor_ms > 0
    assert results.compare(report, subject).peer == "naive"


def test_a_wrong_result_of_ours_is_told() -> None:
    report = session.run(plan(Provider("flash3", "", sloppy), Provider("flash3:x", "", broken), Provider("peer", "", sloppy)))
    assert {row.provider for row in report.wrong()} == {"flash3", "flash3:x"}
    assert "max error" in report.rows[0].faults[0]


def test_backward_is_measured_too() -> None:
    report = session.run(session.Plan(catalogue.select(["smoke/causal"]), [Task.BACKWARD], [OURS], CPU, QUICK, Solo(0.02)))
    (row,) = report.rows
    assert row.task == "backward"
    assert len(row.solo_ms) == 2
    assert not row.faults
    assert row.max_error > 0


def test_an_interrupt_keeps_what_was_measured() -> None:
    calls = 0

    def interrupting(case):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return OURS.prepare(case)

    p = session.Plan(catalogue.select(["smoke"]), [Task.FORWARD], [Provider("flash3", "", interrupting)], CPU, QUICK)
    report = session.run(p)
    assert report.interrupted
    assert [bool(row.times_ms) for row in report.rows] == [True, False]
    assert json.loads(results.to_json(report))["interrupted"] is True


def test_names_of_providers() -> None:
    known = providers.providers()
    assert {"flash3", "flash3:cpu", "flash3:hopper", "sdpa:cudnn", "flex", "fa3", "fa4", "pallas", "naive"} <= set(known)
    assert [p.name for p in providers.select(["sdpa"])] == ["sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "sdpa:math"]
    with pytest.raises(ValueError, match="no provider is called 'fa5'; known: flash3, "):
        providers.select(["fa5"])


def test_a_new_backend_is_a_provider_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash3 import dispatch

    monkeypatch.setitem(dispatch.BACKENDS, "tomorrow", "nowhere:Nothing")
    assert "flash3:tomorrow" in providers.providers()


@pytest.mark.parametrize("name", ["sdpa:cudnn", "sdpa:efficient", "fa3", "fa4", "pallas"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    (row,) = session.run(plan(*providers.select([name]))).rows
    assert row.error.startswith("not supported: ")


@pytest.mark.parametrize("name", ["sdpa:flash", "sdpa:math", "naive"])
@pytest.mark.parametrize("workload", ["smoke/full", "smoke/causal", "packed/lognormal-64k-causal", "gqa/chunk-of-a-prompt", "decode/b8-8k"])
def test_peers_compute_the_same(name: str, workload: str) -> None:
    """What a peer is timed at must be the same attention: held against float64 too."""
    from flash3.bench import accuracy
    from flash3.bench.case import make

    case = make(catalogue.WORKLOADS[workload].small(), Task.FORWARD, CPU)
    try:
        prepared = providers.select([name])[0].prepare(case)
    except Unsupported:
        assert name == "naive"
        assert "packed" in workload
        return
    assert accuracy.errors(case, prepared.outputs(prepared.call())).faults == ()


# ------------------------------------------------------------------------------------------------ the report


def made_up(ours=(1.0, 2.0, 3.0), theirs=(2.0, 4.0, 6.0)) -> Report:
    report = Report(machine={"device": "<GPU>", "packages": {"torch": "2"}}, settings={"rounds": 3}, before={"sm_mhz": 1980})
    for name in ("paper/d64-full-1k", "paper/d64-full-2k", "decode/b1-8k"):
        report.subjects.append(Subject(name, "forward", "shape", 1e12, 1e9, 0.5, "memory" if "decode" in name else "matmuls"))
        report.rows.append(Row(name, "forward", "flash3", times_ms=list(ours), max_error=1e-3, max_allowed=2e-3))
        report.rows.append(Row(name, "forward", "fa3", times_ms=list(theirs)))
        report.rows.append(Row(name, "forward", "fa4", error="failed: it <broke>"))
    return report


def test_summaries() -> None:
    best, fa3 = results.summaries(made_up())
    assert (best.peer, best.count, best.mean, best.least) == ("best peer", 3, pytest.approx(2.0), pytest.approx(2.0))
    assert fa3.peer == "fa3"
    assert results.tflops(made_up().subjects[0], 2.0) == pytest.approx(500.0)
    assert results.fraction(made_up().subjects[0], 2.0) == pytest.approx(0.25)


def test_json_and_csv_hold_everything() -> None:
    report = made_up()
    again = results.from_json(results.to_json(report))
    assert [row.times_ms for row in again.rows] == [row.times_ms for row in report.rows]
    assert again.subjects == report.subjects
    lines = list(csv.DictReader(io.StringIO(results.to_csv(report))))
    assert len(lines) == 9
    assert float(lines[0]["tflops"]) == pytest.approx(500.0)
    assert lines[2]["error"] == "failed: it <broke>"
    with pytest.raises(ValueError, match="no report"):
        results.from_json("[]")


def test_the_page_stands_alone() -> None:
    text = page.page(made_up())
    assert text.startswith("<!doctype html>")
    assert "<svg" in text
    assert "it &lt;broke&gt;" in text
    assert "&lt;GPU&gt;" in text
    for foreign in ("src=", "@import", "<link"):
        assert foreign not in text
    assert "d64, full, forward" in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"deep/run{suffix}"
    pictures.save(pictures.draw(made_up()), path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        pictures.save(pictures.draw(made_up()), tmp_path / "run.gif")


def test_panels_follow_the_paper() -> None:
    panels = pictures.panels_of(made_up())
    assert [label for label, _ in panels["d64, full, forward"]] == ["1k", "2k"]
    assert list(panels) == ["d64, full, forward", "decode, forward"]


def test_the_gpu_s_state_from_nvidia_smi() -> None:
    state = machine.parse_smi("1980, 3201, 412.53, 700.00, 61\n")
    assert state == machine.State(1980, 3201, 412.53, 700.0, 61)
    assert str(state) == "1980 MHz, 3201 MHz memory, 413 W, 61 °C of 700 W allowed"
    assert machine.parse_smi("1980, [N/A], [N/A], , x") == machine.State(1980)
    assert str(machine.state(CPU)) == "not known"
