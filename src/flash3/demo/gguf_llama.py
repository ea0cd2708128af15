"""A Llama model out of a GGUF file: its configuration, its weights in float32, its tokenizer.

transformers can read GGUF too, but wants `accelerate` for it and parses the file once for each of the three parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from .weights import CannotRun

CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its like

# GGUF's names of the parts of block N, and transformers' names for them.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def load(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model (eager attention, evaluation mode) and its tokenizer with its chat template.

    Raises:
        CannotRun: the file holds another architecture, or another kind of tokenizer.
    """
    reader = gguf.GGUFReader(path)
    fields = Fields(reader)
    if fields["general.architecture"] != "llama":
        raise CannotRun(f"{path.name} holds a {fields['general.architecture']} model; the demo reads llama")
    config = configuration(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = state_dict(reader, config)
    logging.disable_progress_bar()  # the demo shows its own
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, attn_implementation="eager", dtype=dtype)
    return model.to(device).eval(), tokenizer(fields)


class Fields:
    """A GGUF file's metadata as a mapping."""

    def __init__(self, reader: gguf.GGUFReader):
        self.fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self.fields[key].contents()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.fields else default


def configuration(fields: Fields, tied: bool) -> LlamaConfig:
    """GGUF's llama.* fields in transformers' words. `tied`: the file has no output matrix, the embedding serves for it."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.attention.key_length", hidden // heads),
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
    )


def state_dict(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The weights in float32 under transformers' names, rows of q and k back in transformers' order."""
    weights = {}
    for tensor in reader.tensors:
        value = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))  # a copy: float32 tensors still are the file
        if "attn_q." in tensor.name:
            value = half_split_rows(value, config.num_attention_heads)
        elif "attn_k." in tensor.name:
            value = half_split_rows(value, config.num_key_value_heads)
        weights[transformers_name(tensor.name)] = value
    return weights


def transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if name in WHOLE:
        return WHOLE[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.{kind}"


def half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k.

    llama.cpp rotates neighbours (0, 1), (2, 3), …; transformers rotates the two halves of a head. The converter therefore
    wove each head's halves together: row 2i of a head was row i, row 2i + 1 was row i + head_dim / 2.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def tokenizer(fields: Fields) -> PreTrainedTokenizerFast:
    """The byte-level BPE of the file, as `tokenizers` builds it."""
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise CannotRun(f"the demo knows the tokenizer gpt2/smollm; this file has {kind}/{pre}")
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    bpe.add_special_tokens([AddedToken(word, special=True) for word, kind in zip(words, types, strict=True) if kind == CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=words[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=words[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=words[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
    )
