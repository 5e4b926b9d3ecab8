"""Decoder layers that are a mixer or feed-forward alone (Nemotron-H), in the terms of `parts`.

Whether it has understood one is shown by `mesh.shard.lean_proof`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.shard.compiled.experts import Experts, experts_of
from mesh.shard.compiled.feed_forward import FeedForward, feed_forward_of
from mesh.shard.compiled.parts import Mixer, all_there, attention_of
from mesh.shard.compiled.parts_reader import Norm, NotCompilable, PartsReader
from mesh.shard.compiled.recurrences import state_space

if TYPE_CHECKING:
    from torch import nn

_PATH = "mixer"
"""What such layers call their part, whatever it is."""


@dataclass(frozen=True, slots=True)
class LonePart:
    """``x + part(before(x))``."""

    part: Mixer | FeedForward | Experts
    before: Norm | None


def lone_part(
    layer: nn.Module, config: Any, index: int, fill: Callable[[], None] = all_there
) -> LonePart | None:
    """That of decoder layer `index` of a span with `config`; None for a layer of two parts. `fill`
    as for `layer_parts`. Raises NotCompilable."""
    if not hasattr(layer, _PATH):
        return None
    reader = PartsReader(layer)
    before, part = reader.norm("norm"), _part(reader, config, index, fill)
    reader.require_all_read()
    return LonePart(part, before)


def _part(
    reader: PartsReader, config: Any, index: int, fill: Callable[[], None]
) -> Mixer | FeedForward | Experts:
    kind = getattr(reader.layer, "block_type", None)
    if kind == "linear_attention":
        return state_space(reader, _PATH)
    if kind == "full_attention":
        return attention_of(reader, config, index, _PATH)
    if kind == "moe" and (experts := experts_of(reader, config, fill)) is not None:
        return experts
    if kind == "mlp":
        return feed_forward_of(reader, config, _PATH)
    raise NotCompilable(f"it has layers of kind {kind}")
