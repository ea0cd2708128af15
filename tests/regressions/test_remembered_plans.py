"""A call that was remembered must not let a wrong one pass."""

import pytest
import torch

import flash3


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [("scale", 1.0, True), ("scale", 0.0, False), ("scale", 1.0, 1 + 0j), ("softcap", 0.0, False), ("softcap", 1.0, True)],
)
def test_options_that_equal_good_ones(name, good, wrong, device):
    """True == 1.0, and hashes alike: the plan was found, and the check left out."""
    q = torch.zeros(1, 3, 1, 8, device=device, dtype=torch.float16)
    flash3.attention(q, q, q, **{name: good})
    with pytest.raises(TypeError, match=f"{name} must be a number, got"):
        flash3.attention(q, q, q, **{name: wrong})
