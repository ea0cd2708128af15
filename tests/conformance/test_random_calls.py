"""Whatever combination comes up: hypothesis draws the case, the public functions answer, the oracle judges."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flash3 import Mask
from tests.conformance.cases import Case, check_forward, check_gradients

width = st.none() | st.integers(0, 40)
SINKS = {"heads": (24, 8), "sink": tuple(i / 12 for i in range(24))}
RAGGED = ("packed", "packed beyond", "packed used", "padded")
lengths = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=3, max_size=5)
some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def masks(draw):
    return Mask(
        causal=draw(st.booleans()),
        left=draw(width),
        right=draw(width),
        chunk=draw(st.none() | st.integers(4, 40)),
        q_offset=draw(st.none() | st.integers(-20, 60)),
        k_offset=draw(st.just(0) | st.integers(-20, 20)),
    )


@st.composite
def cases(draw, layouts):
    q_lens, k_lens = zip(*draw(lengths), strict=True)
    return Case(
        q_lens=q_lens,
        k_lens=k_lens,
        layout=draw(layouts),
        page_size=draw(st.sampled_from([1, 2, 3, 7, 16, 64])),
        dims=(draw(st.sampled_from([64, 32, 96])), draw(st.sampled_from([64, 128, 40]))),
        mask=draw(masks()),
        scale=draw(st.sampled_from([None, 0.0, -0.1, 0.3])),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        dtype=torch.bfloat16,  # in float32, which of two correct codes is nearer is luck: one draw of hundreds would fail
        **(SINKS if draw(st.booleans()) else {}),
    )


@some
@given(case=cases(st.tuples(st.sampled_from(RAGGED), st.sampled_from(RAGGED))))
def test_sequences(case, backend):
    check_gradients(case, backend)


@some
@given(case=cases(st.tuples(st.sampled_from(("packed", "packed beyond")), st.sampled_from(("cache", "paged")))))
def test_caches(case, backend):
    check_forward(case, backend)
