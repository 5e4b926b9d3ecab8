"""Qwen 2 to 3, and the text of those that look at pictures.

Positions of text are the same in each of the sections in which such a model turns its heads, and
what pictures add to its first layers is nothing without one: so it is computed as its like that
has no eyes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh.models.gguf.architecture import DECODER, HEAD_NORMS, Architecture, decoder, head_width
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings

Config = Callable[[GgufSettings], dict[str, Any]]

EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""What a mixture has that has an expert for every token."""

EACH_LAYER: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""That each layer is a mixture: no file says so; llama.cpp computes so."""


def shared_experts(said: GgufSettings) -> dict[str, Any]:
    """The counts and widths of the experts of such a mixture."""
    wide = said.whole("expert_shared_feed_forward_length")
    return _experts(said) | {"shared_expert_intermediate_size": wide}


def _experts(said: GgufSettings) -> dict[str, Any]:
    return {
        "num_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
    }


def _qwen2(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "qwen2", "Qwen2ForCausalLM")
    width = head_width(said, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        said.refuse("its heads together are not as wide as the model")
    return config | {"rope_parameters": full_rotary(said, width)}


def _qwen2_moe(said: GgufSettings) -> dict[str, Any]:
    return (
        _qwen2(said)
        | shared_experts(said)
        | EACH_LAYER
        | {
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            "norm_topk_prob": False,  # no file says it; llama.cpp computes so
        }
    )


def _qwen3(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "qwen3", "Qwen3ForCausalLM")
    width = head_width(said, config)
    return config | {"head_dim": width, "rope_parameters": full_rotary(said, width)}


def _qwen3_moe(said: GgufSettings) -> dict[str, Any]:
    return (
        _qwen3(said)
        | _experts(said)
        | EACH_LAYER
        | {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "norm_topk_prob": True,  # no file says it; llama.cpp computes so
        }
    )


def _of_text(config: Config) -> Config:
    def text_of(said: GgufSettings) -> dict[str, Any]:
        said.pass_over("rope.dimension_sections", "n_deepstack_layers")
        return config(said)

    return text_of


QWEN2 = Architecture(_qwen2, DECODER)
QWEN2_VL = Architecture(_of_text(_qwen2), DECODER)
QWEN2_MOE = Architecture(
    _qwen2_moe, DECODER | SHARED_EXPERT, experts=EXPERTS, dimensions={"ffn_gate_inp_shexp": 2}
)
QWEN3 = Architecture(_qwen3, DECODER | HEAD_NORMS)
QWEN3_VL = Architecture(_of_text(_qwen3), DECODER | HEAD_NORMS)
_MIXTURE = DECODER | HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"}
QWEN3_MOE = Architecture(_qwen3_moe, _MIXTURE, experts=EXPERTS)
QWEN3_VL_MOE = Architecture(_of_text(_qwen3_moe), _MIXTURE, experts=EXPERTS)
