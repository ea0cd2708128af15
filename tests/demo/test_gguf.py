"""A small GGUF file, written with llama.cpp's row order, comes back as the same model and a working tokenizer."""

import gguf
import pytest
import torch

from flash3.demo import gguf_llama
from flash3.demo.weights import CannotRun

CONTROL, NORMAL = gguf_llama.CONTROL_TOKEN, 1
LETTERS = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]  # the byte-level alphabet of ASCII text
WORDS = ["<|end|>", "<|im_start|>", "<|im_end|>", *LETTERS, "he", "ll", "hell", "hello", "Ġhello"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]


def interleaved_rows(weight, heads):
    """What llama.cpp's converter does to q and k: row i and row i + d/2 of a head become rows 2i and 2i + 1."""
    per_head = weight.view(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return torch.stack((per_head[:, 0], per_head[:, 1]), dim=2).reshape(weight.shape)


@pytest.fixture
def gguf_file(tiny_llama, tmp_path):
    def write(pre="smollm"):
        c = tiny_llama.config
        path = tmp_path / f"{pre}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(c.num_hidden_layers)
        writer.add_context_length(c.max_position_embeddings)
        writer.add_embedding_length(c.hidden_size)
        writer.add_feed_forward_length(c.intermediate_size)
        writer.add_head_count(c.num_attention_heads)
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(c.head_dim)
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
        words = WORDS + [f"unused{i}" for i in range(c.vocab_size - len(WORDS))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(words)
        writer.add_token_merges(MERGES)
        writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(words) - 3))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
        names = {ours: theirs for theirs, ours in gguf_llama.WHOLE.items()}
        for layer in range(c.num_hidden_layers):
            for theirs, ours in gguf_llama.PARTS.items():
                names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
        for name, value in tiny_llama.state_dict().items():
            part = name.split(".")[-2]
            writer.add_tensor(names[name], (interleaved_rows(value, heads[part]) if part in heads else value).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_model_and_tokenizer_come_back(tiny_llama, gguf_file, prompts):
    model, tokenizer = gguf_llama.load(gguf_file(), torch.float32, torch.device("cpu"))
    assert not model.training
    for name, value in tiny_llama.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0, msg=name)
    tokens = torch.tensor([prompts[-1]])
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, tiny_llama(tokens).logits, rtol=0, atol=0)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello hello 42"}], return_dict=True)["input_ids"]
    assert [WORDS[i] for i in ids] == ["<|im_start|>", "hello", "Ġhello", "Ġ", "4", "2", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello hello 42"


def test_an_unknown_tokenizer_is_refused(gguf_file):
    with pytest.raises(CannotRun, match="gpt2/other"):
        gguf_llama.load(gguf_file("other"), torch.float32, torch.device("cpu"))
