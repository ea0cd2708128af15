"""Which device the demo takes."""

from pathlib import Path

import pytest
import torch

from flash3.demo import options


@pytest.mark.parametrize(
    ("there", "refusal", "backend", "device", "dtype"),
    [
        (False, "", None, "cpu", torch.float32),
        (True, "", None, "cuda", torch.float16),
        (True, "", "cpu", "cpu", torch.float32),
        (True, "GPU X is not served", None, "cpu", torch.float32),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, there: bool, refusal: str, backend: str | None, device: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(options, "refusals", lambda dtype: refusal)
    found = options.settle([], 8, backend, None, Path())
    assert (found.device.type, found.dtype, found.note) == (device, dtype, refusal)
    if device == "cpu":
        assert refusal in options.device_name(found)
