"""`flash3 demo`: SmolLM2-135M-Instruct answers prompts through flash3's paged cache, measured beside its own attention."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import flash3

from . import gguf_llama, measure, picture
from .generate import Answers, with_flash3, with_transformers
from .options import Options, Progress, device_name, serving_backend
from .results import Answer, ChatResult, ChatRun, LayerErrors
from .weights import SMOLLM2, CannotRun

NAME = "SmolLM2-135M-Instruct"
PROMPTS = (
    "What is the capital of France?",
    "Name the four seasons of the year in order, starting with spring.",
    "Give me a Python function that returns the sum of two numbers.",
    "Here is a list of numbers: 3, 8, 1, 9, 4. Repeat the list exactly as it is written, and then say how many numbers it has.",
)
ROUNDS = 2  # timed ones, after a warm-up of a few tokens; speed is the best of them
WARM_UP_TOKENS = 2
REFERENCE, OURS, THEIRS = "transformers, eager", "flash3, paged", "transformers, torch SDPA"


@dataclass(frozen=True)
class Conversation:
    """A model with its tokenizer, and the prompts as it reads them."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    prompts: tuple[str, ...]
    encoded: list[list[int]]


def run(options: Options, progress: Progress) -> ChatResult:
    """Load, answer in three ways, set every number beside its bound, draw."""
    chat = load(options, progress)
    c = chat.model.config
    backend = serving_backend(options, c.num_attention_heads, c.num_key_value_heads, c.head_dim, flash3.Mask(causal=True))
    answers, speed = race(chat, options, progress)
    reference, ours = answers[REFERENCE], answers[OURS]
    agree = {name: measure.agreement(result, reference) for name, result in answers.items()}
    largest_logit = reference.logits.abs().max().item()
    logit_limit = measure.allowed(agree[THEIRS].largest_logit_difference, largest_logit, options.dtype)
    longest = max((prompt + answer for prompt, answer in zip(chat.encoded, reference.tokens, strict=True)), key=len)
    layers = layer_table(chat.model, longest, options, progress)
    progress.begin("Drawing the blocks that the masks visit")
    path = picture.draw(panels(len(longest)), options.output / "blocks.png")
    return ChatResult(
        model=NAME,
        device=device_name(options),
        dtype=str(options.dtype).removeprefix("torch."),
        backend=backend,
        answers=answer_rows(chat, ours, reference),
        runs=[ChatRun(n, a.equal_tokens, a.all_tokens, a.largest_logit_difference, speed[n]) for n, a in agree.items()],
        largest_logit=largest_logit,
        closest_call=measure.closest_call(reference),
        logit_difference_allowed=logit_limit,
        layers=layers,
        layer_tokens=len(longest),
        picture=str(path),
        checks={
            "tokens equal those of the model's own eager attention": agree[OURS].exact,
            "logits within bounds": agree[OURS].largest_logit_difference <= logit_limit,
            "every layer's attention within bounds": all(layer.within for layer in layers),
        },
    )


def load(options: Options, progress: Progress) -> Conversation:
    """The model, and each prompt as one user message in its chat format.

    Raises:
        CannotRun: the weights are missing, or a prompt with its answer is longer than the model reads.
    """
    progress.begin(f"Loading {NAME}")
    model, tokenizer = gguf_llama.load(SMOLLM2.path(), options.dtype, options.device)
    prompts = options.prompts or PROMPTS
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = [list(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"]) for m in messages]
    longest = max(map(len, encoded)) + options.tokens
    if longest > model.config.max_position_embeddings:
        raise CannotRun(f"a prompt with its answer may have {model.config.max_position_embeddings} tokens; this would be {longest}")
    return Conversation(model, tokenizer, prompts, encoded)


def race(chat: Conversation, options: Options, progress: Progress) -> tuple[dict[str, Answers], dict[str, float]]:
    """Each way's answers and its tokens per second. The ways take turns, so that a busy moment of the machine hits all of them."""
    answers: dict[str, Answers] = {}
    speed: dict[str, float] = dict.fromkeys((REFERENCE, THEIRS, OURS), 0.0)
    for number in range(ROUNDS + 1):
        tokens = options.tokens if number else min(WARM_UP_TOKENS, options.tokens)
        for name in speed:
            each = progress.begin(f"{name}, round {number} of {ROUNDS}" if number else f"{name}, warm-up", tokens)
            if name == OURS:
                answers[name] = with_flash3(chat.model, chat.encoded, tokens, backend=options.backend, each=each)
            else:
                attention = "eager" if name == REFERENCE else "sdpa"
                answers[name] = with_transformers(chat.model, chat.encoded, tokens, attention=attention, each=each)
            if number:
                speed[name] = max(speed[name], answers[name].tokens_per_second)
    return answers, speed


def answer_rows(chat: Conversation, ours: Answers, reference: Answers) -> list[Answer]:
    """flash3's answers as text."""
    rows = zip(chat.prompts, chat.encoded, ours.tokens, reference.tokens, strict=True)
    return [
        Answer(prompt, chat.tokenizer.decode(tokens, skip_special_tokens=True), len(ids), tokens, tokens == expected)
        for prompt, ids, tokens, expected in rows
    ]


def layer_table(model: LlamaForCausalLM, text: list[int], options: Options, progress: Progress) -> list[LayerErrors]:
    """Each layer's attention against float64 while the model reads one prompt with its answer."""
    recorded = measure.real_qkv(model, text)
    each = progress.begin("Each layer's attention against float64", len(recorded))
    layers = []
    for index, (q, k, v) in enumerate(recorded):
        layers.append(measure.layer_errors(index, q, k, v, options.backend))
        each()
    return layers


def panels(tokens: int) -> list[picture.Panel]:
    """The mask that the longest text was read with, in small blocks to be seen; and a window over a longer text."""
    return [
        picture.Panel(f"causal: a prompt and its answer, {tokens} tokens", flash3.Mask(causal=True), tokens, tokens, 8, 8),
        picture.Panel("causal, window of 512 tokens: 2048 tokens", flash3.Mask(causal=True, left=511), 2048, 2048, 64, 64),
    ]
