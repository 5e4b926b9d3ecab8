"""Copies that lie on one machine, as there was no other when they were placed: once there is one
with room, the later copy moves there, so that a machine that fails takes one with it and not both.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mesh.deployments.laid import AvailableNode
from mesh.deployments.wishes import Deployment, Plan, Replica, Span, Wish
from mesh.types import NodeId


@dataclass(frozen=True, slots=True)
class Crowded:
    """A replica on a machine that has the same layers for an earlier one, and the machines that
    hold nothing of the deployment yet and may."""

    replica: int
    node: NodeId
    unused: tuple[NodeId, ...]

    def alone(self, wish: Wish) -> Wish:
        """A wish for this replica and nothing else, on the unused machines."""
        return replace(wish, replicas=1, nodes=self.unused, pins=())

    def why(self, names: Mapping[NodeId, str]) -> str:
        """What is said of a plan that moves it."""
        return f"{names.get(self.node, self.node)} held two copies, and there are others now"


def crowded(deployment: Deployment, machines: Sequence[AvailableNode]) -> Crowded | None:
    """The last replica that could lie on machines of its own; None where none does."""
    plan, wish = deployment.plan, deployment.wish
    if plan is None or not (deployment.is_wanted and deployment.is_planned):
        return None
    unused = tuple(
        machine.node
        for machine in machines
        if machine.node not in plan.nodes and (not wish.nodes or machine.node in wish.nodes)
    )
    # The first one's may be pinned.
    for number in range(len(plan.replicas) - 1, 0, -1) if unused else ():
        replica = plan.replicas[number]
        shared = _shared(replica, plan.replicas[:number])
        if shared is not None:
            return Crowded(replica.number, shared, unused)
    return None


def spread(plan: Plan, found: Crowded, spans: Collection[Span], why: str) -> Plan:
    """The plan with that replica on these spans instead. No operator asked, so that nothing is
    dropped before it is there."""
    moved = Replica(found.replica, tuple(spans))
    replicas = tuple(moved if r.number == found.replica else r for r in plan.replicas)
    return replace(plan, epoch=plan.epoch + 1, replicas=replicas, asked=False, why=why)


def _shared(replica: Replica, others: Sequence[Replica]) -> NodeId | None:
    """A machine that holds layers of it which it holds for another as well."""
    for span in replica.spans:
        for other in (each for one in others for each in one.spans if each.node == span.node):
            if span.layers.overlaps(other.layers):
                return span.node
    return None
