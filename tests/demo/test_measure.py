"""Each layer's attention on the model's own q, k and v."""

import pytest
import torch

from flash3.demo import measure


def test_recorded_qkv_reproduce_the_models_attention(tiny_llama, prompts):
    recorded = measure.real_qkv(tiny_llama, prompts[-1])
    assert [tuple(x.shape) for x in recorded[0]] == [(40, 9, 16), (40, 3, 16), (40, 3, 16)]
    assert len(recorded) == 3
    outputs = []
    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(lambda _, x: outputs.append(x[0])) for layer in tiny_llama.model.layers]
    with torch.inference_mode():
        tiny_llama(torch.tensor([prompts[-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    for qkv, output in zip(recorded, outputs, strict=True):
        torch.testing.assert_close(measure.plain_attention(*qkv).reshape(1, 40, -1), output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_within_bounds(dtype):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(33, heads, 32, generator=generator).to(dtype) for heads in (6, 2, 2))
    found = measure.layer_errors(7, q, k, v, backend=None)
    assert found.layer == 7
    assert found.within
    assert 0 < found.flash3.largest <= found.allowed
    assert 0 < found.flash3_paged.largest <= found.allowed


def test_a_wrong_result_is_out_of_bounds(monkeypatch):
    q, k, v = (torch.randn(20, 2, 16, generator=torch.Generator().manual_seed(3)) for _ in range(3))
    honest = measure.flash3.attention
    monkeypatch.setattr(measure.flash3, "attention", lambda *args, **keywords: honest(*args, **keywords) * 1.001)
    assert not measure.layer_errors(0, q, k, v, backend=None).within


def test_nan_is_an_infinite_error():
    assert measure.error_of(torch.tensor([float("nan"), 1.0]), torch.ones(2, dtype=torch.float64)).largest == float("inf")
