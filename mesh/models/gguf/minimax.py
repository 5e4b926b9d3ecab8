"""MiniMax M2, each of whose layers is a mixture."""

from __future__ import annotations

from typing import Any

from mesh.models.gguf.architecture import DECODER, HEAD_NORMS, Architecture, decoder, head_width
from mesh.models.gguf.deepseeks import require_sigmoid
from mesh.models.gguf.llamas import MIXTRAL_EXPERTS
from mesh.models.gguf.rotary import partial_rotary
from mesh.models.gguf.settings import GgufSettings

_MIXTURE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}


def _minimax_m2(said: GgufSettings) -> dict[str, Any]:
    require_sigmoid(said)
    config = decoder(said, "minimax_m2", "MiniMaxM2ForCausalLM")
    width = head_width(said, config)
    return config | {
        "head_dim": width,
        "rope_parameters": partial_rotary(said, width),
        "intermediate_size": said.whole("expert_feed_forward_length"),
        "num_local_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
    }


MINIMAX_M2 = Architecture(_minimax_m2, DECODER | HEAD_NORMS | _MIXTURE, experts=MIXTRAL_EXPERTS)
