"""merge: partial results over disjoint keys. (That merged parts are the whole is in tests/properties.)"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flash3.reference import merge

INF = torch.inf


def partials(lses: list[float], seed: int = 0) -> tuple[Tensor, Tensor]:
    """One row and head per partial: outs (n, 1, 1, 4), lses (n, 1, 1). Empty ones have out 0."""
    lse = torch.tensor(lses, dtype=torch.float64)[:, None, None]
    outs = torch.randn(len(lses), 1, 1, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return outs.masked_fill(lse.isinf()[..., None], 0.0), lse


lse_values = st.lists(st.floats(-1e5, 1e5) | st.just(-INF), min_size=1, max_size=6)


@given(lses=lse_values, order=st.randoms(use_true_random=False))
def test_order_does_not_matter(lses: list[float], order: object) -> None:
    outs, lse = partials(lses)
    shuffled = list(range(len(lses)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for ours, exact in zip(merge(outs[shuffled], lse[shuffled]), merge(outs, lse), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@given(lses=lse_values, cut=st.integers(0, 6))
def test_merging_in_steps(lses: list[float], cut: int) -> None:
    outs, lse = partials(lses)
    left, right = merge(outs[:cut], lse[:cut]), merge(outs[cut:], lse[cut:])
    for ours, exact in zip(merge([left[0], right[0]], [left[1], right[1]]), merge(outs, lse), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)  # an LSE of 1e5 is known to 1e-11


@given(lses=lse_values)
def test_weights(lses: list[float]) -> None:
    """The definition, with Python's own numbers shifted by the largest LSE."""
    outs, lse = partials(lses)
    out, merged = merge(outs, lse)
    largest = max(lses)
    if largest == -INF:
        assert merged.item() == -INF
        assert (out == 0).all()
        return
    weights = torch.exp(lse - largest)
    torch.testing.assert_close(out, (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged, largest + torch.log(weights.sum(0)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("empties", [(-INF, -INF), (INF, -INF), (-INF, INF), (INF, INF), (-INF,), (INF,), ()])
def test_empty_is_empty(empties: tuple[float, ...]) -> None:
    """flashinfer#4051; +inf is FlashAttention-2's mark of a row without keys."""
    out, lse = merge(torch.full((len(empties), 2, 3, 4), torch.nan), torch.tensor(empties).reshape(-1, 1, 1).expand(-1, 3, 2))
    assert torch.equal(out, torch.zeros(2, 3, 4, dtype=torch.float64))
    assert torch.equal(lse, torch.full((3, 2), -INF, dtype=torch.float64))


@pytest.mark.parametrize("mark", [-INF, INF])
def test_an_empty_partial_changes_nothing(mark: float) -> None:
    """Whatever its out holds."""
    outs, lse = partials([0.3, mark, -200.0])
    outs[1] = torch.nan
    for ours, exact in zip(merge(outs, lse), merge(outs[::2], lse[::2]), strict=True):
        assert torch.equal(ours, exact)


def test_one_partial_is_itself() -> None:
    outs, lse = partials([-123.5])
    for ours, exact in zip(merge(outs, lse), (outs[0], lse[0]), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-13, atol=0)


def test_heads_come_before_rows_in_the_lse() -> None:
    """As `attention` returns them: out (batch, q_len, heads, d), lse (batch, heads, q_len); packed likewise without batch."""
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 3, 5, 4, 8, generator=g), torch.randn(2, 3, 4, 5, generator=g)
    out, lse = merge(outs, lses)
    assert (out.dtype, out.shape, lse.shape) == (torch.float64, (3, 5, 4, 8), (3, 4, 5))
    b, h, i = 2, 3, 1
    alone = merge(outs[:, b, i, h][:, None, None], lses[:, b, h, i][:, None, None])
    torch.testing.assert_close(out[b, i, h], alone[0][0, 0])
    torch.testing.assert_close(lse[b, h, i], alone[1][0, 0])
    for ours, exact in zip(merge(outs[:, b], lses[:, b]), (out[b], lse[b]), strict=True):
        assert torch.equal(ours, exact)
    listed = merge(list(outs.half()), list(lses))
    torch.testing.assert_close(listed[0], out, rtol=0, atol=2e-3)


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 3, 5, 4, 8\) and \(2, 3, 5, 4\)"):
        merge(torch.zeros(2, 3, 5, 4, 8), torch.zeros(2, 3, 5, 4))
    with pytest.raises(ValueError, match=r"got \(2, 3, 5, 4, 8\) and \(3, 4, 5\)"):
        merge(torch.zeros(2, 3, 5, 4, 8), torch.zeros(3, 4, 5))
