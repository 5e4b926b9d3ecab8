"""Decoder layers as a few torch operators over fused products, with no module in between.

Of a standard decoder layer (`compiled.parts` says what that is), transformers makes some sixty
operators and calls as many Python functions; here it is some twenty. Reads the same packed weights
and writes the same caches as the modules do, which stay the reference: whether a family's layers
are understood is shown by `lean_proof`, whether this CPU computes them right by `selfcheck`. Knows
no hooks and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mesh.models.row_form import RowForm
from mesh.shard.compiled.parts import (
    Attention,
    Experts,
    FeedForward,
    LayerParts,
    Mixer,
    NotCompilable,
    layer_parts,
)
from mesh.shard.kv import OneSession
from mesh.shard.lean_attention import (
    AttentionPlace,
    InCaches,
    LeanAttention,
    LeanOthersAttention,
    RotaryKind,
    Rotation,
    WithPast,
)
from mesh.shard.lean_experts import LeanExpertsBeside, lean_mixture
from mesh.shard.lean_parts import LeanInputs, LeanNorm, Product, lean_feed_forward
from mesh.shard.lean_states import LeanRecurrence, lean_recurrence
from mesh.shard.linear import Place
from mesh.shard.rotary import Rotary
from mesh.shard.views import layers_of
from mesh.types import LayerRange


def fused_places(module: Any) -> list[list[Place]]:
    """The linear layers of a span that read the same rows and lie beside each other.

    Raises NotCompilable for layers that are not standard.
    """
    groups: list[list[Place]] = []
    for parts, layer in _all_parts(module):
        places = {
            id(child): (parent, name)
            for parent in layer.modules()
            for name, child in parent.named_children()
        }
        groups += [
            [places[id(linear)] for linear in linears]
            for part in _of(parts)
            for linears in _firsts(part)
            if len(linears) > 1
        ]
    return groups


class LeanLayers(nn.Module):
    """The layers of a span, over the products that its modules were packed into.

    A module for the sake of the tensors that it owns, which are checked and protected as others.
    """

    def __init__(self, module: Any) -> None:
        """Raises NotCompilable for layers that are not standard, or whose products are apart."""
        super().__init__()
        self._of_span = nn.ModuleList(
            _LeanLayer(parts, index) for index, (parts, _) in enumerate(_all_parts(module))
        )
        # A dict lookup for each layer and forward costs more than some of the operators.
        self._layers: list[_LeanLayer] = list(self._of_span)  # type: ignore[arg-type]
        self._row_form, self._first = RowForm.of(module), getattr(module, "first_layer", 0)
        tables = (layer.turning.table for layer in self._layers)
        self._rotary = Rotary(module, (table for table in tables if table is not None))

    def forward(
        self,
        hidden: torch.Tensor,  # (sessions, rows, row size)
        positions: torch.Tensor,  # (sessions, rows)
        caches: Sequence[OneSession],
        layers: LayerRange,  # counted within the span
    ) -> torch.Tensor:
        """As `hidden`. One session of any number of rows, or several of one row each."""
        are_long = [not cache.short for cache in caches] if self.short_positions else ()
        past = InCaches(caches, hidden.shape[1])
        return self.through(hidden, positions, past, layers, are_long)

    @property
    def short_positions(self) -> int:
        """See `mesh.models.rope`."""
        return self._rotary.short

    def through(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        past: WithPast,
        layers: LayerRange,
        are_long: Sequence[bool] = (),
    ) -> torch.Tensor:
        """The same, where `past` has the keys and values of each row's session; `are_long` as in
        `Rotary`."""
        form, (sessions, rows, _) = self._row_form, hidden.shape
        running = self._layers[layers.start : layers.stop]
        turns = {
            kind: self._turn(hidden, positions, kind, are_long)
            for kind in {layer.turning for layer in running}
        }
        flat = hidden.flatten(0, 1)
        x = flat[:, : form.hidden]
        for layer, own in zip(running, self._inputs(flat, layers), strict=True):
            x = layer.run(x, turns[layer.turning], past, own)
        return form.with_states(flat, x).view(sessions, rows, form.size)

    def _inputs(
        self, rows: torch.Tensor, layers: LayerRange
    ) -> Sequence[torch.Tensor] | Sequence[None]:
        """What each of these layers takes of (rows, row size) beside the hidden states."""
        if not self._row_form.width:
            return (None,) * len(layers)
        numbers = LayerRange(self._first + layers.start, self._first + layers.stop)
        return self._row_form.inputs(rows, numbers).unbind(1)

    @property
    def places(self) -> list[AttentionPlace]:
        """The attention of each layer. Raises NotCompilable where there is more than that and
        products."""
        return [layer.place for layer in self._layers]

    def _turn(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kind: RotaryKind,
        are_long: Sequence[bool],
    ) -> Rotation | None:
        if kind.table is None:
            return None
        cos, sin = self._rotary.halves(hidden, positions, kind.table, are_long)
        sin = -sin if kind.is_back else sin
        rows = cos.shape[0] * cos.shape[1]
        if kind.is_of_pairs:
            cos, signed = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, signed = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        grown = None if kind.growth is None else kind.growth.factors(positions).reshape(rows, 1, 1)
        return Rotation(
            cos.reshape(rows, 1, -1), signed.reshape(rows, 1, -1), grown, kind.is_of_pairs
        )


class _LeanLayer(nn.Module):
    """See `LayerParts`."""

    def __init__(self, parts: LayerParts, index: int) -> None:
        super().__init__()
        self.turning = _turning(parts.mixer)
        self._mix = None if parts.mixer is None else _lean_mixer(parts.mixer, index)
        self.beside = None if parts.beside is None else LeanExpertsBeside(parts.beside)
        self._is_mixture = isinstance(parts.feed_forward, Experts) or self.beside is not None
        self._feed = None if parts.feed_forward is None else _lean_feed(parts.feed_forward)
        self._inputs = None if parts.inputs is None else LeanInputs(parts.inputs)
        self._multiplier, self._scale = parts.multiplier, parts.scale
        self._are_parallel = parts.are_parallel
        self._norms = [
            None if norm is None else LeanNorm(norm)
            for norm in (
                parts.before_mixer,
                parts.after_mixer,
                parts.before_feed_forward,
                parts.after_feed_forward,
            )
        ]
        self.norms = nn.ModuleList(norm for norm in self._norms if norm is not None)

    @property
    def place(self) -> AttentionPlace:
        """Its attention. Raises NotCompilable where that is not all it has beside products."""
        if self._mix is None or self._feed is None:
            raise NotCompilable("its layers are attention or feed-forward alone")
        if isinstance(self._mix, LeanOthersAttention) or self._inputs is not None:
            raise NotCompilable("its layers take more than hidden states")
        if isinstance(self._mix, _States):
            raise NotCompilable("some of its layers keep a running state")
        if self._is_mixture:
            raise NotCompilable("some of its layers are mixtures of experts")
        if self._mix.sinks is not None:
            raise NotCompilable("some of its attention goes into sinks")
        return self._mix.place

    def run(
        self,
        x: torch.Tensor,
        turn: Rotation | None,
        past: WithPast,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(rows, hidden), and its own (rows, width) where it takes some -> (rows, hidden)."""
        before, after, before_feed, after_feed = self._norms
        given = x
        if self._mix is not None:
            y = self._mix.run(x if before is None else before.run(x), turn, past)
            y = y if after is None else after.run(y)
            x = torch.add(x, y, alpha=self._multiplier)
        if self._feed is not None:
            fed = given if self._are_parallel else x
            y = self._feed(fed if before_feed is None else before_feed.run(fed))
            y = y if self.beside is None else self.beside.run(x, y)
            y = y if after_feed is None else after_feed.run(y)
            x = torch.add(x, y, alpha=self._multiplier)
        if self._inputs is not None and inputs is not None:
            x = x + self._inputs.run(x, inputs)
        return x if self._scale == 1.0 else x * self._scale


