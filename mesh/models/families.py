"""Model families: the cut of a config to a span of its layers, and the models that refuse it.

The generic rule: layers are made as those of the whole model, so that whatever depends on a layer's
index is right, and run under a config with `num_hidden_layers` set to the span's length and every
per-layer list cut to the span. An entry in `ENTRIES` exists only where that rule is not enough; a
new architecture that needs more gets one there. Model types in `PROVEN` are compared with the whole
model by the test suite; any other is compared on first use (`mesh.models.proof`). What is known not
to work is refused with its reason. Code shipped inside a checkpoint is never run (no
trust_remote_code).
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import transformers
from packaging.version import InvalidVersion, Version
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mesh.errors import BadCheckpoint, UnsupportedFamily
from mesh.models.coded.scheme import KEYS
from mesh.models.cuts import cuts_of
from mesh.models.entries import ENTRIES, FamilyEntry
from mesh.models.headed import PLAIN_HEADS, headed
from mesh.models.manifest import Manifest
from mesh.models.pooling import read_pooling
from mesh.models.row_form import RowForm
from mesh.models.standard import streams_of
from mesh.types import LayerRange

PROVEN = frozenset(
    {
        "afmoe", "apertus", "arcee", "axk2", "bamba", "bloom", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
        "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm4v_text",
        "glm_moe_dsa", "gpt2", "gpt_oss", "granite", "granitemoe", "granitemoehybrid",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "laguna", "lfm2",
        "lfm2_moe", "llama", "llama4_text", "mamba", "mamba2", "mimo_v2_flash", "minicpm3",
        "minimax_m2", "ministral", "ministral3", "mistral", "mistral4", "mixtral", "nanochat",
        "nemotron_h", "olmo2", "olmo3", "opt", "phi", "phi3", "phimoe", "qwen2",
        "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text",
        "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3",
    }
)  # fmt: skip

_SHARED = "layers far apart share one block of weights"
_OWN_STATES = "its layers keep a running state in a form of their own"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "zamba": _SHARED,
        "zamba2": _SHARED,
        "minimax": _OWN_STATES,
        "rwkv": _OWN_STATES,
        "xlstm": _OWN_STATES,
    }
)
_STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_KINDS = _STATE_KINDS | {
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "mlp",
}  # fmt: skip
_INPUTS, _SHARED_KEYS = "hidden_size_per_layer_input", "num_kv_shared_layers"
_PER_LAYER = frozenset(
    {"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "sliding_windows"}
)


_GENERIC = FamilyEntry()
_PERIODIC = ("attn_layer", "expert_layer")
"""What some configs say of layers by a period and where it begins (Jamba)."""


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

    def bare_config(self) -> Any:
        """A config for all layers, taking embedded (and scaled) inputs as they come."""
        bare = copy.deepcopy(self.config)
        if scale := self.entry.embedding_scale:
            setattr(bare, scale.field, scale.none)
        return bare

    def slice_config(self, layers: LayerRange) -> Any:
        """The same for the forward of these layers only; they themselves are made by the other."""
        return cut_config(self.bare_config(), layers)

    def ends_config(self) -> Any:
        """The same for the ends: of one layer, where nothing of theirs is for each of them."""
        return self.bare_config() if self.row_form.width else self.slice_config(LayerRange(0, 1))

    @property
    def row_form(self) -> RowForm:
        """What goes from hop to hop."""
        width = getattr(self.config, _INPUTS, None) or 0
        streams, parts = streams_of(self.config.to_dict()), self.entry.streams
        axis = parts.axis if parts else 0
        return RowForm(self.config.hidden_size, self.config.num_hidden_layers, width, streams, axis)

    def require_cuts(self, layers: LayerRange) -> None:
        """Raise UnsupportedFamily for layers that it may not be cut into."""
        total = self.config.num_hidden_layers
        cuts = cuts_of(self.config.to_dict(), total)
        if not cuts.allow(layers):
            why, fix = cuts.refusal(layers, total)
            raise UnsupportedFamily(
                f"Layers {layers} of {self.model_type} cannot be computed by themselves: {why}.",
                fix=fix,
                param="layers",
            )


def cut_config(whole: Any, layers: LayerRange) -> Any:
    """A copy with so many layers, and of every per-layer list their part."""
    span = copy.deepcopy(whole)
    narrow_config(span, layers)
    return span


def narrow_config(config: Any, layers: LayerRange) -> None:
    """Leave so many layers in it, and of every per-layer list their part."""
    own = overrides(config)
    for name, value in [*vars(config).items()]:
        # Others may be as long as there are layers, and say nothing of those.
        if isinstance(value, (list, tuple)) and (
            name in _PER_LAYER or ("layer" in name and len(value) == config.num_hidden_layers)
        ):
            setattr(config, name, value[layers.start : layers.stop])
    if named := getattr(config, "attn_layer_indices", None):
        config.attn_layer_indices = [n - layers.start for n in named if n in layers]
    for kind in _PERIODIC:
        if period := getattr(config, f"{kind}_period", None):
            offset = getattr(config, f"{kind}_offset")
            setattr(config, f"{kind}_offset", (offset - layers.start) % period)
    if shared := getattr(config, _SHARED_KEYS, 0):
        first = max(layers.start, config.num_hidden_layers - shared)
        setattr(config, _SHARED_KEYS, max(0, layers.stop - first))
    config.num_hidden_layers = len(layers)
    if own:
        first = layers.start
        config.per_layer_config = {i - first: own[i] for i in own if first <= i < layers.stop}


def overrides(config: Any) -> dict[int, dict[str, Any]]:
    """By layer, the fields that it has otherwise than the config says for all."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(layer): said for layer, said in config.to_dict()["per_layer_config"].items()}


