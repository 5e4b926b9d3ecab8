"""The cheapest route: a shortest path over the layers at which shards begin and end.

What a decode step costs on a shard is what its host measured for each layer, once for every step
that waits there besides ours, and the way there and back. Between ends of shards that cost is a
straight line, so a route changes shards only there. All rules of the greedy cover hold, and what
they put first still comes first: shards that failed, the asker's own as the first, another number
format or kernel. Only then milliseconds count. Knows no links.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mesh.errors import NoRoute
from mesh.routing.cover import (
    Candidate,
    CoverRules,
    ShardKey,
    format_of,
    greedy_cover,
    key_of,
    unlikeness,
)
from mesh.routing.fitting import HOP_MS
from mesh.types import LayerRange, RouteHop, ShardDescriptor

WORTHWHILE = 0.85
"""The greedy cover stands unless another route takes less than this share of its time: between
near equals it takes turns, and what was measured is never quite true."""

_NO_HOP_MS = 1e9
"""A charge on each hop beside which nothing else counts."""

Price = tuple[int, int, int, float, int]
"""Of a route or a part of one: failures, own shards that come first though they should not,
unlikeness, milliseconds, hops. Compared in this order."""

_FREE: Price = (0, 0, 0, 0.0, 0)


def cover(
    candidates: Sequence[Candidate],
    span: LayerRange,
    rules: CoverRules,
    exclude: Collection[ShardKey] = (),
    like: ShardDescriptor | None = None,
) -> tuple[RouteHop, ...]:
    """Cover `span` by the policy of the rules. Where not all was measured that is `greedy_cover`,
    and ``auto`` is `cheapest_cover` where that is clearly cheaper, or alone finds a route that is
    short enough. Raises as `greedy_cover` does."""
    if rules.policy == "greedy":
        return greedy_cover(candidates, span, rules, exclude, like)
    free = [c for c in candidates if key_of(c.descriptor) not in exclude]
    cheapest = cheapest_cover(free, span, rules, like)
    if cheapest is None:
        return greedy_cover(candidates, span, rules, exclude, like)
    if rules.policy == "cheapest":
        return cheapest
    try:
        greedy = greedy_cover(candidates, span, rules, exclude, like)
    except NoRoute:
        return cheapest
    return cheapest if _is_clearly_cheaper(cheapest, greedy, free, rules, like) else greedy


def cheapest_cover(
    candidates: Sequence[Candidate],
    span: LayerRange,
    rules: CoverRules,
    like: ShardDescriptor | None = None,
) -> tuple[RouteHop, ...] | None:
    """The cheapest route over `span` with shards of one format.

    None where there is none within the rules, or where some candidate that could take part was not
    measured: nobody is left out because nobody has asked it yet.
    """
    usable = [c for c in candidates if c.descriptor.layers.overlaps(span)]
    if any(c.layer_ms is None or c.rtt_ms is None for c in usable):
        return None
    wanted = {format_of(like)} if like is not None else {format_of(c.descriptor) for c in usable}
    groups = [usable]
    if not rules.mix_formats:
        groups = [[c for c in usable if format_of(c.descriptor) == name] for name in sorted(wanted)]
    found = [way for group in groups if (way := _Search(group, span, rules, like).run())]
    return min(found, key=lambda way: way.price).hops if found else None


@dataclass(frozen=True, slots=True)
class _Way:
    price: Price
    hops: tuple[RouteHop, ...]

    def then(self, price: Price, hop: RouteHop) -> _Way:
        """With one hop more."""
        return _Way(_sum(self.price, price), (*self.hops, hop))

    def on(self, ms: float, stop: int) -> _Way:
        """With the last hop going on to `stop`."""
        last = self.hops[-1]
        longer = RouteHop(last.shard, LayerRange(last.layers.start, stop))
        return _Way(_sum(self.price, (0, 0, 0, ms, 0)), (*self.hops[:-1], longer))


class _Search:
    """One group of candidates: from boundary to boundary, the best way that ends on each shard."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        span: LayerRange,
        rules: CoverRules,
        like: ShardDescriptor | None,
    ) -> None:
        self._candidates = sorted(
            candidates, key=lambda c: (c.lot, c.descriptor.host, c.descriptor.shard_id)
        )
        self._span = span
        self._rules = rules
        self._like = like

    def run(self) -> _Way | None:
        """The cheapest way; where that has too many hops, the one with the fewest."""
        for charge_ms in (0.0, _NO_HOP_MS):
            way = self._along(charge_ms)
            if way is None or len(way.hops) <= self._rules.max_shards:
                return way
        return None

    def _along(self, charge_ms: float) -> _Way | None:
        edges = self._edges()
        best: _Way | None = _Way(_FREE, ())
        on: dict[ShardKey, _Way] = {}
        for start, stop in pairwise(edges):
            part, reached = LayerRange(start, stop), dict[ShardKey, _Way]()
            for each in self._candidates:
                if not each.descriptor.layers.covers(part):
                    continue
                if self._rules.keeps(start) and not each.is_self:
                    continue
                key, ms = key_of(each.descriptor), _layers_ms(each) * len(part)
                ways = [on[key].on(ms, stop)] if key in on else []
                if best is not None:
                    price = self._entering(each, start, ms + charge_ms)
                    ways.append(best.then(price, RouteHop(each.descriptor, part)))
                if ways:
                    reached[key] = min(ways, key=lambda way: way.price)
            on = reached
            best = min(on.values(), key=lambda way: way.price, default=None)
        return best

    def _edges(self) -> list[int]:
        """The layers at which a route may change shards, the span's own ends among them."""
        ranges = [*(c.descriptor.layers for c in self._candidates), *self._rules.home]
        inner = {edge for each in ranges for edge in (each.start, each.stop)}
        start, stop = self._span.start, self._span.stop
        return [start, *sorted(edge for edge in inner if start < edge < stop), stop]

    def _entering(self, each: Candidate, start: int, ms: float) -> Price:
        return _entry(each, start, self._span, self._rules, self._like, ms)


