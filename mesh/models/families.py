"""Model families: the cut of a config to a span of its layers, and the models that refuse it.

The generic rule: a copy of the config with `num_hidden_layers` set to the span's length and every
per-layer list cut to the span. An entry in `ENTRIES` exists only where that rule is not enough; a
new architecture that needs more gets one there. Model types in `PROVEN` are compared with the whole
model by the test suite; any other is compared on first use (`mesh.models.proof`). What is known not
to work is refused with its reason. Code shipped inside a checkpoint is never run (no
trust_remote_code).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mesh.errors import BadCheckpoint, UnsupportedFamily
from mesh.models.manifest import Manifest
from mesh.types import LayerRange

PROVEN = frozenset(
    {
        "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2",
        "gpt2", "smollm3", "minicpm3", "granite",
    }
)  # fmt: skip

_RECURRENT = "its layers keep a running state that cannot be rolled back to an earlier position"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "gemma3n_text": "its later layers share the keys and values of earlier ones",
        "gemma4_text": "its later layers share the keys and values of earlier ones",
        "mamba": _RECURRENT,
        "mamba2": _RECURRENT,
        "falcon_mamba": _RECURRENT,
        "rwkv": _RECURRENT,
        "xlstm": _RECURRENT,
        "recurrent_gemma": _RECURRENT,
    }
)
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_NOT_PER_LAYER = frozenset({"architectures", "eos_token_id", "bos_token_id", "pad_token_id"})
_PER_LAYER = frozenset({"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"})


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """A family's exceptions to the generic rule.

    `refine(span, whole, layers)` corrects the span's config in place. `positions` names the base
    model's learned position embedding, which stays with the ends. `embedding_scale` names the
    config field by which the base model multiplies whatever is embedded: applied by the ends, 1 in
    a span. `refuse(whole)` is the reason why one config cannot be cut, or None.
    """

    refine: Callable[[Any, Any, LayerRange], None] | None = None
    positions: str | None = None
    embedding_scale: str | None = None
    refuse: Callable[[Any], str | None] | None = None


def _refine_depth_scale(span: Any, whole: Any, layers: LayerRange) -> None:
    # Residuals are scaled by scale_depth / sqrt(num_hidden_layers): keep the quotient.
    span.scale_depth = whole.scale_depth * math.sqrt(len(layers) / whole.num_hidden_layers)


def _refine_sparse_layers(span: Any, whole: Any, layers: LayerRange) -> None:
    # A layer is a mixture of experts by its absolute index; name the span's dense ones instead.
    span.mlp_only_layers = [
        layer - layers.start
        for layer in range(layers.start, layers.stop)
        if layer in whole.mlp_only_layers or (layer + 1) % whole.decoder_sparse_step
    ]
    span.decoder_sparse_step = 1


def _refuse_gpt2(whole: Any) -> str | None:
    if whole.scale_attn_by_inverse_layer_idx:
        return "its attention is scaled by the absolute index of the layer"
    return "it attends to an encoder" if whole.add_cross_attention else None


ENTRIES: Mapping[str, FamilyEntry] = MappingProxyType(
    {
        "gpt2": FamilyEntry(positions="wpe", refuse=_refuse_gpt2),
        "granite": FamilyEntry(embedding_scale="embedding_multiplier"),
        "minicpm3": FamilyEntry(refine=_refine_depth_scale),
        "qwen2_moe": FamilyEntry(refine=_refine_sparse_layers),
        "qwen3_moe": FamilyEntry(refine=_refine_sparse_layers),
    }
)
_GENERIC = FamilyEntry()


@dataclass(frozen=True, slots=True)
class Family:
    """One checkpoint's cut: its text config and the Hugging Face classes that run it."""

    config: Any
    entry: FamilyEntry
    base_class: type[Any]
    causal_class: type[Any]

    @property
    def model_type(self) -> str:
        """The config's model_type, after unwrapping a multimodal config."""
        return str(self.config.model_type)

    @property
    def proven(self) -> bool:
        """Whether the test suite covers it; otherwise it is proved on first use."""
        return self.model_type in PROVEN

    def slice_config(self, layers: LayerRange) -> Any:
        """A config for these layers only, taking embedded (and scaled) inputs as they come."""
        whole, span = self.config, cut_config(self.config, layers)
        if self.entry.embedding_scale:
            setattr(span, self.entry.embedding_scale, 1.0)
        if self.entry.refine:
            self.entry.refine(span, whole, layers)
        return span


