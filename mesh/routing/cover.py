"""Greedy cover: which shards serve all layers of one request.

The rule is the mesh specification's (section 5.2): from layer 0, take the shard with the lowest
queue depth that includes the next uncovered layer, move the cursor behind it, repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mesh.errors import NoRoute
from mesh.types import LayerRange, RouteHop, ShardDescriptor

LAN_HOP_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard that may be picked, with what its host last said of it.

    `hop_weight` is the price of reaching it: 1 on the same LAN, more beyond. `streams_left` counts
    the sessions it may still open; 0 takes it out of the choice. `penalty` ranks shards that
    recently failed behind all others (0: never failed).
    """

    descriptor: ShardDescriptor
    queue_depth: int
    streams_left: int
    hop_weight: float = LAN_HOP_WEIGHT
    is_self: bool = False
    penalty: int = 0


@dataclass(frozen=True, slots=True)
class CoverRules:
    """The limits of one request's route."""

    max_shards: int = 16
    allow_self_as_first: bool = False


ShardKey = tuple[str, str]
"""A shard on a particular node: (host, shard_id). Two nodes may serve the same layers."""


def key_of(descriptor: ShardDescriptor) -> ShardKey:
    """The key under which a shard is excluded from a route."""
    return (descriptor.host, descriptor.shard_id)


def greedy_cover(
    candidates: Sequence[Candidate],
    span: LayerRange,
    rules: CoverRules,
    exclude: Collection[ShardKey] = (),
) -> tuple[RouteHop, ...]:
    """Cover `span` with hops in layer order.

    Raises:
        NoRoute: some layer has no usable shard (the message names the layers and why), or the
            cover needs more than `rules.max_shards` hops.
    """
    usable = [c for c in candidates if c.streams_left > 0 and key_of(c.descriptor) not in exclude]
    hops: list[RouteHop] = []
    cursor = span.start
    while cursor < span.stop:
        choices = [c for c in usable if cursor in c.descriptor.layer_range]
        if not choices:
            raise _no_route(candidates, span, exclude)
        first = cursor == span.start == 0
        best = min(choices, key=lambda c: _rank(c, first=first, rules=rules))
        stop = min(best.descriptor.layer_range.stop, span.stop)
        hops.append(RouteHop(best.descriptor, LayerRange(cursor, stop)))
        cursor = stop
    if len(hops) > rules.max_shards:
        raise NoRoute(
            f"covering layers {span} takes {len(hops)} shards; the limit is {rules.max_shards}.",
            fix="Raise max_shards_per_request, or let fewer nodes hold larger shards.",
        )
    return tuple(hops)


def missing_layers(candidates: Sequence[Candidate], span: LayerRange) -> list[LayerRange]:
    """The parts of `span` that no candidate with a free stream holds, in order."""
    held = {
        layer
        for c in candidates
        if c.streams_left > 0
        for layer in range(c.descriptor.layer_range.start, c.descriptor.layer_range.stop)
    }
    missing: list[LayerRange] = []
    for layer in range(span.start, span.stop):
        if layer in held:
            continue
        if missing and missing[-1].stop == layer:
            missing[-1] = LayerRange(missing[-1].start, layer + 1)
        else:
            missing.append(LayerRange(layer, layer + 1))
    return missing


def _rank(
    candidate: Candidate, *, first: bool, rules: CoverRules
) -> tuple[int, bool, int, float, int, str]:
    # Embedding and sampling stay with the asker, so its own shard as the first hop would compete
    # with them for the same cores: it comes last, but it is taken when nobody else holds the layer.
    avoided = first and candidate.is_self and not rules.allow_self_as_first
    return (
        candidate.penalty,
        avoided,
        candidate.queue_depth,
        candidate.hop_weight,
        -candidate.descriptor.layer_range.stop,
        candidate.descriptor.host,
    )


def _no_route(
    candidates: Sequence[Candidate], span: LayerRange, exclude: Collection[ShardKey]
) -> NoRoute:
    free = [c for c in candidates if key_of(c.descriptor) not in exclude]
    missing = ", ".join(str(part) for part in missing_layers(free, span))
    full = sorted({c.descriptor.node_name for c in free if c.streams_left <= 0})
    failed = sorted({c.descriptor.node_name for c in candidates if c not in free})
    reasons = "".join(
        [
            f" At their limit of concurrent streams: {', '.join(full)}." if full else "",
            f" Tried in vain: {', '.join(failed)}." if failed else "",
        ]
    )
    return NoRoute(
        f"no node serves layers {missing}.{reasons}",
        fix="Start a node that holds them (`hearthnet up --layers LO-HI`), or try again later.",
    )
