"""Families of models of which the generic rule of `mesh.models.families` is not enough.

An entry says by names what of a base model is done otherwise; a new architecture that needs more
gets one here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mesh.models.llama4 import only_those_met
from mesh.models.mamba import going_on, taking_cache
from mesh.models.row_form import StreamParts


@dataclass(frozen=True, slots=True)
class EmbeddingScale:
    """What a base model multiplies whatever is embedded with, where it runs on embedded inputs too:
    `of` a config; `field` of which says `none` where it does not."""

    field: str
    none: Any
    of: Callable[[Any], float]


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """A family's exceptions to the generic rule.

    `positions` names the base model's table of positions, which stays with the ends, as does what
    `first` names: what embedded rows go through before the first layer, a norm (which may be the
    final one as well) or a projection. `embedding_scale` is applied by the ends. `base` names the
    class that is cut where the model without a head is no more than that. `layer_inputs` name what
    of a base model makes the numbers that its layers take beside hidden states, where they do (see
    `mesh.models.row_form`). `shares_keys`: its last layers may see the keys and values of earlier
    ones. `streams`: there may be several hidden states for one position. `settle(whole)` has
    transformers compute one config as the model was made. `refuse(whole)` is the reason why one
    cannot be cut, or None. `adapt(base)` has a base model compute as others do. `asks_head`: what
    has its head asks that for its weight, which a head in few bits has not.
    """

    positions: str | None = None
    embedding_scale: EmbeddingScale | None = None
    first: str | None = None
    base: str | None = None
    layer_inputs: tuple[str, ...] = ()
    shares_keys: bool = False
    streams: StreamParts | None = None
    settle: Callable[[Any], None] | None = None
    refuse: Callable[[Any], str | None] | None = None
    adapt: Callable[[Any], None] | None = None
    asks_head: bool = False


def _without_least_step(whole: Any) -> None:
    """transformers bounds the time steps of several rows from below by a number that is there for
    drawing weights, and those of a single row by none, as other programs do with any."""
    whole.time_step_min = math.ulp(0.0)


def _refuse_crossing(whole: Any) -> str | None:
    return "it attends to an encoder" if whole.add_cross_attention else None


_MULTIPLIED = FamilyEntry(
    embedding_scale=EmbeddingScale("embedding_multiplier", 1.0, lambda c: c.embedding_multiplier)
)
_GIVEN = (
    "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm",
)  # fmt: skip
_STATES_ONLY = FamilyEntry(adapt=taking_cache, asks_head=True)
ENTRIES: Mapping[str, FamilyEntry] = MappingProxyType(
    {
        "afmoe": FamilyEntry(
            embedding_scale=EmbeddingScale(
                "mup_enabled", none=False, of=lambda c: c.hidden_size**0.5 if c.mup_enabled else 1.0
            )
        ),
        "biogpt": FamilyEntry(positions="embed_positions"),
        "bloom": FamilyEntry(first="word_embeddings_layernorm"),
        "falcon_h1": _MULTIPLIED,
        "falcon_mamba": _STATES_ONLY,
        "gemma3n_text": FamilyEntry(
            layer_inputs=_GIVEN,
            shares_keys=True,
            streams=StreamParts(0, ("altup_projections",), ("altup_unembed_projections",)),
        ),
        "gemma4_text": FamilyEntry(layer_inputs=_GIVEN, shares_keys=True),
        "gpt2": FamilyEntry(positions="wpe", refuse=_refuse_crossing),
        "gpt_bigcode": FamilyEntry(positions="wpe", refuse=_refuse_crossing),
        "gpt_neo": FamilyEntry(positions="wpe"),
        "granite": _MULTIPLIED,
        "granite_swa": _MULTIPLIED,
        "granitemoe": _MULTIPLIED,
        "granitemoehybrid": _MULTIPLIED,
        "granitemoe_swa": _MULTIPLIED,
        "granitemoeshared": _MULTIPLIED,
        "hy_v4": FamilyEntry(streams=StreamParts(2, (), ("hc_head",), among_others=True)),
        "hyperclovax": _MULTIPLIED,
        "jamba": FamilyEntry(adapt=going_on),
        "llama4_text": FamilyEntry(adapt=only_those_met),
        "mamba": _STATES_ONLY,
        "mamba2": _STATES_ONLY,
        "nanochat": FamilyEntry(first="norm"),
        "nemotron_h": FamilyEntry(settle=_without_least_step),
        "opt": FamilyEntry(positions="embed_positions", first="project_in", base="OPTDecoder"),
        "xglm": FamilyEntry(positions="embed_positions", refuse=_refuse_crossing),
    }
)
