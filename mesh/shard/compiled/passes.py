"""The layers of a span as sessions of onnxruntime, and the buffers of a pass through them.

A pass computes the rows of one or more sessions: what reads weights once for all rows, attention
for each session over its own slot. Buffers and what is bound to them are kept for passes of few
rows, as binding them takes about as long as a small layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.graph import attention_model, back_model, front_model, padding
from mesh.shard.compiled.parts import Attention
from mesh.shard.compiled.slots import Bank
from mesh.shard.compiled.store import GraphSpan

Int32 = npt.NDArray[np.int32]
Tables = Mapping[str, torch.Tensor]

KEPT_ROWS = 128
"""Passes of more rows get buffers of their own, which are large, and used for long."""

_KEPT_SESSIONS = 512
"""Places of a session in a pass for which bindings are kept: a slot, and its first row."""


@dataclass(frozen=True, slots=True)
class LayerSessions:
    """One layer's three graphs, and what turns its queries and keys."""

    front: Any
    attention: Any
    back: Any
    tables: Tables
    kv_heads: int
    width: int
    projected: int
    attended: int
    """How wide a row is before and behind attention."""


def layer_sessions(span: GraphSpan, threads: int, tables: Sequence[Tables]) -> list[LayerSessions]:
    """Those of each layer; layers whose attention is the same share its session."""
    attending: dict[bytes, Any] = {}

    def attention_of(attention: Attention) -> Any:
        model = attention_model(attention)
        if model not in attending:
            attending[model] = compiled(model, threads)
        return attending[model]

    found = []
    for layer, turned in zip(span.layers, tables, strict=True):
        attention = layer.parts.attention
        front, back = (
            compiled(model(layer.parts, layer.products), threads, layer.folder)
            for model in (front_model, back_model)
        )
        attended = attention.heads * attention.width
        projected = attended + 2 * attention.kv_heads * attention.width
        shape = attention.kv_heads, attention.width, projected, attended
        found.append(LayerSessions(front, attention_of(attention), back, turned, *shape))
    return found


@dataclass(frozen=True, slots=True)
class PassPlace:
    """Where a session stands in a pass: its slot of a bank, and which rows are its own."""

    bank: Bank
    slot: int
    start: int
    rows: int

    @property
    def slice(self) -> slice:
        """Its rows."""
        return slice(self.start, self.start + self.rows)

    @property
    def given(self) -> int:
        """How many rows attention gets."""
        return self.rows + padding(self.rows)


@dataclass(frozen=True, slots=True)
class Attending:
    """One session's attention in each layer, at its place in the buffers."""

    bindings: tuple[Binding, ...]
    last: Int32
    total: Int32
    """Memory of the tensors of those names: writing through numpy takes a tenth of the time."""

    def stand(self, length: int) -> None:
        """Its slot holds so many positions, those of the rows and the padding's included."""
        self.last[0], self.total[0] = length - 1, length


@dataclass(slots=True)
class Workspace:
    """Buffers for passes of up to `capacity` rows."""

    layers: Sequence[LayerSessions]
    hidden: int
    capacity: int
    _states: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    _projected: torch.Tensor = field(init=False)
    _attended: torch.Tensor = field(init=False)
    _products: dict[int, list[tuple[Binding, Binding]]] = field(init=False, default_factory=dict)
    _attending: OrderedDict[tuple[int, int, int, int], Attending] = field(
        init=False, default_factory=OrderedDict
    )

    def __post_init__(self) -> None:
        self._states = self._rows(self.hidden), self._rows(self.hidden)
        self._projected = self._rows(max(each.projected for each in self.layers))
        self._attended = self._rows(max(each.attended for each in self.layers))

    def state(self, number: int, rows: int) -> torch.Tensor:
        """What the layer of that number in the span takes, (1, rows, hidden); the one before gives
        it. There are two in turns."""
        return self._states[number % 2][:, :rows]

    def products(self, rows: int) -> list[tuple[Binding, Binding]]:
        """The graphs before and behind attention of each layer, bound for so many rows."""
        known = self._products.get(rows)
        if known is None:
            known = self._products[rows] = [
                self._layer(number, each, rows) for number, each in enumerate(self.layers)
            ]
        return known

    def attending(self, place: PassPlace) -> Attending:
        """Attention of the session at `place`."""
        key = id(place.bank), place.slot, place.start, place.rows
        known = self._attending.get(key)
        if known is None:
            known = self._attending[key] = self._attend(place)
            if len(self._attending) > _KEPT_SESSIONS:
                self._attending.popitem(last=False)
        else:
            self._attending.move_to_end(key)
        return known

    def _rows(self, width: int) -> torch.Tensor:
        return torch.zeros(1, self.capacity, width)

    def _layer(self, number: int, layer: LayerSessions, rows: int) -> tuple[Binding, Binding]:
        x = {"x": self.state(number, rows)}
        projected, attended = self._between(layer, 0, rows)
        y = {"y": self.state(number + 1, rows)}
        front = Binding.of(layer.front, x, {"projected": projected})
        return front, Binding.of(layer.back, x | {"attended": attended}, y)

    def _between(
        self, layer: LayerSessions, start: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows before and behind attention, dense also where layers differ in width."""
        areas = (self._projected, layer.projected), (self._attended, layer.attended)
        before, behind = (
            area.view(-1)[start * width : (start + rows) * width].view(1, rows, width)
            for area, width in areas
        )
        return before, behind

    def _attend(self, place: PassPlace) -> Attending:
        last, queries = (torch.full((1,), place.given, dtype=torch.int32) for _ in range(2))
        total = torch.zeros(1, dtype=torch.int32)
        inputs = {"queries": queries, "last": last, "total": total[0]} | row_shape(place.rows)
        bindings = []
        for number, layer in enumerate(self.layers):
            projected, attended = self._between(layer, place.start, place.rows)
            slot = slice(place.slot, place.slot + 1)
            keys, values = place.bank.keys[number][slot], place.bank.values[number][slot]
            given = {**inputs, **layer.tables}
            given |= {"keys": keys, "values": values, "projected": projected}
            results = {"attended": attended, "new_keys": keys, "new_values": values}
            bindings.append(Binding.of(layer.attention, given, results))
        return Attending(tuple(bindings), last.numpy(), total.numpy())


def row_shape(rows: int) -> dict[str, torch.Tensor]:
    """What tells a graph how many rows there are, and how many attention gets beyond them."""
    return {
        "padding": torch.tensor([0, 0, 0, 0, padding(rows), 0]),
        "rows": torch.tensor([rows]),
    }
