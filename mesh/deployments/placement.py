"""Where the replicas of a deployment go: the plan for a wish, over the machines there are. Pure.

New replicas, and what a lost machine took with it, go where the planner of `mesh.routing` lays
them. Where it cannot say, as nobody has measured the machines yet, `choose_placement` splits
replicas evenly as far as there is room, over machines with more free memory first, with pins where
they were put, and a gap goes to the machine that holds least. What already runs stays where it is
as long as the wish allows, so that a change moves little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from mesh.deployments.laid import UNKNOWN, AvailableNode, Gap, Laid, Rooms
from mesh.deployments.wishes import MAX_SPANS, Deployment, Plan, Replica, Span, Wish
from mesh.errors import BadRequest, NoRoute
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.types import LayerRange, NodeId

_ALL_ORDERS = 5
"""Nodes of which all orders are tried: 120."""


def gaps(wish: Wish, before: Plan | None, nodes: Collection[NodeId]) -> list[Gap]:
    """What the replicas of `before` that the wish keeps lack, when only `nodes` may be used."""
    usable = {node for node in nodes if not wish.nodes or node in wish.nodes}
    found = []
    for replica, pins in _replicas(wish, before):
        spans = _standing(_kept(replica, pins, usable), pins)
        lacking = wish.whole.lacking(span.layers for span in spans)
        found += [Gap(replica.number, layers, len(spans)) for layers in lacking]
    return found


def without(plan: Plan | None, spans: Collection[Span]) -> Plan | None:
    """The plan as if these had never been in it."""
    if plan is None or not spans:
        return plan
    replicas = tuple(
        Replica(each.number, tuple(span for span in each.spans if span not in spans))
        for each in plan.replicas
    )
    return replace(plan, replicas=replicas)


def leaving(wish: Wish, before: Plan | None, nodes: Collection[NodeId]) -> set[Span]:
    """The spans of `before` that the wish has no use for any more, when only `nodes` may be
    used."""
    if before is None:
        return set()
    usable = {node for node in nodes if not wish.nodes or node in wish.nodes}
    kept = [_kept(replica, pins, usable) for replica, pins in _replicas(wish, before)]
    return {s for r in before.replicas for s in r.spans} - {s for r in kept for s in r.spans}


def require_pins(
    wish: Wish, machines: Sequence[AvailableNode], names: Mapping[NodeId, str]
) -> None:
    """Raise BadRequest where layers are pinned to a machine that may not be used; `names` are what
    people call the nodes."""
    pinned, there = {pin.node for pin in wish.pins}, {m.node for m in machines}
    left_out = pinned - set(wish.nodes) if wish.nodes else set()
    if left_out:
        raise BadRequest(
            f"layers are pinned to {_listed(left_out, names)}, and the deployment is for other"
            f" machines only: {_listed(wish.nodes, names)}.",
            fix="Name all of them as `nodes`, or pin the layers to one of these.",
            param="layers",
        )
    if away := pinned - there:
        raise BadRequest(
            f"layers are pinned to {_listed(away, names)}, which may not be used now.",
            fix="Start that node, or pin the layers elsewhere.",
            param="layers",
        )


def _listed(nodes: Collection[NodeId], names: Mapping[NodeId, str]) -> str:
    return ", ".join(sorted(names.get(node, node) for node in nodes))


def make_plan(
    wish: Wish,
    event: str,
    machines: Sequence[AvailableNode],
    before: Plan | None,
    *,
    asked: bool,
    why: str = "",
    laid: Laid = UNKNOWN,
) -> Plan:
    """The plan for a wish whose event is `event`, after the plan `before`.

    What is lacking is put where `laid` says, replicas in its order, as far as that goes.

    Replicas that stand on `machines` and within the wish stay as they are; of others the spans that
    can stay do, and what is new goes to no machine that is paused. The last replicas go first.

    Raises NoRoute when no machine may be used, BadRequest when pins cannot be met and
    NotEnoughMemory where something finds no room.
    """
    usable = [m for m in machines if not wish.nodes or m.node in wish.nodes]
    require_pins(wish, machines, {})
    if wish.replicas and not usable:
        raise NoRoute(
            f"no machine may hold {wish.model_id} now.",
            fix="Start a trusted node, or name others with --nodes.",
        )
    if laid.refusal is not None:
        raise laid.refusal
    here = {machine.node for machine in usable}
    left = Rooms(laid, usable)
    usable = [machine for machine in usable if not machine.is_paused]
    kept = [(_kept(replica, pins, here), pins) for replica, pins in _replicas(wish, before)]
    next_replica = 0 if before is None else before.next_replica
    lying = [(replica.number, span) for replica, _ in kept for span in replica.spans]
    replicas = [_filled(replica, pins, wish, usable, lying, laid, left) for replica, pins in kept]
    new = iter(laid.replicas)
    while len(replicas) < wish.replicas:
        spans = next(new, None) or choose_placement(wish, usable, replicas, left)
        replicas.append(Replica(next_replica, spans))
        next_replica += 1
    _require_small(replicas)
    epoch = 0 if before is None else before.epoch + 1
    return Plan(wish.deployment, event, epoch, tuple(replicas), next_replica, asked, why)


def choose_placement(
    wish: Wish,
    machines: Sequence[AvailableNode],
    others: Sequence[Replica],
    rooms: Rooms,
) -> tuple[Span, ...]:
    """The spans of one new replica beside these `others`, which then take their `rooms`.

    Of the ways to go round the machines, by their memory, as another replica does, or by what lies
    on their disks, the one that puts the fewest layers where another replica has them already, as
    two on one machine are one; then the one that needs the fewest fetched. Parts are even as far as
    there is room. Raises NotEnoughMemory where there is not.
    """
    is_known = all(machine.free_mb is not None for machine in machines)
    ranked = sorted(machines, key=lambda m: (-(m.free_mb or 0) if is_known else 0, m.node))
    there = [span for replica in others for span in replica.spans]
    pins = () if others else wish.pins
    orders = [ranked, *(_as_in(replica, ranked) for replica in others)]
    orders.append(sorted(ranked, key=lambda m: rooms.first_held(m.node)))
    rounds = [order[k:] + order[:k] for order in orders for k in range(len(order))]
    even = _ways(wish, pins, rounds, None, rooms.cuts)
    new = {spans: [s for s in spans if s not in there] for spans in even}
    ways = [spans for spans, more in new.items() if rooms.hold(more)]
    ways = ways or _ways(wish, pins, rounds, rooms, rooms.cuts)
    if not ways:
        raise rooms.refusal(wish, wish.total_layers)

    def disadvantage(spans: tuple[Span, ...]) -> tuple[int, int]:
        shared = sum(_common(one, two) for one in spans for two in there)
        return shared, -sum(rooms.held(span.node, span.layers) for span in spans)

    chosen = min(ways, key=disadvantage)
    rooms.take(span for span in chosen if span not in there)
    return chosen


def _ways(
    wish: Wish,
    pins: Sequence[Span],
    rounds: Iterable[Sequence[AvailableNode]],
    rooms: Rooms | None,
    cuts: Cuts,
) -> list[tuple[Span, ...]]:
    found = [_around(wish, pins, order, rooms, cuts) for order in rounds]
    return [spans for spans in found if spans is not None]


def _as_in(replica: Replica, machines: Sequence[AvailableNode]) -> list[AvailableNode]:
    """The machines in the order in which a replica goes over them, others behind."""
    order = [span.node for span in replica.spans]
    return sorted(machines, key=lambda m: order.index(m.node) if m.node in order else len(order))


def _around(
    wish: Wish,
    pins: Sequence[Span],
    order: Sequence[AvailableNode],
    rooms: Rooms | None,
    cuts: Cuts,
) -> tuple[Span, ...] | None:
    """What is not pinned, in even parts over the machines in their order; None where `rooms` are
    too small for it."""
    spans = list(pins)
    for gap in wish.whole.lacking(pin.layers for pin in pins):
        free = [m for m in order if all(m.node != span.node for span in spans)] or list(order)
        nodes = [machine.node for machine in free]
        parts = (
            _split(gap, nodes, cuts) if rooms is None else _split_within(gap, nodes, spans, rooms)
        )
        if parts is None:
            return None
        spans += parts
    return tuple(sorted(spans, key=lambda span: span.layers))


def _common(one: Span, other: Span) -> int:
    """How many layers of both are on one machine."""
    start = max(one.layers.start, other.layers.start)
    return max(0, min(one.layers.stop, other.layers.stop) - start) * (one.node == other.node)


def planner(deployment: Deployment, alive: Collection[NodeId]) -> NodeId | None:
    """Who plans anew when that has to be done without an operator: the lowest id of those alive,
    itself among them, so that everybody with the same view names the same one."""
    return min(alive, default=None)


def stale(
    deployment: Deployment,
    gone_s: Mapping[NodeId, float],
    trusted: Collection[NodeId],
    limit_s: float,
    names: Mapping[NodeId, str],
) -> str | None:
    """Why a deployment has to be planned anew, by people's `names` of nodes; None when its plan
    stands. `gone_s` are the seconds since a planned node that is away was last seen."""
    if not deployment.is_wanted:
        return None
    if (plan := deployment.plan) is None or not deployment.is_planned:
        return "the wish has changed"
    out = sorted(plan.nodes - set(trusted))
    if out:
        return f"{names.get(out[0], out[0])} may hold no layers any more"
    away = sorted(node for node in plan.nodes if gone_s.get(node, 0.0) > limit_s)
    if away:
        return f"{names.get(away[0], away[0])} has been away for {gone_s[away[0]]:.0f} s"
    return None


def _replicas(wish: Wish, before: Plan | None) -> list[tuple[Replica, tuple[Span, ...]]]:
    """The replicas that the wish keeps, each with its pins: those are the first one's."""
    kept = () if before is None else before.replicas[: wish.replicas]
    return [(replica, () if number else wish.pins) for number, replica in enumerate(kept)]


