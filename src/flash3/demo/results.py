"""What a run of the demo found: plain data, printed by `report`. In each result `checks` says what must hold, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Error:
    """Distance to the float64 result."""

    largest: float
    rms: float


@dataclass(frozen=True)
class LayerErrors:
    """One layer's attention on the model's real q, k and v: plain torch's, flash3's dense and paged calls; the largest error allowed."""

    layer: int
    torch: Error
    flash3: Error
    flash3_paged: Error
    allowed: float
    within: bool


@dataclass(frozen=True)
class Answer:
    """flash3's answer to one prompt, and whether the model's own attention gives the same tokens."""

    prompt: str
    answer: str
    prompt_tokens: int
    tokens: list[int]
    tokens_equal: bool


@dataclass(frozen=True)
class ChatRun:
    """One way to answer the prompts, beside the reference."""

    name: str
    equal_tokens: int
    all_tokens: int
    largest_logit_difference: float
    tokens_per_second: float


@dataclass(frozen=True)
class ChatResult:
    """`--model smollm2`."""

    model: str
    device: str
    dtype: str
    backend: str
    answers: list[Answer]
    runs: list[ChatRun]
    largest_logit: float
    closest_call: float
    logit_difference_allowed: float
    layers: list[LayerErrors]
    layer_tokens: int
    picture: str
    checks: dict[str, bool]


@dataclass(frozen=True)
class EmbedRun:
    """One way to embed the sentences, beside the reference."""

    name: str
    largest_difference: float
    smallest_cosine: float
    token_slots: int
    sentences_per_second: float


@dataclass(frozen=True)
class EmbedResult:
    """`--model minilm`."""

    model: str
    device: str
    dtype: str
    backend: str
    sentences: list[str]
    similarity: list[list[float]]
    runs: list[EmbedRun]
    difference_allowed: float
    timed_sentences: int
    checks: dict[str, bool]
