"""Which models are known to have standard layers, by their config alone.

For whoever plans without loading anything: what is said here holds of the families that the tests
look at, and no is said of all others, whose layers are looked at when they are loaded
(`mesh.shard.lean_proof`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

STANDARD = frozenset(
    {
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2",
        "smollm3", "granite",
    }
)  # fmt: skip
ACTIVATIONS = frozenset(
    {"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"}
)
_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that do not depend on how long a session is."""


def has_standard_layers(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether the language model of this config, of that type, is known to have."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    named = (text.get(n) for n in ("hidden_act", "hidden_activation", "activation_function"))
    activation = next((name for name in named if name), "silu")
    return model_type in STANDARD and activation in ACTIVATIONS and _ROPES.issuperset(_ropes(text))


def _ropes(text: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of rotary embedding that it names."""
    for name in ("rope_parameters", "rope_scaling"):
        said = text.get(name)
        each = [said, *said.values()] if isinstance(said, Mapping) else []
        for one in each:
            if isinstance(one, Mapping) and (kind := one.get("rope_type", one.get("type"))):
                yield str(kind)