def _kept(replica: Replica, pins: Sequence[Span], here: Collection[NodeId]) -> Replica:
    """The spans of a replica that may stay where they are."""
    spans = [
        span
        for span in replica.spans
        if span.node in here
        and all(span == pin or not span.layers.overlaps(pin.layers) for pin in pins)
    ]
    return Replica(replica.number, tuple(spans))


def _standing(replica: Replica, pins: Sequence[Span]) -> list[Span]:
    """What a kept replica has without being planned: its spans, and those that are pinned."""
    return [*replica.spans, *(pin for pin in pins if pin not in replica.spans)]


def _filled(
    replica: Replica,
    pins: Sequence[Span],
    wish: Wish,
    machines: Sequence[AvailableNode],
    lying: list[tuple[int, Span]],
    laid: Laid,
    rooms: Rooms,
) -> Replica:
    """The replica with what it lacks where that was laid, or else at machines that have room: those
    first that hold none of it for another one, and least of all. `lying` has each span with the
    number of its replica, and gets those that are new."""
    spans = _standing(replica, pins)
    kept, pinned = len(spans), spans[len(replica.spans) :]
    rooms.take(pinned)
    lying += [(replica.number, span) for span in pinned]
    for layers in wish.whole.lacking(span.layers for span in spans):
        gap = Gap(replica.number, layers, kept)
        found = laid.gaps.get(gap)
        if found is None:
            same = gap.shared_with(lying)
            load: Counter[NodeId] = Counter()
            for _, span in lying:
                load[span.node] += len(span.layers)
            ranked = sorted(
                machines, key=lambda m: (m.node in same, load[m.node], -(m.free_mb or 0), m.node)
            )
            found = _on_first(wish, layers, ranked, rooms)
            rooms.take(found)
        spans += found
        lying += [(replica.number, span) for span in found]
    return Replica(replica.number, tuple(sorted(spans, key=lambda span: span.layers)))


