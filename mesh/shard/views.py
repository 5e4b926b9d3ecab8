"""A loaded span seen as a shorter one: the same layer modules under a cut config.

A route may use only some layers of a shard. The view shares every weight with the span and costs
nothing until it runs. Knows nothing of sessions.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from mesh.errors import UnsupportedFamily
from mesh.models.anatomy import layer_lists
from mesh.models.families import cut_config
from mesh.types import LayerRange

if TYPE_CHECKING:
    from torch import nn


def layer_list_name(module: nn.Module) -> str:
    """The attribute that holds the decoder layers (``layers``, ``h``, …).

    Raises UnsupportedFamily when no child is a list of exactly the config's number of layers.
    """
    config: Any = module.config
    for name, layers in layer_lists(module).items():
        if len(layers) == config.num_hidden_layers:
            return name
    raise UnsupportedFamily(
        f"{type(module).__name__} keeps its layers in a form that spans cannot be cut from.",
        fix="Use a model of a supported family.",
    )


def layers_of(module: nn.Module) -> Any:
    """The decoder layers themselves. Raises as `layer_list_name`."""
    return module.get_submodule(layer_list_name(module))


def layer_view(module: nn.Module, start: int, stop: int) -> nn.Module:
    """Layers [start, stop) of `module`, counted within it; `module` itself when that is all."""
    name = layer_list_name(module)
    layers: Any = module.get_submodule(name)
    if (start, stop) == (0, len(layers)):
        return module
    view = copy.copy(module)
    # A copied module shares its dict of children; the view needs its own.
    view._modules = {**module._modules, name: layers[start:stop]}  # noqa: SLF001
    # What else a family's config says by layer was cut when the span was loaded, for its layers.
    view.config = cut_config(module.config, LayerRange(start, stop))
    return view
