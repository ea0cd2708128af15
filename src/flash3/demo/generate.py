"""Greedy answers, twice: through flash3's paged cache, and by the model's own `generate` with an attention of its choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from .paged import PagedCache
from .plugged import Packed, PagedStep, paged_model, rotary_tables, using


def nothing() -> None:
    """Called after each step when nobody watches."""


@dataclass(frozen=True)
class Answers:
    """Greedy answers to a batch of prompts: tokens (each up to its end-of-text), logits of every step, time taken."""

    tokens: list[list[int]]
    logits: torch.Tensor  # float32 (steps, batch, vocabulary)
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def through_end(chosen: torch.Tensor, end: int) -> list[list[int]]:
    """(steps, batch) as one list for each sequence, cut after its first `end`."""
    rows = chosen.T.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def with_flash3(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    backend: str | None = None,
    each: Callable[[], None] = nothing,
) -> Answers:
    """Prompts of different lengths go in packed, without padding; their keys and values go to shuffled pages of 16 slots.

    Every step, the prompts and each single token after them, is the same call.
    """
    config, device = model.config, model.device
    synchronize(device)
    start = time.perf_counter()
    capacity = max(map(len, prompts)) + tokens
    cache = PagedCache(
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        batch=len(prompts),
        capacity=capacity,
        like=model.get_input_embeddings().weight,
    )
    rotary = rotary_tables(model, capacity)
    steps: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    new, counts = torch.tensor([t for p in prompts for t in p], device=device), [len(p) for p in prompts]
    with paged_model(model):
        while len(steps) < tokens and not (steps and ended.all()):
            cache.reserve(counts)
            packed = Packed.of(counts, device)
            out = model(
                new[None],
                use_cache=False,  # transformers' cache; ours is in the step
                logits_to_keep=packed.cu_seqlens[1:] - 1,
                paged_step=PagedStep(cache, packed, rotary, backend),
            )
            cache.advance(counts)
            steps.append(out.logits[0])
            new, counts = steps[-1].argmax(-1), [1] * len(prompts)
            chosen.append(new)
            ended |= new == config.eos_token_id
            each()
    synchronize(device)
    seconds = time.perf_counter() - start
    return Answers(through_end(torch.stack(chosen), config.eos_token_id), torch.stack(steps).float().cpu(), seconds)


class Watched(StoppingCriteria):
    """Never stops anything; `generate` asks it after each token, so it can move a progress bar."""

    def __init__(self, each: Callable[[], None]):
        self.each = each

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.each()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def with_transformers(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], tokens: int, *, attention: str, each: Callable[[], None] = nothing
) -> Answers:
    """The model's own way: prompts padded at the left, `generate` with its own cache and `attention` ("eager" or "sdpa")."""
    config, device = model.config, model.device
    width = max(map(len, prompts))
    padded = torch.tensor([[config.pad_token_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    visible = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    greedy = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with using(model, attention):
        synchronize(device)
        start = time.perf_counter()
        out = model.generate(
            padded, attention_mask=visible, generation_config=greedy, stopping_criteria=StoppingCriteriaList([Watched(each)])
        )
        synchronize(device)
        seconds = time.perf_counter() - start
    chosen = out.sequences[:, width:].T
    return Answers(through_end(chosen, config.eos_token_id), torch.stack(out.logits).float().cpu(), seconds)
