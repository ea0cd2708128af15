"""The conformance suite's core under Triton's interpreter, on cases that are small and yet have edges and interiors: `make interpreted`.

Tiles are 32 × 16 here (`heuristics.INTERPRETED`). The whole suite runs on a GPU with `-m gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash3
from flash3 import Mask, reference
from flash3.backends.base import Gradients, Saved
from flash3.backends.triton.plan import Forward, TritonBackend, interpreted
from flash3.backends.triton.tiles import BackwardTiles, Tiles
from flash3.problem import Problem, Request, Task
from tests.conformance.backends import BackendUnderTest
from tests.conformance.cases import Case, check_forward, check_gradients, mask_name, name_of
from tests.conformance.storage import int32, paged
from tests.running import describe

if not interpreted():
    pytest.skip("needs TRITON_INTERPRET=1: make interpreted", allow_module_level=True)

BACKEND = BackendUnderTest("triton", "cpu", torch.float16, complete=True)
CAUSAL = Mask(causal=True)
WINDOW = Mask(left=20, right=9)
SMALL = {"q_lens": (45,), "k_lens": (70,), "heads": (2, 1), "dims": (16, 16)}
SINKS = {"heads": (8, 4), "sink": tuple(i / 4 for i in range(8))}
UNEQUAL = {"q_lens": (33, 0, 1, 5), "k_lens": (65, 9, 0, 40), "heads": (2, 1), "dims": (16, 8)}

MASKS = [
    Mask(),
    CAUSAL,
    WINDOW,
    Mask(chunk=16),
    Mask(causal=True, chunk=32, q_offset=-40, k_offset=-40),
    Mask(left=30, right=3, q_offset=10, k_offset=-7),
    Mask(causal=True, q_offset=-1000),
]
OPTIONS = [
    Case(**{**SMALL, "q_lens": (70,), "k_lens": (20,)}, mask=CAUSAL),
    Case(**{**SMALL, "dims": (40, 24)}, mask=WINDOW),
    Case(**{**SMALL, "dims": (8, 72)}, dtype=torch.bfloat16),
    Case(**{**SMALL, "heads": (1, 1)}, dtype=torch.float32, mask=CAUSAL),
    Case(**SMALL, scale=0.0, mask=CAUSAL),
    Case(**SMALL, scale=-0.3),
    Case(**SMALL, softcap=5.0, spread=4.0, mask=CAUSAL),
    Case(**SMALL, softcap=1000.0, spread=4.0, dtype=torch.float32),
    Case(**SMALL, softcap=2.0, scale=-0.2, dtype=torch.bfloat16),
    Case(**{**SMALL, **SINKS}, mask=CAUSAL),
    Case(**{**SMALL, **SINKS}, softcap=3.0, scale=-0.3, spread=3.0, mask=WINDOW, dtype=torch.bfloat16),
    Case(**{**SMALL, "q_lens": (20,), "k_lens": (0,)}, sink=(0.5, -1.0)),
    Case(**SMALL, spread=12.0, scale=1.0, mask=CAUSAL, dtype=torch.float32),
]
LAYOUTS = [("packed", "packed beyond"), ("packed used", "padded"), ("padded", "packed used")]
CACHES = [
    {"layout": ("packed", "cache"), "leftpad": (3, 0, 1, 20), "rows": (5, 2, 0, 3)},
    {"layout": ("packed", "paged"), "page_size": 3, "leftpad": (3, 0, 1, 17), "rows": (4, 3, 2, 1)},
    {"layout": ("packed", "paged"), "page_size": 16},
]


@pytest.mark.parametrize("mask", MASKS, ids=mask_name)
def test_masks(mask: Mask) -> None:
    check_gradients(Case(**SMALL, mask=mask), BACKEND)


@pytest.mark.parametrize("mask", [Mask(), CAUSAL, WINDOW], ids=mask_name)
def test_even_lengths(mask: Mask) -> None:
    """No block is cut by the end of a sequence: then no load needs a mask."""
    check_gradients(Case(q_lens=(64,), k_lens=(96,), heads=(2, 1), dims=(16, 16), mask=mask, dtype=torch.bfloat16), BACKEND)


@pytest.mark.parametrize("case", OPTIONS, ids=name_of)
def test_options(case: Case) -> None:
    check_gradients(case, BACKEND)


@pytest.mark.parametrize("layout", LAYOUTS, ids=" and ".join)
def test_layouts(layout: tuple[str, str]) -> None:
    check_gradients(Case(**UNEQUAL, layout=layout, mask=CAUSAL, dtype=torch.bfloat16), BACKEND)


@pytest.mark.parametrize("cache", CACHES, ids=lambda c: c["layout"][1] + str(c.get("page_size", "")))
def test_caches(cache: dict[str, object]) -> None:
    check_forward(Case(**UNEQUAL, **cache, mask=CAUSAL), BACKEND)


def test_decoding_packs_heads() -> None:
    check_forward(Case(q_lens=(1, 1), k_lens=(90, 33), heads=(8, 2), dims=(16, 16), layout=("dense", "paged"), mask=CAUSAL), BACKEND)


@pytest.mark.parametrize("sink", [None, 0.7], ids=["", "sink"])
def test_split_keys(sink: float | None) -> None:
    """Two parts, five, and more parts than blocks: as good as one, for rows that see nothing too, and at large scores."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 16, generator=g).half() for n, h in ((7, 2), (90, 1), (90, 1)))
    for mask, scale in ((Mask(causal=True, q_offset=-3), None), (Mask(left=40, right=5), 200.0)):
        request = Request(q=q, k=k, v=v, mask=mask, scale=scale, lse=True, sink=None if sink is None else torch.full((2,), sink))
        problem = Problem.of(request, describe)
        exact, plain = reference.attention(request), reference.plain(request)
        for splits in (2, 5, 9):
            plan = Forward.of(problem, Tiles(16, 16, 1, 1))
            out, lse = torch.full_like(q, torch.nan), torch.full((1, 2, 7), torch.nan)
            replace(plan, splits=splits)(request, out, lse)
            for name, ours, e, p in zip(("out", "lse"), (out, lse), exact, plain, strict=True):
                reference.check(name, ours, e, p)


