"""The decode loop: packed prompts and a paged cache give the model's own greedy tokens."""

import pytest
import torch

from flash3.demo import measure
from flash3.demo.generate import Answers, through_end, with_flash3, with_transformers
from flash3.demo.paged import PagedCache


def test_tokens_and_logits_equal_the_models_own(tiny_llama, prompts):
    reference = with_transformers(tiny_llama, prompts, 20, attention="eager")
    ours = with_flash3(tiny_llama, prompts, 20)
    agreement = measure.agreement(ours, reference)
    assert ours.tokens == reference.tokens
    assert agreement.exact
    assert agreement.all_tokens > len(prompts)
    assert agreement.largest_logit_difference < 1e-4
    assert len({tuple(tokens) for tokens in ours.tokens}) == len(prompts)  # answers that differ: not one constant token


def test_model_is_as_before_afterwards(tiny_llama, prompts):
    rotary = tiny_llama.model.rotary_emb
    with pytest.raises(ValueError, match="no-such-backend"):
        with_flash3(tiny_llama, prompts, 2, backend="no-such-backend")
    assert tiny_llama.model.rotary_emb is rotary
    assert tiny_llama.config._attn_implementation == "eager"


def test_each_step_is_reported(tiny_llama, prompts):
    steps = []
    with_flash3(tiny_llama, prompts[:2], 3, each=lambda: steps.append("ours"))
    with_transformers(tiny_llama, prompts[:2], 3, attention="sdpa", each=lambda: steps.append("theirs"))
    assert steps == ["ours"] * 3 + ["theirs"] * 3


def test_answers_end_with_their_end_of_text():
    chosen = torch.tensor([[5, 2, 7], [2, 9, 7], [6, 6, 7]])
    assert through_end(chosen, end=2) == [[5, 2], [2], [7, 7, 7]]


def make_cache(**keywords):
    return PagedCache(**{"layers": 2, "heads": 1, "head_dim": 8, "batch": 3, "capacity": 40, "like": torch.zeros(1), **keywords})


def test_pages_are_taken_when_needed_and_never_shared():
    cache = make_cache()
    cache.reserve([16, 1, 0])
    assert [len(pages) for pages in cache.pages] == [1, 1, 0]
    cache.advance([16, 1, 0])
    cache.reserve([1, 15, 40])
    taken = [page for pages in cache.pages for page in pages]
    assert [len(pages) for pages in cache.pages] == [2, 1, 3]
    assert len(set(taken)) == len(taken)
    assert sorted(taken) != taken  # the order is shuffled
    assert cache.page_table[2].tolist() == cache.pages[2]
    assert cache.device_lengths.tolist() == [16, 1, 0]


def test_a_sequence_cannot_outgrow_the_cache():
    with pytest.raises(ValueError, match="sequence 1 would have 49 tokens; the cache holds 48"):
        make_cache().reserve([1, 49, 1])


def answers(tokens, logits):
    return Answers(tokens, torch.tensor(logits), 1.0)


def test_agreement_stops_comparing_where_texts_part():
    reference = answers([[1, 2, 0]], [[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]]])
    other = answers([[1, 0, 0]], [[[0.0, 1.5, 0.0]], [[1.25, 0.0, 1.0]], [[99.0, 0.0, 0.0]]])
    found = measure.agreement(other, reference)
    assert (found.equal_tokens, found.all_tokens, found.exact) == (1, 3, False)
    assert found.largest_logit_difference == 1.25  # the step that parted counts, the one after it does not


def test_agreement_is_not_fooled_by_nan_or_length():
    reference = answers([[1]], [[[0.0, 1.0]]])
    assert measure.agreement(answers([[1]], [[[0.0, float("nan")]]]), reference).largest_logit_difference == float("inf")
    longer = answers([[1, 1]], [[[0.0, 1.0]], [[0.0, 1.0]]])
    assert not measure.agreement(longer, reference).exact


def test_closest_call():
    assert measure.closest_call(answers([[1, 0]], [[[0.0, 3.0, 1.0]], [[5.0, 4.5, 0.0]]])) == 0.5
