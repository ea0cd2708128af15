"""The levels by which ragged key tiles are launched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")
from flash3.backends.hopper.backward_rank import LEVELS, level_of

walks = st.integers(0, 2**26)


@given(walks, walks)
def test_a_longer_walk_has_no_lower_level_and_a_level_is_within_a_quarter(one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert 0 <= level_of(short) <= level_of(long) < LEVELS
    if level_of(short) == level_of(long):
        assert long <= 1.25 * short


def test_no_walk_comes_last() -> None:
    assert level_of(0) == 0 < level_of(1)
