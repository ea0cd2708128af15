"""`flash3 demo --model minilm`: sentence embeddings of a packed batch without padding, beside the model's own attention with padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import torch
from transformers import BertModel, BertTokenizerFast, PreTrainedModel
from transformers.utils import logging

import flash3

from . import measure
from .generate import synchronize
from .options import Options, Progress, device_name, serving_backend
from .plugged import PACKED, Packed, PackedBatch, using
from .results import EmbedResult, EmbedRun
from .weights import MINILM

NAME = "all-MiniLM-L6-v2"
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "On the sunny sill of the kitchen window, an old grey cat has curled up and dozes through the whole afternoon.",
    "The central bank raised interest rates by half a point.",
    "Borrowing money becomes more expensive when the monetary authority tightens its policy to bring inflation down.",
    "Matrix multiplication units do most of the work in a transformer.",
    "Good morning!",
)
BATCH = 48  # the sentences repeated to this many, to time them
ROUNDS = 4  # the first one warms up; speed is the best of the others
REFERENCE, OURS, THEIRS = "padded, eager", "packed, flash3", "padded, torch SDPA"


def run(options: Options, progress: Progress) -> EmbedResult:
    """Load, embed in three ways, set every number beside its bound."""
    progress.begin(f"Loading {NAME}")
    logging.disable_progress_bar()  # the demo shows its own
    folder = MINILM.path().parent
    model = (
        BertModel.from_pretrained(folder, attn_implementation="eager", dtype=options.dtype, local_files_only=True).to(options.device).eval()
    )
    tokenizer = BertTokenizerFast.from_pretrained(folder, local_files_only=True)
    heads = model.config.num_attention_heads
    backend = serving_backend(options, heads, heads, model.config.hidden_size // heads, flash3.Mask())
    sentences = options.prompts or SENTENCES
    encoded = tokenizer(list(sentences), truncation=True)["input_ids"]
    ways: dict[str, Callable[[list[list[int]]], torch.Tensor]] = {
        REFERENCE: lambda batch: embed_padded(model, batch, "eager"),
        THEIRS: lambda batch: embed_padded(model, batch, "sdpa"),
        OURS: lambda batch: embed_packed(model, batch, options.backend),
    }
    embeddings = {name: way(encoded).float() for name, way in ways.items()}
    timed = list(islice(cycle(encoded), max(BATCH, len(encoded))))
    speed = race(ways, timed, options.device, progress)
    padded_slots = len(encoded) * max(map(len, encoded))
    slots = {REFERENCE: padded_slots, THEIRS: padded_slots, OURS: sum(map(len, encoded))}
    runs = [beside(name, embeddings[name], embeddings[REFERENCE], slots[name], speed[name]) for name in ways]
    by_name = {row.name: row for row in runs}
    limit = measure.allowed(by_name[THEIRS].largest_difference, embeddings[REFERENCE].abs().max().item(), options.dtype)
    return EmbedResult(
        model=NAME,
        device=device_name(options),
        dtype=str(options.dtype).removeprefix("torch."),
        backend=backend,
        sentences=list(sentences),
        similarity=(embeddings[OURS] @ embeddings[OURS].T).tolist(),
        runs=runs,
        difference_allowed=limit,
        timed_sentences=len(timed),
        checks={"embeddings equal those of the model's own eager attention, within bounds": by_name[OURS].largest_difference <= limit},
    )


def beside(name: str, ours: torch.Tensor, reference: torch.Tensor, slots: int, speed: float) -> EmbedRun:
    difference = (ours - reference).abs().nan_to_num(nan=float("inf")).max().item()
    cosine = torch.nn.functional.cosine_similarity(ours.double(), reference.double()).min().item()
    return EmbedRun(name, difference, cosine, slots, speed)


@torch.inference_mode()
def embed_packed(model: PreTrainedModel, sentences: Sequence[Sequence[int]], backend: str | None) -> torch.Tensor:
    """One row of (1, total tokens): no slot is padding, and no sentence sees another."""
    packed = Packed.of([len(s) for s in sentences], model.device)
    tokens = torch.tensor([[t for s in sentences for t in s]], device=model.device)
    positions = torch.tensor([[p for s in sentences for p in range(len(s))]], device=model.device)
    with using(model, PACKED):
        hidden = model(tokens, position_ids=positions, packed_batch=PackedBatch(packed, backend)).last_hidden_state[0]
    means = [rows.mean(0) for rows in hidden.split([len(s) for s in sentences])]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


@torch.inference_mode()
def embed_padded(model: PreTrainedModel, sentences: Sequence[Sequence[int]], attention: str) -> torch.Tensor:
    """The usual way: every sentence as long as the longest."""
    width, pad = max(map(len, sentences)), model.config.pad_token_id
    tokens = torch.tensor([[*s, *[pad] * (width - len(s))] for s in sentences], device=model.device)
    visible = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sentences], device=model.device)
    with using(model, attention):
        hidden = model(tokens, attention_mask=visible).last_hidden_state
    weights = visible[..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def race(
    ways: dict[str, Callable[[list[list[int]]], torch.Tensor]], batch: list[list[int]], device: torch.device, progress: Progress
) -> dict[str, float]:
    """Sentences per second. The ways take turns, so that a busy moment of the machine hits all of them."""
    each = progress.begin(f"Embedding {len(batch)} sentences, {len(ways)} ways, {ROUNDS} rounds", ROUNDS * len(ways))
    speed = dict.fromkeys(ways, 0.0)
    for number in range(ROUNDS):
        for name, way in ways.items():
            synchronize(device)
            start = time.perf_counter()
            way(batch)
            synchronize(device)
            if number > 0:
                speed[name] = max(speed[name], len(batch) / (time.perf_counter() - start))
            each()
    return speed
