"""Planning anew without an operator: when a machine stays away, or a wish has no plan of its own.

One node does it, the lowest id of those that are alive and trusted; where two believe that they are
the one, both plans are in the log and the same one counts everywhere. Times are of the loop's clock
and of what this node has seen itself: after a start everybody has just been seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from mesh.deployments.placement import AvailableNode, Laid, make_plan, planner, stale
from mesh.deployments.wishes import Deployment, Plan, Wish, live
from mesh.errors import MeshError
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId

logger = logging.getLogger(__name__)

TICK_S = 1.0
SETTLE_S = 5.0
"""Whoever changes a wish has so long to plan it."""
RETRY_S = 30.0


class Members(Protocol):
    """Who is there."""

    @property
    def node(self) -> NodeId:
        """This node."""

    def deployments(self) -> dict[str, Deployment]:
        """What the log says."""

    def machines(self) -> Sequence[AvailableNode]:
        """The trusted nodes that are up now, this one among them if it is trusted."""

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        """Where the planner lays what `before` lacks of a wish, were `freed_mb` more free."""

    def trusted(self) -> Collection[NodeId]:
        """The nodes that may hold layers, up or not."""

    async def publish_plan(self, plan: Plan) -> None:
        """Sign it. Raises MeshError."""


class Replanner:
    """`start`, then `stop`. A planned node that is away for `limit_s` is planned around."""

    def __init__(
        self,
        members: Members,
        limit_s: float,
        tell: Callable[..., None],
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._members = members
        self._limit_s = limit_s
        self._settle_s = settle_s
        self._tell = tell
        self._seen: dict[NodeId, float] = {}
        self._since: dict[str, float] = {}
        self._not_before: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = spawn(self._run(), "plan deployments anew")

    async def stop(self) -> None:
        """Watch no more."""
        if self._task is not None:
            await end([self._task])

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(TICK_S)

    async def _look(self) -> None:
        now, machines = _now(), self._members.machines()
        alive = {machine.node for machine in machines}
        deployments = live(self._members.deployments())
        planned = {node for each in deployments if each.plan for node in each.plan.nodes}
        for node in planned | alive:
            if node in alive or node not in self._seen:
                self._seen[node] = now
        gone = {node: now - self._seen[node] for node in planned - alive}
        for deployment in deployments:
            why = stale(deployment, gone, self._members.trusted(), self._limit_s)
            if why is None:
                self._since.pop(deployment.id, None)
                continue
            since = self._since.setdefault(deployment.id, now)
            is_mine = planner(deployment, alive) == self._members.node
            waits = now - since < self._settle_s or now < self._not_before.get(deployment.id, 0.0)
            if is_mine and not waits:
                self._not_before[deployment.id] = now + RETRY_S
                await self._plan(deployment, machines, why)

    async def _plan(
        self, deployment: Deployment, machines: Sequence[AvailableNode], why: str
    ) -> None:
        # A wish whose author could not plan it any more was still an operator's.
        asked = not deployment.is_planned
        wish, before = deployment.wish, deployment.plan
        try:
            laid = await self._members.laid_out(wish, before, {})
            plan = make_plan(
                wish, deployment.event, machines, before, asked=asked, why=why, laid=laid
            )
            if deployment.plan is None or _differs(plan, deployment.plan):
                await self._members.publish_plan(plan)
        except MeshError as error:
            logger.warning("deployment=%s cannot be planned anew: %s", deployment.id, error)
            self._tell("deployment_unplanned", deployment=deployment.id, reason=error.message)
            return
        self._tell("deployment_planned", deployment=deployment.id, reason=why)


def _differs(one: Plan, other: Plan) -> bool:
    return one.replicas != other.replicas or one.wish != other.wish


def _now() -> float:
    return asyncio.get_running_loop().time()
