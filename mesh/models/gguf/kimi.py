"""Kimi Linear, most of whose layers keep a running state, and the others a latent, which turns
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import Architecture, attentive, some_attend
from mesh.models.gguf.deepseeks import LATENT, MIXTURE, require_sigmoid, require_weighed
from mesh.models.gguf.llamas import MIXTRAL_EXPERTS
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_STATES = {
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a.": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_DIMENSIONS = {f"ssm_conv1d_{each}": 3 for each in "qkv"} | {"ssm_a": 4}


def _kimi_linear(said: GgufSettings) -> dict[str, Any]:
    attends, _ = some_attend(said)
    config = attentive(said, "kimi_linear", "KimiLinearForCausalLM", groups=1)
    require_sigmoid(said)
    require_weighed(said, default=True)
    # Nothing is turned; what is in a latent and in a head is said under other names.
    said.pass_over("rope.freq_base", "attention.key_length", "attention.value_length")
    layers, dense = config["num_hidden_layers"], said.whole("leading_dense_block_count", 0, least=0)
    turned, keys = said.whole("rope.dimension_count"), said.whole("attention.key_length_mla")
    if turned >= keys:
        said.refuse(f"{turned} numbers of keys of {keys} are the same for all heads")
    heads, ranks = config["num_attention_heads"], said.whole("attention.q_lora_rank", 0, least=0)
    return config | {
        "num_key_value_heads": heads,
        "intermediate_size": said.whole("feed_forward_length"),
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "mlp_layer_types": ["dense" if n < dense else "sparse" for n in range(layers)],
        "q_lora_rank": ranks or None,
        "kv_lora_rank": said.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys - turned,
        "v_head_dim": said.whole("attention.value_length_mla"),
        "linear_head_dim": said.whole("kda.head_dim"),
        "linear_num_heads": heads,
        "linear_conv_kernel_dim": said.whole("ssm.conv_kernel"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        "num_experts": said.whole("expert_count"),
        "num_experts_per_token": said.whole("expert_used_count"),
        "num_shared_experts": said.whole("expert_shared_count"),
        "num_expert_group": said.whole("expert_group_count", 1),
        "topk_group": said.whole("expert_group_used_count", 1),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0),
        "moe_renormalize": True,
    }


def _unlike(name: str, _: Mapping[str, Any]) -> Difference | None:
    return Difference("decay", heads=1) if name == "ssm_a" else None


KIMI_LINEAR = Architecture(
    _kimi_linear,
    LATENT | _STATES | MIXTURE,
    experts=MIXTRAL_EXPERTS,
    dimensions=_DIMENSIONS,
    unlike=_unlike,
)
