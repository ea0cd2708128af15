"""dispatch: the first backend that says yes, and every no with its reason."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from flash3 import dispatch
from flash3.backends.base import Refusal, Support
from flash3.plan import Plan
from flash3.problem import DType, Problem, Request, TensorInfo
from flash3.settings import settings


class Backend:
    """Says what it is told to, and plans."""

    answer: Support | Refusal = Support()

    def support(self, problem: Problem) -> Support | Refusal:
        return self.answer

    def plan(self, problem: Problem, tiles: Any = None) -> Plan:
        return Plan(backend=type(self).__name__.lower(), problem=problem, run=print, tiles="64x64", notes=("Rows are copied.",))


class Fast(Backend):
    answer: Support | Refusal = Refusal("needs a GPU")


class Old(Backend):
    answer: Support | Refusal = Refusal("head_dim 64 is too new")


class Slow(Backend):
    answer: Support | Refusal = Support("blocks of keys")


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three backends: the first two refuse, the last serves. One more cannot even be imported, and nobody asks it."""
    module = types.ModuleType("backends_of_this_test")
    vars(module).update(Fast=Fast, Old=Old, Slow=Slow)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    homes = {name: f"{module.__name__}:{name.capitalize()}" for name in ("fast", "old", "slow")}
    monkeypatch.setattr(dispatch, "BACKENDS", homes)
    dispatch.backend_named.cache_clear()
    with settings.override(backend=None):
        yield
    dispatch.backend_named.cache_clear()


@pytest.fixture
def problem() -> Problem:
    x = TensorInfo(DType.BF16, (1, 8, 2, 64), (1024, 128, 64, 1))
    return Problem.of(Request(q=x, k=x, v=x))


def test_the_first_that_supports(problem: Problem) -> None:
    plan = dispatch.choose(problem)
    assert plan.backend == "slow"
    assert plan.problem is problem


def test_order_decides(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fast, "answer", Support())
    assert dispatch.choose(problem).backend == "fast"
    assert dispatch.choose(problem, "slow").backend == "slow"


def test_explanation_names_every_answer(problem: Problem) -> None:
    found = dispatch.explain(problem)
    assert [name for name, _ in found.answers] == ["fast", "old", "slow"]
    assert found.backend == "slow"
    text = str(found)
    for line in ("fast: no, needs a GPU", "old: no, head_dim 64 is too new", "slow: yes, blocks of keys  <- runs"):
        assert line in text
    assert "backends, best first:" in text
    assert "only slow, by backend= or FLASH3_BACKEND:" in str(dispatch.explain(problem, "slow"))
    for fact in ("bfloat16 -> bfloat16", "head_dim 64", "mask full", "tiles: 64x64", "note: Rows are copied."):
        assert fact in text


def test_all_refuse(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "answer", Refusal("it is Sunday"))
    with pytest.raises(NotImplementedError) as caught:
        dispatch.choose(problem)
    for reason in ("fast: needs a GPU", "old: head_dim 64 is too new", "slow: it is Sunday"):
        assert reason in str(caught.value)
    found = dispatch.explain(problem)
    assert found.plan is None
    assert found.backend is None
    assert "<- runs" not in str(found)


def test_the_named_one_or_none(problem: Problem) -> None:
    """A named backend that refuses is not replaced by another."""
    with pytest.raises(NotImplementedError, match="fast: needs a GPU") as caught:
        dispatch.choose(problem, "fast")
    assert "slow" not in str(caught.value)
    with settings.override(backend="old"), pytest.raises(NotImplementedError, match="old: head_dim 64 is too new"):
        dispatch.choose(problem)
    with settings.override(backend="old"):
        assert dispatch.choose(problem, "slow").backend == "slow"  # the argument is stronger than the setting


def test_unknown_backend(problem: Problem) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of fast, old, slow or None .*got 'tpu'"):
        dispatch.choose(problem, "tpu")
    with settings.override(backend="tpu"), pytest.raises(ValueError, match="got 'tpu'"):
        dispatch.choose(problem)


def test_backends_are_made_once() -> None:
    assert dispatch.backend_named("slow") is dispatch.backend_named("slow")
