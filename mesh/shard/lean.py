"""Decoder layers as a few torch operators over fused products, with no module in between.

Of a standard decoder layer (`compiled.parts` says what that is), transformers makes some sixty
operators and calls as many Python functions; here it is some twenty. Reads the same packed weights
and writes the same caches as the modules do, which stay the reference: whether a family's layers
are understood is shown by `lean_proof`, whether this CPU computes them right by `selfcheck`. Knows
no hooks and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from mesh.shard.attention import Attend, CausalRule, row_exact_attention_of, rule_mask
from mesh.shard.compiled.parts import (
    Attention,
    Experts,
    FeedForward,
    Growth,
    LayerParts,
    NotCompilable,
    layer_parts,
)
from mesh.shard.kv import OneSession
from mesh.shard.lean_experts import LeanExpertsBeside, lean_mixture
from mesh.shard.lean_parts import LeanGate, LeanNorm, lean_feed_forward, lean_product
from mesh.shard.lean_states import LeanRecurrence, lean_recurrence
from mesh.shard.linear import Place
from mesh.shard.rotary import Rotary
from mesh.shard.states import StateCache
from mesh.shard.views import layer_list_name
from mesh.types import LayerRange


@dataclass(frozen=True, slots=True)
class RotaryKind:
    """How a layer turns queries and keys by position: see `Attention`."""

    table: str | None = None
    growth: Growth | None = None
    is_of_pairs: bool = False


class Rotation(NamedTuple):
    """Of the rows of a step: cosines, and sines with those of the first of two numbers that turn
    together negated, (rows, 1, turned width) each; what queries are multiplied by, if they are,
    (rows, 1, 1); and whether it is neighbours that turn, or halves."""

    cos: torch.Tensor
    signed: torch.Tensor
    growth: torch.Tensor | None
    is_of_pairs: bool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlace:
    """The attention of layer `index` of the span: at most `window` keys in all are seen (None: all
    that went before). `exact` computes it for one session."""

    index: int
    heads: int
    kv_heads: int
    width: int
    window: int | None
    scale: float
    softcap: float | None
    exact: Attend


class WithPast(Protocol):
    """What keeps the keys and values of earlier rows and lets rows meet them."""

    def __call__(
        self, place: AttentionPlace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """(rows, heads, width) queries, (rows, kv heads, width) keys and values, which are kept:
        (rows, heads, width)."""


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
            for linears in (
                parts.mixer.projections,
                parts.mixer.rates,
                *_ups(parts.feed_forward),
            )
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
        tables = (layer.turning.table for layer in self._layers)
        self._rotary = Rotary(module, (table for table in tables if table is not None))

    def forward(
        self,
        hidden: torch.Tensor,  # (sessions, rows, hidden)
        positions: torch.Tensor,  # (sessions, rows)
        caches: Sequence[OneSession],
        layers: LayerRange,  # counted within the span
    ) -> torch.Tensor:
        """As `hidden`. One session of any number of rows, or several of one row each."""
        return self.through(hidden, positions, _InCaches(caches, hidden.shape[1]), layers)

    def through(
        self, hidden: torch.Tensor, positions: torch.Tensor, past: WithPast, layers: LayerRange
    ) -> torch.Tensor:
        """The same, where `past` has the keys and values of each row's session."""
        sessions, rows, width = hidden.shape
        running = self._layers[layers.start : layers.stop]
        turns = {
            kind: self._turn(hidden, positions, kind)
            for kind in {layer.turning for layer in running}
        }
        x = hidden.reshape(sessions * rows, width)
        for layer in running:
            x = layer.run(x, turns[layer.turning], past)
        return x.view(sessions, rows, width)

    @property
    def places(self) -> list[AttentionPlace]:
        """The attention of each layer. Raises NotCompilable where there is more than that and
        products."""
        return [layer.place for layer in self._layers]

    def _turn(
        self, hidden: torch.Tensor, positions: torch.Tensor, kind: RotaryKind
    ) -> Rotation | None:
        if kind.table is None:
            return None
        cos, sin = self._rotary.halves(hidden, positions, kind.table)
        rows = cos.shape[0] * cos.shape[1]
        if kind.is_of_pairs:
            cos, signed = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, signed = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        grown = None if kind.growth is None else kind.growth.factors(positions).reshape(rows, 1, 1)
        return Rotation(
            cos.reshape(rows, 1, -1), signed.reshape(rows, 1, -1), grown, kind.is_of_pairs
        )


