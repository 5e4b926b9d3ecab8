"""What goes from hop to hop for one position: a hidden state, and for some models more.

Layers of Gemma 4 E2B and E4B take numbers of their own beside hidden states, made of the token that
stands there (its `per-layer embeddings`). Only the ends know tokens: they put those of all layers
behind the hidden state, and a span gives its layers their part and hands all of them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mesh.types import LayerRange


@dataclass(frozen=True, slots=True)
class RowForm:
    """A hidden state of `hidden` numbers, and behind it `width` for each of the model's
    `layers`."""

    hidden: int
    layers: int = 0
    width: int = 0

    @classmethod
    def of(cls, module: Any) -> RowForm:
        """Of the rows that a span takes and gives."""
        found: RowForm | None = getattr(module, "row_form", None)
        return cls(module.config.hidden_size) if found is None else found

    @property
    def size(self) -> int:
        """How many numbers a row has."""
        return self.hidden + self.layers * self.width

    def inputs(self, rows: torch.Tensor, layers: LayerRange) -> torch.Tensor:
        """Of (…, size) what these layers of the model are given: (…, layers, width)."""
        start = self.hidden + layers.start * self.width
        own = rows[..., start : start + len(layers) * self.width]
        return own.reshape(*rows.shape[:-1], len(layers), self.width)

    def with_hidden(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The same rows, (…, size), with other hidden states, (…, hidden)."""
        return torch.cat((hidden, rows[..., self.hidden :]), -1) if self.width else hidden


class TakesRows:
    """The forward of a span whose layers take such numbers; a base model is made one by
    `taking_rows`."""

    row_form: RowForm
    first_layer: int
    layer_list: str

    def forward(self, *, inputs_embeds: torch.Tensor, **options: Any) -> Any:
        """As that of the base model, of rows."""
        form, layers = self.row_form, getattr(self, self.layer_list)
        start = self.first_layer + layers[0].layer_idx  # of a view, another than the span's
        numbers = LayerRange(start, start + len(layers))
        output = super().forward(  # type: ignore[misc] # of the base model
            inputs_embeds=inputs_embeds[..., : form.hidden],
            per_layer_inputs=form.inputs(inputs_embeds, numbers),
            **options,
        )
        output.last_hidden_state = form.with_hidden(inputs_embeds, output.last_hidden_state)
        return output


def taking_rows(base: Any, form: RowForm, first_layer: int, layer_list: str) -> None:
    """Have `base`, whose layers are those from `first_layer` on, take rows of that form."""
    kind = type(base)
    # By these names transformers knows what may be seen of its layers.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    base.__class__ = type(kind.__name__, (TakesRows, kind), names)
    base.row_form, base.first_layer, base.layer_list = form, first_layer, layer_list
