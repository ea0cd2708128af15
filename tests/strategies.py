"""What hypothesis draws: masks and lengths, small enough that every edge comes up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from flash3.mask import Mask

few = settings(max_examples=40, deadline=None)
"""For properties whose every example runs a backend several times."""


@st.composite
def masks(draw: st.DrawFn, offsets: bool = True) -> Mask:
    """Any mask: full, causal, windows, chunks, and (with `offsets`) any alignment."""
    width = st.none() | st.integers(0, 6)
    return Mask(
        causal=draw(st.booleans()),
        left=draw(width),
        right=draw(width),
        chunk=draw(st.none() | st.integers(1, 6)),
        q_offset=draw(st.none() | st.integers(-6, 12)) if offsets else None,
        k_offset=draw(st.integers(-3, 3)) if offsets else 0,
    )


def lengths(max_batch: int = 4) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(q_len, k_len) of one to max_batch sequences, zero included."""
    return st.lists(st.tuples(st.integers(0, 9), st.integers(0, 17)), min_size=1, max_size=max_batch)