class _InCaches:
    """Sessions with a cache of their own each, and `rows` rows of each of them."""

    def __init__(self, caches: Sequence[OneSession], rows: int) -> None:
        self._caches = caches
        self.states = [cache for cache in caches if isinstance(cache, StateCache)]
        self._rows = rows
        self._rules: dict[int | None, CausalRule] = {}

    def __call__(
        self, place: AttentionPlace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        rule = self._rules.get(place.window)
        if rule is None:
            rule = rule_mask(q_length=self._rows, local_size=place.window)
            self._rules[place.window] = rule
        # (sessions, rows, heads, width) -> (sessions, heads, rows, width)
        shape = (len(self._caches), self._rows, -1, query.shape[-1])
        q, k, v = (each.reshape(shape).transpose(1, 2) for each in (query, key, value))
        found = []
        for i, cache in enumerate(self._caches):
            own = slice(i, i + 1)
            past = cache.update(k[own], v[own], place.index)
            found.append(place.exact(q[own], *past, rule, place.scale))
        y = found[0] if len(found) == 1 else torch.cat(found)
        return y.transpose(1, 2).flatten(0, 1)


class _LeanLayer(nn.Module):
    """See `LayerParts`."""

    def __init__(self, parts: LayerParts, index: int) -> None:
        super().__init__()
        mixer = parts.mixer
        self.turning = RotaryKind()
        self._mix: _Attention | _States
        if isinstance(mixer, Attention):
            self.turning = RotaryKind(mixer.table, mixer.growth, mixer.turns_pairs)
            self._mix = _Attention(mixer, index)
        else:
            self._mix = _States(lean_recurrence(mixer, index))
        feed = parts.feed_forward
        self.beside = None if parts.beside is None else LeanExpertsBeside(parts.beside)
        self._is_mixture = isinstance(feed, Experts) or self.beside is not None
        self._feed = lean_mixture(feed) if isinstance(feed, Experts) else lean_feed_forward(feed)
        self._multiplier, self._scale = parts.multiplier, parts.scale
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
        if not isinstance(self._mix, _Attention):
            raise NotCompilable("some of its layers keep a running state")
        if self._is_mixture:
            raise NotCompilable("some of its layers are mixtures of experts")
        if self._mix.sinks is not None:
            raise NotCompilable("some of its attention goes into sinks")
        return self._mix.place

    def run(self, x: torch.Tensor, turn: Rotation | None, past: WithPast) -> torch.Tensor:
        """(rows, hidden) -> (rows, hidden)."""
        before, after, before_feed, after_feed = self._norms
        y = self._mix.run(x if before is None else before.run(x), turn, past)
        y = y if after is None else after.run(y)
        x = torch.add(x, y, alpha=self._multiplier)
        y = self._feed(x if before_feed is None else before_feed.run(x))
        y = y if self.beside is None else self.beside.run(x, y)
        y = y if after_feed is None else after_feed.run(y)
        x = torch.add(x, y, alpha=self._multiplier)
        return x if self._scale == 1.0 else x * self._scale


class _States(nn.Module):
    """A mixer that keeps states of sessions, which have caches of their own each."""

    def __init__(self, recurrence: LeanRecurrence) -> None:
        super().__init__()
        self._recurrence = recurrence

    def run(self, x: torch.Tensor, turn: Rotation | None, past: WithPast) -> torch.Tensor:
        """(rows, hidden) normalised -> (rows, hidden)."""
        assert isinstance(past, _InCaches)  # noqa: S101 - as `places` says
        return self._recurrence.run(x, past.states)


class _Attention(nn.Module):
    """See `Attention`."""

    def __init__(self, attention: Attention, index: int) -> None:
        super().__init__()
        self._of = attention
        softcap, self.sinks = attention.softcap or None, attention.sinks
        self.place = AttentionPlace(
            index, attention.heads, attention.kv_heads, attention.width, attention.window,
            attention.scale, softcap, self._into_sinks if attention.sinks is not None
            else row_exact_attention_of(softcap),
        )  # fmt: skip
        self._qkv = lean_product(attention.projections)
        self._output = lean_product((attention.output,))
        self._heads = attention.heads
        self._both = attention.heads + attention.kv_heads
        if (attention.query_norm is None) != (attention.key_norm is None):
            raise NotCompilable("it normalises either queries or keys")
        self.query_norm = None if attention.query_norm is None else LeanNorm(attention.query_norm)
        self.key_norm = None if attention.key_norm is None else LeanNorm(attention.key_norm)
        self.value_norm = None if attention.value_norm is None else LeanNorm(attention.value_norm)
        self.gate = None if attention.gate is None else LeanGate(attention.gate)

    def run(self, x: torch.Tensor, turn: Rotation | None, past: WithPast) -> torch.Tensor:
        """(rows, hidden) normalised -> (rows, hidden)."""
        rows = len(x)
        both, values, gates = self._parted(self._qkv(x))
        if self.query_norm is not None:
            both = self._normed(both)
        if turn is not None:
            both = _turned(both, turn).to(x.dtype)  # some families turn in fp32
        queries = both[:, : self._heads]
        if turn is not None and turn.growth is not None:
            queries = queries * turn.growth.to(x.dtype)
        y = past(self.place, queries, both[:, self._heads :], values).reshape(rows, -1)
        if self.gate is not None and gates is not None:
            y = self.gate.run(y, gates)
        return self._output(y)

    def _parted(
        self, projected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries and keys, and values, (rows, heads, width), and the gate's numbers, (rows, heads
        * width)."""
        of, rows, gates = self._of, len(projected), None
        heads = projected.view(rows, -1, of.width)
        if self.gate is not None:  # of each head, behind its queries
            pairs = heads[:, : 2 * self._heads].view(rows, self._heads, 2, of.width)
            gates = pairs[:, :, 1].reshape(rows, -1)
            heads = torch.cat((pairs[:, :, 0], heads[:, 2 * self._heads :]), 1)
        values = heads[:, self._heads :] if of.shares_values else heads[:, self._both :]
        if self.value_norm is not None:
            values = self.value_norm.run(values)
        return heads[:, : self._both], values, gates

    def _into_sinks(self, *step: Any) -> torch.Tensor:
        # Not bound to the tensor, which another may take the place of where weights are protected.
        return row_exact_attention_of(self.place.softcap, self.sinks)(*step)

    def _normed(self, both: torch.Tensor) -> torch.Tensor:
        assert self.query_norm is not None and self.key_norm is not None  # noqa: S101, PT018
        parts = []
        for each, norm in (
            (both[:, : self._heads], self.query_norm),
            (both[:, self._heads :], self.key_norm),
        ):
            flat = each.reshape(len(each), -1) if self._of.norm_whole else each
            parts.append(norm.run(flat).view(each.shape))
        return torch.cat(parts, 1)


def _turned(x: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """(rows, heads, width) turned by its position, as far as the tables are wide."""
    wide = turn.cos.shape[-1]
    if wide == x.shape[-1]:
        return torch.addcmul(x * turn.cos, _partners(x, turn), turn.signed)
    part = x[..., :wide]
    turned = torch.addcmul(part * turn.cos, _partners(part, turn), turn.signed)
    return torch.cat((turned, x[..., wide:]), -1)


def _partners(x: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """With which each of its numbers turns."""
    if turn.is_of_pairs:
        return x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


def _all_parts(module: Any) -> list[tuple[LayerParts, nn.Module]]:
    layers = module.get_submodule(layer_list_name(module))
    found = [(layer_parts(layer, module.config, i), layer) for i, layer in enumerate(layers)]
    for parts, _ in found:
        if isinstance(parts.mixer, Attention):
            _require_known(parts.mixer)
    return found


def _require_known(attention: Attention) -> None:
    if attention.latent is not None:
        raise NotCompilable("its keys are made of latents")
    if attention.gate_is_last:
        raise NotCompilable("its attention is not a standard one")


def _ups(feed: FeedForward | Experts) -> list[tuple[nn.Module, ...]]:
    """What rows go through first where it is the same for all of them."""
    part = feed.shared if isinstance(feed, Experts) else feed
    return [] if part is None else [part.up]
