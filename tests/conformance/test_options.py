"""Heads, widths, scale, softcap, sink and dtypes, alone and together, with gradients."""

from dataclasses import replace

import pytest
import torch

from flash3 import Mask, reference
from tests.conformance.cases import Call, Case, check_forward, check_gradients, name_of

CAUSAL = Mask(causal=True)
WINDOW = Mask(left=24, right=8)
SINK = (0.5, -1.0, 3.0, 0.0)
SINKS = {"heads": (32, 8), "sink": tuple(i / 16 for i in range(32))}
"""Many heads: the gradient of a sink is one number a head, and the error of four numbers is luck."""

CASES = [
    *(Case(heads=heads, mask=CAUSAL) for heads in ((1, 1), (3, 3), (6, 2), (5, 1), (8, 8), (16, 2))),
    *(Case(dims=(d, d), mask=CAUSAL) for d in (8, 16, 24, 32, 40, 72, 80, 96, 128, 160, 192, 256)),
    *(Case(dims=dims, mask=WINDOW) for dims in ((64, 128), (128, 64), (192, 128), (8, 256), (256, 8), (40, 24))),
    *(Case(scale=scale, mask=mask) for scale in (0.0, 1e-3, 1.0, -0.1, -1.0) for mask in (Mask(), CAUSAL)),
    *(Case(softcap=cap, spread=4.0, mask=mask) for cap in (0.5, 5.0, 1000.0) for mask in (Mask(), CAUSAL)),
    Case(softcap=2.0, scale=-0.2, mask=CAUSAL),
    Case(softcap=2.0, scale=0.0),
    *(Case(**SINKS, mask=mask) for mask in (Mask(), CAUSAL, Mask(causal=True, chunk=16))),
    Case(sink=(30.0, -30.0, 8.0, -torch.inf), mask=CAUSAL),
    Case(**SINKS, softcap=3.0, scale=-0.3, spread=3.0, mask=WINDOW),
    Case(**SINKS, q_lens=(40,), k_lens=(20,), mask=CAUSAL),
    Case(sink=SINK, q_lens=(20,), k_lens=(0,)),
    Case(spread=20.0, mask=CAUSAL),
    Case(heads=(8, 2), dims=(96, 40), softcap=4.0, mask=Mask(causal=True, left=30, right=2, q_offset=20)),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DTYPE_CASES = [
    Case(q_lens=(70, 70), k_lens=(135, 135)),
    Case(q_lens=(70, 70), k_lens=(135, 135), mask=CAUSAL, **SINKS),
    Case(q_lens=(150,), k_lens=(70,), mask=CAUSAL, dims=(128, 128), softcap=8.0),
    Case(q_lens=(33, 1, 0, 64), k_lens=(65, 7, 9, 64), layout=("packed", "packed"), mask=WINDOW),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_options(case, backend):
    check_gradients(case, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DTYPE_CASES, ids=name_of)
def test_dtypes(case, dtype, backend):
    check_gradients(_with(case, dtype), backend)


@pytest.mark.parametrize("case", DTYPE_CASES, ids=name_of)
def test_float64(case, backend):
    """The oracle is float64 too, so its own rounding counts: equal to 13 digits, the LSE to float32's 7."""
    call = Call(_with(case, torch.float64), backend)
    ours, exact = call.run_with_gradients(), call.by_oracle(reference.attention, reference.gradients)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(ours, name), getattr(exact, name), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours.lse.double(), exact.lse, rtol=2e-7, atol=1e-7)
    if ours.d_sink is not None:
        torch.testing.assert_close(ours.d_sink.double(), exact.d_sink, rtol=2e-7, atol=1e-6)


def _with(case, dtype):
    return replace(case, dtype=dtype)


@pytest.mark.parametrize("page_size", [None, 1, 3, 16])
def test_options_over_a_cache(page_size, backend):
    """The decoding path may be another kernel: the same options once more."""
    layout = ("packed", "cache" if page_size is None else "paged")
    for options in ({"softcap": 3.0, "spread": 4.0}, {"sink": SINK, "scale": -0.2}, {"dims": (128, 40)}, {"heads": (8, 1)}, {"scale": 0.0}):
        case = Case(q_lens=(1, 1, 7), k_lens=(60, 1, 33), layout=layout, page_size=page_size or 16, mask=CAUSAL, **options)
        check_forward(case, backend)
