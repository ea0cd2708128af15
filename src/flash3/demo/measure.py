"""How far apart two results are, and how far apart they may be.

The rule is the test suite's: ours may be at most twice as far from the truth as plain torch in the same dtype, plus 2 ulp, and
in root mean square 1.5 times as far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

import flash3

from .generate import Answers
from .paged import PagedCache
from .plugged import Packed, tokens_first, using
from .results import Error, LayerErrors

RECORDED = "f3_recorded_eager"
RMS_FACTOR = 1.5


def recorded_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, record: list[Any], **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own eager attention; `record` receives its q, k and v, rotated and ready."""
    record.append(tuple(tokens_first(x) for x in (query, key, value)))
    return eager_attention_forward(module, query, key, value, mask, **keywords)


AttentionInterface.register(RECORDED, recorded_attention)
AttentionMaskInterface.register(RECORDED, eager_mask)


@torch.inference_mode()
def real_qkv(model: LlamaForCausalLM, tokens: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """q (tokens, heads_q, d), k and v (tokens, heads_kv, d) of every layer while the model reads one text."""
    record: list[Any] = []
    with using(model, RECORDED):
        model(torch.tensor([tokens], device=model.device), use_cache=False, logits_to_keep=1, record=record)
    return record


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in three lines of torch, in the dtype it is given; (tokens, heads, d)."""
    q, k, v = (
        x.transpose(0, 1) for x in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    )
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str | None) -> torch.Tensor:
    """The same through a paged cache: all tokens but the last as a prompt, then the last as a decode step."""
    cache = PagedCache(layers=1, heads=k.shape[1], head_dim=k.shape[2], batch=1, capacity=len(q), like=k)
    outs: list[Any] = []
    for part in (slice(0, len(q) - 1), slice(len(q) - 1, len(q))):
        new = Packed.of([len(q[part])], q.device)
        cache.reserve([new.longest])
        outs.append(
            flash3.attention_kvcache(
                q[part],
                cache.layer(0),
                k_new=k[part],
                v_new=v[part],
                cu_seqlens_q=new.cu_seqlens,
                max_seqlen_q=new.longest,
                mask=flash3.Mask(causal=True),
                backend=backend,
            )
        )
        cache.advance([new.longest])
    return torch.cat(outs)


def allowed(plain: float, largest: float, dtype: torch.dtype) -> float:
    """Twice plain torch's error and 2 ulp of the largest value."""
    return 2 * plain + 2 * torch.finfo(dtype).eps * largest


def error_of(result: torch.Tensor, exact: torch.Tensor) -> Error:
    """NaN makes it infinite, so that no comparison passes by accident."""
    difference = (result.double() - exact).abs().nan_to_num(nan=float("inf"))
    return Error(difference.max().item(), difference.square().mean().sqrt().item())


@torch.inference_mode()
def layer_errors(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str | None) -> LayerErrors:
    """flash3's dense and paged calls and plain torch's, each against float64."""
    exact = plain_attention(q.double(), k.double(), v.double())
    plain = error_of(plain_attention(q, k, v), exact)
    dense: Any = flash3.attention(q[None], k[None], v[None], mask=flash3.Mask(causal=True), backend=backend)
    ours = error_of(dense[0], exact), error_of(paged_attention(q, k, v, backend), exact)
    limit = allowed(plain.largest, exact.abs().max().item(), q.dtype)
    within = all(error.largest <= limit and error.rms <= RMS_FACTOR * plain.rms for error in ours)
    return LayerErrors(layer, plain, *ours, limit, within)


@dataclass(frozen=True)
class Agreement:
    """One run beside the reference run: equal tokens, and how far the logits are apart where both had read the same text."""

    equal_tokens: int
    all_tokens: int
    largest_logit_difference: float

    @property
    def exact(self) -> bool:
        return self.equal_tokens == self.all_tokens


def same_text(ours: Sequence[int], reference: Sequence[int]) -> int:
    """How many tokens agree before the first that does not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, reference, strict=False)))


def agreement(ours: Answers, reference: Answers) -> Agreement:
    """Compare two runs over the same prompts. After a first unequal token the texts differ, so their logits are not compared."""
    largest, equal = 0.0, 0
    for row, (a, b) in enumerate(zip(ours.tokens, reference.tokens, strict=True)):
        equal += same_text(a, b)
        comparable = min(same_text(a, b) + 1, len(a), len(b))
        difference = (ours.logits[:comparable, row] - reference.logits[:comparable, row]).abs()
        largest = max(largest, difference.nan_to_num(nan=float("inf")).max().item())
    longest = sum(max(len(a), len(b)) for a, b in zip(ours.tokens, reference.tokens, strict=True))
    return Agreement(equal, longest, largest)


def closest_call(reference: Answers) -> float:
    """The smallest lead of a chosen token over the runner-up: a logit error above half of it could have changed the text."""
    leads = []
    for row, tokens in enumerate(reference.tokens):
        first, second = reference.logits[: len(tokens), row].topk(2).values.unbind(-1)
        leads.append((first - second).min().item())
    return min(leads)
