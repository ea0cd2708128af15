"""Backends as fixtures: a test that takes `run` (or `run_backward`) holds for every backend in `running.BACKENDS`.

A test that takes `device` calls the public functions on the CPU, and with `-m gpu` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

from flash3.problem import Request
from tests import running

hypothesis.settings.register_profile("flash3", deadline=None)
hypothesis.settings.load_profile("flash3")  # --hypothesis-profile on the command line comes later and wins


@pytest.fixture(scope="session", params=list(running.BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def run(backend: str) -> Callable[[Request], tuple[Tensor, Tensor]]:
    """request -> (out, lse) by the backend, into buffers poisoned with NaN."""
    return running.BACKENDS[backend].forward


@pytest.fixture(scope="session")
def run_backward(backend: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """(request, d_out, d_lse=None) -> (dq, dk, dv, d_sink) by the backend, into buffers poisoned with NaN."""
    return running.BACKENDS[backend].backward


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """On a GPU, what no backend serves yet is a skip with each backend's reason. On the CPU it is a failure."""
    try:
        return (yield)
    except Exception as error:  # torch's checkers wrap the refusal in errors of their own
        _, found, reason = str(error).partition("no backend supports this call")
        if item.get_closest_marker("gpu") is None or not found:
            raise
        pytest.skip(found + reason.partition("\n")[0])