def _entry(
    each: Candidate,
    start: int,
    span: LayerRange,
    rules: CoverRules,
    like: ShardDescriptor | None,
    ms: float,
) -> Price:
    """The price of a hop that begins at layer `start` and computes for `ms`."""
    first = start == span.start == 0
    avoided = first and each.is_self and not rules.allow_self_as_first
    way = HOP_MS + (each.rtt_ms or 0.0)
    return (each.penalty, int(avoided), unlikeness(each.descriptor, like), ms + way, 1)


def _layers_ms(each: Candidate) -> float:
    """Milliseconds of one layer behind the steps that wait there."""
    return (each.layer_ms or 0.0) * (1 + max(0, each.queue_depth))


def _is_clearly_cheaper(
    one: Sequence[RouteHop],
    other: Sequence[RouteHop],
    candidates: Sequence[Candidate],
    rules: CoverRules,
    like: ShardDescriptor | None,
) -> bool:
    by_key = {key_of(c.descriptor): c for c in candidates}

    def price(hops: Sequence[RouteHop]) -> Price:
        whole = LayerRange(hops[0].layers.start, hops[-1].layers.stop)
        total = _FREE
        for hop in hops:
            each = by_key[key_of(hop.shard)]
            ms = _layers_ms(each) * len(hop.layers)
            total = _sum(total, _entry(each, hop.layers.start, whole, rules, like, ms))
        return total

    new, old = price(one), price(other)
    if new[:3] != old[:3]:
        return new[:3] < old[:3]
    return new[3] < WORTHWHILE * old[3]


def _sum(one: Price, other: Price) -> Price:
    return (
        one[0] + other[0],
        one[1] + other[1],
        one[2] + other[2],
        one[3] + other[3],
        one[4] + other[4],
    )
