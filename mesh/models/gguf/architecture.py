"""What an architecture's GGUF files call its tensors and settings, and transformers calls them.

What the architectures have in common; `architectures` lists them. How llama.cpp writes the files:
https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
DECODER = {
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
BY_PLACE = {name: DECODER[name] for name in DECODER if name != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm"
}
"""The same where the second norm is called by what it stands behind, not by what it is for."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of GGUF file.

    `ends` and `layer` map names of GGUF to those of transformers, without ``.weight`` or ``.bias``
    unless there is one that has either by another name; of one that ends in neither, the dot alone
    is at its end. Tensors of layer i are ``blk.{i}.…`` there and ``{layers}{i}.…`` here. `experts`
    are stacked in one tensor there and apart here; so are the rows of `stacks`, by what those are
    called here and how the config calls their number, and of the ends those of `streams`, a matrix
    for each hidden state but the first. `config` gives what config.json would say,
    but for ids. `by_layer` are lists in the metadata of which each number is a tensor of a
    layer's, by what that is called. `dimensions` says of tensors how many a model's has; where the
    file's has one less, the model's has a 1 before the last, and where the model's has one alone,
    the file's are that. Else either has ones before the others.
    """

    config: Callable[[GgufSettings], dict[str, Any]]
    layer: Mapping[str, str]
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    layers: str = "model.layers."
    experts: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)
    by_layer: Mapping[str, str] = field(default_factory=dict)
    dimensions: Mapping[str, int] = field(default_factory=dict)
    unlike: Callable[[str, Mapping[str, Any]], Difference | None] = lambda name, config: None
    """How the tensor of this GGUF name, without its layer, differs from what the model computes
    with."""


def decoder(
    said: GgufSettings, model_type: str, class_name: str, groups: int | None = None
) -> dict[str, Any]:
    """What the config of every decoder with rotary embeddings says, but for these. `groups` are its
    heads for keys where its layers may differ in them."""
    return attentive(said, model_type, class_name, groups) | {
        "intermediate_size": said.whole("feed_forward_length")
    }


def attentive(
    said: GgufSettings, model_type: str, class_name: str, groups: int | None = None
) -> dict[str, Any]:
    """The same without its feed forward network, which may be experts in each layer."""
    return unnormed(said, model_type, class_name, groups) | {
        "rms_norm_eps": said.real("attention.layer_norm_rms_epsilon")
    }


def unnormed(
    said: GgufSettings, model_type: str, class_name: str, groups: int | None = None
) -> dict[str, Any]:
    """The same without what it normalises by."""
    hidden, heads = said.whole("embedding_length"), said.whole("attention.head_count")
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": said.rows("token_embd.weight", hidden),
        "max_position_embeddings": said.whole("context_length"),
        "num_hidden_layers": said.layers(),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups or said.whole("attention.head_count_kv", heads),
        "tie_word_embeddings": not said.has("output.weight"),
    }


def some_attend(said: GgufSettings) -> tuple[list[bool], int]:
    """Which layers attend, where others keep a running state, and with how many heads for keys.
    Refuses where those differ in them."""
    heads = said.counts("attention.head_count_kv", least=0)
    groups = set(heads) - {0}
    if len(groups) != 1:
        said.refuse("its layers differ in their heads for keys")
    return [each > 0 for each in heads], groups.pop()


def head_width(said: GgufSettings, config: Mapping[str, Any]) -> int:
    """How wide keys and values of a head are. Refuses where they differ."""
    width = said.whole("attention.key_length", 0) or config["hidden_size"] // said.heads(
        config["hidden_size"]
    )
    if said.whole("attention.value_length", width) != width:
        said.refuse("its values are of another width than its keys")
    return width


def kinds(layers: int, period: int) -> list[str]:
    """Every layer looks at a window but each last of `period`."""
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]