def layer_kinds(config: Any) -> list[str]:
    """What kind each of its layers is, as transformers calls them; none where all are of one."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(kinds or ())


def has_states(config: Any) -> bool:
    """Whether layers of this config keep a running state, beside keys and values or alone."""
    return not _STATE_KINDS.isdisjoint(layer_kinds(config))


def family_of(manifest: Manifest) -> Family:
    """How this checkpoint is cut.

    Raises UnsupportedFamily, with the reason, when it cannot be, and BadCheckpoint for a config
    that contradicts itself.
    """
    try:
        whole = whole_config(manifest)
        text = whole.get_text_config(decoder=True)
        # It may be said of the whole only; models for embeddings, without a head, say nothing.
        if manifest.tied and (_says_tied(whole) or read_pooling(manifest).kind):
            text.tie_word_embeddings = True
        reason = _refusal(whole, text)
    except (ValueError, KeyError, TypeError) as error:
        unknown = f"transformers does not know it ({_first_line(error)})"
        raise _unsupported(manifest.model_type, unknown, _newer(manifest)) from error
    except Exception as error:  # a class of its own for each kind of check, and no common root
        found = " ".join(str(error).split())[:200].rstrip(".")
        raise BadCheckpoint(
            f"{manifest.gguf or manifest.directory / 'config.json'} describes no model: {found}.",
            fix="Download the file again, from the same revision as the weights.",
        ) from error
    if reason:
        raise _unsupported(str(text.model_type), reason)
    return family_of_config(text)


def _says_tied(whole: Any) -> bool:
    return bool(getattr(whole, "tie_word_embeddings", False))


def whole_config(manifest: Manifest) -> Any:
    """The config of all that a checkpoint holds, of which text may be a part."""
    if manifest.gguf is not None:
        return AutoConfig.for_model(**manifest.config)
    whole = AutoConfig.from_pretrained(
        manifest.directory, local_files_only=True, trust_remote_code=False
    )
    for each in (whole, whole.get_text_config(decoder=True)):
        for key in KEYS:  # how weights are stored is no matter of what is computed
            if hasattr(each, key):
                delattr(each, key)
    return whole


def family_of_config(config: Any) -> Family:
    """The same for a text config in memory that was not refused."""
    kind = type(config)
    entry = ENTRIES.get(config.model_type, _GENERIC)
    try:
        base_class = _base_class(kind, entry.base)
        causal_class = _causal_class(config, base_class)
    except KeyError as error:
        raise _unsupported(str(config.model_type), "it is not a causal language model") from error
    if entry.settle is not None:
        entry.settle(config)
    return Family(config, entry, base_class, causal_class)


def _base_class(kind: Any, name: str | None) -> type[Any]:
    """The model of such a config without a head, which may be named. Raises KeyError where there is
    none."""
    mapping = AutoModel._model_mapping  # noqa: SLF001 - the only config-to-class table
    if kind in mapping or kind.model_type not in PLAIN_HEADS:
        known: type[Any] = mapping[kind]
        return known if name is None else vars(sys.modules[known.__module__])[name]
    # It leaves out some that are only ever a part of another one.
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    named = (each for name, each in vars(module).items() if name.endswith("TextModel"))
    part: type[Any] = next(each for each in named if each.config_class is kind)
    return part


def _causal_class(config: Any, base_class: Any) -> type[Any]:
    """The model with a head over this base. Raises KeyError where there is none."""
    if config.model_type in PLAIN_HEADS:
        return headed(base_class)
    beside = base_class.__name__.removesuffix("Model") + "ForCausalLM"
    # The table knows Mistral Small 4 as a model for images and text only.
    own: type[Any] | None = vars(sys.modules[base_class.__module__]).get(beside)
    mapping = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - as above
    found: type[Any] | None = mapping.get(type(config), own)
    if found is None:
        raise KeyError(config.model_type)
    return found


def _refusal(whole: Any, text: Any) -> str | None:
    if whole.is_encoder_decoder or text.is_encoder_decoder:
        return "it is an encoder-decoder, whose decoder layers need the encoder's output"
    if text.model_type in _REFUSED:
        return _REFUSED[text.model_type]
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention looks ahead: it turns texts into vectors and does not go on with them"
    entry = ENTRIES.get(text.model_type, _GENERIC)
    return _unlike_layers(text, entry) or (entry.refuse(text) if entry.refuse else None)


def _unlike_layers(text: Any, entry: FamilyEntry) -> str | None:
    if foreign := sorted(set(layer_kinds(text)) - _KINDS):
        return f"it has layers of kind {foreign[0]}, which were never tried"
    shared = getattr(text, _SHARED_KEYS, 0)
    if shared and not entry.shares_keys:
        return f"its last {shared} layers share the keys and values of earlier ones"
    if getattr(text, _INPUTS, 0) and not entry.layer_inputs:
        return "each of its layers reads the token ids, and a hop has only hidden states"
    if streams_of(text.to_dict()) > 1 and not entry.streams:
        return "several streams of hidden states are mixed between its layers"
    return None


def _unsupported(model_type: str, reason: str, fix: str = "") -> UnsupportedFamily:
    return UnsupportedFamily(
        f"Model type {model_type} cannot be cut into layer ranges: {reason}.",
        fix=fix
        or "Use a model of a tested type, as llama, qwen3, gemma3_text or gpt_oss; all of them:"
        " docs/decisions/one-backend.md.",
    )


def _newer(manifest: Manifest) -> str:
    """What to do about a checkpoint that a newer transformers has written; empty for any other."""
    try:
        wrote = Version(str(manifest.config.get("transformers_version")))
    except InvalidVersion:
        return ""
    if wrote <= Version(transformers.__version__):
        return ""
    return (
        f"transformers {wrote} wrote it, and this node has {transformers.__version__};"
        " docs/how-to/models-on-disk.md says how a node takes a newer one."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:200]
