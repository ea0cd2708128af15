"""The backends under test. A new one joins by its entry in `flash3.dispatch.BACKENDS`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from flash3.backends.triton.plan import interpreted
from flash3.dispatch import BACKENDS

REFUSED = "no backend supports this call"


@dataclass(frozen=True)
class BackendUnderTest:
    """`dtype` is what a case without one runs in; a `complete` backend may refuse nothing but what `refuses` names."""

    name: str
    device: str
    dtype: torch.dtype
    complete: bool = False

    def serve(self, run):
        """run(), or a skip with the backend's own reason where it refuses the call."""
        try:
            return run()
        except NotImplementedError as refusal:
            if self.complete or not str(refusal).startswith(REFUSED):
                raise
            pytest.skip(str(refusal))


def _under_test(name):
    if name == "cpu":
        return BackendUnderTest("cpu", "cpu", torch.float32, complete=True)
    if name == "triton" and interpreted():
        return BackendUnderTest("triton", "cpu", torch.float16)
    return pytest.param(BackendUnderTest(name, "cuda", torch.float16), marks=pytest.mark.gpu)


UNDER_TEST = [pytest.param(b, id=b.name) if isinstance(b, BackendUnderTest) else b for b in map(_under_test, BACKENDS)]
