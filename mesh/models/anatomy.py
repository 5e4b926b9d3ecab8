"""Where the parts of a transformers model are: embedding, layers, norm.

Knows modules and no checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mesh.errors import UnsupportedFamily
from mesh.models.families import Family


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The attribute names of a base model's parts."""

    layers: str
    embedding: str
    norm: str
    positions: str | None
    first: str | None
    """What embedded rows go through before the first layer."""

    @classmethod
    def of(cls, base: Any, family: Family) -> Anatomy:
        """Find the parts of `base`; UnsupportedFamily when something is left over or missing."""
        lists = layer_lists(base)
        layers = [n for n, each in lists.items() if len(each) == base.config.num_hidden_layers]
        embedding = [n for n, m in base.named_modules() if m is base.get_input_embeddings()]
        entry, parts = family.entry, dict(base.named_children())
        first = entry.first if entry.first in parts else None
        known = {*layers, *embedding, entry.positions, first, *entry.layer_inputs}
        if streams := entry.streams:
            known |= {*streams.spread, *streams.gathered}
        others = [(name, child) for name, child in parts.items() if name not in known]
        rest = [name for name, child in others if any(True for _ in child.parameters())]
        # Some norms have no parameters (OLMo's): go by the class then.
        rest = rest or [name for name, child in others if "Norm" in type(child).__name__]
        rest = rest or [name for name in (first,) if name]  # the norm that comes before as well
        if len(layers) != 1 or len(embedding) != 1 or len(rest) != 1 or [*lists] != layers:
            raise UnsupportedFamily(
                f"Model type {family.model_type} is not embedding, layers, norm: it has"
                f" {', '.join(parts)}.",
                fix="It needs an entry in mesh/models/entries.py.",
            )
        return cls(layers[0], embedding[0], rest[0], entry.positions, first)


def base_of(causal: nn.Module) -> tuple[str, Any]:
    """The base model in a causal one, and what it is called there: of models that are no more than
    another one, that."""
    parts = [(name, part) for name, part in causal.named_children()]
    name, base = next((name, part) for name, part in parts if isinstance(part, PreTrainedModel))
    if all(isinstance(part, PreTrainedModel) for part in base.children()):
        inner, base = base_of(base)
        name = f"{name}.{inner}"
    return name, base


def layer_lists(base: nn.Module) -> dict[str, nn.ModuleList]:
    """By their names, its lists of what is made of other modules, as decoder layers are."""
    return {
        name: child
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and any(True for each in child for _ in each.children())
    }
