"""Who has to rest so that a new plan fits: the seed's rules, machine by machine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mesh.deployments.levels import Resident, evictions, may_go
from mesh.deployments.placement import AvailableNode
from mesh.deployments.wishes import Deployment, Plan, Wish
from mesh.errors import NotEnoughMemory
from mesh.types import LayerRange, NodeId

NeedMb = Callable[[Wish, LayerRange], int]
"""What some layers of a model take."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A deployment that is up, and for how long it has been."""

    deployment: Deployment
    up_s: float


def to_rest(
    wish: Wish,
    plan: Plan,
    before: Plan | None,
    others: Iterable[Standing],
    machines: Sequence[AvailableNode],
    need_mb: NeedMb,
) -> tuple[str, ...]:
    """The deployments that rest before `plan` is followed, the smallest on each machine first.

    What the plan `before` had on a machine makes room as well. Machines whose free memory nobody
    knows are not looked at. Raises NotEnoughMemory with the numbers of each machine that lacks
    room, when nobody who may rest would give it.
    """
    going: dict[str, None] = {}
    lacking: list[str] = []
    standing = list(others)
    for machine in machines:
        if machine.free_mb is None:
            continue
        kept = before.spans_of(machine.node) if before is not None else []
        new = [layers for layers in plan.spans_of(machine.node) if layers not in kept]
        leaving = [layers for layers in kept if layers not in plan.spans_of(machine.node)]
        need = sum(need_mb(wish, layers) for layers in new)
        free = machine.free_mb + sum(need_mb(wish, layers) for layers in leaving)
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
