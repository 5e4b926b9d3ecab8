"""Attention of lean layers: queries, keys and values of rows, turned by where these stand, and what
each row sees of its session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from mesh.shard.attention import Attend, CausalRule, row_exact_attention_of, rule_mask
from mesh.shard.compiled.parts import Attention, Growth, NotCompilable
from mesh.shard.kv import OneSession
from mesh.shard.lean_parts import LeanGate, LeanNorm, lean_product
from mesh.shard.states import StateCache


@dataclass(frozen=True, slots=True)
class RotaryKind:
    """How a layer turns queries and keys by position: see `Attention`."""

    table: str | None = None
    growth: Growth | None = None
    is_of_pairs: bool = False
    is_back: bool = False


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
    """A layer's attention over the keys and values that layer `index` of the span has cached, for
    most itself: at most `window` keys in all are seen (None: all that went before). `exact`
    computes it for one session."""

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


class InCaches:
    """Sessions with a cache of their own each, and `rows` rows of each of them."""

    def __init__(self, caches: Sequence[OneSession], rows: int) -> None:
        self._caches = caches
        self.states = [cache for cache in caches if isinstance(cache, StateCache)]
        self._rows = rows
        self._rules: dict[int | None, CausalRule] = {}

    def __call__(
        self, place: AttentionPlace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        k, v = self._by_session(key), self._by_session(value)
        each = enumerate(self._caches)
        past = [c.update(k[i : i + 1], v[i : i + 1], place.index) for i, c in each]
        return self._attend(place, query, past)

    def seen_again(self, place: AttentionPlace, query: torch.Tensor) -> torch.Tensor:
        """The same over the keys and values that the layer of `place` has kept of these rows."""
        return self._attend(place, query, [c.seen(place.index, self._rows) for c in self._caches])

    def _attend(
        self,
        place: AttentionPlace,
        query: torch.Tensor,
        past: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        rule = self._rules.get(place.window)
        if rule is None:
            rule = rule_mask(q_length=self._rows, local_size=place.window)
            self._rules[place.window] = rule
        found = [
            place.exact(q, keys, values, rule, place.scale)
            for q, (keys, values) in zip(torch.split(self._by_session(query), 1), past, strict=True)
        ]
        y = found[0] if len(found) == 1 else torch.cat(found)
        return y.transpose(1, 2).flatten(0, 1)

    def _by_session(self, each: torch.Tensor) -> torch.Tensor:
        """(rows, heads, width) as (sessions, heads, rows, width)."""
        shape = (len(self._caches), self._rows, -1, each.shape[-1])
        return each.reshape(shape).transpose(1, 2)


class LeanAttention(nn.Module):
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
        if self.query_norm is not None and not self._of.normed_turned:
            both = self._normed(both)
        if turn is not None:
            both = _turned(both, turn).to(x.dtype)  # some families turn in fp32
        if self._of.normed_turned:
            both = self._normed(both)
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
        if of.gate is not None and of.gate_is_last:
            projected, gates = projected[:, : of.projected], projected[:, of.projected :]
            gates = gates.repeat_interleave(of.width, 1) if of.gate.heads else gates
        heads = projected.reshape(rows, -1, of.width)
        if of.is_interleaved:
            each = heads.view(rows, of.kv_heads, -1, of.width)
            heads = torch.cat((each[:, :, :-2].flatten(1, 2), each[:, :, -2], each[:, :, -1]), 1)
        if self.gate is not None and gates is None:  # of each head, behind its queries
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


class LeanOthersAttention(nn.Module):
    """`Attention` over what another layer has kept."""

    def __init__(self, attention: Attention, seen: int) -> None:
        super().__init__()
        self._heads, self._width = attention.heads, attention.width
        softcap = attention.softcap or None
        self._place = AttentionPlace(
            seen, attention.heads, attention.kv_heads, attention.width, attention.window,
            attention.scale, softcap, row_exact_attention_of(softcap),
        )  # fmt: skip
        self._queries = lean_product(attention.projections)
        self._output = lean_product((attention.output,))
        self.query_norm = None if attention.query_norm is None else LeanNorm(attention.query_norm)

    def run(self, x: torch.Tensor, turn: Rotation | None, past: WithPast) -> torch.Tensor:
        """(rows, hidden) normalised -> (rows, hidden)."""
        assert isinstance(past, InCaches)  # noqa: S101 - as `LeanLayers.places` says
        queries = self._queries(x).view(len(x), self._heads, self._width)
        if self.query_norm is not None:
            queries = self.query_norm.run(queries)
        if turn is not None:
            queries = _turned(queries, turn).to(x.dtype)
        return self._output(past.seen_again(self._place, queries).reshape(len(x), -1))


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