class _States(nn.Module):
    """A mixer that keeps states of sessions, which have caches of their own each."""

    def __init__(self, recurrence: LeanRecurrence) -> None:
        super().__init__()
        self._recurrence = recurrence

    def run(self, x: torch.Tensor, turn: Rotation | None, past: WithPast) -> torch.Tensor:
        """(rows, hidden) normalised -> (rows, hidden)."""
        assert isinstance(past, InCaches)  # noqa: S101 - as `places` says
        return self._recurrence.run(x, past.states)


_LeanMixer = LeanAttention | LeanOthersAttention | _States


def _turning(part: Mixer | None) -> RotaryKind:
    if not isinstance(part, Attention):
        return RotaryKind()
    return RotaryKind(part.table, part.growth, part.turns_pairs, part.turns_back)


def _lean_mixer(mixer: Mixer, index: int) -> _LeanMixer:
    if not isinstance(mixer, Attention):
        return _States(lean_recurrence(mixer, index))
    seen = mixer.sees
    return LeanAttention(mixer, index) if seen is None else LeanOthersAttention(mixer, seen)


def _lean_feed(feed: FeedForward | Experts) -> Product:
    return lean_mixture(feed) if isinstance(feed, Experts) else lean_feed_forward(feed)


def _all_parts(module: Any) -> list[tuple[LayerParts, nn.Module]]:
    layers = enumerate(layers_of(module))
    found = [(layer_parts(layer, module.config, i), layer) for i, layer in layers]
    for parts, _ in found:
        for part in _of(parts):
            if isinstance(part, Attention):
                _require_known(part)
    return found


def _of(parts: LayerParts) -> list[Mixer | FeedForward | Experts]:
    return [part for part in (parts.mixer, parts.feed_forward) if part is not None]


def _require_known(attention: Attention) -> None:
    if attention.latent is not None:
        raise NotCompilable("its keys are made of latents")


def _firsts(part: Mixer | FeedForward | Experts) -> list[tuple[nn.Module, ...]]:
    """What rows go through first where it is the same for all of them."""
    if not isinstance(part, FeedForward | Experts):
        return [part.projections, part.rates]
    feed = part.shared if isinstance(part, Experts) else part
    return [] if feed is None else [feed.up]
