"""The layers of a span as sessions of onnxruntime, and the buffers of a pass through them.

A pass computes the rows of one or more sessions: what reads weights once for all rows, the mixer
for each session over its own slot. Buffers and what is bound to them are kept for passes of few
rows, as binding them takes about as long as a small layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy.typing as npt
import torch

from mesh.models.row_form import RowForm
from mesh.shard.compiled.attention_graph import attention_model, grouped_model, padding, row_shape
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.graph import back_model, front_model
from mesh.shard.compiled.latent_graph import latent_model
from mesh.shard.compiled.lone_rows import is_grouped
from mesh.shard.compiled.parts import Attention, Experts, Mixer, NotCompilable
from mesh.shard.compiled.recurrence_graph import recurrence_model, tables_of
from mesh.shard.compiled.slots import Bank
from mesh.shard.compiled.spreading import needs_spreading, spread_tables
from mesh.shard.compiled.store import GraphSpan
from mesh.types import LayerRange

Ints = npt.NDArray[Any]
Tables = Mapping[str, torch.Tensor]

KEPT_ROWS = 128
"""Passes of more rows get buffers of their own, which are large, and used for long."""

_KEPT_SESSIONS = 512
"""Places of a session in a pass for which bindings are kept: a slot, and its first row."""


@dataclass(frozen=True, slots=True)
class LayerSessions:
    """One layer's graphs, and the `tables` that its mixer takes: what turns queries and keys, and
    what else it has for itself. `alone` is the mixer of a session that has a single row in a pass,
    `mixer` of any other; those of a layer without one are None, as is its `front`. With experts
    `is_mixed`: behind the mixer a row has other bits beside others."""

    front: Any
    mixer: Any
    alone: Any
    back: Any
    tables: Tables
    projected: int
    attended: int
    """How wide a row is before and behind the mixer."""
    is_mixed: bool
    long_tables: Tables = field(default_factory=dict)
    """Those of sessions of long texts, or of any; see `mesh.models.rope`."""
    shares: int | None = None
    """The number of the layer whose keys and values it sees together with others: its own where
    they see those that it makes."""


def layer_sessions(
    span: GraphSpan,
    threads: int,
    rotary: Mapping[str | None, Tables],
    long: Mapping[str | None, Tables],
) -> list[LayerSessions]:
    """Those of each layer; layers whose mixer is the same share its session. `rotary` has the
    tables of each name, `long` those of long texts."""
    known: dict[bytes, Any] = {}

    def session(model: bytes) -> Any:
        if model not in known:
            known[model] = compiled(model, threads)
        return known[model]

    sees = [_seen_by(layer.parts.mixer) for layer in span.layers]
    turning = _Turning(rotary, long)
    found = []
    for number, layer in enumerate(span.layers):
        of, mixer = (layer.parts, layer.products), layer.parts.mixer
        is_mixed = isinstance(layer.parts.feed_forward, Experts)
        back = compiled(back_model(*of), threads, layer.folder)
        if mixer is None:
            found.append(LayerSessions(None, None, None, back, {}, 0, 0, is_mixed))
            continue
        tables, of_long, spread_from = turning.of(mixer)
        model = front_model(*of, is_seen=number in sees, spread_from=spread_from)
        front = compiled(model, threads, layer.folder)
        several, alone = map(session, _models_of(mixer, tables))
        shares = number if number in sees else sees[number]
        found.append(
            LayerSessions(
                front, several, alone, back, tables, mixer.projected, mixer.attended, is_mixed,
                of_long, shares,
            )
        )  # fmt: skip
    return found


def _models_of(mixer: Mixer, turned: Tables) -> tuple[bytes, bytes]:
    """Its graphs for several rows and for a single one. Raises NotCompilable."""
    if not isinstance(mixer, Attention):
        any_rows = recurrence_model(mixer)
    elif mixer.latent is not None:
        any_rows = latent_model(mixer, mixer.latent)
    elif is_grouped(mixer):
        width = _turned(turned)
        several, one = (grouped_model(mixer, width, alone=alone) for alone in (False, True))
        return several, one
    elif mixer.normed_turned:
        raise NotCompilable("it normalises queries and keys that have turned, one to one")
    else:
        any_rows = attention_model(mixer)
    return any_rows, any_rows


def _seen_by(mixer: Mixer | None) -> int | None:
    return mixer.sees if isinstance(mixer, Attention) else None


def _goes_by_operator(mixer: Mixer) -> TypeGuard[Attention]:
    """Whether `attention_model` computes it."""
    return isinstance(mixer, Attention) and mixer.latent is None and not is_grouped(mixer)


class _Turning:
    """What layers turn by, of which those that are alike have the same."""

    def __init__(self, *both: Mapping[str | None, Tables]) -> None:
        self._both: Sequence[Mapping[str | None, Tables]] = both
        self._spread: dict[tuple[str | None, int], Sequence[Mapping[str | None, Tables]]] = {}

    def of(self, mixer: Mixer) -> tuple[Tables, Tables, int]:
        """The tables of a mixer, those of long texts, and how many numbers of a head turned before
        they were spread over all of it; 0 where they are not."""
        both, turned = self._both, _turned(_tables(mixer, self._both[0]))
        if _goes_by_operator(mixer) and needs_spreading(mixer, turned):
            both = self._spread_over(mixer.table, mixer.width)
        else:
            turned = 0
        first, long = (_tables(mixer, each) for each in both)
        return first, long, turned

    def _spread_over(self, name: str | None, width: int) -> Sequence[Mapping[str | None, Tables]]:
        key = name, width
        if key not in self._spread:
            self._spread[key] = [{name: spread_tables(each[name], width)} for each in self._both]
        return self._spread[key]


def _turned(tables: Tables) -> int:
    """How many numbers of a head turn by position."""
    return 2 * tables["cos"].shape[1] if "cos" in tables else 0


def _tables(mixer: Mixer, rotary: Mapping[str | None, Tables]) -> Tables:
    if not isinstance(mixer, Attention):
        return tables_of(mixer)
    own = {} if mixer.sinks is None else {"sinks": mixer.sinks}
    if mixer.normed_turned:
        norms = {"query_gamma": mixer.query_norm, "key_gamma": mixer.key_norm}
        own |= {name: norm.gamma for name, norm in norms.items() if norm is not None}
    return {**rotary.get(mixer.table, {}), **own}


@dataclass(frozen=True, slots=True)
class PassPlace:
    """Where a session stands in a pass: its slot of a bank, and which rows are its own; and which
    copy of the slot's running states it `reads`, and which it `writes`."""

    bank: Bank
    slot: int
    start: int
    rows: int
    reads: int = 0
    writes: int = 1
    is_long: bool = True
    """Whether `long_tables` turn it."""

    @property
    def slice(self) -> slice:
        """Its rows."""
        return slice(self.start, self.start + self.rows)

    def pieces(self, most: int) -> Iterator[PassPlace]:
        """The same rows, so many at a time: one piece sees those before it, and no other."""
        if self.rows <= most:
            yield self
            return
        for first in range(0, self.rows, most):
            rows = min(most, self.rows - first)
            reads = self.writes if first else self.reads
            yield replace(self, start=self.start + first, rows=rows, reads=reads)

    @property
    def room(self) -> int:
        """For how many positions each head of its slot has room."""
        return self.bank.rooms[self.slot]

    @property
    def given(self) -> int:
        """How many rows attention gets, unless it computes a single one by itself."""
        return self.rows + padding(self.rows)