def test_unaligned_rows() -> None:
    """They are copied: bitwise equal to the same numbers in aligned rows, gradients too."""
    g = torch.Generator().manual_seed(3)
    data = [torch.randn(1, n, 2, 16, generator=g).half() for n in (45, 70, 70, 45)]
    found = []
    for q, k, v, d_out in (data, [torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in data]):
        request = Request(q=q, k=k, v=v, mask=CAUSAL, lse=True)
        saved = Saved(out=torch.full_like(data[0], torch.nan), lse=torch.empty(1, 2, 45))
        TritonBackend().plan(Problem.of(request, describe)).run(request, saved.out, saved.lse)
        made = Gradients(d_out=d_out, **{f"d{n}": torch.full_like(x, torch.nan) for n, x in zip("qkv", data, strict=False)})
        request = replace(request, task=Task.BACKWARD)
        TritonBackend().plan(Problem.of(request, describe)).run(request, saved, made)
        found.append((saved.out, saved.lse, made.dq, made.dk, made.dv))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("missing", [None, "dk", "dv"])
def test_dv_by_a_launch_of_its_own(missing: str | None) -> None:
    """The same sums in the same order: bitwise equal to dK and dV by one launch."""
    g = torch.Generator().manual_seed(2)
    q, k, v, d_out = (torch.randn(1, n, 2, 16, generator=g).half() for n in (45, 70, 70, 45))
    request = Request(q=q, k=k, v=v, mask=CAUSAL, lse=True)
    saved = Saved(out=torch.empty_like(q), lse=torch.empty(1, 2, 45))
    TritonBackend().plan(Problem.of(request, describe)).run(request, saved.out, saved.lse)
    request, tiles, found = replace(request, task=Task.BACKWARD), Tiles(32, 16, 1, 1), []
    for chosen in (BackwardTiles(tiles, tiles), BackwardTiles(tiles, tiles, dv=tiles)):
        wanted = Gradients(d_out=d_out, **{f"d{n}": torch.full_like(x, torch.nan) for n, x in (("q", q), ("k", k), ("v", v))})
        if missing:
            setattr(wanted, missing, None)
        TritonBackend().plan(Problem.of(request, describe), chosen).run(request, saved, wanted)
        found.append([x for x in (wanted.dq, wanted.dk, wanted.dv) if x is not None])
    assert len(found[0]) == (2 if missing else 3)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))


def test_sequences_that_share_pages_share_their_gradient() -> None:
    """Backward over pages, one of them listed twice."""
    g = torch.Generator().manual_seed(1)
    at = paged([10, 10], 4)
    table = at.arguments["page_table"].clone()
    table[1, 0] = table[0, 0]
    q, k, v = (torch.randn(*shape, 2, 16, generator=g) for shape in ((2, 3), at.shape, at.shape))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    rows, slots = table[:, :3].long().repeat_interleave(4, 1)[:, :10], (torch.arange(10) % 4).expand(2, 10)
    d_out = torch.randn(2, 3, 2, 16, generator=g)
    wanted = torch.autograd.grad(flash3.attention(q, k[rows, slots], v[rows, slots], backend="cpu"), (q, k, v), d_out)
    from flash3.frameworks.torch.functions import run
    from flash3.frameworks.torch.operators import Arguments

    ours = run(Arguments(q, k, v, page_table=table, seqused_k=int32([10, 10]), backend="triton"), False)
    for ours_, wanted_ in zip(torch.autograd.grad(ours, (q, k, v), d_out), wanted, strict=True):
        torch.testing.assert_close(ours_, wanted_, rtol=1e-5, atol=1e-5)


def test_support_says_that_it_interprets() -> None:
    x = describe(torch.empty(1, 4, 2, 16))
    assert "interpreted" in str(TritonBackend().support(Problem.of(Request(q=x, k=x, v=x))))
