"""Causal models of what transformers has only as a part of models for images and text.

The base model of the text, and a head that is a plain product: what the whole computes of text.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

PLAIN_HEADS = frozenset(
    {
        "glm4v_moe_text",
        "glm4v_text",
        "qwen2_5_omni_text",
        "qwen2_5_vl_text",
        "qwen2_vl_text",
        "qwen3_omni_moe_text",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
    }
)
"""Types of text models whose whole takes the logits as its head gives them."""


@cache
def headed(base_class: type[Any]) -> type[Any]:
    """The causal model over a base model of that class."""
    # Not before there is one: it takes its time to import.
    from transformers import GenerationMixin

    own = {"base_class": base_class, "config_class": base_class.config_class}
    bases = (_Headed, base_class.__mro__[1], GenerationMixin)  # the second: its PreTrainedModel
    return type(f"{base_class.__name__}ForCausalLM", bases, own)


class _Headed:
    """What it has beyond a `PreTrainedModel`."""

    base_class: type[Any]
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: torch.Tensor | None = None, **given: Any
    ) -> CausalLMOutputWithPast:
        """As causal models of transformers do, without a loss."""
        found = self.model(input_ids=input_ids, **given)
        return CausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state),
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )
