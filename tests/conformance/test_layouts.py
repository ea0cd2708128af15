"""Every storage of queries with every storage of keys; what lies outside the sequences is NaN and infinite."""

import pytest
import torch

from flash3 import Mask
from tests.conformance.cases import Case, check_forward, check_gradients, mask_name

MASKS = [Mask(), Mask(causal=True), Mask(left=17, right=3), Mask(causal=True, chunk=16), Mask(causal=True, q_offset=5, k_offset=2)]
SINKS = {"heads": (24, 8), "sink": tuple(i / 12 for i in range(24))}
UNEQUAL = {"q_lens": (33, 0, 1, 70, 5), "k_lens": (65, 9, 0, 70, 130)}
EQUAL_Q = {"q_lens": (9,) * 5, "k_lens": (65, 9, 0, 70, 130)}
EQUAL_K = {"q_lens": (33, 0, 1, 70, 5), "k_lens": (40,) * 5}

RAGGED = ("packed", "packed beyond", "packed used", "padded")
LAYOUTS = [
    *((UNEQUAL, (q, k)) for q in RAGGED for k in RAGGED),
    *((EQUAL_Q, ("dense", k)) for k in RAGGED),
    *((EQUAL_K, (q, "dense")) for q in RAGGED),
]
CACHES = [
    *({"layout": "cache", "leftpad": pad, "rows": rows} for pad in (None, (3, 0, 1, 20, 2)) for rows in (None, (5, 2, 0, 7, 4))),
    *({"layout": "paged", "page_size": size} for size in (1, 3, 16, 64, 256)),
    *({"layout": "paged", "page_size": size, "leftpad": (3, 0, 1, 20, 17)} for size in (1, 3, 16)),
    {"layout": "paged", "page_size": 16, "rows": (5, 2, 0, 7, 4)},
    {"layout": "paged", "page_size": 3, "rows": (4, 3, 2, 1, 0), "leftpad": (3, 0, 1, 20, 17)},
]


@pytest.mark.parametrize("mask", MASKS, ids=mask_name)
@pytest.mark.parametrize(("lengths", "layout"), LAYOUTS, ids=lambda x: " and ".join(x) if isinstance(x, tuple) else "")
def test_layouts(lengths, layout, mask, backend):
    sinks = SINKS if mask.chunk or mask.left else {}
    check_gradients(Case(**lengths, layout=layout, mask=mask, **sinks), backend)


@pytest.mark.parametrize(
    "layout", [("packed", "packed"), ("padded", "packed used"), ("packed", "dense"), ("dense", "padded")], ids=" and ".join
)
@pytest.mark.parametrize(
    ("dims", "softcap"), [((32, 128), 0.0), ((64, 40), 3.0), ((8, 192), 0.0), ((136, 64), 0.0), ((192, 128), 2.0)], ids=str
)
def test_wide_tiles(dims, softcap, layout, backend):
    """Head dims far narrower than the tiles that a kernel may put them into."""
    lengths = EQUAL_Q if layout[0] == "dense" else EQUAL_K if layout[1] == "dense" else UNEQUAL
    check_gradients(Case(**lengths, layout=layout, dims=dims, softcap=softcap, mask=Mask(causal=True), dtype=torch.bfloat16), backend)


@pytest.mark.parametrize("mask", MASKS, ids=mask_name)
@pytest.mark.parametrize("cache", CACHES, ids=lambda c: " ".join(f"{name}={x}" for name, x in c.items()))
def test_caches(cache, mask, backend):
    options = {**cache, "mask": mask, **(SINKS if mask.chunk or mask.left else {})}
    kind = options.pop("layout")
    check_forward(Case(**UNEQUAL, layout=("packed", kind), **options), backend)
    check_forward(Case(**EQUAL_Q, layout=("dense", kind), **options), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_decoding(page_size, dtype, backend):
    """One query to each sequence of very unequal length."""
    lengths = (1, 2, 15, 16, 17, 129, 700, 64)
    case = Case(
        q_lens=(1,) * 8, k_lens=lengths, heads=(8, 1), layout=("dense", "paged"), page_size=page_size, mask=Mask(causal=True), dtype=dtype
    )
    check_forward(case, backend)


@pytest.mark.parametrize(
    "layout", [("packed", "packed"), ("dense", "cache"), ("dense", "paged"), ("padded", "padded"), ("dense", "dense")], ids=" and ".join
)
def test_many_equal_sequences(layout, backend):
    """A batch of equal sequences may be run as one."""
    case = Case(q_lens=(3,) * 40, k_lens=(10,) * 40, layout=layout, heads=(2, 1), dims=(16, 16), mask=Mask(causal=True), page_size=3)
    check = check_forward if case.cached else check_gradients
    check(case, backend)