def cut_config(whole: Any, layers: LayerRange) -> Any:
    """The generic rule: a copy with so many layers, and of every per-layer list their part."""
    span = copy.deepcopy(whole)
    for name, value in vars(whole).items():
        if isinstance(value, (list, tuple)) and (
            name in _PER_LAYER
            or (len(value) == whole.num_hidden_layers and name not in _NOT_PER_LAYER)
        ):
            setattr(span, name, value[layers.start : layers.stop])
    span.num_hidden_layers = len(layers)
    return span


def family_of(manifest: Manifest) -> Family:
    """How this checkpoint is cut.

    Raises UnsupportedFamily, with the reason, when it cannot be, and BadCheckpoint for a config
    that contradicts itself.
    """
    try:
        whole = _config(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise _unsupported(
            manifest.model_type, f"transformers does not know it ({_first_line(error)})"
        ) from error
    except Exception as error:  # a class of its own for each kind of check, and no common root
        found = " ".join(str(error).split())[:200].rstrip(".")
        raise BadCheckpoint(
            f"{manifest.gguf or manifest.directory / 'config.json'} describes no model: {found}.",
            fix="Download the file again, from the same revision as the weights.",
        ) from error
    text = whole.get_text_config(decoder=True)
    reason = _refusal(whole, text)
    if reason:
        raise _unsupported(str(text.model_type), reason)
    return family_of_config(text)


def _config(manifest: Manifest) -> Any:
    if manifest.gguf is not None:
        return AutoConfig.for_model(**manifest.config)
    return AutoConfig.from_pretrained(
        manifest.directory, local_files_only=True, trust_remote_code=False
    )


def family_of_config(config: Any) -> Family:
    """The same for a text config in memory that was not refused."""
    kind = type(config)
    try:
        base_class = AutoModel._model_mapping[kind]  # noqa: SLF001 - the only config-to-class table
        causal_class = AutoModelForCausalLM._model_mapping[kind]  # noqa: SLF001
    except KeyError as error:
        raise _unsupported(str(config.model_type), "it is not a causal language model") from error
    entry = ENTRIES.get(config.model_type, _GENERIC)
    return Family(config, entry, base_class, causal_class)


def _refusal(whole: Any, text: Any) -> str | None:
    if whole.is_encoder_decoder or text.is_encoder_decoder:
        return "it is an encoder-decoder, whose decoder layers need the encoder's output"
    if text.model_type in _REFUSED:
        return _REFUSED[text.model_type]
    entry = ENTRIES.get(text.model_type, _GENERIC)
    return _unlike_layers(text) or (entry.refuse(text) if entry.refuse else None)


def _unlike_layers(text: Any) -> str | None:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if foreign := sorted(set(kinds) - _ATTENTION_KINDS):
        return f"it has layers of kind {foreign[0]}, and {_RECURRENT}"
    if getattr(text, "num_kv_shared_layers", 0):
        return "its later layers share the keys and values of earlier ones"
    if dense := getattr(text, "first_k_dense_replace", 0):
        return f"its first {dense} layers differ from the rest by absolute index"
    return None


def _unsupported(model_type: str, reason: str) -> UnsupportedFamily:
    return UnsupportedFamily(
        f"Model type {model_type} cannot be cut into layer ranges: {reason}.",
        fix=f"Use a model of a supported type: {', '.join(sorted(PROVEN))}.",
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:200]
