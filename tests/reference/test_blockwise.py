"""Algorithms 1 and 2 in plain loops: equal to the oracle, in the paper's order, with the kernels' order of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash3 import reference
from flash3.mask import KeyBlocks, Mask
from flash3.problem import DType, Request
from flash3.reference.blockwise import Algorithm, OnlineSoftmax, QueryTile, blockwise, in_order, pipelined, right_to_left
from flash3.reference.parts import parts
from tests.ragged import Batch, pack, pad, page

TILE_Q, TILE_KV = 4, 8
EDGES_Q, EDGES_KV = (1, 3, 4, 5, 8), (0, 1, 7, 8, 9, 16, 25)
MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, q_offset=-2),
    Mask(left=3, right=1),
    Mask(left=9, right=0),
    Mask(left=2, q_offset=20),
    Mask(chunk=5),
    Mask(causal=True, chunk=8, left=6),
]
ALGORITHMS = [in_order, pipelined]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_equals_the_oracle(algorithm: Algorithm, mask: Mask) -> None:
    """Float64, so that nothing but the algorithm differs; every length at the edges of both tiles."""
    for q_len in EDGES_Q:
        for k_len in EDGES_KV:
            request = Batch.random([(q_len, k_len)], seed=q_len).one(0, mask=mask)
            request = replace(request, q=request.q.double(), k=request.k.double(), v=request.v.double())
            ours = blockwise(request, algorithm=algorithm, tile_q=TILE_Q, tile_kv=TILE_KV)
            for name, x, exact in zip(("out", "lse"), ours, reference.attention(request), strict=True):
                where = f"{name} of {q_len} queries and {k_len} keys: "
                torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-13, msg=where.__add__)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lazy_log2", [0.0, 3.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_as_good_as_plain_torch(algorithm: Algorithm, lazy_log2: float, dtype: torch.dtype) -> None:
    batch = Batch.random([(37, 101)] * 2, dims=(32, 16))
    for mask in (Mask(), Mask(causal=True), Mask(left=20, right=5)):
        for extras in ({}, {"sink": torch.tensor([0.0, 1.0, -1.0, 4.0]), "softcap": 2.0}):
            request = Request(
                q=torch.stack(batch.q).to(dtype), k=torch.stack(batch.k).to(dtype), v=torch.stack(batch.v).to(dtype), mask=mask
            )
            request = replace(request, **extras)
            ours = blockwise(request, algorithm=algorithm, tile_q=16, tile_kv=32, lazy_log2=lazy_log2)
            exact, plain = reference.attention(request), reference.plain(request)
            assert ours[0].dtype == plain[0].dtype
            assert ours[1].dtype == torch.float32
            for name, x, truth, yardstick in zip(("out", "lse"), ours, exact, plain, strict=True):
                reference.check(f"{name} {mask}", x, truth, yardstick)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_layout_and_option(algorithm: Algorithm) -> None:
    batch = Batch.random([(3, 9), (0, 4), (6, 0), (5, 17)])
    q, q_sequences = pack(batch.q, room=1, fill=torch.nan)
    k, layout = pad(batch.k, fill=torch.nan, leftpad=(0, 1, 2, 3))
    v, _ = pad(batch.v, fill=torch.nan, leftpad=(0, 1, 2, 3))
    v, _ = page(v, layout, 3, fill=torch.nan)
    k, paged = page(k, layout, 3, fill=torch.nan)
    request = Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=paged, mask=Mask(causal=True))
    for extras in ({}, {"sink": torch.arange(4.0)}, {"qv": torch.ones(len(q), 4, 8)}, {"scale": -0.3, "softcap": 1.0}):
        one = replace(request, **extras)
        ours = blockwise(one, algorithm=algorithm, tile_q=TILE_Q, tile_kv=TILE_KV)
        for x, exact in zip(ours, reference.attention(one), strict=True):
            torch.testing.assert_close(x.double(), exact, rtol=1e-5, atol=1e-5)


def test_output_dtype() -> None:
    """float32 partial results from 16-bit inputs."""
    request = Batch.random([(3, 9)]).one(0, out_dtype=DType.FP32)
    request = replace(request, q=request.q.half(), k=request.k.half(), v=request.v.half())
    assert blockwise(request)[0].dtype == reference.plain(request)[0].dtype == torch.float32


def test_blocks_are_visited_right_to_left() -> None:
    """Right edge masked, interior not, left edge masked."""
    assert list(right_to_left(KeyBlocks(2, 4, 7, 9))) == [(8, True), (7, True), (6, False), (5, False), (4, False), (3, True), (2, True)]
    assert list(right_to_left(KeyBlocks(3, 3, 3, 3))) == []
    # 12 rows that end at key 40, window of 20: rows 28…39 see keys 8…39 between them, 19…28 all of them.
    found = Mask(left=20, right=0).key_blocks(0, 11, 12, 40, 4)
    assert list(right_to_left(found)) == [(9, True), (8, True), (7, True), (6, False), (5, False), (4, True), (3, True), (2, True)]


@dataclass(frozen=True)
class LoggedTile(QueryTile):
    """Writes down which matmul comes when."""

    log: list[str] = field(default_factory=list)

    def scores(self, j: int, masked: bool) -> Tensor:
        self.log.append(f"S{j}{'m' if masked else ''}")
        return super().scores(j, masked)

    def output(self, p: Tensor, j: int) -> Tensor:
        self.log.append(f"O{j}")
        return super().output(p, j)


@pytest.mark.parametrize(
    ("algorithm", "order"),
    [(in_order, "S3m O3 S2m O2 S1 O1 S0 O0"), (pipelined, "S3m S2m O3 S1 O2 S0 O1 O0")],
)
def test_order_of_matmuls(algorithm: Algorithm, order: str) -> None:
    """Algorithm 2 issues Q K_jᵀ before P̃ V of the block before it; Algorithm 1 finishes each block first."""
    request = Batch.random([(9, 27)]).one(0, mask=Mask(causal=True))
    part = next(parts(request, torch.float64))
    tile = LoggedTile(part, slice(0, 9), 8)
    o = torch.zeros(2, 9, 8, dtype=torch.float64)
    visits = right_to_left(request.mask.key_blocks(0, 8, 9, 27, 8))
    algorithm(tile, visits, OnlineSoftmax.begin(o, torch.float64), o)
    assert tile.log == order.split()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_first_block_that_a_row_does_not_see(algorithm: Algorithm) -> None:
    """FA#2082: logits about -200, and the first visited block all masked for early rows: the row maximum starts at -inf, not at 0."""
    q = torch.full((1, 8, 14, 16), -3.5)
    k = torch.full((1, 48, 2, 16), 3.5) + 0.01 * torch.randn(1, 48, 2, 16, generator=torch.Generator().manual_seed(0))
    v = torch.randn(1, 48, 2, 16, generator=torch.Generator().manual_seed(1))
    request = Request(q=q, k=k, v=v, mask=Mask(causal=True, q_offset=12), scale=1.0)
    exact, plain = reference.attention(request), reference.plain(request)
    assert exact[1].max() < -180
    ours = blockwise(request, algorithm=algorithm, tile_q=8, tile_kv=4)
    for name, x, truth, yardstick in zip(("out", "lse"), ours, exact, plain, strict=True):
        reference.check(name, x, truth, yardstick)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lazy_log2", [0.0, 8.0])
