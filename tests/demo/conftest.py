"""A Llama small enough for a test, with the head counts of the real one."""

import pytest
import torch
import transformers


@pytest.fixture(scope="session")
def tiny_llama():
    """Random weights, large enough to make answers differ; 9 query and 3 key heads as in SmolLM2."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def prompts():
    """Lengths on both sides of a page of 16 slots."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 40)]