def _on_first(
    wish: Wish, layers: LayerRange, ranked: Sequence[AvailableNode], rooms: Rooms
) -> tuple[Span, ...]:
    """A gap on the first machine that has room for all of it, or on several."""
    for machine in ranked:
        alone = (Span(machine.node, layers),)
        if rooms.hold(alone):
            return alone
    parts = _split_within(layers, [machine.node for machine in ranked], (), rooms)
    if parts is None:
        raise rooms.refusal(wish, len(layers))
    return tuple(parts)


def _split(layers: LayerRange, nodes: Sequence[NodeId], cuts: Cuts = ANYWHERE) -> list[Span]:
    """Even parts of a range over nodes, in their order; no part is empty."""
    return [Span(*each) for each in zip(nodes, cuts.parts(layers, len(nodes)), strict=False)]


def _split_within(
    layers: LayerRange, nodes: Sequence[NodeId], beside: Iterable[Span], rooms: Rooms
) -> list[Span] | None:
    """Parts as even as there is room for them beside spans of the same plan; None where there is
    too little."""
    taken: Counter[NodeId] = Counter()
    for span in beside:
        taken[span.node] += len(span.layers) + rooms.extra
    left = {node: _left(rooms.of(node), taken[node], len(layers)) for node in nodes}
    groups = rooms.cuts.groups(layers)
    if len(groups) < len(layers):
        return _groups_within(groups, nodes, left)
    sizes: Counter[NodeId] = Counter()
    while (lacking := len(layers) - sizes.total()) > 0:
        able = [node for node in nodes if sizes[node] < left[node]]
        if not able:
            return None
        for part in _split(LayerRange(0, lacking), able):
            sizes[part.node] = min(left[part.node], sizes[part.node] + len(part.layers))
    spans, at = [], layers.start
    for node in nodes:
        if sizes[node]:
            spans.append(Span(node, LayerRange(at, at + sizes[node])))
            at += sizes[node]
    return spans


