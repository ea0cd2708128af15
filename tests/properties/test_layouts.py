"""Where the tokens lie does not change what attention gives: every layout against one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flash3.mask import Mask
from flash3.problem import Request
from tests.ragged import Batch, close, pack, pad, page
from tests.strategies import few, lengths, masks

Run = Callable[[Request], tuple[Tensor, Tensor]]
POISON = (torch.nan, torch.inf, -torch.inf)
NEW_ROWS = (3, 0, 5, 1)  # where sequences 0…3 lie in a storage of six rows


def loop(run: Run, batch: Batch, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """out (m, heads, value_dim) and lse (heads, m) of each sequence alone."""
    results = [run(batch.one(i, **options)) for i in range(len(batch.q))]
    return [out[0] for out, _ in results], [lse[0] for _, lse in results]


def options_of(sink: bool, softcap: float, mask: Mask, heads: int = 4) -> dict[str, Any]:
    return {"mask": mask, "softcap": softcap, "sink": torch.linspace(-1, 1, heads) if sink else None}


some_options = st.builds(options_of, st.booleans(), st.sampled_from([0.0, 2.0]), masks())


@few
@given(lengths=lengths(), options=some_options, seed=st.integers(0, 99))
def test_packed_is_a_loop(run: Run, lengths: list[tuple[int, int]], options: dict[str, Any], seed: int) -> None:
    batch = Batch.random(lengths, seed=seed)
    outs, lses = loop(run, batch, **options)
    out, lse = run(batch.packed(**options))
    close(out, torch.cat(outs))
    close(lse, torch.cat(lses, dim=1))


@few
@given(lengths=lengths(), options=some_options, poison=st.sampled_from(POISON))
def test_unused_rows_of_packed_sequences(run: Run, lengths: list[tuple[int, int]], options: dict[str, Any], poison: float) -> None:
    """seqused: what lies behind a sequence is not read, and its own outputs are empty: 0 and -inf, with a sink too."""
    batch = Batch.random(lengths)
    q, q_sequences = pack(batch.q, room=2, fill=poison)
    k, k_sequences = pack(batch.k, room=3, fill=poison)
    v, _ = pack(batch.v, room=3, fill=poison)
    out, lse = run(Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=k_sequences, **options))
    outs, lses = loop(run, batch, **options)
    close(out, pack(outs, room=2, fill=0.0)[0])
    close(lse.T, pack([x.T for x in lses], room=2, fill=-torch.inf)[0])


@few
@given(lengths=lengths(), options=some_options, left=st.booleans(), chosen=st.booleans(), page_size=st.integers(0, 9))
def test_a_cache_is_a_loop(
    run: Run, lengths: list[tuple[int, int]], options: dict[str, Any], left: bool, chosen: bool, page_size: int
) -> None:
    """Packed queries on a contiguous (page_size 0) or paged cache, with left padding and chosen rows; poison everywhere else."""
    batch = Batch.random(lengths)
    where: dict[str, Any] = {
        "fill": torch.nan,
        "leftpad": [(2 * i + 1) % 5 for i in range(len(lengths))] if left else None,
        "rows": NEW_ROWS[: len(lengths)] if chosen else None,
    }
    q, q_sequences = pack(batch.q)
    k, k_sequences = pad(batch.k, **where)
    v, _ = pad(batch.v, **where)
    if page_size:
        v, _ = page(v, k_sequences, page_size, fill=torch.inf)
        k, k_sequences = page(k, k_sequences, page_size, fill=torch.inf)
    out, lse = run(Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=k_sequences, **options))
    outs, lses = loop(run, batch, **options)
    close(out, torch.cat(outs))
    close(lse, torch.cat(lses, dim=1))


@few
@given(lengths=lengths(), options=some_options)
def test_padded_queries_are_a_loop(run: Run, lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    batch = Batch.random(lengths)
    q, q_sequences = pad(batch.q, fill=torch.nan)
    k, k_sequences = pack(batch.k)
    v, _ = pack(batch.v)
    out, lse = run(Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=k_sequences, **options))
    outs, lses = loop(run, batch, **options)
    close(out, pad(outs)[0])
    close(lse.mT, pad([x.T for x in lses], fill=-torch.inf)[0])


@pytest.mark.parametrize("page_size", [0, 1, 4, 7])
def test_poison_changes_no_bit(run: Run, page_size: int) -> None:
    """Unused slots, slots before the left padding, unchosen rows and unlisted pages: NaN, Inf or zero, the result is the same."""
    batch = Batch.random([(4, 9), (1, 13), (3, 0)])
    results = []
    for fill in (0.0, *POISON):
        k, layout = pad(batch.k, fill=fill, leftpad=(1, 0, 4), rows=(2, 0, 4))
        v, _ = pad(batch.v, fill=fill, leftpad=(1, 0, 4), rows=(2, 0, 4))
        q, q_sequences = pack(batch.q)
        request = Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=layout, mask=Mask(causal=True))
        if page_size:
            pages_v, _ = page(v, layout, page_size, fill=fill)
            pages_k, paged = page(k, layout, page_size, fill=fill)
            request = replace(request, k=pages_k, v=pages_v, k_sequences=paged)
        results.append(run(request))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@few
@given(lengths=lengths(), options=some_options, seed=st.integers(0, 99))
def test_packed_gradients_are_a_loop(
    run_backward: Callable[..., Any], lengths: list[tuple[int, int]], options: dict[str, Any], seed: int
) -> None:
    batch = Batch.random(lengths, seed=seed)
    g = torch.Generator().manual_seed(seed)
    d_outs = [torch.randn(*q.shape[:2], 8, generator=g) for q in batch.q]
    d_lses = [torch.randn(q.shape[1], q.shape[0], generator=g) for q in batch.q]
    alone = [run_backward(batch.one(i, **options), d_outs[i][None], d_lses[i][None]) for i in range(len(lengths))]
    together = run_backward(batch.packed(**options), torch.cat(d_outs), torch.cat(d_lses, dim=1))
    for i in range(3):
        close(together[i], torch.cat([grads[i][0] for grads in alone]))
    if options["sink"] is not None:
        close(together[3], sum(grads[3] for grads in alone))


def test_gradients_of_unused_slots_are_zero(run_backward: Callable[..., Any]) -> None:
    """Poison in storage and in d_out beyond the sequences neither spreads nor stays."""
    batch = Batch.random([(4, 9), (1, 13), (3, 0)])
    q, q_sequences = pack(batch.q, room=2, fill=torch.nan)
    k, k_sequences = pad(batch.k, fill=torch.nan)
    v, _ = pad(batch.v, fill=torch.inf)
    d_out, _ = pack([torch.ones(len(x), 4, 8) for x in batch.q], room=2, fill=torch.nan)
    grads = run_backward(Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=k_sequences), d_out)
    for grad, storage in zip(grads, (q, k, v), strict=False):
        assert grad.isfinite().all()
        assert (grad[~storage.isfinite().all(-1)] == 0).all()


def test_sequences_that_share_a_cache_row_share_its_gradient(run_backward: Callable[..., Any]) -> None:
    """batch_index naming a row twice, and a page listed twice: the gradients add up."""
    batch = Batch.random([(3, 8)] * 2)
    q, q_sequences = pack(batch.q)
    d_out = torch.randn(6, 4, 8)
    k, v = batch.k[0][None], batch.v[0][None]
    twice = replace(batch.packed(), k=torch.cat([k[0]] * 2), v=torch.cat([v[0]] * 2))
    dq, dk, dv, _ = run_backward(twice, d_out)
    _, layout = pad([batch.k[0]] * 2, rows=(0, 0), room=0)
    shared = run_backward(Request(q=q, k=k, v=v, q_sequences=q_sequences, k_sequences=layout), d_out)
    close(shared[0], dq)
    close(shared[1][0], dk[:8] + dk[8:])
    close(shared[2][0], dv[:8] + dv[8:])
