"""What goes from hop to hop for one position: a hidden state, and for some models more.

Layers of Gemma 4 E2B and E4B take numbers of their own beside hidden states, made of the token that
stands there (its `per-layer embeddings`). Only the ends know tokens: they put those of all layers
behind the hidden state, and a span gives its layers their part and hands all of them on.

Gemma 3n has both those and several hidden states for one position (AltUp's streams): the ends make
them of the embedding and one of them again, layers take and give all of them. In a row they lie
behind each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mesh.types import LayerRange


@dataclass(frozen=True, slots=True)
class StreamParts:
    """Which parts of a base model make its streams (`spread`) and one hidden state of them again
    (`gathered`), and of which `axis` they are of what its layers take (see `mesh.models.streams`).
    `among_others`: its layers give something beside them.
    """

    axis: int
    spread: tuple[str, ...]
    gathered: tuple[str, ...]
    among_others: bool = False


@dataclass(frozen=True, slots=True)
class RowForm:
    """`streams` hidden states of `hidden` numbers each, and behind them `width` for each of the
    model's `layers`. Where there are several streams, `stream_axis` says which axis they are of
    what layers take and give."""

    hidden: int
    layers: int = 0
    width: int = 0
    streams: int = 1
    stream_axis: int = 0

    @classmethod
    def of(cls, module: Any) -> RowForm:
        """Of the rows that a span takes and gives."""
        found: RowForm | None = getattr(module, "row_form", None)
        return cls(module.config.hidden_size) if found is None else found

    @property
    def is_plain(self) -> bool:
        """Whether a row is a hidden state and nothing else."""
        return self.size == self.hidden

    @property
    def states(self) -> int:
        """How many numbers of a row are hidden states: its first."""
        return self.hidden * self.streams

    @property
    def size(self) -> int:
        """How many numbers a row has."""
        return self.states + self.layers * self.width

    def inputs(self, rows: torch.Tensor, layers: LayerRange) -> torch.Tensor:
        """Of (…, size) what these layers of the model are given: (…, layers, width)."""
        start = self.states + layers.start * self.width
        own = rows[..., start : start + len(layers) * self.width]
        return own.reshape(*rows.shape[:-1], len(layers), self.width)

    def with_states(self, rows: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The same rows, (…, size), with other hidden states, (…, states)."""
        return torch.cat((states, rows[..., self.states :]), -1) if self.width else states

    def as_layers_take(self, rows: torch.Tensor) -> torch.Tensor:
        """The streams of (sessions, rows, at least `states`), with an axis of their own."""
        parts = rows[..., : self.states].reshape(*rows.shape[:-1], self.streams, self.hidden)
        return parts.movedim(-2, self.stream_axis)

    def as_in_rows(self, given: torch.Tensor) -> torch.Tensor:
        """What a layer gave, in rows: (sessions, rows, `states`)."""
        return given.movedim(self.stream_axis, -2).flatten(-2)


class TakesRows:
    """The forward of a span whose rows are no plain hidden states; a base model is made one by
    `taking_rows`."""

    row_form: RowForm
    first_layer: int
    layer_list: str

    def project_per_layer_inputs(self, _: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """In the place of what makes them of tokens: they come with the rows."""
        return given

    def forward(self, *, inputs_embeds: torch.Tensor, **options: Any) -> Any:
        """As that of the base model, of rows."""
        form, layers = self.row_form, getattr(self, self.layer_list)
        if form.width:
            start = self.first_layer + layers[0].layer_idx  # of a view, another than the span's
            numbers = LayerRange(start, start + len(layers))
            options["per_layer_inputs"] = form.inputs(inputs_embeds, numbers)
        options["inputs_embeds"] = inputs_embeds[..., : form.hidden]
        run = super().forward  # type: ignore[misc] # of the base model
        if form.streams == 1:
            output = run(**options)
            states = output.last_hidden_state
        else:
            with _streams(layers, form.as_layers_take(inputs_embeds)) as given:
                output = run(**options)
            states = form.as_in_rows(given[0])
        output.last_hidden_state = form.with_states(inputs_embeds, states)
        return output


@contextmanager
def _streams(layers: Sequence[nn.Module], taken: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Meanwhile the first of `layers` takes this, and what the last one gives is put into what
    comes: between the two, their model makes and takes streams as it does for the whole."""
    given: list[torch.Tensor] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (taken, *args[1:]), kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        given.append(output[0] if isinstance(output, tuple) else output)

    # Outermost, so that hooks of others see what the layers take and give themselves.
    handles = [
        layers[0].register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        layers[-1].register_forward_hook(leave),
    ]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def taking_rows(base: Any, form: RowForm, first_layer: int, layer_list: str) -> None:
    """Have `base`, whose layers are those from `first_layer` on, take rows of that form."""
    kind = type(base)
    # By these names transformers knows what may be seen of its layers.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    base.__class__ = type(kind.__name__, (TakesRows, kind), names)
    base.row_form, base.first_layer, base.layer_list = form, first_layer, layer_list