def _groups_within(
    groups: Sequence[LayerRange], nodes: Sequence[NodeId], left: Mapping[NodeId, int]
) -> list[Span] | None:
    """The same of groups of layers that are not parted, the nodes in their order if that will do,
    else by their room, or of a few nodes in any."""
    by_room = sorted(nodes, key=lambda node: left[node])
    others = permutations(nodes if len(nodes) <= _ALL_ORDERS else ())
    for order in (nodes, by_room, by_room[::-1], *filter(None, others)):

        def at_most(count: int, order: Sequence[NodeId] = order) -> list[Span] | None:
            return _in_order(groups, order, {node: min(left[node], count) for node in order})

        total = groups[-1].stop - groups[0].start
        if at_most(total) is not None:
            return at_most(bisect_left(range(total), True, key=lambda n: at_most(n) is not None))
    return None


def _in_order(
    groups: Sequence[LayerRange], nodes: Iterable[NodeId], left: Mapping[NodeId, int]
) -> list[Span] | None:
    """Each node with as many as it has room for, up to the last group; None where some are left."""
    spans, waiting = list[Span](), deque(groups)
    for node in nodes:
        start = stop = waiting[0].start
        while waiting and waiting[0].stop - start <= left[node]:
            stop = waiting.popleft().stop
        spans += [Span(node, LayerRange(start, stop))] if start < stop else []
        if not waiting:
            return spans
    return None


def _left(room: int | None, taken: int, most: int) -> int:
    return most if room is None else max(0, room - taken)


def _require_small(replicas: Sequence[Replica]) -> None:
    count = sum(len(replica.spans) for replica in replicas)
    if count > MAX_SPANS:
        raise BadRequest(
            f"the plan has {count} spans; {MAX_SPANS} fit into the log.",
            fix="Use fewer replicas or fewer nodes.",
            param="replicas",
        )
