"""What a layer is given beside hidden states, where it is, as a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.shard.compiled.feed_forward import ACTIVATION_NAMES
from mesh.shard.compiled.parts_reader import Norm, NotCompilable, PartsReader, rows_out

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a layer does with the numbers that it takes beside hidden states, as Gemma 4 E2B: a few
    numbers of a row, activated and each multiplied by one of those, are projected, normalised and
    added."""

    gate: nn.Module
    projection: nn.Module
    norm: Norm
    activation: str
    width: int


def inputs_of(reader: PartsReader, config: Any) -> LayerInputs | None:
    """Those of the layer, if it takes some. Raises NotCompilable."""
    gate = reader.find("per_layer_input_gate")
    if gate is None:
        return None
    norm = reader.norm("post_per_layer_input_norm")
    activation = ACTIVATION_NAMES.get(config.hidden_activation)
    if norm is None or activation is None:
        raise NotCompilable("what it takes beside hidden states is used in a way of its own")
    projection = reader.get("per_layer_projection")
    return LayerInputs(gate, projection, norm, activation, rows_out(gate))
