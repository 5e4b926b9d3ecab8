"""A checkpoint of `make_large_checkpoint` as a GGUF file, for llama.cpp to run beside us."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_ENDS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write_gguf(file: Path, directory: Path, library: Path) -> None:
    """Write `directory` to `file` in bf16; `library` is the folder of llama.cpp's own gguf."""
    sys.path.insert(0, str(library))
    import gguf

    config = json.loads((directory / "config.json").read_text())
    kind = {"llama": "llama", "qwen2": "qwen2"}[config["model_type"]]
    writer = gguf.GGUFWriter(file, kind)
    _describe(writer, config)
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() == 1:
            writer.add_tensor(_renamed(name), tensor.float().numpy())
        else:
            raw = tensor.to(torch.bfloat16).view(torch.uint16).numpy()
            writer.add_tensor(_renamed(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab = config["vocab_size"]
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")  # nothing is tokenised; a vocabulary has to be there
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"t%d" % i for i in range(3, vocab))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3, *([1] * (vocab - 3))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _renamed(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_LAYER[part]}.{kind}"