@dataclass(frozen=True, slots=True)
class Attending:
    """One session's mixer in each layer that has one, by the layer's number, at its place in the
    buffers."""

    bindings: Mapping[int, Binding]
    place: PassPlace
    room: int
    """Of its slot, which its keys are bound with."""
    last: Ints
    total: Ints
    at: Ints
    end: Ints
    positions: Ints
    """Memory of the tensors of those names: writing through numpy takes a tenth of the time."""

    def stand(self, before: int) -> None:
        """Its slot holds so many positions before these rows."""
        place = self.place
        total = before + place.given
        self.last[0], self.total[0] = total - 1, total
        self.at[0], self.end[0] = before, total if place.rows > 1 else before + 1
        self.positions[0] = range(before, before + self.positions.shape[1])


@dataclass(frozen=True, slots=True)
class BoundProducts:
    """What is computed before the mixer, where there is one, and what behind it in this order."""

    front: Binding | None
    back: tuple[Binding, ...]


@dataclass(slots=True)
class Workspace:
    """Buffers for passes of up to `capacity` rows."""

    layers: Sequence[LayerSessions]
    form: RowForm
    capacity: int
    _states: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    _projected: torch.Tensor = field(init=False)
    _attended: torch.Tensor = field(init=False)
    _gate: torch.Tensor = field(init=False)
    _inputs: torch.Tensor = field(init=False)
    _shared: dict[int, torch.Tensor] = field(init=False)
    _products: dict[tuple[int, int], list[BoundProducts]] = field(init=False, default_factory=dict)
    _attending: OrderedDict[tuple[int, ...], Attending] = field(
        init=False, default_factory=OrderedDict
    )

    def __post_init__(self) -> None:
        self._states = self._rows(self.form.hidden), self._rows(self.form.hidden)
        self._projected = self._rows(max(each.projected for each in self.layers))
        self._attended = self._rows(max(each.attended for each in self.layers))
        self._gate = torch.zeros_like(self._attended)
        self._inputs = torch.zeros(len(self.layers), self.capacity, self.form.width)
        # Not zeros: of a layer that is asked by itself each weight is to have a part in the answer.
        self._shared = {
            layer.shares: torch.ones(1, self.capacity, layer.projected - layer.attended)
            for layer in self.layers
            if layer.shares is not None
        }

    def state(self, number: int, rows: int) -> torch.Tensor:
        """What the layer of that number in the span takes, (1, rows, hidden); the one before gives
        it. There are two in turns."""
        return self._states[number % 2][:, :rows]

    def put(self, rows: torch.Tensor, at: slice, begin: int, layers: LayerRange) -> None:
        """Let `rows` (1, rows, row size) stand there for the layer of the number `begin`, and what
        the `layers` of the model are given with them."""
        self._states[begin % 2][:, at] = rows[..., : self.form.hidden]
        if self.form.width:
            self._inputs[:, at] = self.form.inputs(rows, layers)[0].transpose(0, 1)

    def before_mixer(self, number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer of that number has made of so many rows for its mixer and its gate."""
        projected, _, gate = self._between(self.layers[number], 0, rows)
        return projected, gate

    def products(self, rows: int, apart: int = 0) -> list[BoundProducts]:
        """The graphs before and behind the mixer of each layer, bound for so many rows; those that
        are mixed for each of the first `apart` by itself, if that is not 0."""
        known = self._products.get((rows, apart))
        if known is None:
            known = self._products[rows, apart] = [
                self._layer(number, each, rows, apart) for number, each in enumerate(self.layers)
            ]
        return known

    def attending(self, place: PassPlace) -> Attending:
        """The mixer of the session at `place`."""
        copies = place.reads, place.writes
        key = id(place.bank), place.slot, place.start, place.rows, *copies, place.is_long
        known = self._attending.get(key)
        if known is None or known.room != place.room:
            known = self._attending[key] = self._attend(place)
        self._attending.move_to_end(key)
        if len(self._attending) > _KEPT_SESSIONS:
            self._attending.popitem(last=False)
        return known

    def _rows(self, width: int) -> torch.Tensor:
        return torch.zeros(1, self.capacity, width)

    def _layer(self, number: int, layer: LayerSessions, rows: int, apart: int) -> BoundProducts:
        x, y = self.state(number, rows), self.state(number + 1, rows)
        projected, attended, gate = self._between(layer, 0, rows)
        # Which it does not take otherwise.
        shared = gate if layer.shares is None else self._shared[layer.shares][:, :rows]
        front = layer.front and Binding.of(
            layer.front,
            {"x": x, "shared": shared},
            {"projected": projected, "gate": gate, "shared": shared},
        )
        inputs = self._inputs[number : number + 1, :rows]
        each = [slice(row, row + 1) for row in range(apart)] if layer.is_mixed else []
        back = tuple(
            Binding.of(
                layer.back,
                {
                    "x": x[:, part],
                    "attended": attended[:, part],
                    "gate": gate[:, part],
                    "inputs": inputs[:, part],
                },
                {"y": y[:, part]},
            )
            for part in each or [slice(0, rows)]
        )
        return BoundProducts(front, back)

    def _between(
        self, layer: LayerSessions, start: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows before and behind the mixer, and around it, dense also where layers differ in
        width."""
        areas = (
            (self._projected, layer.projected),
            (self._attended, layer.attended),
            (self._gate, layer.attended),
        )
        before, behind, around = (
            area.view(-1)[start * width : (start + rows) * width].view(1, rows, width)
            for area, width in areas
        )
        return before, behind, around

    def _attend(self, place: PassPlace) -> Attending:
        last, queries = (torch.full((1,), place.given, dtype=torch.int32) for _ in range(2))
        total = torch.zeros(1, dtype=torch.int32)
        at, end = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        is_alone = place.rows == 1
        positions = torch.zeros(1, 1 if is_alone else place.given, dtype=torch.int64)
        inputs = {"queries": queries, "last": last, "total": total[0]} | row_shape(place.rows)
        inputs |= {"at": at, "end": end, "positions": positions}
        bindings = {}
        for number, layer in enumerate(self.layers):
            if layer.mixer is None:
                continue
            projected, attended, _ = self._between(layer, place.start, place.rows)
            held, made = (
                place.bank.tensors(number, place.slot, copy) for copy in (place.reads, place.writes)
            )
            tables = layer.long_tables if place.is_long else layer.tables
            given = {**inputs, **tables, **held, "projected": projected}
            results = {"attended": attended, **{f"new_{name}": made[name] for name in made}}
            session = layer.alone if is_alone else layer.mixer
            bindings[number] = Binding.of(session, given, results)
        told = [each.numpy() for each in (last, total, at, end, positions)]
        return Attending(bindings, place, place.room, *told)
