"""Kernels compiled ahead are those that calls will ask for."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from flash3.backends.hopper import ahead, plan
from flash3.cli import app
from flash3.mask import Mask
from flash3.problem import DType, Request
from flash3.sequences import Packed, Padded, SequenceKind
from tests.hopper.test_plan import info, int32


@pytest.fixture(autouse=True)
def _plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "packed", lambda numbers: numbers)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_calls_find_their_kernels(d: int, causal: bool) -> None:
    mask = Mask(causal=causal)
    q, k = info(3, 700, 8, d), info(3, 700, 2, d)
    flat_q, flat_k, starts = info(5000, 8, d), info(5000, 2, d), Packed(cu_seqlens=int32(8), max_length=900)
    one, cache = info(5, 1, 8, d), info(5, 4096, 2, d)
    calls = {
        SequenceKind.DENSE: Request(q=q, k=k, v=k, mask=mask),
        SequenceKind.PACKED: Request(q=flat_q, k=flat_k, v=flat_k, mask=mask, q_sequences=starts, k_sequences=starts),
        SequenceKind.PADDED: Request(q=one, k=cache, v=cache, mask=mask, k_sequences=Padded(lengths=int32(5))),
    }
    for layout, call in calls.items():
        found = ahead.keys_of(ahead.requests(DType.BF16, d, mask, 4, layout))
        assert set(ahead.keys_of([call])) <= set(found)
        assert len(found) == len(set(found)) <= 16


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    asked = []

    def build(keys, jobs):
        asked.extend(keys)
        return iter([(key, 0.5) for key in keys])

    monkeypatch.setattr(ahead, "build", build)
    result = CliRunner().invoke(app, ["compile", "--head-dim", "128", "--dtype", "float16", "--layout", "dense", "--jobs", "1"])
    assert result.exit_code == 0
    assert f"{len(asked)}/{len(asked)}  float16 128 causal dense/dense" in result.output
    assert {spec.dtype for spec, _ in asked} == {DType.FP16}
    wrong = CliRunner().invoke(app, ["compile", "--head-dim", "100"])
    assert wrong.exit_code == 2
    assert "multiple of 8" in wrong.output
