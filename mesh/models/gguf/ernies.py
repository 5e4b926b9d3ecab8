"""ERNIE 4.5 and its mixtures."""

from __future__ import annotations

from typing import Any

from mesh.models.gguf.architecture import DECODER, Architecture, decoder, head_width
from mesh.models.gguf.deepseeks import MIXTURE
from mesh.models.gguf.qwens import EXPERTS
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings

_MIXTURE = MIXTURE | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}


def _ernie(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "ernie4_5", "Ernie4_5ForCausalLM")
    width = head_width(said, config)
    return config | {
        "head_dim": width,
        "use_bias": said.has("blk.0.attn_q.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _ernie_moe(said: GgufSettings) -> dict[str, Any]:
    config = _ernie(said)
    # It divides the width of what is not a mixture by the heads for keys, which means nothing.
    said.pass_over("expert_shared_feed_forward_length")
    return config | {
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": said.whole("expert_count"),
        "moe_k": said.whole("expert_used_count"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        "moe_num_shared_experts": said.whole("expert_shared_count", 0, least=0),
        "moe_layer_interval": said.whole("interleave_moe_layer_step", 1),
        "moe_layer_start_index": said.whole("leading_dense_block_count", 0, least=0),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
    }


ERNIE4_5 = Architecture(_ernie, DECODER)
ERNIE4_5_MOE = Architecture(
    _ernie_moe, DECODER | _MIXTURE, experts=EXPERTS, dimensions={"exp_probs_b": 2}
)
