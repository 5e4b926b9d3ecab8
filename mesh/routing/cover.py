"""Greedy cover: which shards serve all layers of one request.

The rule is the mesh specification's (section 5.2): from layer 0, take the shard with the lowest
queue depth that includes the next uncovered layer, move the cursor behind it, repeat. That shards
on the same LAN are preferred goes before: a way of 20 ms costs more, with every token, than a
neighbour in the queue, whose steps run as one batch with ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from mesh.errors import NoRoute
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.types import LayerRange, RouteHop, ShardDescriptor

LAN_HOP_WEIGHT = 1.0
Policy = Literal["auto", "greedy", "cheapest"]
"""How a route is chosen: ``greedy`` as the specification says; where all was measured, ``cheapest``
by cost (`mesh.routing.cheapest`), and ``auto`` so too if that is clearly cheaper."""

QUANTISED = frozenset({"int8", "int4"})
"""The dtypes of shards whose weights are in few bits."""

FAR_HOP_WEIGHT = 2.0
"""From here on a shard is not on the LAN, or as slow to reach as if it were not."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard that may be picked, with what its host last said of it.

    `queue_depth` is the steps that wait there and what the asker itself has under way.
    `hop_weight` is the price of reaching it: 1 on the same LAN, more beyond. `penalty` ranks
    shards that recently failed, or are full, behind all others (0: neither). Of equals the one with
    the lowest `lot` is taken. `layer_ms` is what a layer of a decode step took there lately,
    `rtt_ms` the way there and back; None where nobody has measured it.
    """

    descriptor: ShardDescriptor
    queue_depth: int
    hop_weight: float = LAN_HOP_WEIGHT
    is_self: bool = False
    penalty: int = 0
    lot: float = 0.0
    layer_ms: float | None = None
    rtt_ms: float | None = None


@dataclass(frozen=True, slots=True)
class CoverRules:
    """The limits of one request's route. Layers in `home` run on the asker's own shards only.

    Layers in 16 or 32 bit, in 8 and in 4 are three different models, so one route has only one of
    them, unless `mix_formats`. `policy` is for `mesh.routing.cheapest.cover`. With `remote_ends`
    the asker holds no embedding and no head: the first and the last shard have to run them.
    """

    max_shards: int = 16
    allow_self_as_first: bool = False
    home: tuple[LayerRange, ...] = ()
    mix_formats: bool = False
    policy: Policy = "auto"
    remote_ends: bool = False

    def admits(self, shard: ShardDescriptor) -> bool:
        """Whether a shard may be part of a route."""
        has_first, has_last = 0 in shard.layers, shard.total_layers - 1 in shard.layers
        lacks = (has_first and not shard.embeds) or (has_last and not shard.head)
        return not (self.remote_ends and lacks)

    def keeps(self, layer: int) -> bool:
        """Whether a layer has to run at home."""
        return any(layer in part for part in self.home)


def home_layers(
    total_layers: int, keep_first: int, keep_last: int, cuts: Cuts = ANYWHERE
) -> tuple[LayerRange, ...]:
    """The first and the last so many layers of a model, or more where its `cuts` want it, as ranges
    in order."""
    first, last = min(keep_first, total_layers), max(0, total_layers - keep_last)
    ends = ((0, first), (last, total_layers))
    kept = [cuts.around(LayerRange(start, stop)) for start, stop in ends if start < stop]
    return LayerRange.runs(layer for layer in range(total_layers) if any(layer in r for r in kept))


ShardKey = tuple[str, str]
"""A shard on a particular node: (host, shard_id). Two nodes may serve the same layers."""


def key_of(descriptor: ShardDescriptor) -> ShardKey:
    """The key under which a shard is excluded from a route."""
    return (descriptor.host, descriptor.shard_id)


def positions_held(shards: Collection[ShardDescriptor], total_layers: int) -> int | None:
    """How many positions a prompt and its answer may take by the caches of who serve a model, with
    those that have the most for each layer; None where nobody says."""
    held = [
        [each.kv_tokens for each in shards if layer in each.layers] for layer in range(total_layers)
    ]
    return min((max(each) for each in held if each and all(each)), default=None)


def greedy_cover(
    candidates: Sequence[Candidate],
    span: LayerRange,
    rules: CoverRules,
    exclude: Collection[ShardKey] = (),
    like: ShardDescriptor | None = None,
) -> tuple[RouteHop, ...]:
    """Cover `span` with hops in layer order, by shards that compute as `like` does where they can.

    Raises:
        NoRoute: some layer has no usable shard (the message names the layers and why), only shards
            of different formats would do, or the cover needs more than `rules.max_shards` hops.
    """
    free = [c for c in candidates if key_of(c.descriptor) not in exclude]
    if rules.mix_formats:
        return _cover(candidates, free, span, rules, exclude, like)
    refusal: NoRoute | None = None
    for name in [format_of(like)] if like is not None else _formats(free, span, rules):
        same = _of_format(free, name)
        try:
            return _cover(candidates, same, span, rules, exclude, like)
        except NoRoute as error:
            refusal = refusal or error
    held = [c for c in free if c.descriptor.layers.overlaps(span)]
    wanted = {format_of(c.descriptor) for c in held} if like is None else {format_of(like)}
    lacking = [missing_layers(_of_format(held, name), span) for name in wanted]
    if all(lacking) and not missing_layers(held, span):
        raise _only_mixed(held, span, like)
    raise refusal or _no_route(candidates, span, exclude)


def _of_format(candidates: Sequence[Candidate], name: str) -> list[Candidate]:
    return [c for c in candidates if format_of(c.descriptor) == name]


def _formats(usable: Sequence[Candidate], span: LayerRange, rules: CoverRules) -> list[str]:
    """The formats of shards that a cover of `span` may begin with, in the order of their rank."""
    first = [c for c in usable if span.start in c.descriptor.layers]
    first.sort(key=lambda c: _rank(c, first=span.start == 0, rules=rules, like=None))
    return list(dict.fromkeys(format_of(c.descriptor) for c in first))


def format_of(shard: ShardDescriptor) -> str:
    """What all of a route have: ``int8``, ``int4``, or an empty string for no such format."""
    return shard.dtype if shard.dtype in QUANTISED else ""


def _only_mixed(
    held: Sequence[Candidate], span: LayerRange, like: ShardDescriptor | None
) -> NoRoute:
    shards = (c.descriptor for c in held)
    named = sorted(f"{d.layers} in {d.dtype} at {d.node_name}" for d in shards)
    which = "different formats" if like is None else f"other formats than {like.dtype}"
    return NoRoute(
        f"layers {span} are served in {which} only: {', '.join(named)}.",
        fix="Give those nodes the same --quant, or allow it: routing.mix_formats.",
    )


def _cover(
    candidates: Sequence[Candidate],
    usable: Sequence[Candidate],
    span: LayerRange,
    rules: CoverRules,
    exclude: Collection[ShardKey],
    like: ShardDescriptor | None,
) -> tuple[RouteHop, ...]:
    hops: list[RouteHop] = []
    cursor = span.start
    while cursor < span.stop:
        choices = [c for c in usable if cursor in c.descriptor.layers]
        if not choices:
            raise _no_route(candidates, span, exclude)
        if rules.keeps(cursor):
            choices = [c for c in choices if c.is_self]
            if not choices:
                raise _not_at_home(cursor, rules)
        first = cursor == span.start == 0
        best = min(choices, key=lambda c: _rank(c, first=first, rules=rules, like=like))
        stop = _stop(cursor, min(best.descriptor.layers.stop, span.stop), rules)
        _extend(hops, RouteHop(best.descriptor, LayerRange(cursor, stop)))
        cursor = stop
    if len(hops) > rules.max_shards:
        raise NoRoute(
            f"covering layers {span} takes {len(hops)} shards; the limit is {rules.max_shards}.",
            fix="Raise max_shards_per_request, or let fewer nodes hold larger shards.",
        )
    return tuple(hops)


def missing_layers(candidates: Sequence[Candidate], span: LayerRange) -> list[LayerRange]:
    """The parts of `span` that no candidate holds, in order."""
    return span.lacking(candidate.descriptor.layers for candidate in candidates)


def _stop(cursor: int, stop: int, rules: CoverRules) -> int:
    """The end of a hop from `cursor`: where home begins or ends, at the latest at `stop`."""
    here = rules.keeps(cursor)
    return next((layer for layer in range(cursor, stop) if rules.keeps(layer) != here), stop)


def _extend(hops: list[RouteHop], hop: RouteHop) -> None:
    """Put a hop behind the others, as one with the last where both are of one shard."""
    if hops and key_of(hops[-1].shard) == key_of(hop.shard):
        hop = RouteHop(hop.shard, LayerRange(hops.pop().layers.start, hop.layers.stop))
    hops.append(hop)


def _rank(
    candidate: Candidate, *, first: bool, rules: CoverRules, like: ShardDescriptor | None
) -> tuple[int, bool, int, bool, int, float, int, float, str]:
    # Embedding and sampling stay with the asker, so its own shard as the first hop would compete
    # with them for the same cores: it comes last, but it is taken when nobody else holds the layer.
    avoided = first and candidate.is_self and not rules.allow_self_as_first
    return (
        candidate.penalty,
        avoided,
        unlikeness(candidate.descriptor, like),
        candidate.hop_weight >= FAR_HOP_WEIGHT,
        candidate.queue_depth,
        candidate.hop_weight,
        -candidate.descriptor.layers.stop,
        candidate.lot,
        candidate.descriptor.host,
    )


def unlikeness(one: ShardDescriptor, other: ShardDescriptor | None) -> int:
    """0 for the same results to the last bit; another number format counts most."""
    if other is None:
        return 0
    return 2 * (one.dtype != other.dtype) + (one.determinism_class != other.determinism_class)


def _not_at_home(layer: int, rules: CoverRules) -> NoRoute:
    part = next(part for part in rules.home if layer in part)
    return NoRoute(
        f"layers {part} have to run on this machine (routing.keep_first and keep_last), which has"
        " not loaded them.",
        fix="See `hearthnet status` for the reason; free memory, or keep fewer layers.",
    )


def _no_route(
    candidates: Sequence[Candidate], span: LayerRange, exclude: Collection[ShardKey]
) -> NoRoute:
    free = [c for c in candidates if key_of(c.descriptor) not in exclude]
    missing = ", ".join(str(part) for part in missing_layers(free, span))
    failed = sorted({c.descriptor.node_name for c in candidates if c not in free})
    reason = f" Tried in vain: {', '.join(failed)}." if failed else ""
    return NoRoute(
        f"no node serves layers {missing}.{reason}",
        fix="Start a node that holds them (`hearthnet up --layers LO-HI`), or try again later.",
    )
