"""What a decoder layer of transformers is made of, in the terms in which a graph is built.

Reads modules and their config; `NotCompilable` says what it does not know. Whether it has
understood a layer is not believed but shown: `proof` runs the graph against the module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.shard.compiled.attention_parts import Attention, Growth, attention_of
from mesh.shard.compiled.experts import ExpertMatrices, Experts, both_matrices, experts_of
from mesh.shard.compiled.feed_forward import ACTIVATION_NAMES, FeedForward, feed_forward_of
from mesh.shard.compiled.layer_inputs import LayerInputs, inputs_of
from mesh.shard.compiled.parts_reader import Norm, NotCompilable, PartsReader
from mesh.shard.compiled.recurrences import (
    ChannelDeltaNet,
    DeltaNet,
    Recurrence,
    ShortConvolution,
    StateSpace,
    recurrence_of,
    state_space,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ACTIVATION_NAMES",
    "Attention",
    "ChannelDeltaNet",
    "DeltaNet",
    "Experts",
    "ExpertsBeside",
    "FeedForward",
    "Growth",
    "LayerInputs",
    "LayerParts",
    "Mixer",
    "Norm",
    "NotCompilable",
    "ShortConvolution",
    "StateSpace",
    "layer_parts",
]


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Experts that a layer has beside its feed-forward, as Gemma 4: their router sees rows as they
    are, they see them behind the norm `before`, and what they give, behind `after`, is added to
    what feed-forward gives, behind `after_feed_forward`."""

    router: nn.Module
    up: ExpertMatrices
    down: ExpertMatrices
    before: Norm
    after: Norm
    after_feed_forward: Norm


_ALONE = "mixer"
"""What layers that are a mixer or feed-forward alone call that, whichever it is."""

Mixer = Attention | Recurrence
"""Where rows see those before them: the only part of a layer that is computed for each session by
itself."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """``x + multiplier * after(part(before(x)))``, for the mixer and then for feed-forward; where
    they `are_parallel`, both take the same `x`. One of both may be none: then the layer is the
    other alone (Nemotron-H)."""

    mixer: Mixer | None
    feed_forward: FeedForward | Experts | None
    before_mixer: Norm | None
    after_mixer: Norm | None
    before_feed_forward: Norm | None
    after_feed_forward: Norm | None
    multiplier: float
    hidden: int
    scale: float = 1.0
    """What comes out of the layer is multiplied by that."""
    beside: ExpertsBeside | None = None
    inputs: LayerInputs | None = None
    are_parallel: bool = False


def all_there() -> None:
    """The weights of experts are in their modules already."""
    raise AssertionError


def layer_parts(
    layer: nn.Module, config: Any, index: int, fill: Callable[[], None] = all_there
) -> LayerParts:
    """The parts of decoder layer `index` of a span with `config`. `fill` puts the weights of its
    experts there, where they are not yet. Raises NotCompilable."""
    reader = PartsReader(layer)
    mixer, feed_forward = _parts(reader, config, index, fill)
    before, after, before_ff, after_ff = _norms(reader, config.hidden_size)
    parts = LayerParts(
        mixer,
        feed_forward,
        before,
        after,
        before_ff,
        after_ff,
        float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))),
        config.hidden_size,
        _scale_of(reader),
        _beside(reader, fill),
        inputs_of(reader, config),
        are_parallel=_are_parallel(layer, before, before_ff),
    )
    reader.require_all_read()
    return parts


def _parts(
    reader: PartsReader, config: Any, index: int, fill: Callable[[], None]
) -> tuple[Mixer | None, FeedForward | Experts | None]:
    if not hasattr(reader.layer, _ALONE):
        mixer = recurrence_of(reader) or attention_of(reader, config, index)
        return mixer, experts_of(reader, config, fill) or feed_forward_of(reader, config)
    kind = getattr(reader.layer, "block_type", None)
    if kind == "linear_attention":
        return state_space(reader, _ALONE), None
    if kind == "full_attention":
        return attention_of(reader, config, index, _ALONE), None
    if kind == "moe" and (experts := experts_of(reader, config, fill)) is not None:
        return None, experts
    if kind == "mlp":
        return None, feed_forward_of(reader, config, _ALONE)
    raise NotCompilable(f"it has layers of kind {kind or type(reader.layer).__name__}")


def _scale_of(reader: PartsReader) -> float:
    scale = getattr(reader.layer, "layer_scalar", None)
    if scale is None:
        return 1.0
    reader.read.add(id(reader.layer))
    return float(scale)


def _beside(reader: PartsReader, fill: Callable[[], None]) -> ExpertsBeside | None:
    experts = reader.find("experts")
    if experts is None:
        return None
    reader.get("router.proj")
    name = "feedforward_layernorm"
    before, after, after_ff = (
        reader.norm(each) for each in (f"pre_{name}_2", f"post_{name}_2", f"post_{name}_1")
    )
    if before is None or after is None or after_ff is None:
        raise NotCompilable("it has experts beside its feed-forward that are not normalised")
    return ExpertsBeside(
        reader.get("router"), *both_matrices(reader, experts, fill), before, after, after_ff
    )


_NORMS = (
    ("input_layernorm", "ln_1", "operator_norm", "attention_layernorm"),
    ("post_attention_layernorm", "ln_2", "ffn_norm", "feedforward_layernorm"),
    ("pre_feedforward_layernorm", "pre_ff_layernorm", "pre_mlp_layernorm"),
    ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2"),
    ("post_self_attn_layernorm", "post_norm1"),
)
"""What layers call the first and the second of two, and those beside these: before and behind
feed-forward, and behind the mixer."""


def _norms(
    reader: PartsReader, width: int
) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
    """Before and after the mixer, before and after feed-forward. The only one of a layer is before
    both (Cohere)."""
    if hasattr(reader.layer, _ALONE):
        before = reader.norm("norm")
        return before, None, before, None
    before, second, before_ff, after_ff, after = (
        reader.norm(*paths, width=width) for paths in _NORMS
    )
    if second is before_ff is after_ff is after is None:
        return before, None, before, None
    if after is None and (before_ff is not None or after_ff is not None):
        return before, second, before_ff, after_ff  # norms on the way out, as Gemma and OLMo2
    return before, after, second if before_ff is None else before_ff, after_ff


def _are_parallel(layer: nn.Module, before: Norm | None, before_ff: Norm | None) -> bool:
    """Whether mixer and feed-forward share a norm, or the layer says so (GPT-NeoX, StableLM)."""
    is_shared = before is not None and before_ff is before
    return is_shared or bool(getattr(layer, "use_parallel_residual", False))
