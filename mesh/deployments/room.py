"""Who has to rest so that a new plan fits: the rules of the seed, machine by machine; and what is
away while it is followed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from mesh.deployments.laid import AvailableNode
from mesh.deployments.levels import Resident, evictions, may_go
from mesh.deployments.wishes import Deployment, Plan, Span, Wish
from mesh.errors import NotEnoughMemory
from mesh.types import LayerRange, NodeId

NeedMb = Callable[[Wish, LayerRange], int]
"""What some layers of a model take."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A deployment that is up, and for how long it has been."""

    deployment: Deployment
    up_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A wish with its plan, and what is up before it is followed; None where nothing is.

    Spans of both plans are loaded `anew` where what is there is not as it is wished now.
    """

    wish: Wish
    plan: Plan
    before: Deployment | None = None
    anew: frozenset[Span] = frozenset()

    @property
    def standing(self) -> frozenset[Span]:
        """What is there and stays as it is."""
        return frozenset(self.plan.spans & self._spans_before - self.anew)

    def loads(self, node: NodeId) -> list[LayerRange]:
        """What a machine is to load."""
        return _on(node, self.plan.spans - self.standing)

    def drops(self, node: NodeId) -> list[LayerRange]:
        """What a machine is to drop."""
        return _on(node, self._spans_before - self.standing)

    def freed_mb(self, layers: Iterable[LayerRange], need_mb: NeedMb) -> int:
        """What layers that are dropped leave."""
        wish = self.wish if self.before is None else self.before.wish
        return sum(need_mb(wish, each) for each in layers)

    @property
    def _spans_before(self) -> set[Span]:
        plan = None if self.before is None else self.before.plan
        return set() if plan is None else plan.spans


@dataclass(frozen=True, slots=True)
class Absence:
    """Layers that a machine drops before it loads others, as it has no room for both: nobody serves
    them in between."""

    machine: str
    drops: LayerRange
    loads: LayerRange


def to_rest(
    change: Change,
    others: Iterable[Standing],
    machines: Sequence[AvailableNode],
    need_mb: NeedMb,
) -> tuple[str, ...]:
    """The deployments that rest before a change is made, the smallest on each machine first.

    What the deployment itself drops on a machine makes room as well. Machines whose free memory
    nobody knows are not looked at. Raises NotEnoughMemory with the numbers of each machine that
    lacks room, when nobody who may rest would give it.
    """
    wish = change.wish
    going: dict[str, None] = {}
    lacking: list[str] = []
    standing = list(others)
    for machine in machines:
        if machine.free_mb is None:
            continue
        need = sum(need_mb(wish, layers) for layers in change.loads(machine.node))
        free = machine.free_mb + change.freed_mb(change.drops(machine.node), need_mb)
        residents = [_resident(each, machine.node, need_mb) for each in standing]
        free += sum(each.mb for each in residents if each.deployment in going)
        if need <= free:
            continue
        staying = [each for each in residents if each.mb and each.deployment not in going]
        found = evictions(need - free, staying, dedicated=wish.dedicated)
        going |= dict.fromkeys(found)
        if not found:
            held = sum(each.mb for each in staying)
            lacking.append(
                f"{machine.name} needs {need} MiB, {free} MiB are free, {held} MiB are held"
                " by others"
            )
    if lacking:
        raise NotEnoughMemory(
            f"{wish.model_id} does not fit: {'; '.join(lacking)}.",
            fix="Use other machines (--nodes), fewer bits (--quant), or `hearthnet evict` one that"
            " is dedicated or has not been up for its minimum time.",
        )
    return tuple(going)


def absences(
    change: Change,
    others: Iterable[Standing],
    going: Collection[str],
    machines: Sequence[AvailableNode],
    need_mb: NeedMb,
) -> list[Absence]:
    """What a change takes away before the new is there, as `mesh.deployments.reconcile` makes it;
    of the others these are `going` to rest, which makes room without that."""
    resting = [each for each in others if each.deployment.id in going]
    found: list[Absence] = []
    for machine in machines:
        node, free = machine.node, machine.free_mb
        if free is not None:
            free += sum(_resident(each, node, need_mb).mb for each in resting)
        served = [span.layers for span in change.standing]
        old = sorted(change.drops(node), key=lambda layers: need_mb(change.wish, layers))
        for layers in change.loads(node):
            if layers in old:  # both have one name
                first = [layers]
            else:
                spare = [each for each in old if Span(node, each) not in change.anew]
                first = _before(layers, spare, served, free, change, need_mb)
            for each in first:
                old.remove(each)
                if not _is_within(each, served) or each == layers:
                    found.append(Absence(machine.name, each, layers))
            if free is not None:
                free += change.freed_mb(first, need_mb) - need_mb(change.wish, layers)
            served.append(layers)
    return found


def _before(
    layers: LayerRange,
    old: Sequence[LayerRange],
    served: Sequence[LayerRange],
    free_mb: int | None,
    change: Change,
    need_mb: NeedMb,
) -> list[LayerRange]:
    """What of the old is gone when these layers are loaded: what is served otherwise, and then
    the smallest until there is room."""
    gone = [each for each in old if _is_within(each, served)]
    for each in old:
        room = None if free_mb is None else free_mb + change.freed_mb(gone, need_mb)
        if room is None or room >= need_mb(change.wish, layers):
            break
        if each not in gone:
            gone.append(each)
    return gone


def _is_within(layers: LayerRange, served: Sequence[LayerRange]) -> bool:
    return all(any(one in each for each in served) for one in range(layers.start, layers.stop))


def _on(node: NodeId, spans: Iterable[Span]) -> list[LayerRange]:
    return sorted({span.layers for span in spans if span.node == node})


def room_of_others(wish: Wish, others: Iterable[Standing], need_mb: NeedMb) -> dict[NodeId, int]:
    """What would get free on each machine if all went that may go for this wish, in MiB."""
    found: dict[NodeId, int] = {}
    for standing in others:
        plan = standing.deployment.plan
        for node in plan.nodes if plan is not None else ():
            resident = _resident(standing, node, need_mb)
            if may_go(resident, dedicated=wish.dedicated):
                found[node] = found.get(node, 0) + resident.mb
    return found


def _resident(standing: Standing, node: NodeId, need_mb: NeedMb) -> Resident:
    deployment = standing.deployment
    wish, plan = deployment.wish, deployment.plan
    spans = plan.spans_of(node) if plan is not None else []
    mb = sum(need_mb(wish, layers) for layers in spans)
    return Resident(deployment.id, mb, standing.up_s, wish.minimum_s, wish.dedicated)