def test_extreme_scores(algorithm: Algorithm, lazy_log2: float) -> None:
    """-1e5 everywhere, -5e5 once: float32 statistics give the plain mean."""
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 40, 1, 8)
    q[..., 0], k[..., 0], k[0, 33, 0, 0] = 1.0, -1e5, -5e5
    v = torch.randn(1, 40, 1, 8, generator=torch.Generator().manual_seed(0))
    out, lse = blockwise(Request(q=q, k=k, v=v, scale=1.0), algorithm=algorithm, tile_kv=8, lazy_log2=lazy_log2)
    torch.testing.assert_close(out[0, 0, 0], (v.sum(1) - v[:, 33])[0, 0] / 39, rtol=1e-5, atol=1e-6)
    assert lse.item() == pytest.approx(-1e5 + torch.tensor(39.0).log().item(), rel=1e-7)


def update(softmax: OnlineSoftmax, *scores: float) -> tuple[float, float]:
    """Largest P̃ and alpha after one block of these scores."""
    p, alpha = softmax.update(torch.tensor(scores).reshape(1, 1, -1))
    return p.max().item(), alpha.item()


def begin(p_dtype: torch.dtype = torch.float32, **options: Any) -> OnlineSoftmax:
    return OnlineSoftmax.begin(torch.zeros(1, 1, 8), p_dtype, **options)


def test_the_maximum_is_followed_at_once() -> None:
    softmax = begin()
    assert update(softmax, 1.0, 0.0) == (1.0, 0.0)
    assert update(softmax, 0.5) == (pytest.approx(0.6065, abs=1e-4), 1.0)
    assert update(softmax, 2.0) == (1.0, pytest.approx(0.3679, abs=1e-4))


def test_or_lazily() -> None:
    """Up to a factor 2**8 = exp(5.545) nothing is rescaled; beyond it, and out of an empty row, it is."""
    softmax = begin(lazy_log2=8.0)
    assert update(softmax, 1.0)[0] == 1.0
    assert update(softmax, 6.5) == (pytest.approx(244.7, abs=0.1), 1.0)
    assert update(softmax, 6.6) == (1.0, pytest.approx(0.0037, abs=1e-4))
    assert softmax.row_max.item() == pytest.approx(6.6)


def test_an_empty_block_leaves_everything() -> None:
    softmax = begin()
    assert update(softmax, -torch.inf, -torch.inf)[0] == 0.0
    assert softmax.row_sum.item() == 0.0
    assert update(softmax, -3.0) == (1.0, 0.0)
    assert update(softmax, -torch.inf) == (0.0, 1.0)
    assert softmax.row_max.item() == -3.0


@pytest.mark.parametrize("lazy_log2", [0.0, 8.0])
@pytest.mark.parametrize(("p_dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float8_e4m3fn, 256.0)])
def test_probabilities_are_rounded(p_dtype: torch.dtype, scale: float, lazy_log2: float) -> None:
    """P̃ holds values of its dtype only (FP8: times a power of two), each within half a step of exp(S - m)."""
    s = torch.linspace(-4, 0, 33).reshape(1, 1, -1)
    p, _ = begin(p_dtype, lazy_log2=lazy_log2).update(s)
    scale *= 2**-lazy_log2 if p_dtype is torch.float8_e4m3fn else 1
    assert torch.equal(p, (s.exp() * scale).to(p_dtype).float() / scale)
    assert not torch.equal(p, s.exp())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_sum_is_not_rounded(algorithm: Algorithm) -> None:
    """P̃ is rounded for the tensor cores only: the LSE of bfloat16 inputs is as exact as float32."""
    request = Batch.random([(8, 64)]).one(0)
    request = replace(request, q=request.q.bfloat16(), k=request.k.bfloat16(), v=request.v.bfloat16())
    _, lse = blockwise(request, algorithm=algorithm, tile_kv=16)
    torch.testing.assert_close(lse.double(), reference.attention(request)[1], rtol=1e-6, atol=1e-6)
